"""The PTX of every row of the registry, run once in the interpreter: against dense float64, and against the C++ emulator.

The ordinary run takes one row of every kernel and dtype, and one whose dims are no power of two: they have every opcode that a
row has, which ``--all`` checks on all rows, and runs them. Needs nvcc. No GPU.
"""
import re

import numpy as np
import pytest
import test_cuda_tile
from emulator import ptx
from emulator.cases import DTYPES, NOISE, Case, masks, worst
from emulator.device import pretend
from emulator.ptx.machine import Machine
from test_cuda_probe import probe
from test_cuda_tile import BENT, backward, check, forward

from ringmpi.partial import Partial
from ringmpi.tiles import cuda, registry

pytestmark = pytest.mark.skipif(ptx.NVCC is None, reason="nvcc is not on the path")
OPTIONS = (f"-I{registry.SOURCES}",)
HALF = ("float16", "bfloat16")
DIMS = sorted({(row.dtype, row.dim) for row in registry.KERNELS})
# Of what rows compute only products of doubles have an instruction of their own on Hopper.
EVERY = [(dtype, dim, 80) for dtype, dim in DIMS] + [(dtype, dim, 90) for dtype, dim in DIMS if dtype == "float64"]


def together(names):
    """What is compiled in one go with a kernel: the small ones; both of backward."""
    if "<" not in names[0] or names[0] in registry.ROWS:
        return list(registry.ROWS)
    asked = next((row for row in registry.KERNELS if row.name == names[0]), None)
    if asked is None:
        return names
    return [row.name for row in registry.KERNELS if (row.file, row.dtype, row.dim) == (asked.file, asked.dtype, asked.dim)]


class Compiler:
    """What a device compiles with, for an architecture; the kernels that were asked for, by name."""

    def __init__(self, **options):
        self.options, self.entries = options, {}

    def __call__(self, path, names, options, checked):
        made = ptx.Module(path, together(names), options, **self.options)
        self.entries.update((name, made.get_function(name).entry) for name in names)
        return made


def pretended(monkeypatch, **options):
    """A device whose kernels run in the interpreter."""
    return pretend(monkeypatch, module=Compiler(**options))


def ragged(dtype, dim, score=BENT):
    """Two tiles of keys and more, the last in part; rows that see nothing; rows of v that are not whole pieces of 16 bytes."""
    rows = (37, 77) if dtype in HALF else (37, 39)
    case = Case(dtype, (dim, dim - 3), rows, (4, 2), 1, masks(*rows)["random"], score, seed=1)
    assert not case.seen.any(axis=3).all() and case.seen.any()
    return case


def gapped(dtype, dim):
    """The first rows see the first keys, most of the others later ones; keys between are seen by none, and are NaN."""
    i, last = np.arange(37)[None], 77 if dtype in HALF else 39
    bounds = np.where(i < 16, 0, last - 9), np.where(i < 16, 10, np.where(i < 30, last, 0))
    case = Case(dtype, (dim, dim - 3), (37, last), (2, 1), 1, bounds, seed=2)
    for x in (case.k, case.v):
        x[:, 10 : last - 9] = np.nan
    return case


def ordinary(row):
    return row[1:] == (64, 80) or row == ("bfloat16", 96, 80)


def slow(row):
    return pytest.param(*row, marks=() if ordinary(row) else pytest.mark.slow)


def never_executed(kernels):
    """The opcodes of which no instruction was executed."""
    for entry in kernels:
        yield from entry.opcodes - {entry.code[n].opcode for n in entry.executed}


