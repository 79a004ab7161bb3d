"""Optimisers: who gets which parameters, resume bit for bit, rates by group, float32 masters, the clipped norm."""

from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from accelerate import DistributedType
from tiny import call
from tiny_trainer import moments, same, trained_parameters, trainer_base, trainers, weights

from data.batching import collate
from recipes.errors import ConfigError
from recipes.schema import Train
from train import optim, run
from train.loop import Trainer

MATRICES = {"fc.weight", *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
            *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))}

NORMS = {"norm.weight", *(f"midlayer.{x}.weight" for x in (
    "input_layernorm", "hidden_norm", "post_attention_layernorm"))}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target, the traces of 12 + 3 rows, and a recipe."""
    return trainer_base(tmp_path_factory.mktemp("optim"))


@pytest.fixture
def build(base, tmp_path):
    """Makes a Trainer as train/run.py does; settings override the recipe's."""
    yield from trainers(base, tmp_path)


def groups(trainer: Trainer) -> dict[str, dict]:
    """The optimizer's groups by name, with their parameters' names."""
    names = {id(p): name for name, p in trainer.drafter.named_parameters()}
    return {g["name"]: {**g, "params": [names[id(p)] for p in g["params"]]} for g in trainer.optimizer.param_groups}


def steps(trainer: Trainer, count: int) -> None:
    trainer.model.train()
    for _ in range(count):
        trainer.step()


def test_recipe_offers_the_table():
    """`train.optimizer` takes the names of the table, no other."""
    assert sorted(get_args(get_type_hints(Train)["optimizer"])) == sorted(optim.OPTIMIZERS)


@pytest.mark.parametrize("head", [True, False])
def test_who_gets_which_parameters(build, head):
    """Under muon the hidden matrices go to Muon; norms and the output head, which has a row for each token, to AdamW,
    and a frozen head to neither. Under adamw all are in one group (case 62)."""
    found = groups(build(train__optimizer="muon", drafter__options__train_head=head))
    assert sorted(found["muon"]["params"]) == sorted(MATRICES)
    assert sorted(found["adamw"]["params"]) == sorted(NORMS | ({"lm_head.weight"} if head else set()))
    alone = build(drafter__options__train_head=head)
    assert list(groups(alone)) == ["adamw"]
    assert sorted(groups(alone)["adamw"]["params"]) == sorted(trained_parameters(alone.drafter))


