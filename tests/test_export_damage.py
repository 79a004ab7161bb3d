"""Every key of an EAGLE-3 export dropped, renamed, reshaped, zeroed in turn, in both layouts: all damage is refused."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny_drafter import FINGERPRINT, LAYERS, D, H, V, make_meta, make_state, write_checkpoint

from drafters.export.check import read_config
from drafters.export.layouts import LAYOUTS, Served
from drafters.export.write import check_folder, export_layout
from recipes.errors import ConfigError, RunError

SERVED = Served(LAYERS, FINGERPRINT, torch.randn(V, H, generator=torch.Generator().manual_seed(4)),
                ["LlamaForCausalLM"], 4)
NAMES = {"native": [], "speculators": []}
STATE = make_state(make_meta())
for layout in NAMES:
    NAMES[layout] = sorted(LAYOUTS[layout].tensors(STATE, make_meta(), "float32", SERVED))
EMPTY = {int: 0, float: 0.0, str: "", list: [], dict: {}, bool: None, type(None): 0}


def exported(folder, layout, **options):
    """An export's folder with the settings and tensors that it holds."""
    meta = make_meta(**options)
    state = make_state(meta)
    source = write_checkpoint(folder / "checkpoint", meta, state)
    out = export_layout(layout, source, folder / layout, "float32", SERVED)
    return out, read_config(out / "config.json"), LAYOUTS[layout].tensors(state, meta, "float32", SERVED)


def refused(out, layout, named, config=None, tensors=None):
    if config is not None:
        (out / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
    with pytest.raises(RunError) as error:
        check_folder(out, layout)
    assert named in str(error.value), f"{named} not in {error.value}"


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip(tmp_path, layout, dtype):
    """Cases 03, 46: read back by the layout's inverse and written again, an export is the same, bit for bit; in
    float32 it is the checkpoint."""
    meta = make_meta()
    source = write_checkpoint(tmp_path / "checkpoint", meta, make_state(meta))
    out = export_layout(layout, source, tmp_path / "out", dtype, SERVED)
    check_folder(out, layout)
    first = {p.name: p.read_bytes() for p in out.iterdir()}
    export_layout(layout, source, out, dtype, SERVED)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == first


@pytest.mark.parametrize("layout, name", [(layout, name) for layout, names in NAMES.items() for name in names])
def test_every_tensor(tmp_path, layout, name):
    """Cases 13, 18, 46, 47, 56: a tensor that is dropped, renamed, reshaped, zeroed, of another precision or not
    finite is named."""
    out, _, tensors = exported(tmp_path, layout)
    whole = tensors.pop(name)
    refused(out, layout, f"{name}: missing", tensors=tensors)
    refused(out, layout, f"{name}x: unknown", tensors=tensors | {f"{name}x": whole})
    refused(out, layout, f"model.{name}: unknown", tensors=tensors | {f"model.{name}": whole})
    refused(out, layout, f"{name}: ", tensors=tensors | {name: torch.cat([whole, whole[:1]])})
    refused(out, layout, f"{name}: shape [1, ", tensors=tensors | {name: whole[None]})
    if whole.dim() == 2 and whole.shape[0] != whole.shape[1]:
        refused(out, layout, f"{name}: shape", tensors=tensors | {name: whole.T})
    refused(out, layout, name if whole.is_floating_point() else "", tensors=tensors | {name: torch.zeros_like(whole)})
    refused(out, layout, f"{name}: is torch.float64", tensors=tensors | {name: whole.double()})
    if whole.is_floating_point():
        refused(out, layout, f"{name}: holds NaN", tensors=tensors | {name: whole.index_fill(0, torch.tensor([0]),
                                                                                             float("nan"))})


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_tensors_of_other_origin(tmp_path, monkeypatch, layout, name):
    """Case 03: in either layout, a tensor that is neither the trained one nor the target's aborts the export."""
    own = LAYOUTS[layout]

    def changed(*arguments):
        return own.tensors(*arguments) | {name: torch.randn(D if name.startswith("lm") else V, H)}

    monkeypatch.setitem(LAYOUTS, layout, replace(own, tensors=changed))
    source = write_checkpoint(tmp_path / "checkpoint", make_meta(), make_state(make_meta()))
    with pytest.raises(RunError, match=f"{name} (differs|is in only one of the two)"):
        export_layout(layout, source, tmp_path / "out", "float32", SERVED)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def paths(config, prefix=()):
    """Every key of a config, nested ones too, as the keys that lead to it; what this project keeps for itself last."""
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict) and key not in ("options", "fingerprint", "drafthouse"):
            yield from paths(value, (*prefix, key))


