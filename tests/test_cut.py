"""How a pass is cut into calls: every visible pair is computed once, with what it needs packed before."""
import numpy as np
import pytest

from ringmpi.tiles import cut


def ceil(n, of):
    return -(-n // of)


class Library:
    """Takes rows in strips of 3 vectors of 4, and keys in blocks of up to 24."""

    real, dtype, block_strips, gradient_keys = "float32", np.dtype("float32"), 2, 24

    def strips(self, rows):
        return ceil(ceil(rows, 4), 3)

    def strip_row(self, rows, strip):
        return 4 * max(0, min(3 * strip, 2 * strip + ceil(rows, 4) - 2 * self.strips(rows)))

    def block_of_keys(self, panel):
        return 12 * ceil(ceil(panel, ceil(panel, 24)), 12)


LIBRARY = Library()


def bounds(random, kind, batch, rows, keys):
    """Intervals of keys: of all kinds, sorted or not, some of them empty."""
    if kind == "full":
        return None
    batch = random.choice([1, batch])
    if kind == "causal":
        lo, hi = np.zeros((batch, rows), int), np.arange(rows) + random.integers(-rows, rows, (batch, 1))
    elif kind == "window":
        at = np.arange(rows) * keys // max(rows, 1) + random.integers(-3, 3, (batch, 1))
        lo, hi = at - random.integers(0, 30), at + random.integers(0, 9)
    elif kind == "the same keys, other rows":
        lo, hi = np.zeros((batch, rows), int), np.where(np.arange(rows) // 9 % 2 == np.arange(batch)[:, None] % 2, keys, 0)
    else:
        lo, hi = random.integers(-5, keys + 5, (2, batch, rows))
    return tuple(np.clip(x, 0, keys).astype(np.int32) for x in (lo, hi))


@pytest.mark.parametrize("kind", ["full", "causal", "window", "the same keys, other rows", "any"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_every_visible_pair_is_computed_once(which, kind, monkeypatch):
    random, several = np.random.default_rng(0), set()
    for _ in range(40):
        monkeypatch.setitem(cut.FLOPS, "float32", float(10 ** random.uniform(3, 6)))
        monkeypatch.setattr(cut, "PANEL_BYTES", int(10 ** random.uniform(3, 5)))
        batch, kv_heads, group, threads = (int(random.integers(1, n)) for n in (4, 4, 6, 4))
        rows, keys = (int(n) for n in random.integers(1, 130, 2))
        shape, given = cut.Shape(batch, rows, keys, kv_heads * group, kv_heads, 4, 3), bounds(random, kind, batch, rows, keys)
        job, times = cut.Cut(which, shape, given, LIBRARY, threads), np.zeros((batch, kv_heads * group, rows, keys), int)
        panel, queries = None, {}
        for part in job.parts():
            assert all(0 <= part[i] < part[i + 1] for i in range(0, 12, 2)), part
            here = part.batch0, part.kv0, part.panel0, part.panel1
            panel = here if part.pack & cut.PACK_KEYS else panel
            assert panel == here, "its panel of keys is packed"
            these = (*here, part.group0, part.strip0, part.strip1)
            assert part.panel1 - part.panel0 <= job.wide and part.panel0 <= part.key0 and part.key1 <= part.panel1
            last = part.panel1 == max(p.panel1 for p in job.parts() if p.batch0 == part.batch0)
            assert last or (part.panel1 - part.panel0) % LIBRARY.gradient_keys == 0
            if which == "backward":
                queries = {these} if part.pack & cut.PACK_QUERIES else queries
                assert these in queries, "its rows are packed"
                assert (part.key0 - part.panel0) % LIBRARY.block_of_keys(part.panel1 - part.panel0) == 0
            heads = [kv * group + g for kv in range(part.kv0, part.kv1) for g in range(part.group0, part.group1)]
            along = slice(job.starts[part.strip0], job.starts[part.strip1])
            times[part.batch0 : part.batch1, heads, along, part.key0 : part.key1] += 1
            several |= {name for name, number in (("heads", part.group1 - part.group0), ("strips", part.strip1 - part.strip0),
                                                  ("alone", 2 * part.alone)) if number > 1}  # fmt: skip
        lo, hi = given or (np.zeros((1, rows), int), np.full((1, rows), keys))
        visible = (lo[:, None, :, None] <= np.arange(keys)) & (np.arange(keys) < hi[:, None, :, None])
        assert (times[np.broadcast_to(visible, times.shape)] == 1).all() and times.max(initial=0) <= 1
    assert several == {"heads", "strips", "alone"}


def test_calls_are_of_a_size():
    """Where nothing is small: each within a third of what is asked for, but for the last of a panel."""
    shape = cut.Shape(1, 6000, 5000, 8, 2, 64, 64)
    for which in ("forward", "backward"):
        job = cut.Cut(which, shape, None, LIBRARY, 2)
        heads = [(p.kv1 - p.kv0) * (p.group1 - p.group0) for p in job.parts()]
        pairs = [n * int(job.starts[p.strip1] - job.starts[p.strip0]) * (p.key1 - p.key0) for n, p in zip(heads, job.parts())]
        assert sum(pairs) == 6000 * 5000 * 8 and max(pairs) < 4 / 3 * job.most
        assert np.median(pairs) > 2 / 3 * job.most
