"""Device arrays of other libraries, by DLPack or by ``__cuda_array_interface__``, wherever an array is taken; and what is refused."""
import os

import ml_dtypes
import numpy as np
import pytest
from emulator.device import pretend
from emulator.foreign import ByDlpack, ByInterface

import ringmpi

SINKS = np.array([0.5, -1], np.float32)
KINDS = pytest.mark.parametrize("kind", [ByInterface, ByDlpack])


@pytest.fixture
def device(monkeypatch):
    return pretend(monkeypatch)


def drawn(dtype=np.float32):
    """q, k, v, dout: 20 tokens, 2 heads of which k and v have 1, v's own head_dim."""
    random = np.random.default_rng(16)
    return [random.standard_normal((1, 20, *last)).astype(dtype) for last in ((2, 16), (1, 16), (1, 8), (2, 8))]


def close(device, got, want):
    assert isinstance(got, device.ndarray) and got.dtype == want.dtype
    assert np.abs(got.get().astype(float) - want.astype(float)).max() < (1e-5 if want.dtype == np.float32 else 0.03)


@KINDS
@pytest.mark.parametrize("padded", [False, True])
def test_both_passes(device, kind, padded):
    q, k, v, dout = drawn()
    with ringmpi.RingAttention(None, 20, mask="causal") as attn:
        out, lse = attn.forward(q, k, v, SINKS)
        wanted = attn.backward(dout, q, k, v, out, lse, SINKS)
        foreign = lambda *arrays: [kind(device, x, padded) for x in arrays]  # noqa: E731
        for got, want in zip(attn.forward(*foreign(q, k, v, SINKS)), (out, lse)):
            close(device, got, want)
        found = attn.backward(*foreign(dout, q, k, v, out, lse, SINKS))
    assert len(found) == 4
    for got, want in zip(found, wanted):
        close(device, got, want)


@KINDS
def test_the_one_call_functions(device, kind):
    q, k, v, dout = drawn()
    out, lse = ringmpi.ring_attention(q, k, v, mask="causal")
    for got, want in zip(ringmpi.ring_attention(*(kind(device, x) for x in (q, k, v)), mask="causal"), (out, lse)):
        close(device, got, want)
    wanted = ringmpi.ring_attention_backward(dout, q, k, v, out, lse, mask="causal")
    found = ringmpi.ring_attention_backward(*(kind(device, x) for x in (dout, q, k, v, out, lse)), mask="causal")
    for got, want in zip(found, wanted):
        close(device, got, want)


@KINDS
def test_decode(device, kind):
    q, k, v, _ = drawn()
    for options in ({}, {"mask": ringmpi.Mask(causal=True, window=(6, 0)), "positions": np.arange(20)[::-1]}):
        wanted = ringmpi.decode(q[:, :3], k, v, sinks=SINKS, **options)
        found = ringmpi.decode(*(kind(device, x) for x in (q[:, :3], k, v)), sinks=kind(device, SINKS), **options)
        for got, want in zip(found, wanted):
            close(device, got, want)


@KINDS
def test_shard(device, kind):
    x = drawn()[0]
    with ringmpi.RingAttention(None, 20, layout="striped") as attn:
        close(device, attn.shard(kind(device, x)), x)


class OnlyInterface(ByInterface):
    """It has nothing but the one attribute."""

    shape = ndim = property(lambda self: self.missing, lambda self, value: None)


def test_an_array_need_have_nothing_but_the_interface(device):
    q, k, v, _ = drawn()
    close(device, ringmpi.ring_attention(*(OnlyInterface(device, x) for x in (q, k, v)))[0], ringmpi.ring_attention(q, k, v)[0])


def test_bfloat16_by_dlpack(device):
    arrays = drawn(ml_dtypes.bfloat16)[:3]
    close(device, ringmpi.ring_attention(*(ByDlpack(device, x) for x in arrays))[0], ringmpi.ring_attention(*arrays)[0])


def test_bfloat16_has_no_name_in_the_interface(device):
    with pytest.raises(TypeError, match=r"q is \|V2; it must be one of float16, bfloat16"):
        ringmpi.ring_attention(*(ByInterface(device, x) for x in drawn(ml_dtypes.bfloat16)[:3]))


