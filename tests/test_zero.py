"""What a DeepSpeed config may say beside a recipe, and the module that ZeRO-3 is given. No process group is needed."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from drafters.base import LossOutput
from recipes.errors import ConfigError
from recipes.schema import Train
from train.zero import OneModule, autos, check_mixed_precision, configure, stated

RECIPE = Train(batch_rows=2, accumulation=3, clip=0.5)


def base(**changes) -> dict:
    """A config as accelerate makes it for a file with values of `auto`."""
    return {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "zero_optimization": {
                "stage": 2, "offload_optimizer": {"device": "none", "nvme_path": None}, "offload_param": {
                    "device": "none", "nvme_path": None}}, **changes}


def test_auto_is_filled_from_the_recipe():
    """Two rows, three micro-batches, four ranks; no value stays auto, the precision is the recipe's."""
    config = base(bf16={"enabled": "auto"})
    config["zero_optimization"] |= {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    configure(config, RECIPE, 4, set())
    assert config["train_micro_batch_size_per_gpu"] == 2 and config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.5 and config["train_batch_size"] == 24
    assert config["bf16"]["enabled"] is False and config["torch_autocast"]["enabled"] is False
    assert list(autos(config)) == []
    config = base()
    configure(config, replace(RECIPE, dtype="bfloat16"), 4, set())
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"} and not config["bf16"]["enabled"]


def test_values_that_agree_are_accepted():
    """The recipe's own values, written out."""
    configure(base(train_batch_size=24, train_micro_batch_size_per_gpu=2, gradient_clipping=0.5, bf16={
        "enabled": False}), RECIPE, 4, {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"})


@pytest.mark.parametrize("changes, message", [
    ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu = 4, the recipe 2; use auto"),
    ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps = 1, the recipe 3"),
    ({"gradient_clipping": 1.0}, "gradient_clipping = 1.0, the recipe 0.5"),
    ({"train_batch_size": 8}, "train_batch_size = 8, the recipe 24"),
    ({"fp16": {"enabled": True}}, "enables fp16: train.dtype = float32"),
    ({"bf16": {"enabled": True}}, "enables bf16: train.dtype = float32"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled = True, the recipe train.dtype = float32"),
    ({"optimizer": {"type": "Adam"}}, "section optimizer: the recipe's train section makes the optimizer"),
    ({"scheduler": {"type": "WarmupLR"}}, "section scheduler"),
    ({"amp": {"enabled": True}}, "section amp"),
    ({"elasticity": {"enabled": True}}, "section elasticity"),
    ({"zero_optimization": {"stage": 0}}, "zero stage 0; use 1, 2 or 3"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "device = nvme"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.device = nvme"),
    ({"aio": {"block_size": "auto"}}, "aio.block_size = auto, which the recipe has no value for"),
])
def test_a_disagreement_is_named(changes, message):
    """Every value of the launch config that the recipe decides otherwise stops the run (case 42's silent half)."""
    config = base(**changes)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        configure(config, RECIPE, 4, set(changes))


def test_offload_to_the_cpu_keeps_the_recipe_s_optimizer():
    config = base()
    config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    configure(config, RECIPE, 1, set())
    assert config["zero_force_ds_cpu_optimizer"] is False


def test_what_the_user_wrote(tmp_path):
    """accelerate's own 1 for accumulation and clipping is nobody's word; a 1 in the user's file is."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}))
    known = {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    assert stated(known, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}) == {
        "gradient_accumulation_steps", "zero_optimization"}
    assert stated(known, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}) == set()
    assert stated(known, {"ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,gradient_clipping"}) == {
        "zero_stage", "gradient_clipping"}
    assert stated(known | {"gradient_accumulation_steps": 4}, {}) == {"gradient_accumulation_steps"}


@pytest.mark.parametrize("launched, dtype, fits", [
    ("no", "float32", True), ("no", "bfloat16", True), ("bf16", "bfloat16", True), ("bf16", "float32", False),
    ("fp16", "float32", False), ("fp16", "bfloat16", False)])
def test_mixed_precision_of_the_launch(launched, dtype, fits):
    """`accelerate launch --mixed_precision` may repeat train.dtype, not contradict it."""
    if fits:
        check_mixed_precision(launched, dtype)
        return
    with pytest.raises(ConfigError, match=f"mixed_precision = {launched}, the recipe train.dtype = {dtype}"):
        check_mixed_precision(launched, dtype)


class Small(nn.Module):
    """A drafter of one matrix and one table."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.fc.weight)  # sums that no order of adding changes
        self.register_buffer("embedding", torch.zeros(8, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> LossOutput:
        none = torch.zeros(1)
        return LossOutput(self.fc(x).sum(), none, none, none)


def test_zero3_gets_one_module_without_tables():
    """It owns the drafter's parameters, the same objects, and no buffer; it has no parts that hooks could gather one by
    one; its output is a tuple, in which DeepSpeed finds the loss; train() and eval() reach the drafter (case 18)."""
    drafter = Small()
    module = OneModule(drafter)
    assert [id(p) for p in module.parameters()] == [id(drafter.fc.weight)]
    assert not list(module.buffers()) and not list(module.children())
    out = module(torch.ones(1, 2))
    assert isinstance(out, tuple) and torch.equal(out.loss_sum, drafter.fc.weight.sum())
    module.eval()
    assert not drafter.training
