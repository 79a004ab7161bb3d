"""The cost model against numbers by hand, published step times, and what the real drafter computes and keeps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from drafters import chain_attention
from drafters.base import Batch, loss_mask
from drafters.eagle3 import Eagle3, Options
from drafters.layers import Shape
from recipes import cost, draft_cost, stages, storage
from recipes.cost import Format, Pass, Speed, pass_seconds
from recipes.draft_cost import DraftSize
from recipes.hardware import known
from recipes.model_shape import Matrix, shape_of
from tests.test_model_shape import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, QWEN3_235B

positive = st.floats(1e-6, 1e3)


@settings(max_examples=50, deadline=None)
@given(positive, positive, st.floats(1, 8))
def test_norm_of_times_lies_between_the_longer_and_the_sum(a, b, p):
    """pnorm(a, b, p) is the sum at p = 1 and falls towards the longer time."""
    assert max(a, b) <= cost.pnorm(a, b, p) <= (a + b) * (1 + 1e-9)
    assert cost.pnorm(a, b, 1) == pytest.approx(a + b) and cost.pnorm(a, 0.0, p) == a and cost.pnorm(0.0, 0.0, p) == 0


def test_experts_by_hand():
    """2 of 4 experts: one token reads 2, two tokens 4 x (1 - 1/4) = 3, many all; a row's tokens that choose alike
    read as one does."""
    assert cost.experts_read(4, 2, Pass(1)) == 2 and cost.experts_read(4, 2, Pass(2)) == 3
    assert cost.experts_read(4, 2, Pass(1, 2)) == 3 and cost.experts_read(4, 2, Pass(1, 2, alike=1.0)) == 2
    assert cost.experts_read(4, 2, Pass(500)) == pytest.approx(4)


def test_matrix_by_hand():
    """Two matrices [6, 4] at 8 bits, 3 rows of one token, states of 16 bits, shared by two GPUs."""
    moved, done = cost.matrix_work(Matrix("m", 6, 4, 2), Pass(3), Format(8, 16, 16, ranks=2))
    assert moved == (48 + 3 * 10 * 2 * 2) / 2 and done == 2 * 48 * 3 / 2
    moved, done = cost.matrix_work(Matrix("e", 6, 4, 1, 4, 2), Pass(2), Format())
    assert moved == 24 * 3 * 2 + 2 * 10 * 2 * 2 and done == 2 * 2 * 24 * 2, "experts: those that two tokens read"


def test_a_pass_is_bound_by_its_weights_or_its_products():
    """One token of Llama-3.1-8B costs the reading of its weights, a long prompt its products."""
    shape, speed = shape_of(LLAMA_8B), Speed(3.35e12, 989e12, overlap=64)
    weights = (shape.parameters - shape.head - shape.small) * 2 / 3.35e12  # one row of the embedding is read
    assert pass_seconds(shape, Pass(1), Format(), speed) == pytest.approx(weights, rel=0.01)
    prompt = pass_seconds(shape, Pass(1, 8000), Format(), speed)
    assert prompt == pytest.approx(shape.prefill_flops(8000) / 989e12, rel=0.01)


def test_bounds_of_the_audited_claims():
    """70B in fp8 on one H200 at batch 8: weights alone take 14.5 ms, so at most 553 tokens a second (a B200 921); the
    claims of 1,400 and 2,100 are impossible."""
    shape = shape_of(LLAMA_70B)
    for bandwidth, most in ((4.8e12, 553), (8.0e12, 921)):
        rate = 8 / pass_seconds(shape, Pass(8), Format(8, 8, 8), Speed(bandwidth, 1979e12, overlap=64))
        assert rate < most and rate == pytest.approx(most, rel=0.05)


def test_shared_layers():
    """Two GPUs halve weights, products and key/value heads; what they add is the sum of the states, twice a layer.
    MLA's latent is not divided, and eight ranks divide four key/value heads by four."""
    shape = shape_of(LLAMA_8B)
    speed = Speed(3.35e12, 989e12, link=450e9)
    one, two = (pass_seconds(shape, Pass(4, 1, 1000), Format(ranks=n), speed) for n in (1, 2))
    added = 2 * 32 * 4 * 4096 * 2 * 1 / 450e9
    assert two == pytest.approx(one / 2 + added)
    assert cost.cache_split(shape_of(DEEPSEEK_V3), 8) == 1 and cost.cache_split(shape_of(QWEN3_235B), 8) == 4
    assert cost.weights_per_gpu(shape, Format(ranks=2, holders=2)) == shape.parameters * 2 / 4
    assert cost.cache_per_gpu(shape, 3, 100, Format(ranks=2)) == 3 * 100 * 131072 / 2


