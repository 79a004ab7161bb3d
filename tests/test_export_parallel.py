"""The parallel drafter in both layouts (formats.md section 4): round trip, every damage, import, the second reader."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from published import D as PUBLISHED_D
from published import maps, native, speculators, weights, write
from safetensors.torch import load_file, save_file
from test_export_damage import assert_every_key_is_read, refused
from test_ship import start
from tiny import LAYERS, V, load_target, write_target
from tiny_drafter import FINGERPRINT, MASK, D, H, parallel_meta, parallel_state, write_checkpoint
from tiny_drafter import LAYERS as DRAFTED
from tiny_drafter import V as TARGET_V

from drafters import checkpoint, imported, vocab
from drafters.export.check import read_config
from drafters.export.foreign import from_native
from drafters.export.kinds import KINDS
from drafters.export.layouts import LAYOUTS, Served
from drafters.export.serving import speculation
from drafters.export.speculators import from_speculators
from drafters.export.write import check_folder, export_layout, export_native, same_drafter
from drafters.initial import begin
from drafters.registry import entry, options_of
from eval import engine_run, serve_worker
from eval.decode import Decoder
from eval.engine_run import Job
from eval.metrics import Acceptance
from eval.reader import ReadDrafter, read_acceptance
from recipes.errors import ConfigError, RunError
from recipes.schema import Drafter

EMBEDDING = torch.randn(TARGET_V, H, generator=torch.Generator().manual_seed(4))
SERVED = Served(DRAFTED, FINGERPRINT, EMBEDDING, ["LlamaForCausalLM"], 5)
META = parallel_meta()
NAMES = [(layout, name) for layout in LAYOUTS if layout in ("native", "speculators")
         for name in sorted(LAYOUTS[layout].tensors(parallel_state(META), META, "float32", SERVED))]
BOTH = pytest.mark.parametrize("layout", ["native", "speculators"])
VARIANTS = [{}, {"num_layers": 4}, {"tap_norms": True, "norm_before_residual": True, "num_layers": 2}]


def exported(folder: Path, layout: str, dtype: str = "float32", **options):
    """An export's folder with its meta and state."""
    meta = parallel_meta(**options)
    state = parallel_state(meta)
    source = write_checkpoint(folder / "checkpoint", meta, state)
    return export_layout(layout, source, folder / layout, dtype, SERVED), meta, state


@BOTH
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_equal(tmp_path, layout, options, dtype):
    """Cases 03, 46, 56: written in a layout and read back by its inverse, tensors are those of the checkpoint, rounded
    once, bit for bit, options and vocabulary too; written again the folder has the same bytes."""
    out, meta, state = exported(tmp_path, layout, dtype, **options)
    found = LAYOUTS[layout].back(read_config(out / "config.json"), load_file(out / "model.safetensors"))
    d2t, t2d = vocab.maps(found.ids, TARGET_V)
    back, wanted = found.tensors | {"d2t": d2t, "t2d": t2d}, getattr(torch, dtype)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        rounded = tensor.to(wanted) if tensor.is_floating_point() else tensor
        assert back[name].dtype == rounded.dtype
        assert torch.equal(back[name].view(torch.uint8), rounded.view(torch.uint8)), name
    assert found.kind == "parallel" and found.layers == DRAFTED and found.own_row == MASK
    assert {k: found.options[k] for k in KINDS["parallel"].structure if k in meta["options"]} == {
        k: meta["options"][k] for k in KINDS["parallel"].structure if k in meta["options"]}
    table = EMBEDDING.clone()
    table[MASK] = state["mask_embedding"]
    assert torch.equal(found.embedding, table.to(wanted))
    first = {p.name: p.read_bytes() for p in out.iterdir()}
    export_layout(layout, tmp_path / "checkpoint", out, dtype, SERVED)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == first


