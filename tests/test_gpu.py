"""Whether MPI takes device memory: the order of the evidence."""
import pytest

from ringmpi import gpu

TABLE = [
    ({}, None, False), ({}, False, False), ({}, True, True),
    ({"RINGMPI_GPU_AWARE": "1"}, False, True), ({"RINGMPI_GPU_AWARE": "0"}, True, False),
    ({"RINGMPI_GPU_AWARE": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"}, None, False),
    ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, None, True), ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, None, False),
    ({"MV2_USE_CUDA": "1"}, None, True), ({"MV2_USE_CUDA": "1"}, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "says", "aware"), TABLE)
def test_the_order_of_evidence(environ, says, aware):
    found = gpu.decide(environ, says)
    assert found.aware is aware and found.why.startswith("for ")


def test_an_override_that_means_nothing_is_an_error():
    with pytest.raises(ValueError, match="RINGMPI_GPU_AWARE=yes: it is 0 or 1"):
        gpu.decide({"RINGMPI_GPU_AWARE": "yes"}, None)


def test_a_library_that_cannot_say_says_nothing():
    assert gpu.library_says("/nowhere/libmpi.so") is None
    assert gpu.library_says("libc.so.6") is None