# (config, GPU, tensor-parallel size, rows, context, bits, ms): plain decoding steps that others published, see
# shared fixtures of the ROI planner: TensorRT-LLM's blog, vLLM issue 20780, SpecForge's data.json.
PUBLISHED = [(LLAMA_70B, "h200", 1, 1, 1024, 8, 1000 / 51.14), (LLAMA_8B, "h100-sxm", 1, 1, 300, 16, 7.07),
             (LLAMA_70B, "h200", 4, 8, 1024, 16, 13.9), (LLAMA_70B, "h200", 4, 8, 1024, 16, 14.8),
             (QWEN3_235B, "h200", 8, 8, 1024, 16, 15.1),
             (DEEPSEEK_V3 | {"model_type": "kimi_k2", "num_attention_heads": 64, "vocab_size": 163840,
                             "n_routed_experts": 384, "first_k_dense_replace": 1}, "h200", 8, 8, 1024, 8, 15.83)]


@pytest.mark.parametrize("config, gpu, ranks, rows, context, bits, ms", PUBLISHED)
def test_published_steps_lie_in_the_range(config, gpu, ranks, rows, context, bits, ms):
    """With the default shares of a serving engine, best and worst case enclose the measured step."""
    hardware = known({})[gpu]
    flops = hardware.flops("fp8" if bits == 8 else "bfloat16")
    best = Speed(0.9 * hardware.bandwidth_tb_s * 1e12, 0.6 * flops, 0.8 * hardware.link_gb_s * 1e9, 0.0, overlap=8)
    worst = Speed(0.6 * hardware.bandwidth_tb_s * 1e12, 0.25 * flops, 0.8 * hardware.link_gb_s * 1e9, 150e-6)
    low, high = (1e3 * pass_seconds(shape_of(config), Pass(rows, 1, context), Format(bits, 16, 16, ranks), speed)
                 for speed in (best, worst))
    assert low <= ms <= high


# --- the drafter ---

H, V, D, TAPS = 32, 64, 48, 3


def drafter(**options) -> tuple[Eagle3, DraftSize]:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=80, num_attention_heads=4,
                         num_key_value_heads=2, num_hidden_layers=6)
    made = Options(draft_vocab_size=D, deepen_at=0.0, **options)
    module = Eagle3(made, Shape.from_target(config, D), [1, 2, 3], torch.arange(D), torch.randn(V, H),
                    torch.randn(V, H))
    size = DraftSize(H, H, TAPS, 4, 2, 8, 80, D, V, made.tap_norms, made.train_head,
                     made.num_layers)
    return module.train(), size


def batch(prompt: int, answer: int) -> Batch:
    """One row: a prompt, then one supervised turn."""
    S = prompt + answer
    turns = torch.tensor([[0] * prompt + [1] * answer])
    return Batch(torch.randint(V, (1, S)), turns, torch.randn(1, S, TAPS * H), torch.randn(1, S, H))


@pytest.mark.parametrize("options", [{}, {"tap_norms": True}, {"train_head": False}, {"num_layers": 2}])
def test_drafter_parameters_are_the_modules(options):
    """All and trained parameters, as the module allocates them."""
    module, size = drafter(**options)
    assert size.parameters == sum(p.numel() for p in module.parameters())
    assert size.trained == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert size.borrowed == module.embedding.numel() + module.teacher_head.numel()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5))
def test_worked_positions_are_those_of_the_loss_mask(lengths, depth):
    """Turns of any lengths between prompts: as many positions in each unrolled step as the mask has (case 31)."""
    turns = []
    for number, length in enumerate(lengths, 1):
        turns += [0, 0, *[number] * length]
    turns = torch.tensor([turns])
    assert draft_cost.worked(lengths, depth) == [int(loss_mask(turns, k).sum()) for k in range(depth)]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("train_head", [True, False])
def test_training_operations_are_those_of_the_drafter(layers, depth, train_head):
    """FLOPs of forward and backward pass as torch counts the real drafter's products. Where the drafter's forward pass
    changes, train_flops has to follow."""
    module, size = drafter(depth=depth, train_head=train_head, num_layers=layers)
    with FlopCounterMode(display=False) as counter:
        module(batch(20, 12)).loss_sum.backward()
    predicted = draft_cost.train_flops(size, 32, draft_cost.worked([12], depth))
    assert predicted == pytest.approx(counter.get_total_flops(), rel=0.001)


