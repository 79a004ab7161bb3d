"""Answers by transformers in this process: the target decodes them itself (data/generate.py)."""

from data.backends.base import Losses
from data.backends.journal import Journal
from data.generate import Answer, Generator, Request
from data.recorder import Keeper
from drafters.target import Target
from recipes.schema import Generation


class LocalBackend:
    """A unit is decoded as one batch, so nothing is journaled and no row is lost."""

    def __init__(self, section: Generation, target: Target) -> None:
        self.section, self.target = section, target

    def run(self, requests: list[Request], max_tokens: int, journal: Journal, losses: Losses,
            keeper: Keeper | None = None) -> list[Answer]:
        """See Backend.run."""
        generator = Generator(self.target, max_tokens, self.section.batch_size, self.section.seed)
        return generator.run(requests, keeper=keeper)
