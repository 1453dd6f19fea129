"""The PTX interpreter does what the PTX ISA says: instructions written by hand against NumPy, and every fault it is there to find."""
import ml_dtypes
import numpy as np
import pytest
from emulator import ptx

HEAD = """
.version 9.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 shared[];
.visible .entry kernel(.param .u64 in, .param .u64 out)
{
  .reg .pred %p<9>;
  .reg .b16 %rs<9>;
  .reg .b32 %r<40>;
  .reg .f32 %f<20>;
  .reg .f64 %fd<20>;
  .reg .b64 %rd<20>;
  ld.param.u64 %rd1, [in];
  ld.param.u64 %rd2, [out];
  mov.u32 %r1, %tid.x;
"""
# %rd3 is where this thread's first number of `in` is, %rd4 that of `out`, in strides of so many bytes.
PLACES = "mul.wide.u32 %rd5, %r1, {0}; add.s64 %rd3, %rd1, %rd5; mul.wide.u32 %rd6, %r1, {1}; add.s64 %rd4, %rd2, %rd6;\n"
LANE = np.arange(32)
GROUP, PLACE = LANE // 4, LANE % 4


def ran(body, given, shape, threads=32, shared=0, strides=(4, 4)):
    """What a kernel of a few lines makes of an array."""
    [entry] = ptx.read(HEAD + PLACES.format(*strides) + body + "\nret;\n}\n")
    given, got = np.ascontiguousarray(given), np.zeros(shape[0], shape[1])
    ptx.Kernel("kernel", entry)((1,), (threads,), (given, got), shared)
    return got


def numbers(count, kind, size, first=0):
    """Loads ``count`` numbers in a row."""
    register = {"f32": "f", "f64": "fd", "u32": "r"}[kind]
    return "".join(f"ld.global.{kind} %{register}{first + n}, [%rd3+{n * size}];\n" for n in range(count))


def by_thread(operation, a, b=None, kind="f32", result="f32"):
    """One instruction ``%x3 <- %x1, %x2``."""
    given = np.stack([a, a if b is None else b], axis=1)
    size = given.itemsize
    out = {"f32": "f", "f64": "fd", "u32": "r", "s32": "r", "u16": "rs"}[result]
    body = numbers(2, kind, size, 1) + f"{operation}\nst.global.{result} [%rd4], %{out}3;"
    kinds = {"f32": np.float32, "f64": np.float64, "u32": np.uint32, "s32": np.int32, "u16": np.uint16}
    return ran(body, given, (len(a), kinds[result]), len(a), strides=(2 * size, np.dtype(kinds[result]).itemsize))


def special(dtype):
    """Numbers of all sizes, and those that are none."""
    random = np.random.default_rng(0)
    others = random.standard_normal(56) * 10.0 ** random.integers(-9, 9, 56)
    return np.concatenate([[0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-39, 1], others]).astype(dtype)


# ---------------------------------------------------------------------------------------------------------- one thread


def test_floats_are_flushed_where_the_instruction_says_so():
    x = special(np.float32)
    got = by_thread("add.ftz.f32 %f3, %f1, %f2;", x, np.zeros_like(x))
    assert np.array_equal(got, np.where(np.abs(x) < 1.1754944e-38, 0, x), equal_nan=True)
    assert np.array_equal(by_thread("add.f32 %f3, %f1, %f2;", x, np.zeros_like(x)), x + 0, equal_nan=True)


