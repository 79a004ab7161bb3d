"""Medusa's two layouts: pure mappings and their inverses, what the checker refuses, what a second reader makes of them.

The layouts are written out here by hand (formats.md section 3), not taken from the exporter's tables.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_damage import EMPTY, changed, paths
from test_ship import start
from tiny import call
from tiny_medusa import FORMATS, medusa_run

from drafters import checkpoint, imported, source, vocab
from drafters.export import medusa
from drafters.export.layouts import LAYOUTS, Served
from drafters.export.serving import Deployment, serving_files
from drafters.export.write import check_folder, export_layout
from eval import doctor, roi_measure, ship
from eval.decode import Decoder
from eval.reader import open_reader, read_acceptance
from recipes.errors import ConfigError, RunError
from recipes.loader import load_recipe

H, V, D, K, L = 8, 20, 6, 3, 5
IDS = torch.tensor([2, 3, 7, 11, 12, 19])
HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(9))
PRINT = {"weights": "w1", "config": "c1", "dtype": "float32"}
SERVED = Served([], PRINT, head=HEAD)
NAMES = {"medusa": "model.safetensors", "medusa-original": "medusa_lm_head.safetensors"}


def meta_of(projection: str = "own", full: bool = False, layers: int = 1) -> dict:
    return {"format": "drafthouse.drafter/1", "kind": "medusa", "layers": [],
            "options": {"heads": K, "num_layers": layers, "projection": projection, "step_decay": 0.8,
                        "draft_vocab_size": 0 if full else D},
            "shape": {"hidden_size": H, "vocab_size": V, "draft_vocab_size": V if full else D, "target_layers": L},
            "target": {"model": "org/target", "fingerprint": dict(PRINT)}}


def state_of(meta: dict) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    own, full = meta["options"]["projection"] == "own", meta["shape"]["draft_vocab_size"] == V
    layers = meta["options"]["num_layers"]
    shapes = {f"blocks.{i}.layers.{j}.{part}": (H, H) if part == "weight" else (H,) for i in range(K)
              for j in range(layers) for part in ("weight", "bias")}
    shapes |= {f"lm_heads.{i}.weight": (V if full else D, H) for i in range(K)} if own else {}
    maps = vocab.maps(torch.arange(V) if full else IDS, V)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()} | dict(zip(("d2t", "t2d"), maps))


def written(folder, meta, state=None):
    """A checkpoint's folder."""
    folder.mkdir(exist_ok=True)
    save_file(state_of(meta) if state is None else state, folder / checkpoint.WEIGHTS)
    (folder / checkpoint.META).write_text(json.dumps(meta))
    return folder


def exported(tmp_path, layout: str = "medusa", dtype: str = "float32", **options):
    source = written(tmp_path / "checkpoint", meta_of(**options))
    return export_layout(layout, source, tmp_path / "out" / layout, dtype, SERVED)


def widened(rows: torch.Tensor) -> torch.Tensor:
    """The rows of IDS at their places; between them the mean of sixteen that are spread over them, in their
    precision."""
    picked = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5]
    between = rows[picked].double().mean(0).to(rows.dtype)
    return torch.stack([rows[IDS.tolist().index(i)] if i in IDS.tolist() else between for i in range(V)])


def test_no_token_outside_the_map_is_proposed():
    """vLLM skips the map beside whole projections: whatever the state is, the largest logit is a trained row's."""
    rows = torch.randn(D, H, generator=torch.Generator().manual_seed(1))
    states = torch.randn(4000, H, generator=torch.Generator().manual_seed(2))
    for kind in (torch.float32, torch.bfloat16):
        table = medusa.whole(rows.to(kind), IDS, V)
        assert torch.equal(table, widened(rows.to(kind)))
        best = (states.to(kind) @ table.T).argmax(-1)
        assert bool(torch.isin(best, IDS).all()) and len(best.unique()) == D
        if kind == torch.float32:  # of equal logits in less precision either is the first
            assert torch.equal(best, IDS[(states @ rows.T).argmax(-1)])


