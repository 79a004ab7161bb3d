"""The data of `train_step`: a random target's tables, random conversations, first weights that all sides share.

What a step costs does not depend on the values; only the teacher is given its favourites inside the draft vocabulary,
as a real one has them, since specforge leaves out the positions where it has not.
Legend: S tokens, H hidden, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from drafters.base import loss_mask
from drafters.eagle3 import Eagle3, Options
from drafters.eagle3_build import initialise
from drafters.layers import Shape

TAPS = 3  # the peers know no other number
DIVERGENCE = {"speculators"}  # whose loss has the teacher's entropy taken off
FAVOUR = 8.0  # how far the logits of the draft vocabulary stand out, in standard deviations of a logit


@dataclass
class Tables:
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    ids: Tensor  # [D] target ids of the draft vocabulary

    @classmethod
    def random(cls, shape: Shape, seed: int) -> "Tables":
        generator = torch.Generator().manual_seed(seed)
        V, H = shape.vocab_size, shape.hidden_size
        embedding = torch.randn(V, H, generator=generator) * 0.1
        head = torch.randn(V, H, generator=generator) / H**0.5
        ids = torch.randperm(V, generator=generator)[: shape.draft_vocab_size].sort().values
        head[:, 0] = 0
        head[ids, 0] = 1
        return cls(embedding, head, ids)


def drafter_of(options: Options, shape: Shape, tables: Tables, seed: int) -> Eagle3:
    """Our drafter with random first weights."""
    torch.manual_seed(seed)
    drafter = Eagle3(options, shape, list(range(TAPS)), tables.ids, tables.embedding, tables.head)
    with torch.no_grad():
        initialise(drafter)
    return drafter


def write_tables(path: Path, tables: Tables, weights: dict[str, Tensor]) -> None:
    """The file that a side is built from (bench/peers/serving.py)."""
    save_file({"embedding": tables.embedding, "head": tables.head, "ids": tables.ids,
               **{f"weights.{name}": t.detach().contiguous() for name, t in weights.items()}}, path)


def dense(tokens: int) -> Tensor:
    """Turns [S] of one conversation that is supervised from its first token to its last."""
    return torch.ones(tokens, dtype=torch.long)


def half(tokens: int) -> Tensor:
    """Four prompts and their answers, all of one length."""
    span = tokens // 8
    turns = torch.arange(tokens) // span
    return torch.where((turns % 2 == 1) & (turns < 8), turns // 2 + 1, 0)


def case(turns: Tensor, shape: Shape, seed: int, conversation: int | None = None) -> dict[str, Tensor]:
    """A case as bench/peers/serving.py describes it, of these turns [S]. conversation: the length of each where several
    are packed."""
    generator = torch.Generator().manual_seed(seed)
    S, H = len(turns), shape.hidden_size
    starts = torch.zeros(S, dtype=torch.long)
    if conversation:
        starts = torch.arange(S) // conversation * conversation
        turns = torch.where(torch.arange(S) > starts, turns, 0)  # as data.batching packs them
    final = torch.randn(S, H, generator=generator)
    final[:, 0] = FAVOUR
    return {"ids": torch.randint(0, shape.vocab_size, (S,), generator=generator), "turns": turns, "starts": starts,
            "taps": torch.randn(S, TAPS * H, generator=generator), "final": final}


def compared(one: dict[str, Tensor]) -> dict[str, Tensor]:
    """The dense case with masks by which every side counts the same positions of every step.

    At step k ours counts the starts t whose tokens t+1 ... t+2+k exist. speculators counts t where the mask has
    t+1+k, specforge where it has t+k: to both the state behind the last token would teach too.
    """
    mask = torch.ones(len(one["ids"]), dtype=torch.bool)
    return one | {f"mask.{name}": mask.index_fill(0, torch.arange(-ends, 0) + len(mask), False)
                  for name, ends in (("speculators", 1), ("specforge", 2))}


def entropies(one: dict[str, Tensor], tables: Tables, depth: int) -> list[float]:
    """Mean entropy of what teaches each step of the dense case: speculators' loss is a divergence, which is the
    cross-entropy of the others less this."""
    logits = F.linear(one["final"], tables.head[tables.ids]).log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)  # [S]
    found = []
    for k in range(depth):
        at = loss_mask(one["turns"][None], k)[0].nonzero()[:, 0]
        found.append(float(entropy[at + 1 + k].mean()))
    return found


def differing(name: str, theirs: list[float], ours: list[float], entropy: list[float], tolerance: float) -> list[str]:
    """The steps at which the losses of the peer `name` differ from ours. entropy: of the teacher at each step."""
    if len(theirs) != len(ours):
        return [f"{len(theirs)} steps, ours {len(ours)}"]
    found: list[str] = []
    for k, (their, our) in enumerate(zip(theirs, ours)):
        their += entropy[k] if name in DIVERGENCE else 0.0
        if abs(their - our) > tolerance * abs(our):
            found.append(f"step {k}: {their:.6f}, ours {our:.6f}")
    return found


def favourites(tables: Tables, count: int) -> Tensor:
    """Final states [count, H] of a real teacher whose first choice is inside the draft vocabulary."""
    candidates = tables.head[tables.ids[:512]]
    inside = torch.isin((candidates @ tables.head.T).argmax(-1), tables.ids)
    return candidates[inside][torch.arange(count) % int(inside.sum())]


def shape_of(sizes: Any) -> Shape:
    """The Shape of a measurement's sizes."""
    return Shape(
        hidden_size=sizes.hidden, target_hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_dim, rms_norm_eps=1e-5,
        hidden_act="silu", vocab_size=sizes.vocabulary, draft_vocab_size=sizes.draft_vocabulary,
        max_position_embeddings=max(sizes.sequence, *sizes.lengths) + 64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, target_layers=30)