def test_fma_rounds_once():
    random = np.random.default_rng(1)
    a, b = (random.integers(1 << 23, 1 << 24, 512).astype(np.float32) for _ in "ab")
    exact = [int(x) * int(y) for x, y in zip(a, b)]
    got = by_thread("neg.f32 %f4, %f2; mul.f32 %f5, %f1, %f2; neg.f32 %f5, %f5; fma.rn.f32 %f3, %f1, %f2, %f5;", a, b)
    assert np.array_equal(got, [float(e - int(np.float32(e))) for e in exact])
    # 1 + 2^-24 is half-way between two floats; a little more must not be lost on the way through double.
    one, tiny = np.full(32, 1 + 2.0**-12, np.float32), np.full(32, 2.0**-12, np.float32)
    assert (by_thread("mov.f32 %f4, 0f3F800000; fma.rn.f32 %f3, %f2, %f2, %f4;", one, tiny) == 1).all()
    assert (by_thread("mov.f32 %f4, 0f3F800000; mul.f32 %f5, %f1, %f2; fma.rn.f32 %f3, %f5, %f2, %f4;", one, tiny) > 1).all()


def test_fma_of_doubles_knows_the_low_half():
    a = np.random.default_rng(2).random(64) + 1
    got = by_thread("mul.f64 %fd4, %fd1, %fd2; neg.f64 %fd4, %fd4; fma.rn.f64 %fd3, %fd1, %fd2, %fd4;", a, 1 / a, "f64", "f64")
    exact = a.astype(np.longdouble) * (1 / a) - a * (1 / a)
    assert np.allclose(got, exact.astype(float), rtol=2e-3, atol=1e-19) and got.any()


def test_comparisons_with_nan():
    x = special(np.float32)
    nan = np.isnan(x)
    wanted = {"lt": x < 1, "ltu": (x < 1) | nan, "ne": (x != 1) & ~nan, "neu": x != 1, "num": ~nan, "gtu": (x > 1) | nan}
    for order, want in wanted.items():
        got = by_thread(f"setp.{order}.f32 %p1, %f1, %f2; selp.u32 %r3, 1, 0, %p1;", x, np.ones_like(x), result="u32")
        assert np.array_equal(got, want), order


def test_the_larger_one_is_no_nan():
    x = special(np.float32)
    assert np.array_equal(by_thread("max.f32 %f3, %f1, %f2;", x, x[::-1].copy()), np.fmax(x, x[::-1]), equal_nan=True)


@pytest.mark.parametrize(("dtype", "operation"), [(ml_dtypes.bfloat16, "cvt.rn.bf16.f32"), (np.float16, "cvt.rn.f16.f32")])
def test_rounding_to_16_bits(dtype, operation):
    x = np.concatenate([special(np.float32), (np.arange(64) / 64 + 1).astype(np.float32) + np.float32(2**-9)])
    with np.errstate(over="ignore"):
        want = x.astype(dtype)
    got = by_thread(f"{operation} %rs3, %f1;", x, result="u16").view(dtype)
    assert np.array_equal(got.astype(float), want.astype(float), equal_nan=True)


def test_two_are_packed_the_second_operand_low():
    x, y = np.full(32, 1.5, np.float32), np.full(32, -2.0, np.float32)
    got = by_thread("cvt.rn.bf16x2.f32 %r3, %f1, %f2;", x, y, result="u32").view(ml_dtypes.bfloat16).reshape(32, 2)
    assert (got == np.array([-2.0, 1.5], ml_dtypes.bfloat16)).all()


def test_whole_numbers():
    random = np.random.default_rng(3)
    a, b = (random.integers(-(1 << 31), 1 << 31, 64).astype(np.int32) for _ in "ab")
    a_bits, b_bits = a.view(np.uint32), b.view(np.uint32)
    cases = {
        "div.s32 %r3, %r1, %r2;": [int(x / y) for x, y in zip(a.tolist(), b.tolist())],
        "rem.u32 %r3, %r1, %r2;": a_bits % b_bits,
        "mul.hi.s32 %r3, %r1, %r2;": (a.astype(np.int64) * b) >> 32,
        "shr.s32 %r3, %r1, 40;": a >> 31,
        "shr.u32 %r3, %r1, 32;": 0 * a,
        "shl.b32 %r3, %r1, 4;": a << 4,
        "brev.b32 %r3, %r1;": [int(f"{x:032b}"[::-1], 2) for x in a_bits.tolist()],
        "bfi.b32 %r3, %r1, %r2, 8, 4;": (b & ~0xF00) | ((a & 15) << 8),
        "bfind.shiftamt.u32 %r3, %r1;": [32 - x.bit_length() for x in a_bits.tolist()],
        "and.b32 %r3, %r1, %r2;": a & b,
        "not.b32 %r3, %r1;": ~a,
    }
    for operation, want in cases.items():
        got = by_thread(operation, a, b, "u32", "u32")
        assert np.array_equal(got, np.asarray(want).astype(np.int64) & 0xFFFFFFFF), operation


