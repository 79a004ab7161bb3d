"""`accelerate launch train/eagle3.py --config RECIPE`: train/run.py for recipes with drafter.kind eagle3."""

from recipes.cli import process
from train.run import COMMAND

if __name__ == "__main__":
    process(COMMAND)
