"""Random programs of sums, copies, gathers and scatters: what is reported is what is wrong."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gradaccum._copies import misused_copies
from gradaccum._variance import varying_outputs
from gradaccum.tensor_parallel import (
    all_gather_to,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)

M, N = 2, 4  # devices along "mp", features
STEPS = 8
OPERATIONS = {  # and how often they are drawn
    "sin": 2,
    "add": 3,
    "mul": 3,
    "copy": 4,
    "reduce": 3,
    "gather": 1,
    "scatter": 1,
    "gather_to": 1,
    "scatter_from": 1,
}
ARITHMETIC = {
    "sin": lambda a, b: jnp.sin(a) + 0.5 * a,
    "add": lambda a, b: a + 0.7 * b,
    "mul": lambda a, b: a * b + 0.3 * a,
}


def join(parts):
    """Makes one [N] of [M, N], not evenly."""
    return 0.6 * parts.sum(0) + 0.3 * parts[0]


def repeat(part):
    """Makes [N] of a part [N / M]."""
    return jnp.tile(part, M)


# What each device does with its [N].
SHARDED = {
    "copy": lambda v: copy_to(v, "mp"),
    "reduce": lambda v: reduce_from(v, "mp"),
    "gather": lambda v: join(gather_from(v, "mp").reshape(M, N)),
    "scatter": lambda v: repeat(scatter_to(v, "mp")),
    "gather_to": lambda v: join(all_gather_to(v, "mp").reshape(M, N)),
    "scatter_from": lambda v: repeat(reduce_scatter_from(v, "mp")),
}


def on_all(v):
    return jnp.broadcast_to(v, (M, N))


def own(rows):
    return jnp.stack([repeat(part[i]) for i, part in enumerate(rows.reshape(M, M, N // M))])


# What that is of the [M, N] of all devices, by the definition of the values.
WHOLE = {
    "copy": lambda v: v,
    "reduce": lambda v: on_all(v.sum(0)),
    "gather": lambda v: on_all(join(v)),
    "scatter": own,
    "gather_to": lambda v: on_all(join(v)),
    "scatter_from": lambda v: own(on_all(v.sum(0))),
}


def draw(seed):
    """Returns steps (operation, operand, operand), operands among the values before it."""
    rng = np.random.default_rng(seed)
    odds = np.array(list(OPERATIONS.values())) / sum(OPERATIONS.values())
    steps = []
    for count in range(3, 3 + STEPS):
        first = rng.integers(0 if rng.random() < 0.4 else max(0, count - 4), count)
        steps.append((str(rng.choice(list(OPERATIONS), p=odds)), first, rng.integers(count)))
    return steps


def result(steps, operators, *values):
    """Returns the last value of a program of a parameter, a sharded one and data."""
    values = list(values)
    for name, i, j in steps:
        if name in ARITHMETIC:
            values.append(ARITHMETIC[name](values[i], values[j]))
        else:
            values.append(operators[name](values[i]))
    return values[-1]


def values(seed):
    rng = np.random.default_rng(seed + 1_000_000)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((N,), (M, N), (N,))]


def untyped(steps, *arguments):
    """Returns what is reported, whether the last value varies, and all devices' gradients."""
    seen = []

    def local(p, w, x):
        def loss(p, w):
            total = jnp.sum(result(steps, SHARDED, p, w, x))
            return reduce_from(total, "mp") if seen and seen[0] else total

        seen.append(varying_outputs(jax.make_jaxpr(loss)(p, w[0]), [False, True], "mp")[0])
        jaxpr = jax.make_jaxpr(loss)(p, w[0])
        seen.append(misused_copies(jaxpr, [True, True], [True], [False, True], "mp"))
        return [g[None] for g in jax.grad(loss, argnums=(0, 1))(p, w[0])]

    mesh = jax.make_mesh((M,), ("mp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:M])
    specs = {"in_specs": (P(), P("mp"), P()), "out_specs": [P("mp"), P("mp")]}
    fun = jax.shard_map(local, mesh=mesh, **specs, check_vma=False)
    grads = jax.jit(fun, compiler_options=helpers.COMPILE_FAST)(*arguments)
    varies, misused = seen
    return misused, varies, grads


def is_right(grads, varies, steps, p, w, x):
    def loss(p, w):
        rows = result(steps, WHOLE, on_all(p), w, on_all(x)).sum(-1)
        return rows.sum() if varies else rows[0]

    of_p, of_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(p, w)
    size = 1e-3 + max(np.abs(of_p).max(), np.abs(of_w).max())
    wanted = zip(grads, (on_all(of_p), of_w), strict=True)
    return all(np.allclose(g, want, rtol=1e-3, atol=1e-4 * size) for g, want in wanted)


@pytest.mark.parametrize("start", range(0, 30, 30))
def test_what_is_reported_is_what_is_wrong(start):
    right = wrong = 0
    for seed in range(start, start + 30):
        steps, arguments = draw(seed), values(seed)
        misused, varies, grads = untyped(steps, *arguments)
        if not is_right(grads, varies, steps, *arguments):
            assert any(misused), (seed, steps)
            wrong += 1
        elif any(misused):  # two mistakes may undo each other: m times too much of 1/m
            assert sum(map(bool, misused)) == 2, (seed, steps, misused)
        else:
            right += 1
    assert min(right, wrong) > 5