def test_scopes_hide_names():
    body = "mov.u32 %r3, 7; { .reg .b32 %r3; mov.u32 %r3, 9; { .reg .b32 %r3; mov.u32 %r3, 1; } st.global.u32 [%rd4], %r3; }"
    body += "ld.global.u32 %r4, [%rd4];"
    assert (ran(body + "add.u32 %r4, %r4, %r3; st.global.u32 [%rd4], %r4;", np.zeros(32, np.int32), (32, np.int32)) == 16).all()


# ------------------------------------------------------------------------------------------------------------ branches


def test_lanes_that_parted_meet_again():
    """Each lane goes round its own number of times, half of them by another way; then all vote."""
    body = """
      mov.u32 %r3, 0; mov.u32 %r4, 0;
      setp.lt.u32 %p1, %r1, 16;
      @%p1 bra AGAIN;
      bra.uni OTHER;
    AGAIN:
      add.u32 %r4, %r4, 2;
      add.u32 %r3, %r3, 1;
      setp.le.u32 %p2, %r3, %r1;
      @%p2 bra AGAIN;
      bra.uni JOIN;
    OTHER:
      mov.u32 %r4, 1000;
    JOIN:
      setp.gt.u32 %p3, %r4, 10;
      vote.sync.ballot.b32 %r5, %p3, -1;
      add.u32 %r6, %r4, %r5;
      st.global.u32 [%rd4], %r6;"""
    times = np.where(LANE < 16, 2 * (LANE + 1), 1000)
    ballot = sum(1 << int(n) for n in LANE[times > 10])
    assert np.array_equal(ran(body, np.zeros(32, np.uint32), (32, np.uint32)), (times + ballot) % (1 << 32))


def test_what_is_guarded_touches_nothing_else():
    body = "mov.u32 %r3, 1; setp.lt.u32 %p1, %r1, 5; @%p1 mov.u32 %r3, 2; @!%p1 st.global.u32 [%rd4], %r3;"
    assert np.array_equal(ran(body, np.zeros(32, np.uint32), (32, np.uint32)), LANE >= 5)


def test_a_warp_of_which_half_does_not_come():
    with pytest.raises(ptx.PtxError, match=r"16 threads wait for others that never come, at: vote\.sync"):
        ran("setp.lt.u32 %p1, %r1, 16; @!%p1 ret; vote.sync.ballot.b32 %r5, %p1, -1;", np.zeros(32, np.uint32), (32, np.uint32))


def test_two_barriers_are_not_one():
    body = "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 0; bra.uni B;\nA: bar.sync 0;\nB: st.global.u32 [%rd4], %r1;"
    with pytest.raises(ptx.PtxError, match=r"never come, at: bar\.sync 0"):
        ran(body, np.zeros(64, np.uint32), (64, np.uint32), threads=64)


def test_an_or_over_the_block():
    body = "setp.eq.u32 %p1, %r1, 33; bar.red.or.pred %p2, 0, %p1; selp.u32 %r3, 5, 6, %p2; st.global.u32 [%rd4], %r3;"
    assert (ran(body, np.zeros(64, np.uint32), (64, np.uint32), threads=64) == 5).all()


