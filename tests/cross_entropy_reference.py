"""`cross_entropy` of a sharded vocabulary, and losses and gradients that it must equal."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from layouts import jit
from model_axis import mesh_of

from gradaccum.tensor_parallel import cross_entropy

SHAPE, V = (2, 3), 12  # of targets; columns, which 1, 2 and 4 divide
PADDED = 9  # a vocabulary in V columns: of four devices, the last has no real column
COLUMNS = P(None, None, "mp")
LOGITS = 3 * helpers.normal(0, *SHAPE, V)
TARGETS = np.array([[0, 5, 8], [11, 3, 7]])
WEIGHTS = helpers.normal(1, *SHAPE)  # each loss counts differently


def sharded(fun, in_specs, out_specs, m=4, typed=False):
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jax.shard_map(fun, mesh=mesh_of(m), **options)


def weighed(logits, loss_fn):
    losses = loss_fn(logits)
    return jnp.sum(losses * WEIGHTS.astype(losses.dtype)), losses


def losses_and_gradient(logits, targets, m=4, typed=False, **options):
    """Returns the losses, and the gradient of their weighted sum, from a sharded vocabulary."""

    def fun(logits, targets):
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name="mp", **options)
        grads, losses = jax.grad(weighed, has_aux=True)(logits, loss_fn)
        return losses, grads

    return jit(sharded(fun, (COLUMNS, P()), (P(), COLUMNS), m, typed))(logits, targets)


def losses_of(logits, counts, ids, label_smoothing=0.0, z_loss=0.0):
    """Returns the losses as optax has them, of what counts; the z-loss by hand."""
    logits = jnp.where(counts[..., None], logits, 0)
    labels = jax.nn.one_hot(ids, logits.shape[-1], dtype=logits.dtype)
    losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, label_smoothing))
    losses += z_loss * jax.scipy.special.logsumexp(logits, axis=-1) ** 2
    return jnp.where(counts, losses, 0)


def counted(targets, columns, where=None):
    """Returns which targets count, and the ids of those."""
    counts = np.broadcast_to(True if where is None else where, targets.shape)
    counts = counts & (targets >= 0) & (targets < columns)
    return counts, np.where(counts, targets, 0).astype(np.int32)


@functools.partial(jit, static_argnums=0)  # few programs for many references
def _reference(columns, logits, weights, *rest):
    def loss(logits):
        losses = losses_of(logits[..., :columns], *rest)
        return jnp.sum(losses * weights), losses

    grads, losses = jax.grad(loss, has_aux=True)(logits)
    return losses, grads


def reference(
    logits, targets, where=None, label_smoothing=0.0, z_loss=0.0, vocab_size=None, weights=WEIGHTS
):
    """Returns losses and gradient of the whole vocabulary, in float64 from these very values."""
    logits, columns = np.asarray(logits, np.float64), vocab_size or logits.shape[-1]
    rest = *counted(np.asarray(targets), columns, where), label_smoothing, z_loss
    with jax.enable_x64(True):
        return jax.device_get(_reference(columns, logits, np.asarray(weights, np.float64), *rest))
