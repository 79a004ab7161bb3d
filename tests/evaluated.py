"""A finished evaluation of a random drafter on a tiny target, with several sets: what report tests look at."""

import json
from pathlib import Path

from tiny import call, load_target, write_recipe, write_target
from tiny_drafter import LAYERS, D, make_meta, make_state, write_checkpoint

from eval.run import COMMAND

TURNS = [{"question_id": 81, "category": "writing", "turns": ["tell me a story", "now shorter"]},
         {"question_id": 82, "category": "maths", "turns": ["add 2 and 3"], "reference": ["5"]},
         {"question_id": 83, "category": "maths", "turns": ["take 2 from 9", "and once more"]}]
LOG = [{"id": f"req-{i}", "timestamp": 1_700_000_000 + 2 * i,
        "request": {"model": "m", "messages": [{"role": "user", "content": text}]}}
       for i, text in enumerate(["what is rain", "why is it cold", "who was here", "secret name bob"])]
SETTINGS = {"max_tokens": 12, "draft_length": 3, "lossless_prompts": 4, "speed_prompts": 5, "speed_tokens": 6,
            "batch_sizes": [], "sampling_contexts": 2, "sampling_draws": 200, "entropy_prompts": 4, "batch_size": 4}


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def world(folder: Path) -> Path:
    """A target, a drafter for it, two evaluation sets and a recipe named `tiny` that evaluates them; returns it."""
    model = write_target(folder / "model", layers=8)
    meta = make_meta()
    meta["options"] = {"draft_vocab_size": D, "num_layers": 1, "tap_norms": False}
    meta["target"] = {"model": "tiny", "fingerprint": load_target(model, "float32").fingerprint()}
    drafter = write_checkpoint(folder / "drafter", meta, make_state(meta))
    sets = [{"name": "bench", "path": str(write_jsonl(folder / "question.jsonl", TURNS))},
            {"kind": "log", "path": str(write_jsonl(folder / "log.jsonl", LOG))}]
    return write_recipe(folder / "r.yaml", model, trace={"layers": LAYERS}, drafter={"path": str(drafter)},
                        eval=SETTINGS | {"sets": sets})


def evaluate(recipe: Path, *flags: str) -> tuple[int, dict]:
    """Exit code of `make eval`, and its report."""
    code = call(COMMAND, recipe, *flags)
    path = recipe.parent / "runs" / "tiny" / "eval" / "report.json"
    return code, json.loads(path.read_text()) if path.exists() else {}
