"""Who computes the hidden states (`trace.backend`): the target in this process, or a vLLM engine beside it.

vLLM hands out the states that its `extract_hidden_states` method keeps (0.32). Before the first row some rows are
computed by both and compared; after that every row is held to its own tokens and length.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.capture import BAD, Conversation, capture, trace_row
from data.compare import NOISE, compare
from data.store import TraceRow
from drafters.target import Target
from recipes.errors import ConfigError, RunError
from recipes.schema import Trace

ROOT = Path(__file__).resolve().parent.parent
# Decided by the recipe's other fields, or by what extraction needs.
FIXED = {"model", "tokenizer", "dtype", "max_model_len", "enable_prefix_caching", "speculative_config",
         "kv_transfer_config"}
CHECKED = 3  # rows: the shortest, one between, the longest

# (rows, storage dtype) -> (traces, reasons of the rows left out), as data.capture.capture
Capture = Callable[[list[Conversation], torch.dtype], tuple[list[TraceRow], dict[str, str]]]


def check_states(section: Trace, target: Target) -> None:
    """ConfigError for settings that the backend cannot work with."""
    if section.backend == "transformers":
        if section.engine or section.engine_python:
            raise ConfigError("trace.engine and trace.engine_python are for trace.backend vllm")
        return
    if section.mode != "store":
        raise ConfigError(f"trace.backend = vllm: with trace.mode = {section.mode} training computes the states; "
                          "set trace.mode to store")
    taken = FIXED & set(section.engine)
    if taken:
        raise ConfigError(f"trace.engine: {sorted(taken)[0]} is decided by the recipe's other fields")
    if section.max_length >= target.max_length:
        raise ConfigError(f"trace.max_length = {section.max_length}: vLLM needs a position more than the longest row; "
                          f"at most {target.max_length - 1} for this target")
    if section.engine_python and not shutil.which(section.engine_python):
        raise ConfigError(f"trace.engine_python = {section.engine_python}: no such program")


@contextmanager
def open_states(section: Trace, target: Target, folder: Path, local: Callable = capture) -> Iterator[Capture]:
    """The backend as a function of rows; an engine starts with the first of them and ends with the block.
    `folder` is the trace folder: nothing is written outside it, and what an engine hands over is gone afterwards.
    local: computes rows with the target in this process, as data.capture.capture."""
    if section.backend == "transformers":
        yield lambda rows, dtype: local(target, rows, section.batch_tokens, dtype)
        return
    states = VllmStates(section, target, folder)
    try:
        yield states
    finally:
        states.close()


def engine_layers(layers: list[int], depth: int) -> list[int]:
    """The layer ids that vLLM is asked for. Its id k is ours, the state entering layer k; id `depth` is what enters
    the final norm, which the final states are made from. vLLM gives them in ascending order."""
    return sorted({*layers, depth})


class VllmStates:
    """States by vLLM, in a process of its own: vLLM needs another version of transformers than the target here, and
    its memory is free again when it ends."""

    def __init__(self, section: Trace, target: Target, folder: Path) -> None:
        self.section, self.target = section, target
        self.staging, self.log = folder / ".states", folder / "vllm.log"
        self.engine: subprocess.Popen | None = None

    def __call__(self, rows: list[Conversation], dtype: torch.dtype) -> tuple[list[TraceRow], dict[str, str]]:
        """See data.capture.capture. Raises RunError where the engine fails or its states are not the target's, and
        ConfigError where it cannot be started."""
        if self.engine is None:
            self.start()
            self.check(rows)
        return self.compute(rows, dtype)

    def start(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)  # of a run that was killed
        self.staging.mkdir(parents=True)
        # In one process with us asking, the engine steps when it is told to: that is what writes the last states.
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with open(self.log, "w", encoding="utf-8") as log:
            self.engine = subprocess.Popen(
                [self.section.engine_python or sys.executable, "-P", "-m", "data.backends.vllm_worker"], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": search})
        ready = self.ask({
            "folder": str(self.staging.resolve()),
            "layers": engine_layers(self.target.layers, self.target.depth),
            "arguments": {"model": self.target.path, "dtype": self.target.section.dtype,
                          "max_model_len": self.section.max_length + 1, **self.section.engine}})
        if "error" in ready:
            raise ConfigError(f"trace.backend = vllm: {ready['error']} (see {self.log})")
        if ready["prefix_caching"]:
            raise RunError("vLLM keeps its prefix cache on, which withholds the states of what rows share")

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The engine's answer. RunError with its last words where it ended."""
        try:
            self.engine.stdin.write(json.dumps(command) + "\n")
            self.engine.stdin.flush()
            answer = self.engine.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line]
            raise RunError(f"the vLLM engine ended: {said[-1] if said else 'without a word'} (see {self.log})")
        return json.loads(answer)

    def check(self, rows: list[Conversation]) -> None:
        """Computes some rows here too and compares every state."""
        ordered = sorted(rows, key=lambda row: len(row.ids))
        chosen = [ordered[i * (len(ordered) - 1) // (CHECKED - 1)] for i in range(CHECKED)]
        chosen = list({row.id: row for row in chosen}.values())
        found = {row.id: row for row in self.compute(chosen, torch.float32)[0]}
        for own in capture(self.target, chosen, self.section.batch_tokens, torch.float32)[0]:
            if own.id not in found:
                raise RunError(f"row {own.id}: vLLM's states have NaN or Inf, the target's own have not")
            _, said = compare(found[own.id], own, torch.float32, NOISE[self.target.dtype])
            if said:
                raise RunError(f"row {own.id}: vLLM's states are others than transformers': {said}")

    def compute(self, rows: list[Conversation], dtype: torch.dtype) -> tuple[list[TraceRow], dict[str, str]]:
        answer = self.ask({"rows": [row.ids for row in rows]})
        if "error" in answer:
            raise RunError(f"the vLLM engine: {answer['error']} (see {self.log})")
        traced, bad = [], {}
        for row, path in zip(rows, answer["states"], strict=True):
            taps, final = self.parts(row, *take(Path(path)))
            trace = trace_row(row, taps, final, dtype)
            if trace is None:
                bad[row.id] = BAD
            else:
                traced.append(trace)
        return traced, bad

    @torch.inference_mode()
    def parts(self, row: Conversation, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Taps [T, n*H] and final states [T, H] from what the engine gave, [T, ids, H] (case 08: nothing is padded,
        shifted or cut to fit)."""
        if ids.tolist() != row.ids:
            raise RunError(f"row {row.id}: vLLM names {len(ids)} tokens for its states, which are not the row's "
                           f"{len(row.ids)}")
        if len(states) != len(ids):
            raise RunError(f"row {row.id}: {len(states)} states for {len(ids)} tokens; was a prefix cache at work?")
        norm = self.target.model.get_decoder().norm
        return states[:, : len(self.target.layers)].flatten(1), norm(states[:, -1].to(self.target.device))

    def close(self) -> None:
        """Ends the engine; it ends by itself too where this process is gone."""
        if self.engine is not None:
            with suppress(BrokenPipeError):  # it is gone, and said so
                self.engine.stdin.close()
            try:
                self.engine.wait(30)
            except subprocess.TimeoutExpired:
                self.engine.kill()
                self.engine.wait()
            self.engine.stdout.close()
        shutil.rmtree(self.staging, ignore_errors=True)


def take(path: Path) -> tuple[Tensor, Tensor]:
    """(token ids [T], states [T, ids, H]) of a file that the engine writes; it is gone then. Waits for the lock that
    vLLM's connector holds until the file is whole. RunError where there is no such file."""
    lock = path.with_name(path.name + ".lock")
    try:
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            tensors = load_file(path)
        path.unlink()
        lock.unlink()
        return tensors["token_ids"], tensors["hidden_states"]
    except (OSError, KeyError, SafetensorError) as error:
        raise RunError(f"{path}: vLLM wrote no hidden states there: {error}") from None
