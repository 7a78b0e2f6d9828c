"""What the tests of `powersgd` share: it in NumPy's float64, by QR decompositions, and a mesh."""

import functools

import helpers
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradaccum import Unreduced

N = 8
WEIGHTS = np.float32([3, 1, 0, 4, 1, 5, 9, 2])
WITHIN = 2e-5  # of the largest entry, float32


def shared(rows, weights):
    return jax.tree.map(lambda x: Unreduced(x, weights, axis_name="dp"), rows)


def put(tree):
    return jax.device_put(tree, NamedSharding(helpers.data_mesh(N), P("dp")))


def by_weight(rows, weights):
    """Returns weighted sums, as gradients come, of means."""
    return (rows * weights.reshape(-1, *[1] * (rows.ndim - 1))).astype(np.float32)


@functools.cache
def compiled(hook):
    step = lambda rows, weights, state: hook(shared(rows, weights), state)  # noqa: E731
    return jax.jit(step, compiler_options=helpers.COMPILE_FAST)


def start(hook, rows):
    with jax.set_mesh(helpers.data_mesh(N)):
        return hook.init(shared(put(rows), put(np.ones(N, np.float32))))


def run(hook, rows, weights, state):
    with jax.set_mesh(helpers.data_mesh(N)):
        return compiled(hook)(put(rows), put(np.float32(weights)), state)


def exact(rows, weights):
    return np.asarray(rows, np.float64).sum(0) / np.sum(weights, dtype=np.float64)


def low_rank_rows(seed, rank, n=20, m=16):
    """Returns rows whose columns and rows span spaces of this dimension, other ones for a seed."""
    u, v = helpers.normal(seed, n, rank), helpers.normal(seed + 1, m, rank)
    return np.einsum("nr,dr,mr->dnm", u, helpers.normal(seed + 2, N, rank), v)


def off(got, want):
    return np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


SHAPES = {
    "bias": (20,),
    "conv": (2, 3, 12, 14),
    "matrix": (24, 20),
    "scale": (),
    "small": (4, 20),  # 80 < 2 * 2 * (4 + 20)
    "stack": (3, 12, 16),
    "wide": (9, 40),
}


def few_rows():
    some = ("bias", "matrix")
    return {k: by_weight(helpers.normal(i, N, *SHAPES[k]), WEIGHTS) for i, k in enumerate(some)}


COMPRESSED = ("conv", "matrix", "stack", "wide")


# --- In NumPy -------------------------------------------------------------------------------------


def step(rows, weights, residuals, q):
    """Returns the mean of a batch of matrices, the new residuals, and the new right factors.

    Args:
      rows: `[d, ..., n, m]`, each device's weighted sum.
      weights: `[d]`.
      residuals: as rows, in units of the mean.
      q: `[..., m, r]`.
    """
    rows, weights, residuals, q = (np.asarray(x, np.float64) for x in (rows, weights, residuals, q))
    mean, after, factors = np.zeros(rows.shape[1:]), residuals.copy(), np.zeros(q.shape)
    for i in np.ndindex(rows.shape[1:-2]):
        own = [
            None if w == 0 else row[i] / w + e[i]
            for row, w, e in zip(rows, weights, residuals, strict=True)
        ]
        total = sum(w * m for w, m in zip(weights, own, strict=True) if w)
        basis, triangle = np.linalg.qr(total @ q[i])
        basis = basis * np.sign(np.diag(triangle))  # as Gram and Schmidt have it
        factor = total.T @ basis / weights.sum()
        mean[i] = basis @ factor.T
        factors[i] = factor / np.linalg.norm(factor, axis=0)
        for d, m in enumerate(own):
            if m is not None:
                after[(d, *i)] = m - mean[i]
    return mean, after, factors


def best(matrix, rank):
    """Returns the best approximation of a rank."""
    u, s, v = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    return (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