def test_operations_of_a_long_row_in_parts(monkeypatch):
    """Two layers over rows of several parts: positions of the first layer see the columns up to their part's end."""
    monkeypatch.setattr(draft_cost, "PART", 8)
    monkeypatch.setattr(chain_attention, "CHAINS", {"cpu": 8})
    module, size = drafter(depth=2, num_layers=2)
    with FlopCounterMode(display=False) as counter:
        module(batch(20, 44)).loss_sum.backward()
    predicted = draft_cost.train_flops(size, 64, draft_cost.worked([44], 2))
    assert predicted == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("layers", [1, 2])
def test_kept_activations_are_not_underestimated(layers):
    """Bytes that autograd keeps of the real pass, weights and batch aside: the estimate is no lower, and at most three
    times as high."""
    module, size = drafter(depth=3, num_layers=layers)
    row = batch(20, 12)
    known_storages = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), row.taps,
                                                               row.final, row.ids, row.turns)}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage_ = tensor.untyped_storage()
        if storage_.data_ptr() not in known_storages:
            kept[storage_.data_ptr()] = storage_.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(row).loss_sum
    assert loss.requires_grad
    given_ = 32 * (TAPS + 1) * H * 4
    predicted = draft_cost.activation_bytes(size, 1, 32, draft_cost.worked([12], 3), 4) - given_
    assert sum(kept.values()) <= predicted <= 3 * sum(kept.values())


def test_thinned_chains_and_schedule():
    """Half of the chains go on from each step: P, P/2, P/4 at most; a run that begins shallow averages both depths."""
    _, size = drafter()
    assert draft_cost.worked([9], 3, 0.5) == [8, 3.5, 1.5]
    one, three = (draft_cost.train_flops(size, 20, draft_cost.worked([9], d)) for d in (1, 3))
    mean = draft_cost.mean_train_flops(size, 20, [9], [(0.0, 1), (0.25, 3)])
    assert mean == pytest.approx(0.25 * one + 0.75 * three)
    later = draft_cost.mean_train_flops(size, 20, [9], [(0.0, 1), (0.0, 3), (0.5, 1)])
    assert later == pytest.approx(0.5 * three + 0.5 * one)


def test_optimizer_memory_by_stage():
    """16 bytes a trained parameter on one GPU; ZeRO divides moments and its copy, then gradients, then weights."""
    _, size = drafter()
    n = size.parameters
    assert draft_cost.optimizer_bytes(size, 1, 0) == 16 * n and draft_cost.optimizer_bytes(size, 4, 0) == 20 * n
    assert draft_cost.optimizer_bytes(size, 4, 1) == (4 + 4 + 12 / 4) * n
    assert draft_cost.optimizer_bytes(size, 4, 2) == (4 + 16 / 4) * n
    assert draft_cost.optimizer_bytes(size, 4, 3) == 20 / 4 * n


def test_steps_are_the_plans():
    """Optimizer steps as data.batching.Plan counts them: 428 rows, 3 epochs of single rows; 10 rows in global batches
    of 2 x 2 x 1, the last one short."""
    assert draft_cost.optimizer_steps(428, 3, 1, 1, 1) == 1284 and draft_cost.optimizer_steps(10, 1, 2, 2, 1) == 3
    assert draft_cost.optimizer_steps(1, 0.1, 8, 8, 8) == 1


def test_files_are_as_large_as_the_demos():
    """The demo's drafter (9.8 M parameters, D 8,192) took 39,348,616 bytes and its moments 78,476,488; its 63,006
    tokens of traces 550,601,772."""
    size = DraftSize(576, 576, 3, 9, 3, 64, 1536, 8192, 49152)
    found = storage.checkpoint_bytes(size.trained, 0, 8192, 49152)
    assert found == pytest.approx(39348616 + 78476488, rel=0.001)
    assert storage.export_bytes(size.parameters, 4, 8192, 49152) == pytest.approx(39348648, rel=0.001)
    assert storage.row_bytes(63006, 25950 + 22967, 3, 576, 4, False) == pytest.approx(550601772, rel=0.01)


def test_checkpoints_are_counted_as_the_loop_writes_them():
    """10 steps: validated at 4, 8 and 10, saved at 3, 6 and 9 too; every multiple of both once; the end always."""
    assert stages.saves(10, 4, 3) == len({3, 4, 6, 8, 9, 10})
    assert stages.saves(12, 4, 3) == len({3, 4, 6, 8, 9, 12}) and stages.saves(10, 5, 5) == 2
    assert stages.saves(1, 200, 200) == 1 and stages.saves(1284, 200, 50) == 26


# --- stages ---

ONE = stages.Machine(1, *[Speed(1e12, 1e14)] * 3, disk=1e9, start_s=0, base=0)


