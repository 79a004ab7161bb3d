"""Prints the training script of a recipe's drafter, for the Makefile: `python -m train.script --config RECIPE`."""

from drafters.registry import entry, require_training
from recipes.cli import Command, run
from recipes.schema import Recipe


def main(recipe: Recipe, switches: set[str]) -> None:
    require_training(recipe.drafter.kind)
    print(entry(recipe.drafter.kind).script)


COMMAND = Command("make train", "Prints the training script of a recipe's drafter.", main)

if __name__ == "__main__":
    run(COMMAND)