def test_the_documented_keys(tmp_path):
    """Case 47: EAGLE-3's tensors and mask_hidden [1, 1, 3Ht], the token of the masks at the top level, where
    speculators calls it mask_token_id; vLLM is told parallel_drafting, and no other engine is offered."""
    out, _, _ = exported(tmp_path, "native", num_layers=2)
    config, tensors = read_config(out / "config.json"), load_file(out / "model.safetensors")
    assert config["ptd_token_id"] == MASK and config["parallel_drafting"] is True and "norm_output" not in config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 2
    assert config["drafthouse"]["kind"] == "parallel"
    assert tensors["mask_hidden"].shape == (1, 1, 3 * H) and tensors["embed_tokens.weight"].shape == (TARGET_V, H)
    assert "mask_embedding" not in tensors and tensors["lm_head.weight"].shape == (D, H)
    told = '"method": "eagle3", "model": "PATH", "num_speculative_tokens": 5'
    text = (out / "SERVE.md").read_text()
    assert told in text and '"parallel_drafting": true' in text and "pull request 32887" in text
    assert "SGLang does not draft in parallel" in text and "TensorRT-LLM does not draft in parallel" in text
    assert not (out / "tensorrt-llm.yaml").exists()
    for name in ("dynamo-aggregated.yaml", "dynamo-disaggregated.yaml"):
        assert '"parallel_drafting": true' in (out / name).read_text()
    out = export_layout("speculators", tmp_path / "checkpoint", tmp_path / "s", "float32", SERVED)
    config = read_config(out / "config.json")
    assert config["mask_token_id"] == MASK and config["speculators_model_type"] == "peagle"
    assert config["architectures"] == ["PEagleSpeculator"] and config["norm_output"] is False
    assert config["speculators_config"]["algorithm"] == "peagle" and config["embed_requires_grad"] is True
    assert "vllm serve PATH\n" not in (out / "SERVE.md").read_text()  # without the switch vLLM would not use the masks


def test_serve_script_asks_for_parallel_drafting(tmp_path):
    """What serve.sh hands to vLLM is JSON with the switch; engines that cannot are refused by name."""
    out, _, _ = exported(tmp_path, "native")
    code, [command], _ = start(out, tmp_path, "vllm", "org/t")
    told = json.loads(command[command.index("--speculative-config") + 1])
    assert code == 0 and told == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 5,
                                  "draft_tensor_parallel_size": 1, "parallel_drafting": True}
    code, commands, message = start(out, tmp_path, "sglang", "org/t")
    assert code == 2 and not commands and "SGLang does not draft in parallel" in message


@pytest.mark.parametrize("layout, name", NAMES)
def test_every_tensor(tmp_path, layout, name):
    """Cases 13, 18, 46, 47, 56: a tensor that is dropped, renamed, reshaped, zeroed, of another precision or not finite
    is named; the embedding, which EAGLE-3 may leave out, must be there."""
    out, meta, state = exported(tmp_path, layout)
    tensors = LAYOUTS[layout].tensors(state, meta, "float32", SERVED)
    whole = tensors.pop(name)
    refused(out, layout, f"{name}: missing", tensors=tensors)
    refused(out, layout, f"{name}x: unknown", tensors=tensors | {f"{name}x": whole})
    refused(out, layout, f"{name}: ", tensors=tensors | {name: torch.cat([whole, whole[:1]])})
    refused(out, layout, f"{name}: shape [1, ", tensors=tensors | {name: whole[None]})
    refused(out, layout, name if whole.is_floating_point() else "", tensors=tensors | {name: torch.zeros_like(whole)})
    refused(out, layout, f"{name}: is torch.float64", tensors=tensors | {name: whole.double()})
    if whole.is_floating_point():
        refused(out, layout, f"{name}: holds NaN", tensors=tensors | {name: whole.index_fill(
            0, torch.tensor([0]), float("nan"))})


@BOTH
def test_every_config_key(tmp_path, layout):
    """Cases 04, 32, 47: a key of config.json that is dropped, renamed or emptied is refused; so is another mask token,
    which no tensor shows, and a second key that names another one."""
    out, _, _ = exported(tmp_path, layout, tap_norms=True, num_layers=2)
    config = read_config(out / "config.json")

    assert_every_key_is_read(out, layout, config)
    key = "ptd_token_id" if layout == "native" else "mask_token_id"
    refused(out, layout, "mask_token", config=config | {key: MASK + 1})
    refused(out, layout, "must be a token of the target", config=config | {key: TARGET_V})
    if layout == "native":
        refused(out, layout, "pard_token = 6, but ptd_token_id = 5", config=config | {"pard_token": MASK + 1})
        refused(out, layout, "norm_output = True", config=config | {"norm_output": True})
        refused(out, layout, "num_hidden_layers = 5", config=config | {"num_hidden_layers": 5})


def test_a_parallel_folder_is_no_eagle3_folder(tmp_path):
    """Neither kind passes as the other: without the keys mask_hidden is a stray tensor, which vLLM would skip."""
    out, _, _ = exported(tmp_path, "native")
    config = read_config(out / "config.json")
    without = {k: v for k, v in config.items() if k not in ("ptd_token_id", "parallel_drafting")}
    refused(out, "native", "mask_hidden: unknown tensor: belongs to a parallel drafter", config=without)
    (out / "config.json").write_text(json.dumps(without))
    with pytest.raises(RunError, match="kind = 'parallel'.*must be 'eagle3'"):
        check_folder(out, "native")


