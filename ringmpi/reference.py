"""Dense attention by definition: the oracle.

Every score is computed, the mask is a boolean matrix written out rule by rule (not ``Mask.bounds``), and the dtype
may be as wide as ``np.longdouble``. Memory is queries x keys: for tests, not for use.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from .mask import Mask
from .mask import mask as named_mask
from .score import Score


def visible(mask: str | Mask, queries: int, keys: int) -> np.ndarray:
    """Which keys each query sees, as a boolean array (1 or batch, queries, keys).

    >>> visible("causal", 2, 3).astype(int).tolist()
    [[[1, 1, 0], [1, 1, 1]]]
    """
    rules = named_mask(mask)
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    q_borders, k_borders = (0, queries), (0, keys)
    if rules.documents is not None:
        q_borders, k_borders = rules.documents if isinstance(rules.documents[0], tuple) else (rules.documents,) * 2
    q_doc = np.searchsorted(q_borders, i, side="right") - 1
    k_doc = np.searchsorted(k_borders, j, side="right") - 1
    diagonal = i - np.take(q_borders, q_doc + 1) + np.take(k_borders, q_doc + 1)
    place = j - np.take(k_borders, k_doc)
    sees = q_doc == k_doc
    if rules.causal:
        sees &= (j <= diagonal) | (place < (rules.prefix or 0))
    if rules.window is not None:
        left, right = (keys + queries if side is None else min(side, keys + queries) for side in rules.window)
        sees &= (diagonal - left <= j) & (j <= diagonal + right) | (place < rules.keep_first)
    if rules.kv_range is None:
        return sees[None]
    return np.stack([sees & (first <= j) & (j < stop) for first, stop in rules.kv_range])


def scores(q: np.ndarray, k: np.ndarray, mask: str | Mask, score: Score | None) -> tuple[np.ndarray, np.ndarray]:
    """The scores (batch, heads, queries, keys), -inf where a key is not seen, and d(score)/d(q . k)."""
    score = (score or Score()).resolve(q.shape[-1])
    dtype, queries, keys = q.dtype, q.shape[1], k.shape[1]
    s = dtype.type(score.scale) * (_heads_first(q) @ _heads_first(k).swapaxes(2, 3))
    slope = np.full_like(s, score.scale)
    if score.softcap:
        t = np.tanh(s / dtype.type(score.softcap))
        s, slope = dtype.type(score.softcap) * t, slope * (1 - t * t)
    if score.alibi is not None:
        rules = named_mask(mask)
        diagonal = np.array([i + rules.shift(i, queries, keys) for i in range(queries)]).reshape(-1, 1)
        s = s - np.asarray(score.alibi, dtype)[:, None, None] * np.abs(diagonal - np.arange(keys))
    return np.where(visible(mask, queries, keys)[:, None], s, -np.inf), slope


def attention_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: str | Mask = "full",
    score: Score | None = None,
    sinks: np.ndarray | None = None,
    dtype: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """Dense attention in ``dtype``.

    Parameters
    ----------
    q, k, v
        ``(batch, tokens, heads, head_dim)``, whole sequences; k and v may have fewer heads, v its own head_dim.
    mask, score, sinks
        as in ``RingAttention``.
    dtype
        in which everything is computed: up to ``np.longdouble``.

    Returns
    -------
    out ``(batch, queries, heads, v_dim)`` and lse ``(batch, heads, queries)``, both of ``dtype``.

    >>> out, lse = attention_reference(*np.ones((3, 1, 5, 2, 4)), mask="causal")
    >>> out.shape, np.round(lse[0, 0], 2).tolist()
    ((1, 5, 2, 4), [2.0, 2.69, 3.1, 3.39, 3.61])
    """
    q, k, v = (x.astype(dtype) for x in (q, _repeat(k, q), _repeat(v, q)))
    s, _ = scores(q, k, mask, score)
    lse = _logsumexp(s if sinks is None else np.concatenate([s, _sink_column(sinks, s)], axis=-1))
    p = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    return _weighted(p, v), lse


def attention_reference_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    mask: str | Mask = "full",
    score: Score | None = None,
    sinks: np.ndarray | None = None,
    dtype: Any = np.float64,
) -> tuple[np.ndarray, ...]:
    """Gradients of dense attention in ``dtype``, given what the forward pass returned.

    Shapes as in ``attention_reference``; ``dout`` as ``out``. Returns dq, dk, dv in the shapes of q, k, v, and dsinks
    when sinks are given. Keys that no query sees, and queries (and their dout) that see no key, have gradient 0, and
    give nobody any, whatever they hold.
    """
    kv_heads = k.shape[2]
    q, k, v, dout, out, lse = (x.astype(dtype) for x in (q, _repeat(k, q), _repeat(v, q), dout, out, lse))
    s, slope = scores(q, k, mask, score)
    p = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    seen = ~np.isneginf(s)
    q, dout = (_where(seen.any(axis=(1, 3)), x) for x in (q, dout))
    k, v = (_where(seen.any(axis=(1, 2)), x) for x in (k, v))
    delta = np.einsum("bqhd,bqhd->bhq", dout, out)
    dp = _heads_first(dout) @ _heads_first(v).swapaxes(2, 3)
    ds = np.where(seen, p * (dp - delta[..., None]) * slope, 0)
    dq = _heads_first(ds @ _heads_first(k))
    dk = _fold(_heads_first(ds.swapaxes(2, 3) @ _heads_first(q)), kv_heads)
    dv = _fold(_heads_first(p.swapaxes(2, 3) @ _heads_first(dout)), kv_heads)
    if sinks is None:
        return dq, dk, dv
    p_sink = np.exp(np.asarray(sinks, dtype)[None, :, None] - np.where(np.isneginf(lse), 0, lse))
    return dq, dk, dv, -(p_sink * delta).sum(axis=(0, 2))


def _heads_first(x: np.ndarray) -> np.ndarray:
    """(batch, tokens, heads, dim) as (batch, heads, tokens, dim), and back."""
    return x.swapaxes(1, 2)


def _repeat(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _fold(x: np.ndarray, kv_heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[-1]).sum(axis=3)


def _weighted(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p . v over the keys that some query of the entry sees: what nobody sees may be NaN."""
    return _heads_first(p @ _heads_first(_where((p != 0).any(axis=(1, 2)), v)))


def _where(used: Any, x: np.ndarray) -> np.ndarray:
    """The tokens of x that are used, (batch, tokens), and 0 for the others: those may be NaN."""
    return np.where(used[:, :, None, None], x, 0)


def _sink_column(sinks: np.ndarray, s: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.asarray(sinks, s.dtype)[None, :, None, None], (*s.shape[:3], 1))


def _logsumexp(s: np.ndarray) -> np.ndarray:
    m = s.max(axis=-1, initial=-np.inf)
    total = np.exp(s - np.where(np.isneginf(m), 0, m)[..., None]).sum(axis=-1)
    return m + np.log(np.where(total > 0, total, 1))