def test_options_reach_their_part(build):
    """Each recipe field arrives in the group that it speaks of; muon_lr 0 takes the rate of the rest."""
    trainer = build(train__optimizer="muon", train__muon_lr=0.02, train__muon_momentum=0.9, train__ns_steps=3,
                    train__weight_decay=0.1, train__beta2=0.99)
    found = groups(trainer)
    assert {k: found["muon"][k] for k in ("peak_lr", "momentum", "ns_steps", "weight_decay", "adjust_lr_fn")} == {
        "peak_lr": 0.02, "momentum": 0.9, "ns_steps": 3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    assert {k: found["adamw"][k] for k in ("peak_lr", "betas", "weight_decay", "fused")} == {
        "peak_lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True}
    assert groups(build(train__optimizer="muon"))["muon"]["peak_lr"] == 0.01


def test_muon_step_against_its_definition(build):
    """The first update of a hidden matrix is its gradient with every singular value near 1 (Newton-Schulz leaves 0.7
    to 1.2 of those that are not tiny), times 0.2 sqrt(longer side) and the rate; directions are the gradient's own."""
    trainer = build(train__optimizer="muon", train__warmup_steps=0, train__clip=1e9)
    before, gradients = weights(trainer), {}
    optimizer_step = trainer.optimizer.optimizer.step

    def record(closure=None):
        gradients.update({n: p.grad.double().clone() for n, p in trained_parameters(trainer.drafter).items()})
        optimizer_step(closure)

    trainer.optimizer.optimizer.step = record
    steps(trainer, 1)
    for name in MATRICES:
        moved = (before[name] - weights(trainer)[name]).double()
        u, s, vt = torch.linalg.svd(gradients[name], full_matrices=False)
        size = 0.01 * 0.2 * max(moved.shape) ** 0.5
        along = torch.diagonal(u.T @ moved @ vt.T) / size  # the update in the gradient's singular directions
        large = s > 0.1 * s[0]
        assert large.sum() > 1 and along[large].min() > 0.6 and along[large].max() < 1.3, name
        assert torch.linalg.matrix_norm(moved, 2) < 1.3 * size
    head = before["lm_head.weight"] - weights(trainer)["lm_head.weight"]
    large = gradients["lm_head.weight"].abs() > 1e-5
    assert torch.allclose(head[large].abs(), torch.tensor(0.01), rtol=1e-2)  # AdamW's first step: the rate itself


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_resume_is_bit_equal(build, name):
    """6 steps in one go equal 3, a new process and 3: rates, moments and weights, accumulation included (case 19)."""
    settings = {"train__optimizer": name, "train__epochs": 2, "train__accumulation": 2, "train__muon_lr": 0.02,
                "train__schedule": "wsd", "train__decay_share": 0.5, "drafter__options__hidden_noise": 0.1}
    whole = build(folder="whole", **settings)
    whole.run()
    first = build(**settings)
    steps(first, 3)
    first.save()
    second = build(**settings)
    second.resume()
    assert second.progress.step == 3 and same(weights(second), weights(first)) and same(moments(second), moments(first))
    second.run()
    assert second.total == 6 and same(weights(second), weights(whole)) and same(moments(second), moments(whole))
    assert [g["lr"] for g in second.optimizer.param_groups] == [g["lr"] for g in whole.optimizer.param_groups]
    assert {str(value.dtype) for value in moments(second)} == {"torch.float32"}


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_rates_by_optimizer_step(build, name):
    """Four rows at once or one accumulated four times: the optimizer steps with the same rates; every group follows
    the one schedule from its own peak to its floor (case 39)."""
    def rates(rows: int, accumulation: int) -> list[list[float]]:
        trainer = build(train__optimizer=name, train__muon_lr=0.03, train__batch_rows=rows, train__epochs=2,
                        train__accumulation=accumulation, train__schedule="linear", train__min_lr_share=0.1)
        seen, optimizer_step = [], trainer.optimizer.optimizer.step

        def record(closure=None):
            seen.append([g["lr"] for g in trainer.optimizer.optimizer.param_groups])
            optimizer_step(closure)

        trainer.optimizer.optimizer.step = record
        steps(trainer, trainer.total)
        return seen

    found = rates(4, 1)
    assert found == rates(1, 4)
    wanted = [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]
    peaks = [0.03, 0.01] if name == "muon" else [0.01]
    assert found == [pytest.approx([peak * share for peak in peaks]) for share in wanted]


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_float32_masters_under_bfloat16(build, name):
    """With train.dtype bfloat16 weights, gradients and moments stay float32: an update far below bfloat16's resolution
    of a weight is kept, and the weights are no bfloat16 numbers."""
    trainer = build(train__optimizer=name, train__dtype="bfloat16", train__lr=1e-5, train__warmup_steps=0)
    with torch.no_grad():
        for p in trainer.trained:
            p.copy_(p.bfloat16())
    before, dtypes = weights(trainer), set()
    trainer.drafter.fc.weight.register_hook(lambda grad: dtypes.add(grad.dtype))
    trainer.drafter.midlayer.mlp.up_proj.register_forward_hook(lambda m, i, out: dtypes.add(out.dtype))
    steps(trainer, 3)
    assert dtypes == {torch.float32, torch.bfloat16}  # of the gradient, of the forward pass
    assert {p.dtype for p in trainer.drafter.parameters()} == {value.dtype for value in moments(trainer)} == {
        torch.float32}
    for key in ("norm.weight", "midlayer.mlp.up_proj.weight", "lm_head.weight"):
        after = weights(trainer)[key]
        moved, seen = after != before[key], after.bfloat16() != before[key].bfloat16()
        assert moved.float().mean() > 0.9 and seen.float().mean() < 0.1, key


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
@pytest.mark.parametrize("rows, accumulation", [(4, 1), (1, 4)])
def test_clips_the_norm_of_the_whole_step(build, base, monkeypatch, name, rows, accumulation):
    """The logged gradient norm is that of the global batch before clipping, computed here without the loop; what the
    optimizer gets is that gradient scaled to the bound, after the last micro-batch (case 38)."""
    trainer = build(rows=[0, 1, 2, 3], train__optimizer=name, train__batch_rows=rows, train__log_every=1,
                    train__accumulation=accumulation, train__clip=0.01)
    batch = collate([base.reader[i] for i in range(4)])
    (trainer.drafter(batch, 0.0, 0).loss_sum / trainer.drafter.count(batch)).backward()
    wanted = {n: p.grad.clone() for n, p in trained_parameters(trainer.drafter).items()}
    norm = float(sum(g.double().square().sum() for g in wanted.values()).sqrt())
    trainer.drafter.zero_grad()
    logged, got = {}, {}
    monkeypatch.setattr(trainer.accelerator, "log", lambda values, step: logged.update(values))
    monkeypatch.setattr(trainer.optimizer.optimizer, "step", lambda closure=None: got.update(
        {n: p.grad.clone() for n, p in trained_parameters(trainer.drafter).items()}))
    steps(trainer, 1)
    assert norm > 0.1 and logged["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient * (0.01 / norm), rtol=1e-3, atol=1e-8)


def test_composite_calls_the_closure_once():
    """torch's contract of a step with a closure: it runs once, with gradients, and its value is returned."""
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    both = optim.Composite([torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=1.0)])
    calls = []

    def closure():
        calls.append(1)
        loss = (a + b).sum()
        loss.backward()
        return loss

    assert both.step(closure) == 4 and calls == [1]
    torch.testing.assert_close(a.detach(), torch.full((2,), 0.9))
    torch.testing.assert_close(b.detach(), torch.zeros(2))


@pytest.mark.parametrize("cutting", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_muon_is_refused_where_parameters_are_cut(cutting):
    """ZeRO flattens parameters: a recipe with muon is refused by name, one with adamw is not, nor muon under DDP."""
    with pytest.raises(ConfigError, match=f"train.optimizer = muon: .*{cutting.value} .* set train.optimizer to adamw"):
        optim.check(Train(optimizer="muon"), cutting)
    optim.check(Train(optimizer="adamw"), cutting)
    for whole in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        optim.check(Train(optimizer="muon"), whole)


def test_make_train_refuses_before_it_loads_anything(base, monkeypatch, capsys):
    """The command ends with exit code 2 and names the field, before target or traces are read."""
    monkeypatch.setattr(run, "start", lambda *args: SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))
    monkeypatch.setattr(run, "open_rows", None)
    assert call(run.COMMAND, base.recipe, "--train.optimizer", "muon") == 2
    assert "train.optimizer = muon: Muon needs whole matrices, which DEEPSPEED cuts" in capsys.readouterr().err