CASES = [("medusa", "own", False, 1), ("medusa", "own", True, 3), ("medusa", "shared", False, 2),
         ("medusa", "shared", True, 1), ("medusa-original", "own", True, 1), ("medusa-original", "shared", True, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout, projection, full, layers", CASES)
def test_round_trip_is_bit_for_bit(tmp_path, layout, projection, full, layers, dtype):
    """Cases 03, 13, 46, 56: exactly the names of the layout are written; read back they are the checkpoint's tensors,
    rounded once, under its names, with its ids and structure."""
    meta = meta_of(projection, full, layers)
    state = state_of(meta)
    out = export_layout(layout, written(tmp_path / "c", meta, state), tmp_path / "out", dtype, SERVED)
    tensors, config = load_file(out / NAMES[layout]), json.loads((out / "config.json").read_text())
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    ids = torch.arange(V) if full else IDS
    if layout == "medusa":
        wanted = {n: t for n, t in state.items() if n.startswith(("blocks.", "lm_heads."))}
        if projection == "shared":
            wanted["lm_heads.0.weight"] = HEAD[ids]
        if not full:  # vLLM loads no fewer rows
            wanted |= {n: widened(t.to(kind)) for n, t in wanted.items() if n.startswith("lm_heads.")}
        assert config["num_heads"] == K and config["num_hidden_layers"] == layers
        assert config["truncated_vocab_size"] == config["vocab_size"] == V
        assert config["original_lm_head"] == (projection == "shared")
        assert ("token_map" in tensors) != full
        if not full:
            assert tensors.pop("token_map").tolist() == IDS.tolist()  # ids: not offsets
    else:
        wanted = {f"{i}.0.linear.{part}": state[f"blocks.{i}.layers.0.{part}"] for i in range(K)
                  for part in ("weight", "bias")}
        wanted |= {f"{i}.1.weight": state[f"lm_heads.{i}.weight"] if projection == "own" else HEAD for i in range(K)}
        assert config["medusa_num_heads"] == K and config["base_model_name_or_path"] == "org/target"
    assert tensors.keys() == wanted.keys()
    assert all(tensors[n].dtype == kind and torch.equal(tensors[n], t.to(kind)) for n, t in wanted.items())
    found = LAYOUTS[layout].back(config, load_file(out / NAMES[layout]))
    assert found.ids.equal(ids) and found.options == {"heads": K, "num_layers": layers, "projection": projection,
                                                      "draft_vocab_size": len(ids)}
    own = {n: t for n, t in state.items() if n not in ("d2t", "t2d")}
    assert found.tensors.keys() == own.keys() and all(torch.equal(found.tensors[n], t.to(kind)) for n, t in own.items())
    assert (found.carried is not None) == (projection == "shared") and found.target["fingerprint"] == PRINT


@pytest.mark.parametrize("change, message", [
    ({"kind": "eagle3"}, "kind = 'eagle3', must be 'medusa'"),
    ({"shape": {"hidden_size": H}}, "shape.vocab_size = None"),
    ({"target": {"model": "x"}}, "target.fingerprint missing"),
    ({"options": {"heads": K}}, "options.num_layers missing"),
    ({"options": {"heads": "3", "num_layers": 10**9, "projection": "mine"}},
     "options.heads = '3', .*options.num_layers = 1000000000, .*options.projection = 'mine'")])
def test_a_checkpoint_without_form_is_named(change, message):
    for config in (medusa.vllm_config, medusa.original_config):
        with pytest.raises(ConfigError, match=message):
            config(meta_of(full=True) | change, "float32", 3)


def test_what_a_layout_has_no_place_for_is_refused(tmp_path):
    """The original layout has no draft vocabulary, and its loader ties the blocks of a head; no engine may be told to
    draft more tokens than there are heads (vLLM would make heads that the file does not hold)."""
    with pytest.raises(ConfigError, match="medusa-original has no place for a draft vocabulary"):
        exported(tmp_path, "medusa-original")
    with pytest.raises(ConfigError, match="all blocks of a head one"):
        exported(tmp_path, "medusa-original", full=True, layers=2)
    with pytest.raises(ConfigError, match="eval.draft_length = 4: .* this drafter has 3"):
        medusa.vllm_config(meta_of(), "float32", 4)
    with pytest.raises(ConfigError, match="export.dtype = int8"):
        medusa.vllm_config(meta_of(), "int8", 3)
    assert not (tmp_path / "out" / "medusa-original").exists()


def config_with(**change):
    return lambda config, tensors: config.update(change)


def without(key):
    return lambda config, tensors: config.pop(key)


def tensor(name, work):
    return lambda config, tensors: tensors.update({name: work(tensors[name])})


FAULTS = [
    (config_with(architectures=["Medusa"]), "architectures = "), (config_with(model_type="llama"), "model_type = "),
    (without("medusa_fc_bias"), "medusa_fc_bias = 'missing'"), (without("vocab_size"), "vocab_size = 'missing'"),
    (config_with(num_attention_heads=4), "num_attention_heads: vLLM takes it for"),
    (config_with(num_layers=1), "num_layers: vLLM takes it for"), (config_with(num_heads=2), "blocks.2.layers.0.bias"),
    (config_with(num_heads=2), "says heads = 2, but the drafter was trained with 3"),
    (config_with(num_hidden_layers=2), "blocks.0.layers.1.weight: missing"),
    (config_with(truncated_vocab_size=D), "truncated_vocab_size = 6, must be vocab_size = 20"),
    (lambda config, tensors: config["drafthouse"]["shape"].update(draft_vocab_size=V + 1), "are they exchanged"),
    (config_with(logit_scale=0.5), "logit_scale"),
    (config_with(original_lm_head=True), "says projection = 'shared'"),
    (config_with(torch_dtype="float16"), "is torch"),
    (config_with(auto_map={"a": "b"}), "auto_map"), (without("drafthouse"), "drafthouse: must hold"),
    (lambda config, tensors: config["drafthouse"]["target"].pop("fingerprint"), "must hold model and fingerprint"),
    (lambda config, tensors: tensors.pop("blocks.1.layers.0.bias"), "blocks.1.layers.0.bias: missing"),
    (lambda config, tensors: tensors.pop("lm_heads.2.weight"), "lm_heads.2.weight: missing"),
    (lambda config, tensors: tensors.pop("token_map"), "token_map: missing"),
    (lambda config, tensors: tensors.update({"d2t": torch.zeros(D)}), "d2t: unknown tensor: the map of this layout"),
    (tensor("token_map", lambda t: t - torch.arange(D)), "do.* hold OFFSETS"),
    (tensor("token_map", lambda t: t + 1), "outside 0..19"), (tensor("token_map", lambda t: t.flip(0)), "ascending"),
    (tensor("token_map", lambda t: t.int()), "must be torch.int64"),
    (tensor("lm_heads.1.weight", lambda t: t[:-1].clone()), "lm_heads.1.weight: shape"),
    (tensor("lm_heads.1.weight", lambda t: t * 0), "never trained"),
    (tensor("lm_heads.1.weight", lambda t: t.index_fill(0, torch.tensor([0]), 1.0)), "not name could be proposed"),
    (tensor("token_map", lambda t: torch.cat([t[:-1], t[-1:] - 1])), "lm_heads.0.weight: rows that token_map does"),
    (tensor("blocks.0.layers.0.weight", lambda t: t * 0), "never trained"),  # case 46: as it began
    (tensor("blocks.0.layers.0.weight", lambda t: t.clone().fill_(torch.nan)), "NaN"),
    (tensor("blocks.0.layers.0.weight", lambda t: t[:0].clone()), "has no elements"),
]


@pytest.mark.parametrize("damage, message", FAULTS)
def test_damaged_exports_are_refused(tmp_path, damage, message):
    """Cases 13, 18, 46, 47, 56: every fault is named; what is left alone passes."""
    out = exported(tmp_path)
    check_folder(out, "medusa")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    damage(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors")
    with pytest.raises(RunError, match=f"not a servable medusa Medusa export(.|\n)*{message}"):
        check_folder(out, "medusa")


@pytest.mark.parametrize("damage, message", [
    (config_with(medusa_num_heads=2), "says heads = 2"), (config_with(medusa_num_layers=2), "must be 1"),
    (without("base_model_name_or_path"), "base_model_name_or_path"), (without("torch_dtype"), "torch_dtype"),
    (lambda config, tensors: tensors.pop("1.0.linear.bias"), "1.0.linear.bias: missing"),
    (lambda config, tensors: tensors.update({"token_map": torch.zeros(D)}), "token_map: unknown tensor"),
    (tensor("2.1.weight", lambda t: t[:, 1:].clone()), "2.1.weight: shape")])
def test_damaged_exports_of_the_original_layout_are_refused(tmp_path, damage, message):
    out = exported(tmp_path, "medusa-original", full=True)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / NAMES["medusa-original"])
    damage(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / NAMES["medusa-original"])
    with pytest.raises(RunError, match=message):
        check_folder(out, "medusa-original")


@pytest.mark.parametrize("layout", NAMES)
def test_every_key_and_tensor(tmp_path, layout):
    """Cases 03, 04, 13, 18, 46, 47: what is exported twice is the same, byte for byte; any key of config.json or
    provenance.json, and any tensor, that is dropped, renamed or emptied is refused."""
    full = layout == "medusa-original"
    out = exported(tmp_path, layout, full=full)
    first = {p.name: p.read_bytes() for p in out.iterdir()}
    exported(tmp_path, layout, full=full)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == first
    config, origin = (json.loads(first[name]) for name in ("config.json", "provenance.json"))
    tensors = load_file(out / NAMES[layout])
    named = {"dropped": lambda node, key: node.pop(key), "renamed": lambda node, key: node.update(x=node.pop(key)),
             "emptied": lambda node, key: node.update({key: EMPTY[type(node[key])]})}

    def refused(what: str) -> None:
        try:
            check_folder(out, layout)
        except RunError:
            return
        pytest.fail(f"{what} passes")

    for how, change in named.items():
        for path in paths(config):
            (out / "config.json").write_text(json.dumps(changed(config, path, change)))
            refused(f"config.json: {'.'.join(path)} {how}")
        (out / "config.json").write_bytes(first["config.json"])
        for key in origin if how != "emptied" else ():
            (out / "provenance.json").write_text(json.dumps(changed(origin, (key,), change)))
            refused(f"provenance.json: {key} {how}")
        (out / "provenance.json").write_bytes(first["provenance.json"])
    for name, whole in tensors.items():
        rest = {n: t for n, t in tensors.items() if n != name}
        for what, damaged in (("dropped", {}), ("renamed", {f"{name}x": whole}), ("longer", {
                name: torch.cat([whole, whole[:1]])}), ("double", {name: whole.double()})):
            save_file(rest | damaged, out / NAMES[layout])
            refused(f"{name} {what}")


def test_strays_and_other_origins_are_refused(tmp_path):
    """Case 36: provenance.json is of this export; a second weight file beside it is named."""
    out = exported(tmp_path)
    (out / "medusa_lm_head.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="medusa_lm_head.safetensors: an engine may load it"):
        check_folder(out, "medusa")
    (out / "medusa_lm_head.safetensors").unlink()
    origin = json.loads((out / "provenance.json").read_text())
    for change, message in (({"kind": "eagle3"}, "kind = 'eagle3'"), ({"layout": "native"}, "layout = 'native'"),
                            ({"options": origin["options"] | {"heads": 4}}, "options.heads = 4"),
                            ({"shape": origin["shape"] | {"target_layers": 9}}, "shape.target_layers = 9"),
                            ({"shape": origin["shape"] | {"draft_vocab_size": 5}}, "shape.draft_vocab_size = 5")):
        (out / "provenance.json").write_text(json.dumps(origin | change))
        with pytest.raises(RunError, match=message):
            check_folder(out, "medusa")
    with pytest.raises(RunError, match="fingerprint differs"):
        export_layout("medusa", tmp_path / "checkpoint", tmp_path / "other", "float32",
                      replace(SERVED, fingerprint=PRINT | {"weights": "w2"}))


@pytest.mark.parametrize("name, value, message", [
    ("d2t", torch.zeros(2, 3).long(), r"d2t \[2, 3\]"), ("d2t", torch.zeros(D), "d2t torch.float32"),
    ("t2d", None, "t2d missing"), ("t2d", torch.ones(2, 10).bool(), r"t2d \[2, 10\]")])
def test_a_checkpoint_with_maps_of_another_form(tmp_path, name, value, message):
    """Case 56: refused by name where a run starts from it, not indexed with."""
    state = {**state_of(meta_of()), name: value}
    found = {key: tensor for key, tensor in state.items() if tensor is not None}
    with pytest.raises(ConfigError, match=message):
        medusa.from_checkpoint(meta_of(), found, tmp_path)


# --- folders of others ---


def test_published_spellings_are_read(tmp_path):
    """vLLM's prefix medusa_heads., blocks without biases, a map that is not ascending, and a config of the original
    repository that says other numbers of heads than its file holds."""
    state = state_of(meta_of())
    tensors = {f"medusa_heads.{n}": t for n, t in state.items() if n.startswith(("blocks.", "lm_heads."))}
    tensors = {n: t for n, t in tensors.items() if not n.endswith("bias")} | {"token_map": IDS.flip(0)}
    config = {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "truncated_vocab_size": D, "num_heads": K,
              "num_hidden_layers": 1}
    found = medusa.from_vllm(config, tensors)
    assert found.ids.equal(IDS.flip(0)) and not found.tensors["blocks.2.layers.0.bias"].any()
    assert found.tensors["lm_heads.0.weight"].equal(state["lm_heads.0.weight"]) and "no biases" in found.notes[0]
    full = state_of(meta_of(full=True))
    theirs = medusa.original_tensors(full, meta_of(full=True), "float32", HEAD)
    found = medusa.from_original({"medusa_num_heads": 2, "medusa_num_layers": 1}, theirs)
    assert found.options["heads"] == K and "medusa_num_heads = 2, but the file holds 3 heads" in found.notes[0]
    assert all(found.tensors[n].equal(full[n]) for n in found.tensors)


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_whole_projections_with_a_map_are_read_as_vllm_does(projection):
    """Rows of the map where the projection has all of them; a map beside a whole vocabulary counts for nothing."""
    meta, whole = meta_of(projection), state_of(meta_of(projection, full=True))
    config = medusa.vllm_config(meta, "float32", 3) | {"truncated_vocab_size": D}
    del config["drafthouse"]  # somebody else's
    tensors = medusa.vllm_tensors(whole, meta_of(projection, full=True), "float32", HEAD)
    order = IDS[torch.tensor([3, 0, 5, 1, 4, 2])]
    found = medusa.from_vllm(config, tensors | {"token_map": order})
    rows = [whole[f"lm_heads.{i}.weight"] for i in range(K)] if projection == "own" else [HEAD]
    read = [found.tensors[f"lm_heads.{i}.weight"] for i in range(K)] if projection == "own" else [found.carried]
    assert found.ids.equal(order) and all(a.equal(b[order]) for a, b in zip(read, rows, strict=True))
    found = medusa.from_vllm(config | {"truncated_vocab_size": V}, tensors | {"token_map": order})
    read = [found.tensors[f"lm_heads.{i}.weight"] for i in range(K)] if projection == "own" else [found.carried]
    assert found.ids.equal(torch.arange(V)) and all(a.equal(b) for a, b in zip(read, rows, strict=True))
    assert "token_map is left out" in found.notes[0]
    with pytest.raises(ConfigError, match=r"lm_heads.0.weight \[19, 8\], the config implies \[6, 8\]"):
        medusa.from_vllm(config, tensors | {"token_map": order, "lm_heads.0.weight": HEAD[:-1].clone()})


def test_biases_that_vllm_does_not_load_are_named():
    """Without medusa_fc_bias the biases of a file are skipped there: here too, and not said to be missing."""
    tensors = medusa.vllm_tensors(state_of(meta_of()), meta_of(), "float32", HEAD)
    config = medusa.vllm_config(meta_of(), "float32", 3)
    config.pop("medusa_fc_bias")
    found = medusa.from_vllm(config, tensors)
    assert "its biases are left out" in found.notes[0] and not found.tensors["blocks.2.layers.0.bias"].any()


@pytest.mark.parametrize("change, lost, message", [
    ({"num_attention_heads": 3}, "", "num_attention_heads: vLLM takes it"), ({"vocab_size": None}, "", "vocab_size = "),
    ({"logit_scale": 2.0}, "", "logit_scale"), ({}, "token_map", "token_map is missing"),
    ({}, "lm_heads.1.weight", "lm_heads.1.weight is missing"),
    ({"num_heads": 2}, "", "blocks.2.layers.0.bias is unknown"),
    ({"hidden_size": 4}, "", r"the config implies \[4, 4\]"),
    ({"original_lm_head": True}, "", "lm_heads.1.weight is unk"),
    ({"drafthouse": "x"}, "", "drafthouse = 'x': must be a mapping"),
    ({"drafthouse": {"target": {"fingerprint": {"weights": 1}}}}, "", "must hold digests"),
    ({"drafthouse": {"shape": [1]}}, "", r"drafthouse.shape = \[1\]: must be a mapping"),
    ({"truncated_vocab_size": 7}, "", "must hold 7 distinct ids"),
    ({"drafthouse": {"shape": {"draft_vocab_size": 7}}}, "", "must hold 7 distinct ids")])
def test_folders_that_do_not_fit_are_named(change, lost, message):
    """Cases 13, 56, 57: nothing is filled in where no engine's default is right."""
    config = medusa.vllm_config(meta_of(), "float32", 3)
    tensors = medusa.vllm_tensors(state_of(meta_of()), meta_of(), "float32", HEAD)
    tensors.pop(lost, None)
    with pytest.raises(ConfigError, match=message):
        medusa.from_vllm(config | change, tensors)


@pytest.mark.parametrize("name, message", [("0.0.weight", "block 0 of a head"),
                                           ("0.1.linear.weight", "block 1 of a head"),
                                           ("fc.weight", "a Medusa file holds")])
def test_original_files_that_do_not_fit_are_named(name, message):
    tensors = medusa.original_tensors(state_of(meta_of(full=True)), meta_of(full=True), "float32", HEAD)
    with pytest.raises(ConfigError, match=message):
        medusa.from_original({"medusa_num_heads": K}, tensors | {name: torch.ones(H, H)})


# --- a run whose heads count ---


@pytest.fixture(scope="module", params=["own", "shared"])
def base(request, tmp_path_factory):
    """Own projections that count; shared ones accept next to nothing, which must come back too."""
    made = medusa_run(tmp_path_factory.mktemp("medusa"), {"projection": request.param})
    made.projection = request.param
    return made


def test_the_second_reader_decodes_what_the_loop_does(base, tmp_path):
    """Cases 12, 56: same drafts, acceptance and text from the files alone, and from the checkpoint that `drafter.path`
    makes of them."""
    assert call(ship.COMMAND, base.recipe, "--name", "tiny") == 0
    out, prompts = base.run / "export" / "medusa", [[5, 9, 20], [7, 41], [30, 31, 48]]
    ours = Decoder(base.target, 9).speculative(prompts, base.drafter, 3)
    reading = read_acceptance(out, base.target.model, prompts, 3, 9, base.target.end_ids)
    assert reading.tokens == [o.tokens for o in ours]
    accepted = [sum(o.acceptance.accepted[i] for o in ours) for i in range(3)]
    assert reading.accepted_per_position == accepted and reading.drafts == sum(o.acceptance.drafts for o in ours)
    assert (accepted[2] > 0) == (base.projection == "own")
    section = replace(load_recipe(base.recipe).drafter, path=str(out))
    again = imported.open_drafter(section, base.target, tmp_path)
    assert all(torch.equal(t, again.drafter.tensors()[n]) for n, t in base.drafter.tensors().items())
    assert imported.open_drafter(section, base.target, tmp_path).digest == again.digest


def test_the_reader_refuses_what_is_not_whole(base, tmp_path):
    """Case 13: it shares no code with the checker, and fails on its own."""
    assert call(ship.COMMAND, base.recipe) == 0
    config = (base.run / "export" / "medusa" / "config.json").read_text()
    whole = load_file(base.run / "export" / "medusa" / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    for change, message in ((lambda t: t.pop("blocks.0.layers.0.bias"), "blocks.0.layers.0.bias missing"),
                            (lambda t: t.update(more=torch.ones(2)), "unexpected: more"),
                            (lambda t: t.update({"lm_heads.0.weight": t["lm_heads.0.weight"][1:].clone()}), "rows"),
                            (lambda t: t.update(token_map=t["token_map"] * 0), "token_map has repeated ids")):
        tensors = dict(whole)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(RunError, match=message):
            open_reader(tmp_path, base.target.model)
    with pytest.raises(RunError, match="cannot be read"):
        open_reader(tmp_path / "nothing", base.target.model)
    with pytest.raises(RunError, match="4 tokens a draft, but the export has 3 heads"):
        read_acceptance(base.run / "export" / "medusa", base.target.model, [[5, 9]], 4, 4, [2])


def test_heads_of_another_target_are_refused(base, tmp_path):
    """Case 36: another fingerprint, and a shared projection that is not this target's head."""
    assert call(ship.COMMAND, base.recipe) == 0
    out = tmp_path / "theirs"
    out.mkdir()
    for path in (base.run / "export" / "medusa").iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    section = replace(load_recipe(base.recipe).drafter, path=str(out))
    config["drafthouse"]["target"]["fingerprint"]["weights"] = "others"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="weights differs"):
        imported.open_drafter(section, base.target, tmp_path)
    if base.projection == "shared":
        tensors = load_file(out / "model.safetensors")
        save_file(tensors | {"lm_heads.0.weight": tensors["lm_heads.0.weight"] + 1}, out / "model.safetensors")
        with pytest.raises(ConfigError, match="not the head of target.model"):
            imported.open_drafter(section, base.target, tmp_path)


def test_a_checkpoint_of_another_kind_is_refused_by_its_kind(base, tmp_path, capsys):
    """Named by `drafter.path`, or as the run's own best: before layers and tensors, which differ too."""
    section = replace(load_recipe(base.recipe).drafter, kind="eagle3", options={})
    for path in (str(base.checkpoint), str(base.run), ""):
        with pytest.raises(ConfigError, match="step-000001: a drafter of kind medusa, but drafter.kind = eagle3"):
            imported.open_drafter(replace(section, path=path), base.target, base.run)
    flags = ["--drafter.kind", "eagle3", "--drafter.options", "{}", "--drafter.path", str(base.checkpoint)]
    assert call(ship.COMMAND, base.recipe, *flags, "--export.formats", "[native]") == 2
    assert "a drafter of kind medusa, but drafter.kind = eagle3" in capsys.readouterr().err


def test_other_layouts_are_refused_by_name(base, capsys):
    assert call(ship.COMMAND, base.recipe, "--export.formats", "[native]") == 2
    assert "a drafter of kind medusa has the layouts medusa, medusa-original" in capsys.readouterr().err
    assert call(ship.COMMAND, base.recipe, *FORMATS) == 2  # the run's heads have a draft vocabulary
    assert "has no place for a draft vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["own"], indirect=True)
def test_doctor_finds_training_loop_and_reader_in_agreement(base, capsys):
    """Every stage that heads have agrees; projections that were moved in the export are named."""
    assert call(ship.COMMAND, base.recipe) == 0
    assert call(doctor.COMMAND, base.recipe) == 0, capsys.readouterr()
    found = json.loads((base.run / "doctor" / "report.json").read_text())
    assert found["witnesses"] == ["training", "loop", "reader of medusa"] and found["first"] is None
    assert found["not_compared"] == ["layers", "positions"]
    stages = {one["stage"] for one in found["findings"]}
    assert {"vocabulary", "token ids", "layer states", "teacher", "drafter logits at step 3", "acceptance"} <= stages
    path = base.run / "export" / "medusa" / "model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    save_file(tensors | {"lm_heads.0.weight": tensors["lm_heads.0.weight"].roll(1, 0)}, path)
    assert call(doctor.COMMAND, base.recipe) == 1
    assert "drafter logits at step 1: loop and reader of medusa depart" in capsys.readouterr().err
    path.write_bytes(whole)
    for command, flags in ((doctor.COMMAND, []), (ship.COMMAND, ["--check"])):
        assert call(command, base.recipe, "--eval.draft_length", "4", *flags) == 2
        assert "eval.draft_length = 4: this drafter of kind medusa proposes at most 3" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="roi.draft_lengths = 5: this drafter of kind medusa proposes at most 3"):
        roi_measure.measure(load_recipe(base.recipe), print)


def test_serving_files(tmp_path):
    """vLLM is told its own method and no more tokens than there are heads; other engines are refused by name."""
    out = exported(tmp_path)
    text = (out / "SERVE.md").read_text()
    assert '"method": "medusa"' in text and "another number up to 3, one for each head" in text
    assert "SGLang does not load the medusa layout, nor another one of such a drafter" in text
    folder = tmp_path / "heads"
    folder.mkdir()
    keys = LAYOUTS["medusa"].flat(json.loads((out / "config.json").read_text()))
    for name, content in serving_files(Deployment("org/target", "PATH", "medusa", keys, L, 3)).items():
        (folder / name).write_text(content)
    code, [command], _ = start(folder, tmp_path, "vllm")
    config = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    assert code == 0 and json.loads(command[5]) == config
    code, commands, message = start(folder, tmp_path, "sglang")
    assert code == 2 and not commands and "does not load the medusa layout" in message
    assert "tensorrt-llm.yaml" not in {p.name for p in folder.iterdir()}
    text = serving_files(Deployment("org/target", "PATH", "medusa-original", keys, L, 3))["SERVE.md"]
    assert "makes 5 heads whatever config.json says; this drafter has 3" in text
    assert "vLLM does not load the medusa-original layout; export medusa" in text


def test_the_line_that_converts_for_the_medusa_repository(tmp_path):
    """SERVE.md of medusa-original: run as it stands, in a copy of the folder, it gives the same tensors under the name
    that the repository's loader opens; in the export itself the new file is refused."""
    out = exported(tmp_path, "medusa-original", full=True)
    [line] = re.findall(r'^    python (-c ".*?")$', (out / "SERVE.md").read_text(), re.MULTILINE | re.DOTALL)
    folder = shutil.copytree(out, tmp_path / "copy")
    done = subprocess.run(["bash", "-c", f"{sys.executable} {line}"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tensors, converted = (source.read_tensors([folder / f"medusa_lm_head.{end}"]) for end in ("safetensors", "pt"))
    assert tensors.keys() == converted.keys() and all(torch.equal(t, converted[name]) for name, t in tensors.items())
    with pytest.raises(RunError, match="medusa_lm_head.pt"):
        check_folder(folder, "medusa-original")
