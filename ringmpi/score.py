"""How a query and a key make a score: scale, softcap, ALiBi."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Score:
    """score(i, j) = cap(scale * q_i . k_j) - slope * |diagonal_i - j|.

    Parameters
    ----------
    scale
        1 / sqrt(head_dim) unless given.
    softcap
        cap(s) = softcap * tanh(s / softcap), as in Gemma 2 (arXiv:2408.00118); none unless given.
    alibi
        A slope for every query head (arXiv:2108.12409); the distance is taken from the diagonal of the query's
        document. ``slopes`` gives the paper's.

    Raises
    ------
    ValueError
        for a scale that is not finite, or a softcap that is not positive.

    >>> Score(softcap=30).resolve(64)
    Score(scale=0.125, softcap=30.0, alibi=None)
    """

    scale: float | None = None
    softcap: float | None = None
    alibi: Any = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if self.scale is not None:
            put("scale", _finite("scale", self.scale))
        if self.softcap is not None:
            put("softcap", _finite("softcap", self.softcap))
            if self.softcap <= 0:  # type: ignore[operator]
                raise ValueError(f"softcap={self.softcap}: a softcap is positive, or None for none")
        if self.alibi is not None:
            put("alibi", tuple(_finite("alibi", slope) for slope in np.asarray(self.alibi, float).ravel()))

    def resolve(self, head_dim: int) -> Score:
        """The same with its scale as a number."""
        return self if self.scale is not None else replace(self, scale=1 / math.sqrt(max(head_dim, 1)))


def slopes(heads: int) -> Sequence[float]:
    """The ALiBi slopes of the paper for a number of heads: powers of 2^(-8/heads) (and between, off powers of two).

    >>> slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    of = lambda n: [2.0 ** (-8 * (i + 1) / n) for i in range(n)]  # noqa: E731
    return of(heads) if power == heads else of(power) + of(2 * power)[0 :: 2][: heads - power]


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} is not a finite number")
    return float(value)
