"""`accelerate launch train/small_lm.py --config RECIPE`: train/run.py for recipes with drafter.kind small_lm."""

from recipes.cli import process
from train.run import COMMAND

if __name__ == "__main__":
    process(COMMAND)
