"""What the README says: its programs run as shown, its commands are real, its table names every room."""
import re
import shlex

import pytest
from launch import ROOT, launchers

from ringmpi import cli

TEXT = (ROOT / "README.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py): mpiexec -n 4 python \1\n(.*?)```", TEXT, re.S))
SAYS = {"example.py": r"4 ranks, largest difference from dense attention [1-9]e-0[67]\n", "masks.py": "", "embed.py": "", "generate.py": ""}
HERE = pytest.mark.parametrize("mpi", launchers(), ids=lambda mpi: mpi.name)


def test_every_program_is_run():
    assert len(PROGRAMS) == TEXT.count("```python") and set(PROGRAMS) == set(SAYS)


@HERE
@pytest.mark.parametrize("name", SAYS)
def test_program(mpi, name, tmp_path):
    (tmp_path / name).write_text(PROGRAMS[name])
    done = mpi.run(4, tmp_path / name)
    assert done.returncode == 0 and re.fullmatch(SAYS[name], done.stdout), done.stdout


def test_commands_are_understood():
    calls = [shlex.split(call) for call in re.findall(r"^    (?:mpiexec -n 4 )?ringmpi (.*?)(?: *#.*)?$", TEXT, re.M)]
    assert len(calls) >= 3
    for words in calls:
        assert cli._parser(words).parse_args(words).run


def test_every_room_is_named():
    rooms = {path.name for path in (ROOT / "ringmpi").glob("*.py")} - {"__init__.py", "__main__.py"}
    packages = {f"{path.parent.name}/" for path in (ROOT / "ringmpi").glob("*/__init__.py")}
    assert not [room for room in rooms | packages if f"`{room}`" not in TEXT]
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (ROOT / link).exists(), link
