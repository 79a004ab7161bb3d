"""Writes a trained checkpoint in a layout of engines: everything is checked before it gets its name."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from drafters import vocab
from drafters.checkpoint import META, WEIGHTS, read_meta, read_tensors
from drafters.export.check import read_config
from drafters.export.kinds import KINDS, TABLE
from drafters.export.layouts import LAYOUTS, Layout, Served
from drafters.export.native import DTYPES, canonical_rope, layers_of, own_table
from drafters.export.serving import FILES, HERE, Deployment, serving_files, target_reference
from drafters.export.tensor_check import is_size
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sync_folder, write_bytes, write_json, write_text

WEIGHT_FILE, CONFIG, ORIGIN = "model.safetensors", "config.json", "provenance.json"
FORMAT = "drafthouse.export/1"
EXPORTED = (*sorted({layout.weights for layout in LAYOUTS.values()}), CONFIG, ORIGIN, *FILES)
TITLES = {"eagle3": "EAGLE-3", "parallel": "P-EAGLE", "medusa": "Medusa", "small_lm": "small LM"}


def export_native(checkpoint: Path, out: Path, dtype: str, expected_layers: list[int],
                  target_fingerprint: dict[str, Any]) -> Path:
    """The native layout, which needs nothing of the target's weights; see export_layout."""
    return export_layout("native", checkpoint, out, dtype, Served(expected_layers, target_fingerprint))


def export_layout(name: str, checkpoint: Path, out: Path, dtype: str, served: Served) -> Path:
    """Writes `out` with weights, config, provenance and serving files; an earlier export there is replaced.

    name: of LAYOUTS. checkpoint: folder with drafter.safetensors and drafter.json. dtype: precision of the exported
    tensors. served: of the traces and of the target to be served.
    The folder is complete, checked and fsynced before it is renamed to `out`; on failure `out` is untouched.
    Returns `out`. Raises ConfigError where an input cannot be used, RunError where the checkpoint belongs to
    other layers or another target (cases 04, 36) or a check of the written files fails (case 03).
    """
    layout, meta = LAYOUTS[name], read_meta(checkpoint)
    layout.check_meta(meta)
    state = read_tensors(checkpoint)
    same_origin(checkpoint, meta, served.layers, served.fingerprint)
    config = layout.config(meta, dtype, served)
    partial, earlier = (out.with_name(f".{out.name}.{suffix}") for suffix in ("partial", "earlier"))
    out.parent.mkdir(parents=True, exist_ok=True)
    recover(out, partial, earlier, layout.weights)
    partial.mkdir()
    try:
        tensors = layout.tensors(state, meta, dtype, served)
        write_bytes(partial / layout.weights, save(tensors, metadata={"format": "pt"}))
        write_json(partial / CONFIG, config)
        write_json(partial / ORIGIN, provenance(name, meta, dtype, sha256_file(checkpoint / WEIGHTS)))
        deployment = Deployment(target_reference(meta["target"]["model"]), HERE, name, layout.flat(config),
                                meta["shape"]["target_layers"], served.drafted)
        for file, text in serving_files(deployment).items():
            write_text(partial / file, text)
        check_folder(partial, name)
        same_drafter(partial, layout, meta, state, dtype, served)
        replace(out, partial, earlier)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(earlier, ignore_errors=True)
    return out


def provenance(layout: str, meta: dict[str, Any], dtype: str, weights: str) -> dict[str, Any]:
    """provenance.json: what the drafter is, for which target, and of which checkpoint."""
    return {"format": FORMAT, "layout": layout, "kind": meta["kind"], "options": dict(meta["options"]),
            "shape": dict(meta["shape"]), "layers": list(meta["layers"]),
            "target_layers": meta["shape"]["target_layers"],
            "target": dict(meta["target"]), "dtype": dtype, "checkpoint_sha256": weights}


def check_folder(folder: Path, layout: str) -> None:
    """RunError that names every violation of an exported folder: config keys, tensor names, shapes, precisions,
    values, and what provenance.json says otherwise."""
    found = [*LAYOUTS[layout].violations(folder), *origin_violations(folder, layout)]
    if found:
        listed = "\n".join(f"  - {each}" for each in found)
        title = " or ".join(TITLES[kind] for kind in LAYOUTS[layout].kinds)
        raise RunError(f"{folder}: not a servable {layout} {title} export; mend and export again:\n{listed}")


def origin_violations(folder: Path, layout: str) -> list[str]:
    """Where config.json and provenance.json describe unlike drafters: a lost flag or moved tap touches no tensor."""
    try:
        config, origin = read_config(folder / CONFIG), read_config(folder / ORIGIN)
    except ConfigError as error:
        return [str(error)]
    of, keys = LAYOUTS[layout], LAYOUTS[layout].flat(config)
    pairs = {"format": (origin.get("format"), FORMAT), "layout": (origin.get("layout"), layout),
             "dtype": (origin.get("dtype"), keys.get("torch_dtype"))}
    options, target, shape = (origin[key] if isinstance(origin.get(key), dict) else {}
                              for key in ("options", "target", "shape"))
    pairs |= {what: (there, here)
              for what, there, here in of.said(origin | {"options": options, "shape": shape}, keys)}
    formed = {"kind": origin.get("kind") in of.kinds, "options": bool(options),
              "target": bool(target.get("model")) and bool(target.get("fingerprint")),
              "target_layers": is_size(origin.get("target_layers")),
              "checkpoint_sha256": bool(re.fullmatch("[0-9a-f]{64}", str(origin.get("checkpoint_sha256"))))}
    return [f"{ORIGIN}: {key} = {origin.get(key)!r}: missing or not of its form" for key, ok in formed.items()
            if not ok] + [f"{ORIGIN}: {key} = {said!r}, but the export has {found!r}"
                          for key, (said, found) in pairs.items() if said != found]


