"""A communication hook of a user's own, no more than the protocol, and what calls it."""

import dataclasses
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum._unreduced import is_unreduced

jit = layouts.jit
N = 8


def mesh_of(n=N):
    return helpers.data_mesh(n)


def grad_fn(mesh, **options):
    return gradaccum.unreduced_value_and_grad(
        layouts.pair_loss, axis_name="dp", mesh=mesh, **options
    )


def reference(batch=None):
    batch = layouts.pair_batch() if batch is None else batch
    return layouts.in_float64(jax.grad(layouts.pair_loss), layouts.init_pair(), batch)


def as_arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


class Kept(NamedTuple):
    count: Any
    seen: Any


@dataclasses.dataclass(frozen=True)
class Halved:
    """Sends half of each sum, and counts its calls."""

    keep: bool = True

    def init(self, unreduced):
        shape = lambda x: jnp.zeros(x.sum.shape[1:], x.sum.dtype)  # noqa: E731
        seen = jax.tree.map(shape, unreduced, is_leaf=is_unreduced)
        return Kept(jnp.zeros((), jnp.int32), seen) if self.keep else ()

    def __call__(self, unreduced, state):
        half = lambda x: dataclasses.replace(x, sum=x.sum / 2)  # noqa: E731
        mean = gradaccum.mean(jax.tree.map(half, unreduced, is_leaf=is_unreduced))
        return mean, Kept(state.count + 1, mean) if self.keep else state


def halved():
    return jax.tree.map(lambda g: g / 2, reference())


def steps(tx, mesh, calls, *, state=None, bad=(), params=None):
    """Returns the updates and states of some calls; in `bad` ones the batch has an inf."""
    fun = grad_fn(mesh)
    params = layouts.place(layouts.init_pair(), mesh, {"up": P(), "down": P(), "bias": P()})
    state = tx.init(params) if state is None else state

    @jit
    def step(state, batch):
        loss, grads = fun(params, batch)
        return tx.update(grads, state, params, value=loss)

    found = []
    for i in calls:
        batch = dict(layouts.pair_batch())
        if i in bad:
            batch["y"] = np.full_like(batch["y"], np.inf)
        updates, state = step(state, batch)
        found.append((updates, state))
    assert step._cache_size() == 1
    return found
