"""What training, our loop, the second reader and an engine make of the same rows, for `make doctor`.

Each witness fills an Evidence as far as it knows; nothing is compared here.
Legend: T tokens of a row, n taps, H target hidden, D draft vocabulary, K steps, t a position that can start a draft.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.batching import collate
from data.reader import RowReader
from data.store import TraceRow
from drafters.target import Target
from drafters.unrolled import Chains
from eval.decode import Decoder
from eval.engine_run import Answers
from eval.metrics import Acceptance
from eval.reader import open_reader, read_acceptance, read_target
from eval.replay import walk


@dataclass
class Evidence:
    """One witness's account; None or empty: it does not know. States and log-probabilities are float32."""

    name: str
    precision: str = "float32"  # that it computes in
    stored: str = ""  # precision that its states were stored in
    weights: str = ""  # precision that the drafter's weights went through
    checkpoint: str = ""  # SHA-256 of the weights that it computes with, or was exported from
    dtypes: dict[str, str] = field(default_factory=dict)  # of traces, target and export, which should be one
    vocabulary: list[int] | None = None  # target id of each draft id
    layers: list[int] | None = None
    frequencies: Tensor | None = None  # rotary inverse frequencies
    ids: dict[str, list[int]] = field(default_factory=dict)  # row or prompt -> tokens
    states: dict[str, Tensor] = field(default_factory=dict)  # row -> taps [T, n*H]
    teacher: dict[str, list[int]] = field(default_factory=dict)  # row -> greedy token after each answer position
    gaps: dict[str, list[float]] = field(default_factory=dict)  # row -> top-2 logit gap of the teacher
    drafts: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # (row, t) -> log-probabilities [K, D]
    acceptance: dict[str, Acceptance] = field(default_factory=dict)  # over `rows` and over `prompts`
    counted: dict[str, list[str]] = field(default_factory=dict)  # which rows and prompts these are


def frequencies_of(drafter: Any) -> Tensor | None:
    """Rotary inverse frequencies; None for a drafter that attends to nothing."""
    rotary = getattr(drafter, "rotary", None)
    return None if rotary is None else rotary.inv_freq.cpu()


def answer_of(row: TraceRow) -> list[int]:
    return row.ids[row.turns > 0].tolist()


