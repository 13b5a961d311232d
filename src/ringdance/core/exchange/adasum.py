"""Adasum combines gradients according to how well they agree (Maleki et al., 2020, arXiv:2006.02924).

Two vectors a, b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if orthogonal, their average if
parallel. 2^k ranks combine their vectors pairwise in k levels, separately for each tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringdance.core.exchange import Exchange, Steps

Array = np.ndarray[Any, Any]


def _dot(a: Array, b: Array) -> float:
    """Compute a·b in double precision. Avoids BLAS, whose threads would oversubscribe the cores."""
    return float(np.einsum("i,i->", a, b, dtype=np.float64))


def combine_pair(a: Array, b: Array) -> Array:
    """Combine two float32 or float64 vectors. A zero vector leaves the other unchanged."""
    dot, norm_a, norm_b = _dot(a, b), _dot(a, a), _dot(b, b)
    share_a = 1.0 - dot / (2.0 * norm_a) if norm_a > 0.0 else 1.0
    share_b = 1.0 - dot / (2.0 * norm_b) if norm_b > 0.0 else 1.0
    combined: Array = a * a.dtype.type(share_a)
    combined += b * b.dtype.type(share_b)
    return combined


def adasum(exchange: Exchange, source: Array, out: Array, prescale: float, postscale: float) -> Steps:
    """Reduce a flat array of floats over all members. The number of members must be a power of two."""
    own: Array = source.astype(np.float64 if source.dtype == np.float64 else np.float32)
    if prescale != 1.0:
        np.multiply(own, own.dtype.type(prescale), own)
    distance = 1
    while distance < exchange.size:
        partner = exchange.rank ^ distance
        other = np.empty_like(own)
        yield from exchange.swap(own.view(np.uint8), other.view(np.uint8), partner)
        # The lower member's vector comes first on both members, so that both round in the same way.
        own = combine_pair(own, other) if exchange.rank < partner else combine_pair(other, own)
        distance *= 2
    out[...] = own * own.dtype.type(postscale) if postscale != 1.0 else own
