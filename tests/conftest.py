"""Tests of rooms need no MPI and run here. Tests of whole rings are in rings/: test_rings.py starts them under mpiexec."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore = [] if "--with-mpi" in sys.argv else ["rings"]


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only run with --all")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --all"))
