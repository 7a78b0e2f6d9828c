"""`global_norm` and `clip_by_global_norm` of small trees of shards, and optax's clip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from layouts import jit, mesh_of

from gradaccum.tensor_parallel import clip_by_global_norm, global_norm

SPECS = {"up": P(None, "mp"), "down": P("mp"), "norm": None, "scale": P()}
SHAPES = {"up": (3, 8), "down": (8, 3), "norm": (3,), "scale": ()}


def tree_of(dtype="float32", factor=1.0):
    rng = np.random.default_rng(0)

    def leaf(shape):
        x = rng.normal(size=shape) * factor
        x = x + 1j * rng.normal(size=shape) * factor if dtype == "complex64" else x
        return jnp.asarray(x).astype(dtype)

    return {name: leaf(shape) for name, shape in SHAPES.items()}


def run(fun, tree, specs=None, out_specs=None, typed=False, compiled=True, **sizes):
    """Runs fun of this device's shards; out_specs are the tree's own where not given."""
    specs = SPECS if specs is None else specs
    placed = jax.tree.map(lambda s: s or P(), specs, is_leaf=lambda s: s is None)
    options = {
        "mesh": mesh_of(sizes or {"mp": 4}),
        "in_specs": (placed,),
        "out_specs": placed if out_specs is None else out_specs,
        "check_vma": typed,
    }
    fun = jax.shard_map(fun, **options)
    return jit(fun)(tree) if compiled else fun(tree)


def norm_of(tree, specs=None, axis_name="mp", **options):
    specs = SPECS if specs is None else specs
    fun = functools.partial(global_norm, specs=specs, axis_name=axis_name)
    return run(fun, tree, specs, P(), **options)


def clip_of(tree, max_norm, specs=None, axis_name="mp", **options):
    specs = SPECS if specs is None else specs
    clip = clip_by_global_norm(max_norm, specs, axis_name)
    return run(lambda g: clip.update(g, clip.init(g))[0], tree, specs, **options)


def optax_clip(tree, max_norm):
    clip = optax.clip_by_global_norm(max_norm)
    return clip.update(tree, clip.init(tree))[0]
