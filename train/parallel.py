"""`accelerate launch train/parallel.py --config RECIPE`: train/run.py for recipes with drafter.kind parallel."""

from recipes.cli import process
from train.run import COMMAND

if __name__ == "__main__":
    process(COMMAND)
