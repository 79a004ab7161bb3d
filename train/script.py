"""Prints the training script of a recipe's drafter, for the Makefile: `python -m train.script --config RECIPE`."""

from drafters.registry import entry
from recipes.cli import Command, run
from recipes.schema import Recipe


def main(recipe: Recipe, switches: set[str]) -> None:
    print(entry(recipe.drafter.kind).script)


if __name__ == "__main__":
    run(Command("make train", "Prints the training script of a recipe's drafter.", main))