@pytest.mark.parametrize(
    ("operands", "source"),
    [
        ("idx.b32 %r3, %r1, 5, 31", LANE * 0 + 5), ("idx.b32 %r3, %r1, 2, 7199", LANE // 4 * 4 + 2),
        ("bfly.b32 %r3|%p2, %r1, 6, 31", LANE ^ 6),
    ],
)  # fmt: skip
def test_shuffles(operands, source):
    assert np.array_equal(ran(f"shfl.sync.{operands}, -1; st.global.u32 [%rd4], %r3;", np.zeros(32, np.uint32), (32, np.uint32)), source)


# -------------------------------------------------------------------------------------------------------------- memory

# A thread copies 16 bytes to shared memory, and reads those of its neighbour.
COPY = """mov.u32 %r2, shared; shl.b32 %r3, %r1, 4; add.s32 %r4, %r2, %r3; xor.b32 %r5, %r3, 16;
  {0}
  ld.shared.v4.u32 {{%r6, %r7, %r8, %r9}}, [%r5];
  st.global.v4.u32 [%rd4], {{%r6, %r7, %r8, %r9}};"""
WAIT = "cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;"


def copied(how, size="16"):
    x = np.arange(128, dtype=np.uint32)
    body = COPY.format(f"cp.async.cg.shared.global [%r4], [%rd3], 16, {size}; {how}")
    return ran(body, x, (128, np.uint32), shared=512, strides=(16, 16)).reshape(32, 4)


def test_a_copy_lands_when_it_is_waited_for():
    assert np.array_equal(copied(WAIT), np.arange(128).reshape(32, 4)[LANE ^ 1])
    assert not copied(WAIT, "0").any()
    one_left = "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;"
    assert np.array_equal(copied(one_left), np.arange(128).reshape(32, 4)[LANE ^ 1])
    with pytest.raises(ptx.PtxError, match="never waited for"):
        copied("cp.async.wait_group 0; cp.async.commit_group;")


def test_a_copy_that_is_not_waited_for_is_nonsense():
    late = "cp.async.commit_group; ld.shared.u32 %r10, [%r4]; cp.async.wait_group 0; st.shared.u32 [%r4], %r10;"
    assert (copied(late)[:, 0] == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r3, [%rd3+4];", "out of bounds: 1 threads"), ("ld.global.u32 %r3, [%rd3+2];", "misaligned: 4 bytes"),
        ("st.global.u32 [%rd4+4], %r1;", "out of bounds"), ("ld.shared.u32 %r3, [shared+64];", "out of bounds: 64 to 64"),
        ("add.u32 %r3, %r7, 1;", "%r7 is read and was never written"), ("vote.sync.ballot.b32 %r3, %p1, 15;", "a part of a warp"),
    ],
)  # fmt: skip
def test_faults_are_told_with_the_instruction(body, message):
    with pytest.raises(ptx.PtxError) as error:
        ran("setp.eq.u32 %p1, %r1, 0;" + body, np.zeros(32, np.uint32), (32, np.uint32), shared=64)
    assert message in str(error.value) and body[:-1] in str(error.value)


def test_unknown_instructions_are_refused_by_name():
    pair = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r3,%r4},[%r1]"
    for text in ("add.sat.s32 %r3, %r1, %r1", "wgmma.fence.sync.aligned", "setp.lt.and.u32 %p1, %r1, %r1, %p1", pair):
        with pytest.raises(ptx.UnknownPtx) as error:
            ran(f"{text};", np.zeros(32, np.uint32), (32, np.uint32))
        assert text.split()[0] in str(error.value)


# -------------------------------------------------------------------------------------------------------- tensor cores


