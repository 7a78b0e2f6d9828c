"""What is found in a loss over a manual axis, and whether its untyped gradients are right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gradaccum._copies import misused_copies
from gradaccum._variance import varying_outputs

M = 2  # devices along "mp"
B, D, H = 4, 6, 8  # rows, features, hidden features

PARAMS = {
    "up": P(None, "mp"),  # [D, H]
    "down": P("mp"),  # [H, D]
    "table": P("mp"),  # [H, D]: a row for each word
    "stack": P(None, None, "mp"),  # [3, D, H]
    "back": P(None, "mp"),  # [3, H, D]
    "local": P(None, "mp"),  # [1, H]
    "scale": P(),  # [1, D]
    "bias": P(),  # [1, D]
    "square": P(),  # [D, D]
}
SHAPES = {
    "up": (D, H),
    "down": (H, D),
    "table": (H, D),
    "stack": (3, D, H),
    "back": (3, H, D),
    "local": (1, H),
    "scale": (1, D),
    "bias": (1, D),
    "square": (D, D),
}
NONE = ([], [], [])  # no copy missing, too many, or of a value that varies
VARYING = {k: "mp" in spec for k, spec in PARAMS.items()}


def params():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        k: 0.5 * jax.random.normal(key, s) for key, (k, s) in zip(keys, SHAPES.items(), strict=True)
    }


def batch():
    return jax.random.normal(jax.random.key(1), (B, D))


def manual(fun, **options):
    types = 2 * (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1, M), ("dp", "mp"), axis_types=types, devices=jax.devices()[:M])
    return jax.jit(jax.shard_map(fun, mesh=mesh, **options))


def verdict(loss, x_spec):
    """Returns (whether the loss varies, the misused copies) of a loss of (params, batch)."""
    found = []

    def local(p, x):
        def flat(*leaves):
            return loss(*jax.tree.unflatten(tree, leaves))

        leaves, tree = jax.tree.flatten((p, x))
        jaxpr = jax.make_jaxpr(flat)(*leaves)
        active = [True] * len(p) + [False]
        varying = [VARYING[k] for k in sorted(p)] + ["mp" in x_spec]
        count = len(jax.tree.leaves(jax.eval_shape(loss, p, x)))
        live = [i == 0 for i in range(count)]
        found.append(
            (
                varying_outputs(jaxpr, varying, "mp")[0],
                misused_copies(jaxpr, active, live, varying, "mp"),
            )
        )
        return jnp.zeros(())

    specs = {"in_specs": (PARAMS, x_spec), "out_specs": P(), "check_vma": False}
    jax.eval_shape(manual(local, **specs), params(), batch())
    return found[0]


def gradients(loss, x_spec, check_vma):
    """Returns the gradients that each device has, those of replicated parameters side by side."""

    def scalar(p, x):
        value = jax.tree.leaves(loss(p, x))[0]
        return value

    def local(p, x):
        grads = jax.grad(scalar)(p, x)
        # Each device's own, so that it shows where they differ.
        return {k: v if VARYING[k] else v[None] for k, v in grads.items()}

    out = {k: spec if VARYING[k] else P(None if check_vma else "mp") for k, spec in PARAMS.items()}
    specs = {"in_specs": (PARAMS, x_spec), "out_specs": out, "check_vma": check_vma}
    return manual(local, **specs)(params(), batch())


def is_right(loss, typed, x_spec):
    """Whether untyped gradients are those that JAX's types give, on all devices."""
    got, want = gradients(loss, x_spec, False), gradients(typed, x_spec, True)
    return all(np.allclose(got[k], want[k], rtol=2e-3, atol=1e-5) for k in got)


def is_from_here(source):
    """Whether a place is in one of these modules or in a test of them."""
    return re.search(r"variance_\w+\.py:", source) is not None


def name_of(request):
    return request.node.callspec.id


def cases(right, split):
    return [
        pytest.param(v, spec, id=k)
        for programs, spec in ((right, P()), (split, P("mp")))
        for k, v in programs.items()
    ]