def test_waves_of_a_batch():
    """10 answers of 5 tokens, 4 at a time: three waves of five passes over 3.33 rows, and two passes of prompts."""
    shape, keep, speed = shape_of(LLAMA_8B), Format(), Speed(1e12, 1e14)
    step = pass_seconds(shape, Pass(10 / 3, 1, 20 + 2.5), keep, speed)
    filling = 2 * pass_seconds(shape, Pass(8, 20), keep, speed)
    assert stages.decode_seconds(shape, keep, speed, 10, 20, 5, 4) == pytest.approx(15 * step + filling)
    assert stages.decode_seconds(shape, keep, speed, 0, 20, 5, 4) == 0


def test_more_gpus_share_the_rows():
    """Eight GPUs answer an eighth of the rows each; four of them that hold one target leave two such groups."""
    shape = shape_of(LLAMA_8B)
    load = stages.Load(answers=768, rows=768, prompt=100, answer=100, longest=200)
    section = stages.Tracing(96, "with", "bfloat16", 3, 2048, True, 64e6, 128)

    def answers(gpus: int, keep: Format) -> float:
        machine = stages.Machine(gpus, *[Speed(1e12, 1e14)] * 3, disk=1e9, start_s=0, base=0)
        return stages.trace(shape, keep, keep, machine, load, section).parts["answers"]

    assert answers(8, Format()) == pytest.approx(answers(1, Format()) / 8)
    assert answers(8, Format(holders=4)) == pytest.approx(answers(1, Format()) / 2)


def test_where_states_come_from():
    """States that come with the answers cost no pass; those apart do; without states the folder holds tokens alone;
    8 bits wait as float32 until the last answer."""
    shape = shape_of(LLAMA_8B)
    load = stages.Load(answers=10, rows=10, prompt=100, answer=100, longest=200)

    def traced(states: str, stored: str = "bfloat16", staged: bool = False, unit: int = 10) -> stages.Stage:
        return stages.trace(shape, Format(), Format(), ONE, load,
                            stages.Tracing(4, states, stored, 3, 2048, staged, 0, unit))

    apart, with_answers, none = traced("apart"), traced("with"), traced("none")
    assert apart.seconds - with_answers.seconds == pytest.approx(stages.states_seconds(
        shape, Format(), ONE.eager, 10, 200, 2048))
    assert with_answers.disk == 2000 * 10 + (2000 * 3 + 1000) * 4096 * 2 and none.disk == 20000
    shards, waiting = 20000 + 7000 * (4096 + 4), 20000 + 7000 * 4096 * 4
    assert traced("with", "int8", True).peak == pytest.approx(shards + waiting), "one unit goes when all is written"
    assert traced("with", "int8", True, unit=1).peak == pytest.approx(waiting), "parts go as their shards come"
    assert traced("with", "bfloat16", True, unit=1).peak == pytest.approx(1.1 * with_answers.disk)


def test_online_training_holds_and_runs_the_target():
    """Computed states add the target's memory and a pass over every row in every epoch, instead of reading them; a
    cache saves the passes of what it keeps, which it holds on disk and reads."""
    shape, size = shape_of(LLAMA_8B), DraftSize(4096, 4096, 3, 32, 8, 128, 14336, 32000, 128256)
    load = stages.Load(rows=100, validation=4, prompt=100, answer=100, longest=200)

    def trained(states: str, cached: float = 0.0) -> stages.Stage:
        return stages.train(shape, Format(), ONE, load, stages.Training(
            size, ((0.0, 3),), 1.0, 3.0, 1, 1, 200, 200, 4, 2, 0, True, states, cached, "bfloat16"))

    stored, computed, half = trained("stored"), trained("computed"), trained("computed", 0.5)
    held = 20000 * 10 + (20000 * 3 + 10000) * 4096 * 2
    assert "computing states" not in stored.parts and stored.parts["reading states"] == pytest.approx(3 * held / 1e9)
    assert half.parts["computing states"] == pytest.approx(2 / 3 * computed.parts["computing states"])
    assert computed.parts["reading states"] == 0 and half.parts["reading states"] == pytest.approx(held / 1e9)
    assert half.disk - computed.disk == pytest.approx(held / 2)
    assert computed.memory - size.parameters * 16 > 2 * shape.parameters > stored.memory - size.parameters * 16
    assert stored.disk == pytest.approx(3 * 12 * size.parameters, rel=0.01)


def test_dollars():
    """Half an hour of four GPUs at 2 dollars an hour."""
    assert cost.dollars(1800, 4, 2.0) == 4.0 and math.isclose(cost.ring(4), 1.5) and cost.ring(1) == 0