@KINDS
def test_who_does_not_wait_is_told_of(device, kind):
    """What these tests rest on."""
    q, k, v = (kind(device, x) for x in drawn()[:3])
    late = device.asarray(drawn()[0])
    late.memory = q.memory
    with pytest.raises(AssertionError, match="work has run before"):
        ringmpi.ring_attention(late, k, v)[0].get()


class Masked(ByInterface):
    @property
    def __cuda_array_interface__(self):
        return {**super().__cuda_array_interface__, "mask": self}


class Pinned(ByDlpack):
    """Host memory that a device can read."""

    kind = 3


class OfHost(ByDlpack):
    """PyTorch's and JAX's host arrays: their class has the other attribute too."""

    kind = 1

    @property
    def __cuda_array_interface__(self):
        raise AttributeError("not on a device")


@pytest.mark.parametrize(("kind", "words"), [
    (Masked, "with a mask: say by a Mask"), (Pinned, "Pinned is not an array that the auto tile computes on"),
    (OfHost, "OfHost is not an array that the auto tile computes on"),
])  # fmt: skip
def test_what_is_refused(device, kind, words):
    arrays = [kind(device, x) for x in drawn()[:3]]
    with pytest.raises(TypeError, match=words):
        ringmpi.ring_attention(*arrays)
    with pytest.raises(TypeError, match=words):
        ringmpi.decode(*arrays)


def test_arrays_of_host_and_device_do_not_mix(device):
    q, k, v, _ = drawn()
    with pytest.raises(TypeError, match="k is in host memory, q in device memory; all must be in one"):
        ringmpi.ring_attention(ByDlpack(device, q), k, v)
    with pytest.raises(TypeError, match="v is in device memory, q in host memory"):
        ringmpi.decode(q, k, ByDlpack(device, v))


def test_sinks_of_the_host_serve_a_device(device):
    q, k, v, dout = drawn()
    out, lse = ringmpi.ring_attention(q, k, v, sinks=SINKS)
    on_device = [device.asarray(x) for x in (dout, q, k, v, out, lse)]
    close(device, ringmpi.ring_attention(*on_device[1:4], sinks=SINKS)[0], out)
    found = ringmpi.ring_attention_backward(*on_device, sinks=SINKS)
    for got, want in zip(found, ringmpi.ring_attention_backward(dout, q, k, v, out, lse, sinks=SINKS)):
        close(device, got, want)


def test_an_array_of_another_device_is_refused(device):
    device.devices, device.number = 2, 1
    q, k, v = (device.asarray(x) for x in drawn()[:3])
    device.number = 0
    with pytest.raises(ValueError, match=r"an array is on device 1; this rank computes on device 0 until cupy.cuda.Device\(1\).use\(\)"):
        ringmpi.ring_attention(q, k, v)
    device.number = 1
    ringmpi.ring_attention(q, k, v)


def of_torch(x):
    import torch

    return torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2))).cuda().transpose(1, 2)


def of_jax(x):
    import jax

    return jax.device_put(x, jax.devices("gpu")[0])


def of_numba(x):
    from numba import cuda

    return cuda.to_device(x)


@pytest.mark.skipif(os.environ.get("RINGMPI_GPU") != "1", reason="the libraries themselves need a GPU")
@pytest.mark.parametrize("library", ["torch", "jax", "numba"])
def test_the_libraries_themselves(library):
    import cupy

    pytest.importorskip(library)
    put, arrays = globals()[f"of_{library}"], drawn()
    q, k, v, dout = arrays
    want = ringmpi.ring_attention(q, k, v, mask="causal")
    found = ringmpi.ring_attention(*map(put, (q, k, v)), mask="causal")
    gradients = ringmpi.ring_attention_backward(*map(put, (dout, q, k, v)), *found, mask="causal")
    decoded = ringmpi.decode(*map(put, (q[:, -1:], k, v)))
    wanted = [*want, *ringmpi.ring_attention_backward(dout, q, k, v, *want, mask="causal"), *ringmpi.decode(q[:, -1:], k, v)]
    for got, right in zip((*found, *gradients, *decoded), wanted):
        close(cupy, got, right)
