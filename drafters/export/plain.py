"""A standalone language model as a plain Hugging Face folder: what transformers and vLLM's draft_model load.

Source: formats.md section 6. The tokenizer is the target's, which engines take it from.
"""

import os
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from recipes.errors import RunError
from recipes.files import sync_folder


def write_model(model: nn.Module, out: Path) -> None:
    """Writes a causal LM of transformers as config.json and safetensors, whole, in place of what was there.

    RunError where the folder, read back, is not the same model, tensors bit for bit (case 03).
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        model.save_pretrained(partial)
        check_same(model, partial)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(partial, out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_same(model: nn.Module, folder: Path) -> None:
    """RunError naming the first tensor that the folder does not give back."""
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, use_safetensors=True).state_dict()
    for name, tensor in model.state_dict().items():
        pair = tensor, found.get(name, tensor.new_empty(0))
        if not torch.equal(*(t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in pair)):
            raise RunError(f"{folder}: {name} does not read back as it was written")