def starts_of(row: TraceRow, count: int) -> list[int]:
    """First, middle and last positions of a row from which a draft can start."""
    chains = Chains(collate([row]), 1.0, 0)
    at = chains.at[0][chains.valid[0]].tolist()
    return sorted({at[i * (len(at) - 1) // max(count - 1, 1)] for i in range(count)}) if at else []


@torch.no_grad()
def training(drafter: Any, reader: RowReader, rows: list[TraceRow], K: int, count: int, target: Target) -> Evidence:
    """Stored states through the parallel chains that training unrolls, and the replayed walk of validation. Validation
    rows are the target's greedy answers whatever the others are (data/answers.py), so that a loop gives them again."""
    said = Evidence("training", target.section.dtype, reader.manifest["dtype"],
                    dtypes={"traces": reader.manifest["target"]["dtype"]}, vocabulary=drafter.draft_ids.tolist(),
                    layers=list(reader.manifest["layers"]) if target.layers else None,
                    frequencies=frequencies_of(drafter))
    counts = Acceptance(K)
    for row in rows:
        batch = collate([row]).to(target.device, target.dtype)
        chains = Chains(batch, 1.0, 0)
        found = [logits.float().log_softmax(-1)[0].cpu() for logits in drafter.chain_logits(batch, K)]  # [P, D] each
        at, valid = chains.at[0].tolist(), chains.valid[0]
        said.drafts |= {(row.id, t): torch.stack([step[at.index(t)] for step in found]) for t in starts_of(row, count)}
        said.ids[row.id] = row.ids.tolist()
        if target.layers:  # of a final state the traces hold those that teach alone
            said.states[row.id] = row.taps.float().cpu()
        if not row.off_policy:
            said.teacher[row.id] = answer_of(row)
        if walked(row, K):
            drafted = drafter.draft_ids.cpu()[torch.stack([step.argmax(-1) for step in found], dim=-1)]  # [P, K]
            tokens = drafted[valid.cpu()].tolist()
            counts = counts + walk(tokens, answer_of(row), row.tail, K)
    if counts.drafts:
        said.acceptance["rows"], said.counted["rows"] = counts, [row.id for row in rows if walked(row, K)]
    return said


def walked(row: TraceRow, K: int) -> bool:
    """Whether a loop can give this row again from its prompt, K tokens a draft: one answer, the target's own, with as
    many tokens behind it as its last draft is compared with."""
    return not row.off_policy and int(row.turns.max()) == 1 and len(answer_of(row)) > 1 and len(row.tail) >= K


def retokenised(target: Target, row: TraceRow) -> list[int]:
    """The row's prompt as text, tokenised again, with the row's own answer behind it (case 45)."""
    ids = row.ids.tolist()
    prompt = next((i for i, turn in enumerate(row.turns.tolist()) if turn > 0), len(ids))
    text = target.tokenizer.decode(ids[:prompt], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return target.tokenizer(text, add_special_tokens=False)["input_ids"] + ids[prompt:]


@torch.inference_mode()
def loop(drafter: Any, target: Target, rows: list[TraceRow], prompts: dict[str, list[int]], K: int, count: int,
         max_tokens: int) -> Evidence:
    """The target's cached pass, the decoding session, and the loop itself."""
    said = Evidence("loop", target.section.dtype, dtypes={"target": target.section.dtype},
                    vocabulary=drafter.draft_ids.tolist(), layers=list(target.layers),
                    frequencies=frequencies_of(drafter), counted={"prompts": list(prompts)})
    for row in rows:
        ids = row.ids[None].to(target.device)
        positions = torch.arange(ids.shape[1], device=target.device)[None]
        states = target.forward(ids, positions, target.new_cache(1, ids.shape[1] + K + 1))
        said.ids[row.id] = retokenised(target, row)
        if states.taps is not None:  # a drafter may read tokens alone
            said.states[row.id] = states.taps[0].float().cpu()
        said.teacher[row.id], said.gaps[row.id] = greedy(states.logits[0], row)
        for t in starts_of(row, count):
            session = drafter.session(1, t + K + 2)
            session.begin([ids[0, : t + 1].tolist()])
            taps = None if states.taps is None else states.taps[:, : t + 1]
            session.observe(taps, ids[:, 1 : t + 2], positions[:, : t + 1], torch.tensor([t], device=target.device))
            q = session.propose(K, lambda spread: spread.argmax(-1)).q[0]  # [K, V]
            said.drafts[row.id, t] = q[:, drafter.draft_ids].float().log().cpu()
    again = [row for row in rows if walked(row, K)]
    if again:
        said.acceptance["rows"] = counted(target, drafter, [row_prompt(row) for row in again], K,
                                          [len(answer_of(row)) for row in again])
    said.ids |= prompts
    outputs = Decoder(target, max_tokens).speculative(list(prompts.values()), drafter, K)
    said.acceptance["prompts"] = sum((o.acceptance for o in outputs), Acceptance(K))
    for (name, prompt), output in zip(prompts.items(), outputs):
        said.teacher[name], said.gaps[name] = output.tokens, gaps_of(target, prompt, output.tokens)
    return said


def gaps_of(target: Target, prompt: list[int], answer: list[int]) -> list[float]:
    """How far the second best token is below the best, at every token of an answer."""
    ids = torch.tensor([prompt + answer], device=target.device)
    logits = target.forward(ids, torch.arange(ids.shape[1], device=target.device)[None]).logits[0]  # [T, V]
    top = logits[len(prompt) - 1 : -1].float().topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).tolist()


def row_prompt(row: TraceRow) -> list[int]:
    """Tokens before a row's answer."""
    return row.ids.tolist()[: next(i for i, turn in enumerate(row.turns.tolist()) if turn > 0)]


def counted(target: Target, drafter: Any, prompts: list[list[int]], K: int, limits: list[int]) -> Acceptance:
    """The loop's counts where each prompt has an answer of its own length."""
    found = (Decoder(target, limit).speculative([prompt], drafter, K)[0] for prompt, limit in zip(prompts, limits))
    return sum((o.acceptance for o in found), Acceptance(K))


def greedy(logits: Tensor, row: TraceRow) -> tuple[list[int], list[float]]:
    """The best token before each answer token of a row, and how far the second best is below it; logits [T, V]."""
    before = (row.turns > 0).nonzero()[:, 0].to(logits.device) - 1
    top = logits[before].float().topk(2, dim=-1)
    return top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()


@torch.inference_mode()
def second_reader(folder: Path, layout: str, target: Target, rows: list[TraceRow], prompts: dict[str, list[int]],
                  K: int, count: int, max_tokens: int) -> Evidence:
    """The exported files, read by plain torch over transformers' own forward pass."""
    drafter = open_reader(folder, target.model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    frequencies = None if drafter.frequencies is None else drafter.frequencies.cpu()
    said = Evidence(f"reader of {layout}", target.section.dtype, weights=config["torch_dtype"],
                    checkpoint=origin["checkpoint_sha256"], dtypes={"export": config["torch_dtype"]},
                    vocabulary=list(drafter.target_ids), layers=list(drafter.layers), frequencies=frequencies,
                    counted={"prompts": list(prompts)})
    for row in rows:
        ids = row.ids.tolist()
        tokens, taps = read_target(target.model, ids, drafter.layers)
        before = [i - 1 for i, turn in enumerate(row.turns.tolist()) if turn > 0]
        if taps:
            said.states[row.id] = torch.cat(taps, dim=-1).float().cpu()
        said.teacher[row.id] = [tokens[i] for i in before]
        for t in starts_of(row, count):
            steps = drafter.draft_logits([tap[: t + 1] for tap in taps], ids[: t + 2], K)
            said.drafts[row.id, t] = torch.stack(steps).float().log_softmax(-1).cpu()
    reading = read_acceptance(folder, target.model, list(prompts.values()), K, max_tokens, target.end_ids)
    said.acceptance["prompts"] = Acceptance(K, reading.drafts, list(reading.accepted_per_position))
    said.teacher |= dict(zip(prompts, reading.tokens))
    return said


def engine(answers: Answers, name: str, prompts: list[str]) -> Evidence:
    """A real engine's answers and counters, and the ids that its own tokenizer makes of the chats."""
    said = Evidence(name, counted={"prompts": prompts})
    said.teacher = dict(zip(prompts, answers.tokens))
    said.ids = dict(zip(prompts, answers.rendered))
    K = len(answers.accepted)
    said.acceptance["prompts"] = Acceptance(K, answers.drafts, list(answers.accepted))
    return said