@BOTH
@pytest.mark.parametrize("row, named", [(MASK, "mask_embedding differs"), (MASK + 1, "embed_tokens.weight differs")])
def test_another_embedding_is_refused(tmp_path, layout, row, named):
    """Case 03: the table is the target's but for one row, and that row is the trained one, bit for bit."""
    out, meta, state = exported(tmp_path, layout)
    tensors = load_file(out / "model.safetensors")
    tensors["embed_tokens.weight"][row] += 1e-6
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(RunError, match=named):
        same_drafter(out, LAYOUTS[layout], meta, state, "float32", SERVED)


def test_what_the_export_needs(tmp_path):
    """Without the target's embedding, the mask's own or its token there is nothing to serve: named, nothing is left."""
    meta, state = parallel_meta(), parallel_state(META)
    source = write_checkpoint(tmp_path / "checkpoint", meta, state)
    with pytest.raises(ConfigError, match="embedding None: the drafter reads"):
        export_native(source, tmp_path / "out", "float32", DRAFTED, FINGERPRINT)
    write_checkpoint(source, meta, {n: t for n, t in state.items() if n != "mask_embedding"})
    with pytest.raises(ConfigError, match="mask_embedding must have hidden_size = 32 numbers"):
        export_layout("native", source, tmp_path / "out", "float32", SERVED)
    del meta["options"]["mask_token"]
    write_checkpoint(source, meta, state)
    with pytest.raises(ConfigError, match="options.mask_token = None, must be a token's id"):
        export_layout("native", source, tmp_path / "out", "float32", SERVED)
    with pytest.raises(ConfigError, match="options.num_layers = 5, must be 1 to 4"):
        LAYOUTS["native"].config(parallel_meta(num_layers=5), "float32", SERVED)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


# --- import ---

