"""How the ranks of a trace run share its work and what it may ask of others; what they cannot do together."""

import hashlib
from dataclasses import replace

import torch

from data.capture import Conversation
from data.place import behind_url
from data.ranks import Ranks
from recipes.errors import ConfigError
from recipes.launched import local_processes
from recipes.schema import Generation, Recipe


def check_ranks(recipe: Recipe, world: int) -> None:
    """ConfigError for what so many processes cannot do together."""
    if world == 1:
        return
    if behind_url(recipe.trace):
        raise ConfigError(f"trace.url = {recipe.trace.url}: {world} processes collect into one folder of their own; "
                          "leave it empty, and run once more in one process with the URL to move the traces there")
    for section in ("trace", "generation"):
        if getattr(recipe, section).backend == "vllm":
            raise ConfigError(f"{section}.backend = vllm: an engine takes the GPUs of a machine by itself, so {world} "
                              f"processes would want the same ones; use one process and {section}.engine, or servers")
    if recipe.generation.backend == "openai" and recipe.generation.server.concurrency < world:
        raise ConfigError(f"generation.server.concurrency = {recipe.generation.server.concurrency}: all {world} "
                          "processes share it, at least one request each")
    spread = recipe.target.device_map
    if isinstance(spread, str) and spread and local_processes() > 1 and torch.cuda.is_available():
        raise ConfigError(f"target.device_map = {spread}: {local_processes()} processes on this machine would spread "
                          "over the same devices; start one a machine")


def part_of(section: Generation, ranks: Ranks) -> Generation:
    """The section with this rank's part of what the server is asked to bear."""
    server = section.server
    concurrency = (server.concurrency + ranks.world - 1 - ranks.rank) // ranks.world
    return replace(section, server=replace(server, concurrency=concurrency,
                                           requests_per_s=server.requests_per_s / ranks.world))


def neighbours(names: list[str], rank: int, world: int) -> list[str]:
    """A rank's run of the names, as long as any other or one shorter. Neighbours, because the states that wait for
    them lie in the same parts."""
    return names[len(names) * rank // world : len(names) * (rank + 1) // world]


def rows_digest(rows: list[Conversation]) -> str:
    """Hex SHA-256 of all rows."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()
