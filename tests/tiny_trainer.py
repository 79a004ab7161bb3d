"""A Trainer on a random target of six layers and a few hand-made rows, in this process."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate.state import AcceleratorState
from tiny import LAYERS, conversations, load_target, write_recipe, write_target, write_traces

from data.batching import plan_for
from data.capture import Conversation
from data.store import TraceReader
from drafters.registry import entry, options_of
from recipes.loader import load_recipe
from train.launch import start
from train.loop import Trainer


def trainer_base(folder: Path, rows: list[Conversation] | None = None, **sections: dict) -> SimpleNamespace:
    """A target, its traces (of 12 + 3 rows by default), and a recipe, whose values `sections` update."""
    model = write_target(folder / "model")
    traces = write_traces(folder / "runs" / "tiny", model, rows or conversations(12, 3))
    return SimpleNamespace(recipe=write_recipe(folder / "r.yaml", model, **sections), reader=TraceReader(traces),
                           target=load_target(model, "float32", LAYERS))


def make_trainer(base: SimpleNamespace, folder: Path, rows: list[int] | None = None, **overrides) -> Trainer:
    """A Trainer as train/run.py makes it, with its checkpoints in `folder`; settings (train__lr=1) override the
    recipe's, `rows` are trained on instead of all."""
    flags = {name.replace("__", "."): str(value) for name, value in overrides.items()}
    recipe = load_recipe(base.recipe, flags)
    kind = recipe.drafter.kind
    options = options_of(kind, recipe.drafter.options)
    AcceleratorState._reset_state(True)
    accelerator = start(recipe.train, None)
    drafter = entry(kind).code.build(options, base.target, {i: 1 for i in range(3, 40)}, recipe.train.seed)
    section = recipe.train
    plan = plan_for(base.reader, section.batch_rows, 1, section.accumulation, section.seed)
    if rows is not None:
        plan = type(plan)(tuple(rows), tuple(map(base.reader.tokens, rows)), section.batch_rows, 1,
                          section.accumulation, section.seed)
    origin = {"model": "tiny", "fingerprint": base.target.fingerprint()}
    settings = {"train": {"lr": section.lr, "epochs": section.epochs}, "traces": "tiny"}
    return Trainer(accelerator, drafter, base.reader, plan, section, folder, origin, settings)


def trainers(base: SimpleNamespace, parent: Path) -> Iterator[Callable[..., Trainer]]:
    """For a fixture: what makes Trainers with checkpoints in parent/`folder`; what they change in this process is put
    back."""
    handler = signal.getsignal(signal.SIGTERM)
    yield lambda rows=None, folder="checkpoints", **settings: make_trainer(base, parent / folder, rows, **settings)
    signal.signal(signal.SIGTERM, handler)
    AcceleratorState._reset_state(True)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}


def moments(trainer: Trainer) -> list[torch.Tensor]:
    return [state[key].clone() for state in trainer.optimizer.state.values() for key in sorted(state)]


def same(a, b) -> bool:
    """Bit for bit equal tensors, in mappings or lists."""
    a, b = (list(x.values()) if isinstance(x, dict) else x for x in (a, b))
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def assert_resumes(build: Callable[..., Trainer], run: dict, **options) -> None:
    """8 steps in one go equal 4, a new process and 4: rates, moments, weights and curve. build: as `trainers` gives it;
    run: options of 8 steps."""
    whole = build(folder="whole", **run, **options)
    whole.run()
    first = build(**run, **options)
    first.model.train()
    for _ in range(4):
        first.step()
    first.save()
    torch.manual_seed(123)  # what the new process begins with does not matter
    again = build(**run, **options)
    again.resume()
    assert again.progress.step == 4 < again.total and same(moments(again), moments(first))
    again.run()
    assert same(weights(again), weights(whole)) and same(moments(again), moments(whole))
    assert again.progress.curve == whole.progress.curve


def trained_parameters(drafter) -> dict[str, torch.Tensor]:
    """What the optimizer should hold: exactly the drafter's trainable parameters (case 62)."""
    return {name: p for name, p in drafter.named_parameters() if p.requires_grad}
