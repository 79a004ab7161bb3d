"""A standalone language model of transformers: made of its config.json, and written as the plain folder that
transformers and vLLM's draft_model load.

Source: formats.md section 6. The tokenizer is the target's, which engines take it from.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.errors import ConfigError, RunError
from recipes.files import sync_folder


def model_of(config: dict[str, Any]) -> nn.Module:
    """A model of this config.json, in float32 on the default device. ConfigError where transformers has none, or its
    code would be somebody else's."""
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), trust_remote_code=False).float()
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"config.json: no language model that transformers knows: {error!r:.200}") from None


def skeleton_of(config: dict[str, Any]) -> nn.Module:
    """The same without numbers: its names and shapes, before anything of these sizes is allocated."""
    with torch.device("meta"):
        return model_of(config)


def facing(model: nn.Module) -> tuple[str, str]:
    """Names of a model's embedding and head; one and the same where they are tied."""
    known = {id(p): name for name, p in model.named_parameters()}
    return known[id(model.get_input_embeddings().weight)], known[id(model.get_output_embeddings().weight)]


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