def passes(offsets, size):
    """How often shared memory is gone to for loads of whole warps: 128 bytes at a time, of which each bank has 4 bytes of one place."""
    words = offsets[:, None] // 4 + np.arange(max(1, size // 4))
    at_once = words.reshape(-1, min(32, 128 // size) * words.shape[1])
    return [int(np.bincount(np.unique(each) % 32).max()) for each in at_once]


def test_passes_are_counted():
    lanes = np.arange(32)
    assert passes(4 * lanes, 4) == [1] and passes(128 * lanes, 4) == [32] and passes(0 * lanes, 8) == [1, 1]
    assert passes(144 * lanes, 16) == [1] * 4 and passes(128 * lanes, 16) == [8] * 4
    assert passes(8 * (lanes // 4 * 68 + lanes % 4), 8) == [1, 1] and passes(8 * (lanes % 4 * 2 * 68 + lanes // 4), 8) == [2, 2]


def watched(monkeypatch):
    """The loads of floating numbers from shared memory that need more passes than their bytes do, by the first warps of a launch."""
    execute, slow = Machine._execute, []

    def watch(machine, does, i, active):
        size = re.fullmatch(r"ld\.shared(?:\.v([24]))?\.f(32|64)|ldmatrix.*", i.opcode)
        if size and active.mask[:64].all():
            size = int(size[1] or 1) * int(size[2]) // 8 if size[2] else 16
            if max(passes(machine.address(i.operands[1])[:64], size)) > 1:
                slow.append(f"{machine.entry.name}: {i.text}")
        execute(machine, does, i, active)

    monkeypatch.setattr(Machine, "_execute", watch)
    return slow


@pytest.mark.parametrize(("dtype", "dim", "arch"), [slow(row) for row in EVERY])
def test_a_row_runs(monkeypatch, dtype, dim, arch):
    ptx.read.cache_clear()
    device, case = pretended(monkeypatch, arch=arch), ragged(dtype, dim)
    with monkeypatch.context() as patch:
        conflicts = watched(patch)
        got = check(device, case)
    assert not conflicts, "bank conflicts"
    check(device, gapped(dtype, dim))
    rows = [row for row in registry.KERNELS if (row.dtype, row.dim) == (dtype, dim)]
    assert {row.name for row in rows} <= set(device.launches)
    assert not set(never_executed(device.module.entries[row.name] for row in rows))
    agree(case, got, monkeypatch)


def agree(case, got, monkeypatch):
    """Two readings of the instructions, two compilers: the same to rounding, in half types to that of p and ds."""
    device = pretend(monkeypatch)
    other = forward(device, case), backward(device, case)
    bound = 8e-3 if case.dtype in HALF else 8 * NOISE[case.dtype]
    for name in "oml":
        assert worst(getattr(got[0], name), getattr(other[0], name)) <= (bound if name == "o" else 8 * NOISE[case.dtype]), name
    for name, x, y in zip(("dq", "dk", "dv"), got[1], other[1]):
        assert worst(x, y) <= bound * max(1, np.abs(y).max()), name


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", registry.TYPES)
def test_small_kernels(monkeypatch, dtype, arch):
    device, random = pretended(monkeypatch, arch=arch), np.random.default_rng(3)
    if dtype not in HALF:
        test_cuda_tile.test_merge_finish_and_delta(device, dtype)
    sums = np.float64 if dtype == "float64" else np.float32
    total = Partial(*(random.random(shape).astype(sums) for shape in ((2, 17, 3, 37), (2, 3, 17), (2, 3, 17))))
    total.l[...] += 1
    total.o[:, 4], total.m[..., 4], total.l[..., 4] = 0, -np.inf, 0
    out, lse = cuda.finish(Partial(*map(device.asarray, (total.o, total.m, total.l))), DTYPES[dtype])
    with np.errstate(all="ignore"):
        want, wanted = total.finish()
    assert worst(out.get(), want.astype(DTYPES[dtype])) <= (0 if dtype in HALF else 4 * NOISE[dtype])
    assert worst(lse.get(), wanted) <= NOISE[dtype]
    dout = random.standard_normal(out.shape).astype(DTYPES[dtype])
    found = cuda.delta(device.asarray(dout), out).get()
    assert worst(found, np.einsum("bqhd,bqhd->bhq", dout.astype(float), out.get().astype(float))) <= 30 * NOISE[dtype]
    assert {f"{name}<{registry.TYPES[dtype]}>" for name in ("finish", "delta")} <= set(device.launches)


def test_bounds_far_away_are_clipped(monkeypatch):
    """By a division of 64 bits, which nearer ones do without; those of the block's number are beyond any launch."""
    ptx.read.cache_clear()
    device = pretended(monkeypatch)
    zero = np.zeros((1, 37), int)
    check(device, Case("bfloat16", (64, 64), (37, 20), (1, 1), 1, (zero, zero + (1 << 40)), key=(1 << 40, 3), seed=4))
    check(device, Case("bfloat16", (64, 64), (37, 20), (1, 1), 1, masks(37, 20)["random"], seed=4))
    left = set(never_executed([device.module.entries["clip"]]))
    assert left <= {"div.s64", "rem.s64", "bra.uni"}, left


@pytest.mark.parametrize(("dtype", "arch"), [*((dtype, 80) for dtype in registry.TYPES), ("float64", 90)])
def test_instructions(monkeypatch, dtype, arch):
    """Small whole numbers, whose products and sums are exact: the same test that a GPU gets."""
    probe(pretended(monkeypatch, arch=arch), dtype)


@pytest.mark.slow
def test_the_ordinary_rows_have_every_opcode():
    opcodes = {True: set(), False: set()}
    for dtype, dim, arch in EVERY:
        for file in ("forward.cu", "backward.cu"):
            names = [row.name for row in registry.KERNELS if (row.file, row.dtype, row.dim) == (file, dtype, dim)]
            for entry in ptx.read(ptx.compiled(registry.SOURCES / file, names, OPTIONS, arch)):
                opcodes[ordinary((dtype, dim, arch))] |= entry.opcodes
    assert opcodes[False] - opcodes[True] <= {f"mma.sync.aligned.m16n8k8.row.col{'.f64' * 4}"}


# ----------------------------------------------------------------------------------------------------------- planted bugs

MMA = r"(mma\.sync\S+) (\{[^}]*\}),\{(%\w+),(%\w+),(%\w+),(%\w+)\},\{(%\w+),(%\w+)\}"
SMALL = r"(mma\.sync\.aligned\.m8n8k4\S+ \{[^}]*\}),(\{%\w+\}),(\{%\w+\})"
FOUR = r"\{(%\w+),(%\w+),(%\w+),(%\w+)\}"
# What may go wrong in a wrapper of platform.cuh and nowhere else, as an edit of the PTX: the C++ emulator cannot see it.
BUGS = {
    "rows and columns of a exchanged": (MMA, r"\1 \2,{\3,\5,\4,\6},{\7,\8}"),
    "halves of b exchanged": (MMA, r"\1 \2,{\3,\4,\5,\6},{\8,\7}"),
    "sums of another row": (rf"(mma\.sync\S+) {FOUR}", r"\1 {\4,\5,\2,\3}"),
    "the other type of 16 bits": (r"bf16\.bf16\.f32", "f16.f16.f32"),
    "a matrix not transposed": (r"x4\.trans", "x4"),
    "a matrix transposed": (r"x4\.shared", "x4.trans.shared"),
    "matrices in another order": (rf"(ldmatrix\S+) {FOUR}", r"\1 {\2,\4,\3,\5}"),
    "copies not waited for": (r"cp\.async\.wait_group 0;", ""),
    "the last group not waited for": (r"cp\.async\.wait_group 0;", "cp.async.wait_group 1;"),
    "a group never closed": (r"cp\.async\.commit_group;", ""),
    "rows that are not real copied": (r"(cp\.async\.cg\S+ \[[^]]*\],\[[^]]*\],16),%r\d+", r"\1,16"),
    "two packed the other way round": (r"(cvt\.rn\.bf16x2\.f32 %\w+), (%\w+), (%\w+)", r"\1, \3, \2"),
    "2 to the power of -x": (r"(ex2\.approx\.ftz\.f32 %\w+), (%\w+);", r"neg.f32 \2, \2; \1, \2;"),
}  # fmt: skip
OF_DOUBLES = {
    "a and b exchanged": (80, SMALL, r"\1,\3,\2"),
    "columns of c exchanged": (80, r"(m8n8k4\S+) \{(%\w+), ?(%\w+)\}", r"\1 {\3,\2}"),
    "rows and columns of a exchanged": (90, MMA, r"\1 \2,{\3,\5,\4,\6},{\7,\8}"),
    "halves of b exchanged": (90, MMA, r"\1 \2,{\3,\4,\5,\6},{\8,\7}"),
}


def planted(pattern, replacement):
    """An edit of PTX, which must change something in a kernel that computes products."""

    def edit(text):
        text, times = re.subn(pattern, replacement, text)
        assert times or not re.search("forward|probe", text), "the bug was not planted"
        return text

    return edit


def small():
    return Case("bfloat16", (64, 64), (37, 77), (1, 1), 1, masks(37, 77)["random"], seed=5)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_ptx_is_found(monkeypatch, bug):
    with pytest.raises((AssertionError, ptx.PtxError)) as error:
        check(pretended(monkeypatch, edit=planted(*BUGS[bug])), small())
    assert "not planted" not in str(error.value)


@pytest.mark.parametrize("bug", OF_DOUBLES)
def test_a_bug_in_the_ptx_of_doubles_is_found(monkeypatch, bug):
    arch, pattern, replacement = OF_DOUBLES[bug]
    with pytest.raises((AssertionError, ptx.PtxError)) as error:
        probe(pretended(monkeypatch, arch=arch, edit=planted(pattern, replacement)), "float64")
    assert "not planted" not in str(error.value)


def test_without_a_bug_nothing_is_found(monkeypatch):
    check(pretended(monkeypatch), small())