def replace(out: Path, partial: Path, earlier: Path) -> None:
    """Gives `partial` the name `out`. An export that was there is `earlier` from then on; where the replacing fails, it
    keeps its name."""
    try:
        if out.exists():
            os.replace(out, earlier)
        os.replace(partial, out)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from None
    finally:
        if earlier.exists() and not out.exists():
            os.replace(earlier, out)
    sync_folder(out.parent)


def recover(out: Path, partial: Path, earlier: Path, weights: str = WEIGHT_FILE) -> None:
    """Clears what a killed export left, and puts the earlier export back where it was already moved away.

    Raises ConfigError where `out` holds something that is no export, so that nothing else is ever deleted.
    """
    if partial.exists():
        shutil.rmtree(partial)
    if earlier.exists() and not out.exists():
        os.replace(earlier, out)
    is_export = all((out / name).is_file() for name in (weights, CONFIG, "SERVE.md"))
    if out.exists() and not is_export:
        raise ConfigError(f"{out}: exists and is no earlier export; move it away or choose another folder")
    if earlier.exists():
        shutil.rmtree(earlier)


def same_origin(checkpoint: Path, meta: dict[str, Any], layers: list[int],
                fingerprint: dict[str, Any]) -> None:
    """Raises RunError naming what differs between the checkpoint and the traces or the target."""
    where = checkpoint / META
    if meta["layers"] != list(layers):
        raise RunError(f"{where}: layers = {meta['layers']}, but the traces hold {list(layers)}; export the "
                       f"checkpoint that was trained on these traces, or train again")
    ours = meta["target"]["fingerprint"]
    if not ours or not fingerprint:
        raise RunError(f"{where}: target.fingerprint = {ours!r}, the target's is {fingerprint!r}; both are "
                       f"needed to know that the drafter belongs to the target; train again")
    keys = sorted(ours.keys() | fingerprint.keys())
    differ = [key for key in keys if ours.get(key) != fingerprint.get(key)]
    if differ:
        listed = ", ".join(f"{k} ({ours.get(k)} here, {fingerprint.get(k)} served)" for k in differ)
        raise RunError(f"{where}: target.fingerprint differs from the target's in {listed}; serve the target "
                       f"that the drafter was trained on, or train again")


def same_drafter(folder: Path, layout: Layout, meta: dict[str, Any], state: dict[str, Tensor], dtype: str,
                 served: Served) -> None:
    """Reads the written folder back by the layout's inverse. Raises RunError naming tensors that are not the trained
    ones or the target's own, bit for bit (case 03), and settings that came back as others."""
    found = layout.back(read_config(folder / CONFIG), load_file(folder / layout.weights))
    written = found.tensors | dict(zip(("d2t", "t2d"), vocab.maps(found.ids, meta["shape"]["vocab_size"])))
    expected, kind = dict(state), KINDS.get(meta["kind"])
    if kind and (layout.carries_embedding or kind.own_row):
        expected[TABLE] = own_table(served.embedding, state, meta)
    if found.embedding is not None:
        written[TABLE] = found.embedding
        if kind is None:
            expected[TABLE] = served.embedding
    if found.carried is not None:
        written["the target's head"], expected["the target's head"] = found.carried, served.head[found.ids]
    wrong = [f"{name} is in only one of the two" for name in sorted(written.keys() ^ expected.keys())]
    for name in sorted(written.keys() & expected.keys()):
        trained = expected[name].cpu()
        trained = trained.to(DTYPES[dtype]) if trained.is_floating_point() else trained
        # Bytes, not values: -0.0 and 0.0 are equal as numbers.
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (written[name], trained)]
        if written[name].dtype != trained.dtype or not torch.equal(*bits):
            wrong.append(f"{name} differs")
    options = meta["options"] | {"num_layers": layers_of(meta)}
    said = {"layers": (found.layers, meta["layers"])}
    said |= {key: (found.options.get(key), options[key]) for key in layout.structure(meta)}
    shape = dict(meta["shape"])
    if "rope_parameters" in shape:
        shape["rope_parameters"] = canonical_rope(shape)
    said |= {key: (found.shape[key], value) for key, value in shape.items() if key != "target_layers"}
    wrong += [f"{key} reads back as {back!r}, trained as {own!r}" for key, (back, own) in said.items() if back != own]
    if wrong:
        raise RunError(f"{layout.weights}: not the trained tensors: {'; '.join(wrong)}; export again")
