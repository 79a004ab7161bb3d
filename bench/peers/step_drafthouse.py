"""Steps our own EAGLE-3 drafter: `python step_drafthouse.py`, see serving.py. The optimizer is that of training."""

from dataclasses import fields
from typing import Any

from serving import Case, serve
from torch import Tensor

from drafters.base import Batch
from drafters.eagle3 import Eagle3, Options
from drafters.layers import Shape
from recipes.provenance import git_revision
from recipes.schema import Train
from train import optim


class Drafthouse:
    name, version = "drafthouse", git_revision()[:12]

    def __init__(self, opening: dict[str, Any], tables: Case) -> None:
        train = Train(**opening["train"])
        self.model = Eagle3(Options(**opening["options"]), Shape(**opening["shape"]), opening["layers"], tables["ids"],
                            tables["embedding"], tables["head"])
        weights = {name.removeprefix("weights."): t for name, t in tables.items() if name.startswith("weights.")}
        self.model.load_state_dict(weights)
        self.optimizers, self.clip = [optim.build(self.model, train)], train.clip
        for group in self.optimizers[0].param_groups:
            group["relative"] = group["peak_lr"] / train.lr

    def batch(self, case: Case) -> Batch:
        return Batch(**{field.name: case[field.name][None] for field in fields(Batch)})

    def loss(self, case: Case, options: dict[str, Any]) -> Tensor:
        """options: depth_share and train_head, where they are not those of the run; progress of the run; seed."""
        self.model.options.depth_share = options.get("depth_share", self.model.options.depth_share)
        self.model.lm_head.weight.requires_grad_(options.get("train_head", self.model.options.train_head))
        batch = self.batch(case)
        out = self.model(batch, options.get("progress", 1.0), options.get("seed", 0))
        return out.loss_sum / max(self.model.count(batch), 1)

    def depth_losses(self, case: Case) -> list[float]:
        out = self.model(self.batch(case))
        return (out.depth_loss / out.depth_count).tolist()

    def tensors(self) -> dict[str, Tensor]:
        return self.model.state_dict()


if __name__ == "__main__":
    serve(Drafthouse)