def lanes_of(*parts):
    """What each lane holds, from the matrices as the ISA's figures lay them out."""
    return np.ascontiguousarray(np.stack(parts, axis=1))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_mma_of_16_bit_numbers(dtype):
    random = np.random.default_rng(4)
    a, b = random.standard_normal((16, 16)).astype(dtype), random.standard_normal((16, 8)).astype(dtype)
    c = random.standard_normal((16, 8)).astype(np.float32)
    held = []
    for row, column in ((0, 0), (8, 0), (0, 8), (8, 8)):
        held.append(lanes_of(*(a[GROUP + row, 2 * PLACE + column + h] for h in (0, 1))).view(np.uint32)[:, 0])
    for row in (0, 8):
        held.append(lanes_of(*(b[2 * PLACE + row + h, GROUP] for h in (0, 1))).view(np.uint32)[:, 0])
    held += [c[GROUP + row, 2 * PLACE + j].view(np.uint32) for row in (0, 8) for j in (0, 1)]
    name = "f16.f16" if dtype == np.float16 else "bf16.bf16"
    body = numbers(6, "u32", 4, 10) + "".join(f"ld.global.f32 %f{n}, [%rd3+{24 + 4 * n}];" for n in range(4))
    body += f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.f32 {{%f4,%f5,%f6,%f7}},"
    body += "{%r10,%r11,%r12,%r13},{%r14,%r15},{%f0,%f1,%f2,%f3};"
    body += "st.global.v4.f32 [%rd4], {%f4,%f5,%f6,%f7};"
    got = ran(body, lanes_of(*held), ((32, 4), np.float32), strides=(40, 16))
    want = c + a.astype(float) @ b.astype(float)
    places = np.stack([want[GROUP + row, 2 * PLACE + j] for row in (0, 8) for j in (0, 1)], axis=1)
    assert np.abs(got - places).max() < 2e-6


@pytest.mark.parametrize(("shape", "tall", "depths"), [("m16n8k8", (0, 8), (0, 4)), ("m8n8k4", (0,), (0,))])
def test_mma_of_doubles(shape, tall, depths):
    random, rows, depth = np.random.default_rng(5), 8 * len(tall), 4 * len(depths)
    a, b, c = (random.standard_normal(size) for size in ((rows, depth), (depth, 8), (rows, 8)))
    held = {
        "a": [a[GROUP + row, PLACE + k] for k in depths for row in tall], "b": [b[PLACE + k, GROUP] for k in depths],
        "c": [c[GROUP + row, 2 * PLACE + j] for row in tall for j in (0, 1)],
    }  # fmt: skip
    names = iter(f"%fd{n}" for n in range(20))
    x, y, z = ([next(names) for _ in part] for part in held.values())
    parts = ",".join("{" + ",".join(part) + "}" for part in (z, x, y, z))
    body = numbers(len(x + y + z), "f64", 8) + f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {parts};"
    body += "".join(f"st.global.f64 [%rd4+{8 * n}], {name};" for n, name in enumerate(z))
    got = ran(body, lanes_of(*held["a"], *held["b"], *held["c"]), ((32, len(z)), np.float64), strides=(8 * len(x + y + z), 8 * len(z)))
    want = c + a @ b
    assert np.allclose(got, np.stack([want[GROUP + row, 2 * PLACE + j] for row in tall for j in (0, 1)], axis=1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    """Rows lie 48 bytes apart in shared memory, the last matrix first."""
    x = np.random.default_rng(6).integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    body = "mul.lo.s32 %r2, %r1, 48; ld.global.v4.u32 {%r3,%r4,%r5,%r6}, [%rd3]; st.shared.v4.u32 [%r2], {%r3,%r4,%r5,%r6};"
    body += "bar.warp.sync -1;"
    body += "xor.b32 %r7, %r1, 24; mul.lo.s32 %r7, %r7, 48;"
    body += f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{%r10,%r11,%r12,%r13}},[%r7];"
    got = ran(body + "st.global.v4.u32 [%rd4], {%r10,%r11,%r12,%r13};", x, ((32, 8), np.uint16), shared=48 * 32, strides=(16, 16))
    for i in range(4):
        matrix = x.reshape(4, 8, 8)[3 - i]
        for h in (0, 1):
            want = matrix[2 * PLACE + h, GROUP] if transposed else matrix[GROUP, 2 * PLACE + h]
            assert np.array_equal(got[:, 2 * i + h], want)
