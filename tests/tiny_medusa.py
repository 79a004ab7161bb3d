"""Medusa heads that tests share: a finished tiny run whose target counts and whose heads count too (tests/tiny_run.py).

The final state behind a token x is one-hot, so head k, which reads row j + 2 + k from component j, names x + 2 + k; ids
outside the draft vocabulary are misses. H = V = 64.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from tiny import LAYERS, V, load_target, write_prompts, write_recipe, write_traces
from tiny_run import EVAL, MISSES, counted_rows, counting_target

from data.capture import Conversation
from drafters import checkpoint
from drafters.registry import FINAL, entry, options_of

OPTIONS = {"heads": 3, "draft_vocab_size": V - len(MISSES)}
FORMATS = ["--export.formats", "[medusa, medusa-original]"]


@torch.no_grad()
def count_along(drafter) -> None:
    """Gives fresh heads the weights that count. Blocks are next to nothing, yet not zero."""
    g = torch.Generator().manual_seed(1)
    for weight in drafter.blocks.parameters():
        weight.copy_(1e-5 * torch.randn(weight.shape, generator=g))
    for k, head in enumerate(drafter.lm_heads):
        head.weight.copy_(torch.eye(V).roll(2 + k, 0)[drafter.draft_ids])


def medusa_run(folder: Path, options: dict | None = None, trained: bool = True,
               rows: list[Conversation] | None = None) -> SimpleNamespace:
    """`target` (showing its final state), `run` (its folder), `recipe` (a file), `drafter`, whose checkpoint is the
    best where it is `trained`."""
    model = counting_target(folder / "model")
    run = folder / "runs" / "tiny"
    write_traces(run, model, rows or counted_rows(6, 3))
    target, chosen = load_target(model, "float32", FINAL), OPTIONS | (options or {})
    counts = {i: 1 for i in range(V) if i not in MISSES}
    drafter = entry("medusa").code.build(options_of("medusa", chosen), target, counts, 0)
    if trained:
        count_along(drafter)
        place = checkpoint.path_of(run / "checkpoints", 1)
        place.mkdir(parents=True)
        origin = {"model": str(model), "fingerprint": target.fingerprint()}
        checkpoint.save(place, drafter.tensors(), {**drafter.meta(), "target": origin})
        (run / "checkpoints" / checkpoint.BEST).write_text(json.dumps({"step": 1}))
    texts = write_prompts(folder / "eval.jsonl", [f"say {word}" for word in ("abc", "tea", "42", "no")])
    recipe = write_recipe(folder / "r.yaml", model, trace={"layers": LAYERS}, eval={**EVAL, "prompts": str(texts)},
                          drafter={"kind": "medusa", "options": chosen},
                          export={"formats": ["medusa"], "check_prompts": 2, "check_tokens": 8})
    return SimpleNamespace(target=target, run=run, recipe=recipe, drafter=drafter, model=model,
                           checkpoint=checkpoint.path_of(run / "checkpoints", 1))
