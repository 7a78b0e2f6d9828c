"""The mean of blocks in int8, by NumPy."""

import numpy as np

BLOCK = 16
SMALL = {"block_size": BLOCK, "min_size": 16}  # of a hook, for small leaves


def blocks_of(x, shares, block=BLOCK):
    """Rounds a part of a leaf: flat, in equal shares of whole blocks."""
    flat = np.pad(x.ravel(), (0, -x.size % (shares * block))).reshape(-1, block)
    scale = (np.abs(flat).max(1, keepdims=True) / np.float32(127)).astype(np.float32)
    steps = np.round(flat / np.where(scale, scale, np.float32(1)))
    return (steps * scale).ravel()[: x.size].reshape(x.shape).astype(np.float32)


def modelled(sums, weights, cuts, shares):
    """Returns the mean by NumPy: of sums `[n, *shape]` whose mean is cut into (dimension, parts).

    Each part is rounded on every device; what `shares` devices then own in common once more.
    """
    if cuts:
        (dimension, parts), *rest = cuts
        pieces = np.split(sums, parts, axis=dimension + 1)
        pieces = [modelled(x, weights, rest, shares) for x in pieces]
        return np.concatenate(pieces, axis=dimension)
    total = np.sum([blocks_of(x, shares) for x in sums], axis=0, dtype=np.float32)
    return (blocks_of(total, shares) if shares > 1 else total) / weights.sum()
