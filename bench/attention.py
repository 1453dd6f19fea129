"""Whole passes on the ranks this is started with: time, rate, bytes, exposed wait, memory, and the error of the very run.

    mpiexec -n 4 python bench/attention.py --tokens 400000 --heads 1 --head-dim 64 --causal --layout zigzag

Every rank makes its own rows, so memory is what the library needs. The rate counts two operations for every product of a visible
pair of query and key. The error is against float64 on four rows of every rank: each rank sums its own keys for all of them.
"""
import statistics

import driver
import numpy as np

import ringmpi
from ringmpi import comm, io
from ringmpi.commands.meter import Meter, peak_memory
from ringmpi.layout import LAYOUTS
from ringmpi.schedule import SCHEDULES

ROWS = 4


def parse():
    parser = driver.arguments(__doc__.split("\n")[0])
    for name, number in (("tokens", 16384), ("batch", 1), ("heads", 4), ("kv-heads", 0), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=number, help="0: as heads" if name == "kv-heads" else " ")
    parser.add_argument("--dtype", default="float32", help="of q, k and v")
    parser.add_argument("--causal", action="store_true", help="under a causal mask")
    parser.add_argument("--window", type=int, default=-1, help="keys seen before the diagonal; -1: all")
    parser.add_argument("--backward", action="store_true", help="the gradients too")
    parser.add_argument("--layout", default="zigzag", choices=LAYOUTS, help=" ")
    parser.add_argument("--schedule", default="ring", choices=SCHEDULES, help=" ")
    parser.add_argument("--tile", default="auto", help=" ")
    return parser.parse_args()


def rows(attn, args, heads, seed):
    """This rank's rows of an array."""
    random = np.random.default_rng([seed, attn.ring.rank])
    made = random.standard_normal((args.batch, len(attn.positions), heads, args.head_dim), np.float32)
    return made.astype(io.named(args.dtype), copy=False)


class Dense:
    """Attention in float64 of a few rows of every rank, to the keys of all: each rank sums its own keys. Making one is collective."""

    def __init__(self, attn, q, k, v):
        self.attn, self.k, self.v, self.group = attn, k.astype(float), v.astype(float), q.shape[2] // k.shape[2]
        self.mine = np.linspace(0, max(q.shape[1] - 1, 0), min(ROWS, q.shape[1])).astype(int)
        positions = np.concatenate(attn.ring.gather(attn.positions[self.mine]))
        self.scale = attn.work.score.resolve(q.shape[3]).scale
        s = self.scale * np.einsum("bqhgd,bkhd->bhgqk", self.sample(q), self.k)
        (lo, hi), *_ = attn.work.mask.bounds(positions, *attn.work.lengths)
        s = np.where((lo[0][:, None] <= attn.kv_positions) & (attn.kv_positions < hi[0][:, None]), s, -np.inf)
        lse = np.logaddexp.reduce(attn.ring.gather(np.logaddexp.reduce(s, axis=-1)))
        self.p = np.exp(s - lse[..., None])
        self.out = self.total("bhgqk,bkhd->bqhgd", self.p, self.v)

    def sample(self, x):
        """The rows of all ranks (batch, rows, kv_heads, group, dim)."""
        rows = np.concatenate(self.attn.ring.gather(x[:, self.mine].astype(float)), axis=1)
        return rows.reshape(*rows.shape[:2], -1, self.group, rows.shape[3])

    def total(self, product, *arrays):
        """A product over this rank's keys, summed over the ranks."""
        return sum(self.attn.ring.gather(np.einsum(product, *arrays)))

    def error(self, found):
        """The largest difference of out, or with its gradient of dq. Collective."""
        right = self.out if "dq" not in found else self.dq(found["dout"])
        return float(np.abs(self.sample(found.get("dq", found["out"])) - right).max())

    def dq(self, dout):
        d = self.sample(dout)
        delta = np.moveaxis((d * self.out).sum(axis=-1), 1, -1)
        ds = self.p * (np.einsum("bqhgd,bkhd->bhgqk", d, self.v) - delta[..., None]) * self.scale
        return self.total("bhgqk,bkhd->bqhgd", ds, self.k)


def passes(attn, args):
    """The passes by name, each a callable; the arrays they are of, and what they find."""
    q, k, v = (rows(attn, args, heads, seed) for seed, heads in enumerate((args.heads, args.kv_heads, args.kv_heads)))
    given, found = {"q": q, "k": k, "v": v}, {"dout": rows(attn, args, args.heads, 3)} if args.backward else {}

    def forward():
        found["out"], found["lse"] = attn.forward(q, k, v)

    def backward():
        found["dq"], found["dk"], found["dv"] = attn.backward(found["dout"], q, k, v, found["out"], found["lse"])

    return {"forward": forward, **({"backward": backward} if args.backward else {})}, given, found


def measure(attn, args, name, call, given):
    """A row of the table, less its error. Collective."""
    meter = Meter(attn, bar=False)

    def metered():
        with meter.over(name, **given):
            call()

    mine = {"time": driver.median(metered, args), "memory": peak_memory()}
    ranks = attn.ring.gather({**meter.passes[name], **mine})
    seconds = max(rank["time"] for rank in ranks)
    return {
        "pass": name,
        "ranks": len(ranks),
        "tokens": args.tokens,
        "heads": f"{args.heads}/{args.kv_heads}x{args.head_dim}",
        "dtype": args.dtype,
        "time_s": seconds,
        "GFLOP/s": sum(rank["flop"] for rank in ranks) / seconds / 1e9,
        "sent_MB": sum(rank["sent"] for rank in ranks) / 1e6,
        "wait_s": statistics.mean(rank["wait"] for rank in ranks),
        "peak_MiB": max(rank["memory"] for rank in ranks) / 2**20,
    }


def main():
    args = parse()
    args.kv_heads = args.kv_heads or args.heads
    mask = ringmpi.Mask(causal=args.causal, window=None if args.window < 0 else (args.window, 0 if args.causal else args.window))
    with ringmpi.Ring(comm.world()) as ring:
        attn = ringmpi.RingAttention(ring, args.tokens, mask=mask, layout=args.layout, schedule=args.schedule, tile=args.tile)
        work, given, found = passes(attn, args)
        measured = [measure(attn, args, name, call, given) for name, call in work.items()]
        dense, table = Dense(attn, **given), driver.Table(args.json)
        errors = [dense.error(found if row["pass"] == "backward" else {"out": found["out"]}) for row in measured]
        for row, error in zip(measured, errors):
            if ring.rank == 0:
                table.row(**row, error=error)


if __name__ == "__main__":
    main()
