"""The contract of test_tile.py, held by the compiled tile as other processors get it, and under the sanitizers.

Each build runs those tests in a process of its own.
"""
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringmpi.tiles import host, native

TESTS = Path(__file__).parent
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64")
pytestmark = pytest.mark.skipif(host.available(np.float32) is not None, reason=f"no library: {host.available(np.float32)}")

# The last has AVX-512's shapes on the vectors there are, and does by multiply-adds what are dot products of bfloat16 there: the
# arithmetic, not the speed.
BUILDS = {
    "AVX2": {"RINGMPI_MARCH": "haswell"},
    "plain": {"RINGMPI_MARCH": "x86-64"},
    "AVX-512's shapes": {"RINGMPI_MARCH": "x86-64-v3", "RINGMPI_CFLAGS": "-O2 -DVECTOR_BYTES=64 -DEMULATED_DOTS"},
}


def contract(tmp_path, only="host", program="import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", **environment):
    """Runs test_tile.py with the compiled tile alone."""
    variables = {**os.environ, "RINGMPI_CACHE": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "2", **environment}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    line = [sys.executable, "-c", program, "-q", "-x", "-p", "no:cacheprovider", "-k", only, str(TESTS / "test_tile.py")]
    done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=900)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


@x86
@pytest.mark.parametrize("environment", BUILDS.values(), ids=BUILDS)
def test_builds(environment, tmp_path):
    contract(tmp_path, **environment)


def test_sanitized(tmp_path):
    """No read or write outside an array, no undefined behaviour."""
    found = subprocess.run([*native.compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    flags = "-O1 -g -DEMULATED_DOTS -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    contract(tmp_path, LD_PRELOAD=found, ASAN_OPTIONS="detect_leaks=0", RINGMPI_CFLAGS=flags, OMP_NUM_THREADS="1", PYTHONMALLOC="malloc")


NEON = {"NEON": ("host", []), "with BF16": ("host and bfloat16", ["-march=armv8.2-a+bf16"])}


@pytest.mark.parametrize("only, march", NEON.values(), ids=NEON)
def test_aarch64(only, march, tmp_path):
    """The NEON build, run instruction by instruction; and where bfloat16 has dot products."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if not (compiler and emulator):
        pytest.skip("needs gcc-aarch64-linux-gnu and qemu-user")
    for real, kind in native.REALS.items():
        flags = [flag for flag in native.FLAGS if flag not in ("-shared", "-fPIC")]
        flags += ["-static", f"-DREAL={kind}", f"-I{native.sources()}", *march]
        subprocess.run([compiler, *flags, str(TESTS / "serve_tile.c"), "-o", str(tmp_path / real), "-lm"], check=True)
    install = f"served.install({[emulator, '-cpu', 'max']!r}, {str(tmp_path)!r})"
    program = f"import served, pytest, sys; {install}; sys.exit(pytest.main(sys.argv[1:]))"
    contract(tmp_path, only, program, OMP_NUM_THREADS="1")
