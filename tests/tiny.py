"""Tiny things that many tests share: a character tokenizer with a ChatML template, a random target, hand-made traces.

V 64 tokens of the target's vocabulary, H 32 hidden, L 6 layers: everything is random and seeded.
"""

import gc
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.capture import Conversation, bare, capture
from data.store import FORMAT, shard_of, write_shard
from drafters.target import Target
from recipes.cli import Command, run
from recipes.files import write_json
from recipes.schema import Target as TargetSection

V, H, L = 64, 32, 6
LAYERS = [1, 2, 3]  # the default [2, L//2, L-3] collides at six layers (case 63)
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!:;'-+*/()"
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a character, lower case; <|im_end|> ends a turn. `template` None: a tokenizer that cannot chat."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.normalizer, core.decoder = normalizers.Lowercase(), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>",
                                        additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = template
    return tokenizer


def llama(seed: int = 0, layers: int = L, hidden: int = H, vocab: int = V) -> LlamaForCausalLM:
    """A random float32 target whose end token is the tokenizer's <|im_end|>."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2,
                         bos_token_id=None, pad_token_id=None, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def write_target(folder: Path, seed: int = 0, layers: int = L, template: str | None = CHATML) -> Path:
    """A target folder as a user would name it in `target.model`."""
    llama(seed, layers).save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    return folder


def conversations(train: int, validation: int, seed: int = 0) -> list[Conversation]:
    """Rows of uneven length: a prompt, then an answer of a fixed song that ends with the end token."""
    song = [(7 * i * i + 3 * i) % 40 + 3 for i in range(64)]
    random = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(train + validation):
        start, words, answer = (int(torch.randint(low, high, (1,), generator=random))
                                for low, high in ((0, 30), (3, 9), (6, 18)))
        prompt = song[start : start + words]
        text = song[start + words : start + words + answer] + [2]
        split = "train" if number < train else "validation"
        rows.append(Conversation(f"r{number}", split, prompt + text, [0] * len(prompt) + [1] * len(text),
                                 [3, 4, 5, 6, 7, 8], "stop"))
    return rows


def write_traces(run: Path, model: Path, rows: list[Conversation], mode: str = "store") -> Path:
    """run/traces as `make trace` leaves it, for hand-made rows; mode online: without states. Returns the folder."""
    target = Target(TargetSection(model=str(model), threads=1), LAYERS)
    traced, bad = capture(target, rows, 256, torch.float32) if mode == "store" else (bare(rows), {})
    assert not bad
    shards = run / "traces" / "shards"
    shards.mkdir(parents=True)
    write_shard(shards, "shard-00000", shard_of(traced, torch.float32), {}, "tiny")
    counts = Counter(t for r in rows if r.split == "train" for t, turn in zip(r.ids, r.turns) if turn)
    write_json(run / "traces" / "manifest.json", {
        "format": FORMAT, "mode": mode, "dtype": "float32", "key": "tiny", "target": target.fingerprint(),
        "model": str(model), "layers": LAYERS,
        "shards": ["shard-00000"], "user_turn_tokens": sum(turn < 0 for r in rows for turn in r.turns),
        "draft_vocabulary_counts": {str(t): n for t, n in counts.items()}})
    return run / "traces"


def write_recipe(path: Path, model: Path, **sections: dict) -> Path:
    """A recipe for a tiny run named `tiny` beside it; `sections` update its values, one mapping a section."""
    values = {
        "name": "tiny", "runs_dir": str(path.parent / "runs"),
        "target": {"model": str(model), "threads": 1}, "trace": {"layers": LAYERS},
        "drafter": {"options": {"draft_vocab_size": 32, "depth": 2, "deepen_at": 0.0}},
        "train": {"epochs": 1.0, "lr": 0.01, "warmup_steps": 2, "tracker": "none", "validation_draft_length": 3},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path.write_text(yaml.safe_dump(values))
    return path


def load_target(folder: Path, dtype: str = "float64", layers: list[int] | None = None) -> Target:
    """The folder as the pipeline loads it, on one CPU thread."""
    return Target(TargetSection(model=str(folder), dtype=dtype, device="cpu", threads=1), layers)


def plain_model(folder: Path, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """The same weights in transformers' own model with its simplest attention: the reference."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def write_prompts(path: Path, texts: list[str]) -> Path:
    """A JSONL file with one prompt a line and the ids p0, p1, ..."""
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": t}) + "\n" for i, t in enumerate(texts)))
    return path


def call(command: Command, recipe: Path, *flags: str) -> int:
    """Exit code of the command, run in this process."""
    AcceleratorState._reset_state(True)
    with pytest.raises(SystemExit) as stop:
        run(command, ["--config", str(recipe), *flags])
    return stop.value.code


def left_to_the_collector(work: Callable[[], object]) -> list[torch.Tensor]:
    """Tensors that nothing holds any more behind work(), except one another: they stay until Python's collector comes
    by, while more are made."""
    gc.collect()
    flags = gc.get_debug()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return [item for item in gc.garbage if isinstance(item, torch.Tensor)]
    finally:
        gc.set_debug(flags)
        gc.enable()
        gc.garbage.clear()
