"""The rooms: who may import whom, what importing costs, and that every example in a docstring runs."""
import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringmpi

PACKAGE = Path(ringmpi.__file__).parent

# The whole top level; a built or downloaded file has no business in a commit.
TOP = {"ringmpi", "kernels", "tests", "jobs", "bench", "setup.cfg", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md",
       "LICENSE", "MANIFEST.in", "pyproject.toml", "ringmpi.svg", "ruff.toml", ".ci", ".gitignore"}  # fmt: skip

# Imports run one way. A room that is not here has no business in the house.
ROOMS = {
    "layout": {"numpy"},
    "mask": {"numpy", "layout"},
    "score": {"numpy"},
    "pairs": {"numpy", "layout", "mask", "score"},
    "topology": {"numpy"},
    "schedule": {"topology"},
    "partial": {"numpy"},
    "gpu": set(),
    "tiles": {"numpy", "cupy", "cupyx", "gpu", "mask", "pairs", "partial"},
    "comm": {"numpy", "mpi4py", "gpu", "topology"},
    "ring": {"schedule"},
    "attention": {"numpy", "layout", "pairs", "partial", "ring", "schedule", "score"},
    "profile": {"numpy"},
    "reference": {"numpy", "mask", "score"},
    "io": {"numpy", "layout", "partial"},
    "api": {"numpy", "attention", "comm", "layout", "mask", "pairs", "partial", "profile", "ring", "schedule", "score", "tiles",
            "topology"},
    "decode": {"numpy", "api", "attention", "comm", "layout", "mask", "pairs", "partial", "score", "tiles"},
    "plan": {"numpy", "layout", "mask", "schedule"},
    "survey": {"numpy", "api", "attention", "plan", "profile"},
    "cli": {"__version__", "api", "comm", "profile"},
    "commands": {
        *("__version__", "numpy", "matplotlib", "api", "cli", "comm", "gpu", "io", "layout", "mask", "partial", "plan", "profile"),
        *("reference", "schedule", "score", "survey", "tiles", "topology"),
    },
    "__main__": {"cli"},
}


def imports(path):
    """What a file imports: rooms of the package by name, other packages by theirs; the standard library left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and path.parent != PACKAGE:
            yield path.parent.name
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def files():
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    room = path.stem if path.parent == PACKAGE else path.parent.name
    if room == "__init__":
        return
    within = {other.stem for other in path.parent.glob("*.py")} if path.parent != PACKAGE else set()
    found = {name for name in imports(path) if name not in sys.stdlib_module_names and name not in {room, *within}}
    assert room in ROOMS, f"{path.name} is a room that nobody knows"
    assert found <= ROOMS[room], f"{path.name} imports {sorted(found - ROOMS[room])}"


def test_rooms_are_in_order():
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed if other in ROOMS), room


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)


def test_importing_touches_neither_mpi_nor_a_gpu():
    done = python(
        "import sys, numpy as np, ringmpi\n"
        "q = np.ones((1, 5, 2, 4)); ringmpi.ring_attention(q, q, q)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'cupy', 'ml_dtypes', 'matplotlib')], sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_importing_writes_and_prints_nothing():
    done = python("import os; before = dict(os.environ); import ringmpi; assert before == dict(os.environ)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def modules():
    return sorted(name for _, name, _ in pkgutil.walk_packages([str(PACKAGE)], "ringmpi.") if "__main__" not in name)


@pytest.mark.parametrize("name", modules())
def test_examples_run(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert not failed


def public():
    for name in ringmpi.__all__:
        yield name, getattr(ringmpi, name)


@pytest.mark.parametrize(("name", "thing"), list(public()))
def test_public_names_say_what_they_do(name, thing):
    assert thing.__doc__ and len(thing.__doc__) > 60, name


def test_nothing_strays_into_the_top_level():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    if listed.returncode:
        pytest.skip("not a checkout")
    assert {name.split("/")[0] for name in listed.stdout.splitlines()} <= TOP
