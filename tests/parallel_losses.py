"""What the models of parallel_models.py share: sizes, losses of targets, random arrays."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np

V, D, H = 12, 8, 16


def count_targets(batch):
    return ((batch["targets"] >= 0) & (batch["targets"] < V)).sum().astype(jnp.float32)


def whole_losses(logits, targets):
    counts = (targets >= 0) & (targets < V)
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.where(counts, targets, 0)[..., None], axis=-1
    )
    return jnp.where(counts, -picked[..., 0], 0)


def mean_of_targets(losses, batch):
    """0/0 where none counts, as such losses are."""
    return losses.sum() / count_targets(batch).astype(losses.dtype)


def random_arrays(shapes, seed):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    arrays = [helpers.normal(seed + i, *s) / np.sqrt(s[0] if len(s) > 1 else 4)
              for i, s in enumerate(leaves)]  # fmt: skip
    return jax.tree.unflatten(tree, arrays)


def arrays_like(shapes, seed):
    """Returns random arrays of a tree of abstract ones."""
    return random_arrays(jax.tree.map(lambda x: x.shape, shapes), seed)
