"""The folders import in one direction only, and no module hides one that Python or a package provides."""

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["recipes", "drafters", "data", "eval", "train", "bench"]  # left never imports right
FILES = [p for folder in ORDER for p in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports; relative imports are not allowed at all."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_left_never_imports_right(path):
    """recipes < drafters < data < eval < train; bench/, which is no package of the installation, may import all."""
    own = ORDER.index(path.relative_to(ROOT).parts[0])
    assert not imported(path) & {*ORDER[own + 1 :], "tests"}


def test_no_module_shadows_another():
    """`accelerate launch train/x.py` puts train/ first on sys.path: a module there would hide its namesake."""
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    assert not {p.stem for p in FILES if p.stem != "__init__"} & (taken - set(ORDER))
