"""Writes a trained EAGLE-3 checkpoint as a native folder: everything is checked before it gets its name."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from drafters.checkpoint import read_meta, read_tensors
from drafters.export.check import check_native
from drafters.export.native import DTYPES, VARIANTS, check_meta, native_config, native_tensors
from recipes.errors import ConfigError, RunError
from recipes.files import sync_folder, write_bytes, write_json, write_text

SERVE = """# Serving this drafter

Target: `{target}`. It was trained on exactly this model: another one, or a fine-tuned one, lowers acceptance.
PATH is this folder. {drafted} tokens are drafted a cycle; another number needs no new export.

## vLLM

    vllm serve {target} --speculative-config '{vllm}'
{others}"""
OTHERS = """
## SGLang

    python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\
      --speculative-draft-model-path PATH --speculative-num-steps {drafted} --speculative-eagle-topk 1 \\
      --speculative-num-draft-tokens {verified}

## TensorRT-LLM

`trtllm-serve {target} --extra_llm_api_options drafter.yaml`, with drafter.yaml:

    speculative_config:
      decoding_type: Eagle
      max_draft_len: {drafted}
      speculative_model_dir: PATH
"""
ONLY_VLLM = """
## Other engines

Not with this drafter: it uses {flags}, which SGLang and TensorRT-LLM do not read. They would refuse it,
or load it without a message and accept far fewer tokens.
"""


def export_native(checkpoint: Path, out: Path, dtype: str, expected_layers: list[int],
                  target_fingerprint: dict[str, Any]) -> Path:
    """Writes `out` with model.safetensors, config.json and SERVE.md; an earlier export there is replaced.

    checkpoint: folder with drafter.safetensors and drafter.json. dtype: precision of the exported tensors.
    expected_layers, target_fingerprint: those of the traces and of the target to be served.
    The folder is complete, checked and fsynced before it is renamed to `out`; on failure `out` is untouched.
    Returns `out`. Raises ConfigError where an input cannot be used, RunError where the checkpoint belongs to
    other layers or another target (cases 04, 36) or a check of the written files fails (case 03).
    """
    meta = read_meta(checkpoint)
    check_meta(meta)
    state = read_tensors(checkpoint)
    same_origin(checkpoint, meta, expected_layers, target_fingerprint)
    config = native_config(meta, dtype)
    partial, earlier = (out.with_name(f".{out.name}.{suffix}") for suffix in ("partial", "earlier"))
    out.parent.mkdir(parents=True, exist_ok=True)
    recover(out, partial, earlier)
    partial.mkdir()
    try:
        tensors = native_tensors(state, meta, dtype)
        write_bytes(partial / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_json(partial / "config.json", config)
        write_text(partial / "SERVE.md", serve_text(meta, config))
        check_native(partial)
        same_bytes(partial / "model.safetensors", state, dtype)
        if out.exists():
            os.replace(out, earlier)
        os.replace(partial, out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(earlier, ignore_errors=True)
    return out


def recover(out: Path, partial: Path, earlier: Path) -> None:
    """Clears what a killed export left, and puts the earlier export back where it was already moved away.

    Raises ConfigError where `out` holds something that is no export, so that nothing else is ever deleted.
    """
    if partial.exists():
        shutil.rmtree(partial)
    if earlier.exists() and not out.exists():
        os.replace(earlier, out)
    if earlier.exists():
        shutil.rmtree(earlier)
    is_export = all((out / name).is_file() for name in ("model.safetensors", "config.json", "SERVE.md"))
    if out.exists() and not is_export:
        raise ConfigError(f"{out}: exists and is no earlier export; move it away or choose another folder")


def same_origin(checkpoint: Path, meta: dict[str, Any], layers: list[int],
                fingerprint: dict[str, Any]) -> None:
    """Raises RunError naming what differs between the checkpoint and the traces or the target."""
    where = checkpoint / "drafter.json"
    if meta["layers"] != list(layers):
        raise RunError(f"{where}: layers = {meta['layers']}, but the traces hold {list(layers)}; export the "
                       f"checkpoint that was trained on these traces, or train again")
    ours = meta["target"]["fingerprint"]
    if not ours or not fingerprint:
        raise RunError(f"{where}: target.fingerprint = {ours!r}, the target's is {fingerprint!r}; both are "
                       f"needed to know that the drafter belongs to the target; train again")
    keys = sorted(ours.keys() | fingerprint.keys())
    differ = [key for key in keys if ours.get(key) != fingerprint.get(key)]
    if differ:
        listed = ", ".join(f"{k} ({ours.get(k)} here, {fingerprint.get(k)} served)" for k in differ)
        raise RunError(f"{where}: target.fingerprint differs from the target's in {listed}; serve the target "
                       f"that the drafter was trained on, or train again")


def same_bytes(path: Path, state: dict[str, Tensor], dtype: str) -> None:
    """Raises RunError naming tensors of the written file that are not the trained ones, bit for bit."""
    written = load_file(path)
    wrong = [f"{name} is in only one of the two" for name in sorted(written.keys() ^ state.keys())]
    for name in sorted(written.keys() & state.keys()):
        trained = state[name].to(DTYPES[dtype]) if state[name].is_floating_point() else state[name]
        # Bytes, not values: -0.0 and 0.0 are equal as numbers.
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (written[name], trained)]
        if written[name].dtype != trained.dtype or not torch.equal(*bits):
            wrong.append(f"{name} differs")
    if wrong:
        raise RunError(f"{path.name}: not the trained tensors: {'; '.join(wrong)}; export again")


def serve_text(meta: dict[str, Any], config: dict[str, Any], drafted: int = 3) -> str:
    """SERVE.md: the commands of formats.md section 1 for the engines that can serve this drafter."""
    target = meta["target"]["model"]
    flags = [f"`{flag}`" for flag in VARIANTS if config.get(flag)]
    if config["num_hidden_layers"] > 1:
        flags.append("more than one layer (`layers.1.*`)")
    if flags:
        others = ONLY_VLLM.format(flags=", ".join(flags))
    else:
        others = OTHERS.format(target=target, drafted=drafted, verified=drafted + 1)
    vllm = json.dumps({"method": "eagle3", "model": "PATH", "num_speculative_tokens": drafted,
                       "draft_tensor_parallel_size": 1})
    return SERVE.format(target=target, drafted=drafted, vllm=vllm, others=others)
