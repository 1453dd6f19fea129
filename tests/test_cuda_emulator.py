"""The emulator finds what it is there to find: each kind of fault, planted in a kernel of a few lines, and none where there is none."""
import numpy as np
import pytest
from emulator import EmulatorError, Module

# One kernel a fault; `sound` has none. All run 64 threads on an array of 64 floats.
SOURCE = r"""
#include <emulated.h>
void sound(float* x, int n) {
  DYNAMIC_SHARED(shared);
  float* s = (float*)shared;
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float y = s[(threadIdx.x + 33) % n];
  __syncthreads();
  s[threadIdx.x] = y + __shfl_xor_sync(~0u, y, 1) - __shfl_xor_sync(~0u, y, 1);
  __syncwarp();
  x[threadIdx.x] = s[threadIdx.x ^ 1];
}
void late(float* x, const float* from) {
  DYNAMIC_SHARED(shared);
  float* s = (float*)shared;
  if (threadIdx.x < 16) copy_16_async(s + 4 * threadIdx.x, from + 4 * threadIdx.x, threadIdx.x % 2);
  copies_commit();
  copies_wait();
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}
void no_barrier(float* x, int n) {
  DYNAMIC_SHARED(shared);
  float* s = (float*)shared;
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[(threadIdx.x + 1) % n];
}
void no_warp_barrier(float* x, int n) {
  DYNAMIC_SHARED(shared);
  float* s = (float*)shared;
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[threadIdx.x ^ 1];
}
void unwritten(float* x, int n) {
  DYNAMIC_SHARED(shared);
  x[threadIdx.x] = ((float*)shared)[threadIdx.x];
}
void past_the_end(float* x, int n) { x[threadIdx.x + 1] = 0; }
void misaligned(float* x, int n) {
  DYNAMIC_SHARED(shared);
  *(float*)(shared + 2 + 4 * threadIdx.x) = x[threadIdx.x];
}
void constant(float* x, const float* y) { const_cast<float*>(y)[threadIdx.x] = x[threadIdx.x]; }
void two_blocks(float* x, int n) { x[threadIdx.x] = blockIdx.x; }
void divergent(float* x, int n) {
  if (threadIdx.x < 32) __syncthreads();  // another line is another barrier
  else x[threadIdx.x] = 1, __syncthreads();
}
void half_a_warp(float* x, int n) {
  if (threadIdx.x % 32 < 16) x[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
}
void never_waited(float* x, const float* from) {
  DYNAMIC_SHARED(shared);
  copy_16_async(shared + 16 * threadIdx.x, from, true);
  copies_commit();
}
void read_in_flight(float* x, const float* from) {
  DYNAMIC_SHARED(shared);
  copy_16_async(shared + 16 * threadIdx.x, from, true);
  copies_commit();
  x[threadIdx.x] = *(float*)(shared + 16 * threadIdx.x);
  copies_wait();
}
void overflow(float* x, int n) { x[threadIdx.x] = (float)(n * 100000000); }
"""
FAULTS = {
    "no_barrier": "race on byte", "no_warp_barrier": "race on byte", "unwritten": "never written", "past_the_end": "past the end",
    "misaligned": "misaligned write of 4 bytes", "constant": "which is const", "two_blocks": "race between blocks",
    "divergent": "divergent barrier", "half_a_warp": "deadlock", "never_waited": "in flight", "read_in_flight": "while a cp.async",
    "overflow": "signed overflow",
}  # fmt: skip
ALWAYS = {"divergent", "half_a_warp", "never_waited"}


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "faults.cu"
    path.write_text(SOURCE)
    return {checked: Module(path, ["sound", "late", *FAULTS], checked=checked) for checked in (False, True)}


def run(module, name, seed=0):
    kernel, x = module.get_function(name), np.arange(64, dtype=np.float32)
    second = x.copy() if kernel.signature[1][0] == "in" else np.int32(64)
    kernel((2 if name == "two_blocks" else 1,), (64,), (x, second), 2048, seed=seed)
    return x


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_sound_runs(modules, checked, seed):
    want = np.array([((i ^ 1) + 33) % 64 for i in range(64)], np.float32)
    assert np.array_equal(run(modules[checked], "sound", seed), want)
    late = np.where(np.arange(64) // 4 % 2, np.arange(64), 0)
    assert np.array_equal(run(modules[checked], "late", seed), late)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_placed(modules, name):
    with pytest.raises(EmulatorError, match=FAULTS[name]) as found:
        run(modules[True], name)
    if name not in ("half_a_warp", "never_waited"):
        assert "faults.cu:" in str(found.value)
    if name in ALWAYS:
        with pytest.raises(EmulatorError):
            run(modules[False], name)


def test_a_launch_is_held_against_the_signature(modules):
    kernel, x = modules[False].get_function("sound"), np.zeros(64, np.float32)
    wrongs = {"integer of 4 bytes": (x, 64), "floating": (x, np.float32(64)), "takes 2": (x,), "pointer": (3.0, np.int32(1))}
    for words, wrong in wrongs.items():
        with pytest.raises(EmulatorError, match=words):
            kernel((1,), (64,), wrong, 256)
    for grid, block, shared in [((0,), (64,), 0), ((1,), (33,), 0), ((1,), (64,), 49 << 10), ((1 << 31,), (64,), 0)]:
        with pytest.raises(EmulatorError):
            kernel(grid, block, (x, np.int32(64)), shared)
