"""A finished tiny run whose drafter accepts some tokens: a target that counts, and a drafter that counts too.

The target's answer to a token t is t + 1: its embedding is one-hot, its blocks add nothing. The drafter's MLP moves a
one-hot state x to x + 1 and its head reads x + 1 as x + 2; ids outside its draft vocabulary are misses. H = V = 64.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny import LAYERS, L, V, chat_tokenizer, load_target, write_prompts, write_recipe, write_traces
from transformers import LlamaConfig, LlamaForCausalLM

from data.capture import Conversation
from data.store import list_digest
from drafters import checkpoint
from drafters.registry import entry, options_of
from recipes.files import sha256_file

EVAL = {"draft_length": 3, "max_tokens": 8, "lossless_prompts": 4, "speed_prompts": 2, "speed_tokens": 4,
        "batch_sizes": [], "sampling_contexts": 2, "sampling_draws": 60}
MISSES = {43, 47, *range(50, 64)}  # after the template's end come 41, 42, ...


def counting_target(folder: Path) -> Path:
    """Written as a user would name it in `target.model`. Its head of 64 is the smallest for vLLM's CPU attention."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=V, intermediate_size=2 * V, num_hidden_layers=L, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=2, bos_token_id=None, pad_token_id=None))
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.copy_(torch.eye(V))
    model.lm_head.weight.data.copy_(torch.eye(V).roll(1, 0))  # row j + 1 reads component j
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def cycling_target(folder: Path) -> Path:
    """The same, but that tokens go round in threes: behind 39 comes 40, then 41, then 39 again."""
    counting_target(folder)
    behind = [i - 2 if i % 3 == 2 else i + 1 for i in range(V - 1)] + [V - 1]
    head = torch.zeros(V, V)
    head[behind, range(V)] = 1.0  # row `behind` reads component i
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": head}, path, {"format": "pt"})
    return folder


def counted_rows(train: int, validation: int) -> list[Conversation]:
    """The target's own greedy answers to short prompts, cut by their length."""
    rows = []
    for n in range(train + validation):
        prompt, answer = [5 + n, 9, 20 + 2 * n], [21 + 2 * n + i for i in range(7)]
        rows.append(Conversation(f"r{n}", "train" if n < train else "validation", prompt + answer,
                                 [0] * 3 + [1] * 7, [answer[-1] + 1 + i for i in range(6)], "length"))
    return rows


@torch.no_grad()
def count_along(drafter) -> None:
    """Gives a fresh drafter the weights that count."""
    layer, eye = drafter.midlayer, torch.eye(V)
    layer.self_attn.o_proj.weight.mul_(1e-4)
    drafter.fc.weight.copy_(torch.cat([torch.zeros(V, 2 * V), eye], 1))
    wide = layer.mlp.gate_proj.out_features
    for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
        part.weight.copy_(torch.cat([eye, torch.zeros(wide - V, V)]))
    step = F.silu(torch.tensor(V**0.5)) * V**0.5  # of a one-hot state behind its norm
    layer.mlp.down_proj.weight.copy_(torch.cat([(eye.roll(1, 0) - eye) / step, torch.zeros(V, wide - V)], 1))
    drafter.lm_head.weight.copy_(eye.roll(1, 0)[drafter.draft_ids])
    for norm in (layer.hidden_norm, layer.input_layernorm, layer.post_attention_layernorm, drafter.norm):
        norm.weight.fill_(1.0)


def tiny_run(folder: Path, options: dict | None = None) -> SimpleNamespace:
    """`target` (tapped at LAYERS), `run` (its folder), `recipe` (a file), `drafter`, whose checkpoint is the best."""
    model = counting_target(folder / "model")
    run = folder / "runs" / "tiny"
    write_traces(run, model, counted_rows(6, 3))
    target = load_target(model, "float32", LAYERS)
    chosen = {"draft_vocab_size": V - len(MISSES), "start": "random", **(options or {})}
    counts = {i: 1 for i in range(V) if i not in MISSES}
    drafter = entry("eagle3").code.build(options_of("eagle3", chosen), target, counts, 0)
    count_along(drafter)
    place = checkpoint.path_of(run / "checkpoints", 1)
    place.mkdir(parents=True)
    origin = {"model": str(model), "fingerprint": target.fingerprint()}
    checkpoint.save(place, drafter.tensors(), {**drafter.meta(), "target": origin})
    (run / "checkpoints" / checkpoint.BEST).write_text(json.dumps({"step": 1}))
    texts = write_prompts(folder / "eval.jsonl", [f"say {word}" for word in ("abc", "tea", "42", "no")])
    recipe = write_recipe(folder / "r.yaml", model, drafter={"options": chosen}, eval={**EVAL, "prompts": str(texts)},
                          export={"check_prompts": 2, "check_tokens": 8})
    return SimpleNamespace(target=target, run=run, recipe=recipe, drafter=drafter, model=model, checkpoint=place)


def change_json(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_tensors(path: Path, change: Callable[[dict], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def change_shard(run: Path, change: Callable[[dict], None]) -> None:
    """Changes the run's stored shard and makes its list agree, as a fault of the writer would."""
    [path] = (run / "traces" / "shards").glob("*.safetensors")
    change_tensors(path, change)

    def agree(listed):
        listed |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        listed["list_sha256"] = list_digest(listed)

    change_json(path.with_suffix(".json"), agree)


def roll_states(tensors: dict) -> None:
    """Every state that of the token before it: a capture that is off by one."""
    tensors["taps"] = tensors["taps"].roll(1, 0)