def changed(config, path, change):
    config = copy.deepcopy(config)
    node = config
    for key in path[:-1]:
        node = node[key]
    change(node, path[-1])
    return config


def assert_every_key_is_read(out, layout, config):
    """A key of config.json, at any depth, that is dropped, renamed or emptied is refused."""
    def rename(node, key):
        node[key + "_"] = node.pop(key)

    def empty(node, key):
        node[key] = EMPTY[type(node[key])]

    for path in paths(config):
        for name, change in (("dropped", lambda node, key: node.pop(key)), ("renamed", rename), ("emptied", empty)):
            (out / "config.json").write_text(json.dumps(changed(config, path, change)))
            try:
                check_folder(out, layout)
            except RunError:
                continue
            pytest.fail(f"{'.'.join(path)} {name} passes")


@pytest.mark.parametrize("options", [{}, {"tap_norms": True, "feedback": "post_norm", "norm_before_residual": True}],
                         ids=["plain", "every flag"])
@pytest.mark.parametrize("layout", NAMES)
def test_every_config_key(tmp_path, layout, options):
    """Cases 04, 32, 47: a key of config.json that is dropped, renamed or emptied is refused, flags that no tensor shows
    among them."""
    out, config, _ = exported(tmp_path, layout, **options)

    assert_every_key_is_read(out, layout, config)


def test_every_provenance_key(tmp_path):
    """Cases 36, 50: an export without its origin, or with another one's, is refused."""
    out, _, _ = exported(tmp_path, "speculators")
    origin = read_config(out / "provenance.json")
    for key in origin:
        for value in (None, "other"):
            (out / "provenance.json").write_text(json.dumps(origin | {key: value}))
            with pytest.raises(RunError, match="provenance.json"):
                check_folder(out, "speculators")
    (out / "provenance.json").unlink()
    with pytest.raises(RunError, match="provenance.json: cannot be read"):
        check_folder(out, "speculators")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001.safetensors", "model.safetensors.index.json",
                                  "modeling_drafter.py"])
def test_a_file_that_an_engine_may_load_or_run(tmp_path, name):
    out, config, _ = exported(tmp_path, "native")
    (out / name).write_text("{}")
    refused(out, "native", name)
    (out / name).unlink()
    refused(out, "native", "names code that a reader would run",
            config=config | {"auto_map": {"AutoModel": "x.y"}})


def test_a_config_that_would_fill_memory(tmp_path):
    """A description of a drafter is kilobytes: a larger or deeper one is refused before it is parsed into memory."""
    path = tmp_path / "config.json"
    path.write_text('{"a": "' + "x" * 4_000_000 + '"}')
    with pytest.raises(ConfigError, match="larger than 4000000 bytes"):
        read_config(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(path)


def test_full_vocabulary_has_no_maps(tmp_path):
    """Formats.md section 2: d2t and t2d only where D is not V."""
    meta = make_meta()
    meta["shape"]["draft_vocab_size"] = V
    g = torch.Generator().manual_seed(3)
    state = make_state(make_meta()) | {"lm_head.weight": torch.randn(V, H, generator=g),
                                       "d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V).bool()}
    source = write_checkpoint(tmp_path / "checkpoint", meta, state)
    out = export_layout("speculators", source, tmp_path / "out", "float32", SERVED)
    tensors = LAYOUTS["speculators"].tensors(state, meta, "float32", SERVED)
    refused(out, "speculators", "d2t: unknown", tensors=tensors | {"d2t": torch.zeros(V, dtype=torch.long)})
    assert D != V
