"""`accelerate launch train/medusa.py --config RECIPE`: train/run.py for recipes with drafter.kind medusa."""

from recipes.cli import process
from train.run import COMMAND

if __name__ == "__main__":
    process(COMMAND)