MASKS = {"mask_hidden": torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("config, form", [
    (native(ptd_token_id=7), (1, 1, 96)), (native(pard_token=7), (96,)), (native(mask_token_id=7), (1, 96)),
    (native(mask_token_id=7, pard_token=9), (1, 1, 96)), (speculators(
        speculators_model_type="peagle", architectures=["PEagleSpeculator"], mask_token_id=7), (1, 1, 96))])
def test_published_spellings(config, form):
    """formats.md section 4: every key that names the mask's token, the first one vLLM would take, and every form of
    the mask's state."""
    read = from_speculators if "speculators_model_type" in config else from_native
    found = read(config, weights() | maps() | {"mask_hidden": MASKS["mask_hidden"].reshape(form)})
    assert found.kind == "parallel" and found.options["mask_token"] == found.own_row == 7
    assert torch.equal(found.tensors["mask_hidden"], MASKS["mask_hidden"]) and "feedback" not in found.options
    assert not found.unsaid and "mask_embedding" not in found.tensors  # there is no table: the target's row


@pytest.mark.parametrize("config, tensors, message", [
    (native(), MASKS, "mask_hidden: it is a parallel drafter's"),
    (native(ptd_token_id=7), {}, "mask_hidden is missing"),
    (native(ptd_token_id=V), MASKS, "must name the token of the masks, within vocab_size = 64, not 64"),
    (native(parallel_drafting=True), MASKS, "must name the token of the masks.* not None"),
    (native(ptd_token_id="7"), MASKS, "not '7'"),
    (native(ptd_token_id=7), {"mask_hidden": torch.ones(1, 1, 64)}, r"mask_hidden \[1, 1, 64\], the config implies"),
    (native(ptd_token_id=7, num_hidden_layers=5), MASKS, "num_hidden_layers = 5: the drafter here has 1 to 4")])
def test_what_cannot_be_imported(config, tensors, message):
    """Cases 13, 47: no token, another size, a state without its key: named, never guessed."""
    with pytest.raises(ConfigError, match=message):
        from_native(config, weights() | maps() | tensors)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A random target, a drafter of two layers on it, and its export in both layouts."""
    folder = tmp_path_factory.mktemp("parallel")
    target = load_target(write_target(folder / "model"), "float32", LAYERS)
    options = options_of("parallel", {"draft_vocab_size": 40, "num_layers": 2, "start": "random"})
    drafter = entry("parallel").code.build(options, target, {i: 1 for i in range(3, 60)}, 0).eval()
    with torch.no_grad():
        drafter.mask_embedding.normal_(generator=torch.Generator().manual_seed(2))
    (folder / "checkpoint").mkdir()
    origin = {"model": str(folder / "model"), "fingerprint": target.fingerprint()}
    checkpoint.save(folder / "checkpoint", drafter.tensors(), {**drafter.meta(), "target": origin})
    served = Served(LAYERS, target.fingerprint(), target.embedding, ["LlamaForCausalLM"], 3)
    for layout in ("native", "speculators"):
        export_layout(layout, folder / "checkpoint", folder / layout, "float32", served)
    return folder, target, drafter


@BOTH
def test_an_export_is_opened_as_the_drafter_it_was(world, tmp_path, layout):
    """drafter.path: the converted checkpoint is the trained one, bit for bit, and drafts the same."""
    folder, target, drafter = world
    section = Drafter(kind="parallel", path=str(folder / layout))
    opened = imported.open_drafter(section, target, tmp_path)
    before, after = drafter.tensors(), opened.drafter.tensors()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert opened.drafter.options.mask_token == drafter.options.mask_token == V - 1  # behind the tokenizer's ids
    prompts = [[3, 9, 14, 3], [7, 8]]
    ours, theirs = (Decoder(target, 12, end_ids=[]).speculative(prompts, d, 3) for d in (drafter, opened.drafter))
    assert [(o.tokens, o.drafts) for o in ours] == [(o.tokens, o.drafts) for o in theirs]
    with pytest.raises(ConfigError, match="a drafter of kind parallel, but drafter.kind = eagle3"):
        imported.open_drafter(Drafter(kind="eagle3", path=str(folder / layout)), target, tmp_path)


@BOTH
def test_training_goes_on_from_an_export(world, layout):
    """drafter.init_from: weights and mask token come from the folder; another token in the recipe is refused."""
    folder, target, drafter = world
    for stated in ({}, {"mask_token": -1}, {"mask_token": V - 1}):
        found = begin(Drafter("parallel", stated, init_from=str(folder / layout)), target, {9: 1}, 0)
        before, after = drafter.tensors(), found.drafter.tensors()
        assert all(torch.equal(before[n], after[n]) for n in before) and found.options.mask_token == V - 1
    with pytest.raises(ConfigError, match=f"options.mask_token = 3, but .* has {V - 1}"):
        begin(Drafter("parallel", {"mask_token": 3}, init_from=str(folder / layout)), target, {9: 1}, 0)


def test_a_folder_without_a_table_reads_the_targets_row(world, tmp_path):
    """Engines share the target's embedding where the folder has none: so the mask's embedding is its row there; a table
    with another row that is not the target's was trained on its own and is refused (case 03)."""
    _, target, _ = world
    config = native(ptd_token_id=7, draft_vocab_size=PUBLISHED_D)
    found = begin(Drafter("parallel", init_from=str(write(tmp_path / "a", config, weights() | maps() | MASKS))), target,
                  {9: 1}, 0)
    assert torch.equal(found.drafter.mask_embedding, target.embedding[7])
    table = target.embedding.clone()
    table[7] += 1
    folder = write(tmp_path / "b", config, weights() | maps() | MASKS | {"embed_tokens.weight": table})
    found = begin(Drafter("parallel", init_from=str(folder)), target, {9: 1}, 0)
    assert torch.equal(found.drafter.mask_embedding, table[7])
    table[8] += 1
    folder = write(tmp_path / "c", config, weights() | maps() | MASKS | {"embed_tokens.weight": table})
    with pytest.raises(ConfigError, match="is not the embedding of target.model"):
        begin(Drafter("parallel", init_from=str(folder)), target, {9: 1}, 0)


def test_a_damaged_checkpoint_is_named(world):
    """Cases 13, 18, 46: held against its kind before anything of its sizes is made; EAGLE-3 has no place for it."""
    folder, target, drafter = world
    shape = checkpoint.read_meta(folder / "checkpoint")["shape"]
    tensors = checkpoint.read_tensors(folder / "checkpoint")
    load = entry("parallel").code.load
    whole = load(drafter.options, shape, LAYERS, tensors, target)
    assert all(torch.equal(t, tensors[n]) for n, t in whole.tensors().items())
    for change, message in (({"mask_embedding": None}, "do not fit a parallel drafter .*mask_embedding is missing"),
                            ({"mask_hidden": None}, "mask_hidden is missing"),
                            ({"mask_embedding": torch.ones(3)}, r"mask_embedding \[3\], the config implies \[32\]"),
                            ({"mask_hidden": torch.full((1, 1, 96), torch.nan)}, "mask_hidden .*NaN"),
                            ({"fc_norm.0.weight": torch.ones(32)}, "fc_norm.0.weight: no drafter here has it")):
        damaged = {name: t for name, t in (tensors | change).items() if t is not None}
        with pytest.raises(ConfigError, match=message):
            load(drafter.options, shape, LAYERS, damaged, target)
    with pytest.raises(ConfigError, match="mask_.*: it is a parallel drafter's"):
        entry("eagle3").code.load(options_of("eagle3", {"draft_vocab_size": 40, "num_layers": 2}), shape, LAYERS,
                                  {name: t for name, t in tensors.items() if name != "mask_embedding"}, target)


# --- the second reader ---


@BOTH
def test_the_reader_accepts_what_our_loop_accepts(world, layout):
    """Case 12: plain torch over the written files drafts the loop's own tokens, with the loop's own counts."""
    folder, target, drafter = world
    prompts, K = [[3, 9, 14, 3, 9], [7], [30, 31, 32, 33]], 4
    outputs = Decoder(target, 14, end_ids=[]).speculative(prompts, drafter, K)
    reading = read_acceptance(folder / layout, target.model, prompts, K, 14, [])
    assert reading.tokens == [o.tokens for o in outputs]
    ours = sum((o.acceptance for o in outputs), Acceptance(K))
    assert (reading.drafts, reading.accepted_per_position) == (ours.drafts, ours.accepted)


@torch.no_grad()
def test_the_reader_s_logits_are_the_session_s(world):
    """Every depth's distribution, from a context that holds the mask's token itself."""
    folder, target, drafter = world
    tokens = [3, 9, drafter.options.mask_token, 14, 20, 7]
    ids = torch.tensor([tokens])
    taps = target.forward(ids, torch.arange(6)[None]).taps
    session = drafter.session(1, 16)
    session.observe(taps[:, :5], ids[:, 1:], torch.arange(5)[None], torch.tensor([4]))
    q = session.propose(4, lambda q: q.argmax(-1)).q[0]
    reader = ReadDrafter(folder / "native", target.model)
    logits = reader.draft_logits([tap[0] for tap in taps[:, :5].chunk(3, -1)], tokens, 4)
    for k in range(4):
        torch.testing.assert_close(logits[k].softmax(-1), q[k][drafter.draft_ids], rtol=1e-3, atol=1e-5)


def test_the_reader_refuses_damaged_folders(world, tmp_path):
    """A mask token outside the target, a missing state or table: nothing is filled in (case 13)."""
    folder, target, _ = world
    config, tensors = read_config(folder / "native" / "config.json"), load_file(folder / "native" / "model.safetensors")
    for change, missing, message in (({"ptd_token_id": V}, "", "ptd_token_id = 64 is not in 0..63"),
                                     ({}, "mask_hidden", "mask_hidden"), ({}, "embed_tokens.weight", "embed_tokens"),
                                     ({"ptd_token_id": None}, "", "unexpected: mask_hidden")):
        write(tmp_path / "d", config | change, {n: t for n, t in tensors.items() if n != missing})
        with pytest.raises(RunError, match=message):
            ReadDrafter(tmp_path / "d", target.model)


# --- what engines are told ---


@pytest.mark.parametrize("parallel", [True, False])
def test_a_job_asks_vllm_for_parallel_drafting(tmp_path, monkeypatch, parallel):
    """In a process and over HTTP the switch goes to vLLM with a parallel drafter, and with no other."""
    job = Job("target", speculation("drafter", 5, parallel=parallel), 5, [[1]], 4, [2], "float32")
    wanted = {"method": "eagle3", "model": "drafter", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}
    wanted |= {"parallel_drafting": True} if parallel else {}
    told = {}

    class LLM:
        def __init__(self, **arguments):
            told.update(arguments["speculative_config"])
            raise RuntimeError("seen")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=None))
    with pytest.raises(RuntimeError, match="seen"):
        serve_worker.answer(json.loads(json.dumps(asdict(job))))
    assert told == wanted
    monkeypatch.setattr(engine_run.subprocess, "Popen", lambda command, **rest: told.update(command=command) or 1 / 0)
    with pytest.raises(ZeroDivisionError), engine_run.server("python", job, 1, tmp_path / "log"):
        pass
    assert json.loads(told["command"][told["command"].index("--speculative-config") + 1]) == wanted
