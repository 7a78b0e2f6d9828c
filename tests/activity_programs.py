"""Losses over a manual axis that are differentiated, what they are made of, and their reports."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from gradaccum._activity import differentiated_collectives

M = 2  # devices along "mp"


def manual(fun):
    """Returns `fun` of arrays that are split over two devices, with results that are too."""
    types = 2 * (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1, M), ("dp", "mp"), axis_types=types, devices=jax.devices()[:M])
    return jax.jit(
        jax.shard_map(fun, mesh=mesh, in_specs=P("mp"), out_specs=P("mp"), check_vma=False)
    )


def report(loss, axis_names=("mp",), **options):
    """Returns the report for a loss of (w, x), or a (loss, aux), that is differentiated by w."""
    reports = []

    def local(w, x):
        jaxpr = jax.make_jaxpr(loss)(w, x)
        live = [i == 0 for i in range(len(jax.tree.leaves(jax.eval_shape(loss, w, x))))]
        reports.append(
            differentiated_collectives(jaxpr, [True, False], live, axis_names, **options)
        )
        return w

    jax.eval_shape(manual(local), jnp.ones(8), jnp.ones(8))
    return reports[0]


def primitives(loss, **options):
    return [row.primitive for row in report(loss, **options)]


def psum(v):
    return lax.psum(v, "mp")


def gather(v):
    return lax.all_gather(v, "mp", tiled=True)


@jax.custom_vjp
def reduce_from(v):
    """A psum with the transpose that is right for a replicated cotangent."""
    return psum(v)


reduce_from.defvjp(lambda v: (psum(v), None), lambda _, g: (g,))


@jax.custom_jvp
def summed(v):
    return psum(v)


summed.defjvp(lambda primals, tangents: (summed(*primals), psum(*tangents)))


@jax.custom_jvp
def straight_through(v):
    """Rounds. Its rule is the identity's, which its body doesn't show."""
    return v.astype(jnp.int32).astype(v.dtype)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), *tangents))


def scan(body, carry, xs, **options):
    return lax.scan(body, carry, xs, length=3 if xs is None else None, **options)


def repeat(body, *carry):
    """Returns the carry after three iterations of a while loop."""
    step = lambda c: (c[0] + 1, *body(*c[1:]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 3, step, (jnp.int32(0), *carry))[1:]


def switch(x, *branches):
    return lambda *operands: lax.switch(x[0].astype(jnp.int32), branches, *operands)


def sum_the_late(carry, _):
    """Carries (late, early, total): what is `early` is summed one iteration later."""
    late, early, total = carry
    return (early, early, total + psum(late).sum()), None


def use_late(carry, v):
    """Carries (early, late, total): what is summed into `early` counts two iterations later."""
    early, late, total = carry
    return (psum(early * v), early, total + late.sum()), None


def nested(fun):
    """Returns `fun` in a shard_map inside the manual region."""
    options = {"in_specs": P(), "out_specs": P(), "axis_names": set(), "check_vma": False}
    return jax.shard_map(fun, **options)


def apart(call):
    """Returns a loss with a psum of what `call` computes from data, beside the parameters."""

    def loss(w, x):
        a, b = call(lambda w, x: (jnp.sin(w), jnp.cos(x)))(w, x)
        return a.sum() + psum(b).sum()

    return loss


@jax.custom_batching.custom_vmap
def batched(v):
    """A psum in a call that the walk doesn't know, with its operands one to one."""
    return psum(v)


batched.def_vmap(lambda size, on, v: (psum(v), on[0]))


def solved(w, b):
    """A psum in a call that the walk doesn't know, with other operands than the call's."""
    return lax.custom_linear_solve(lambda v: psum(w * v), b, lambda _, b: b / 2)


def through_ref(write, read):
    ref = jax.new_ref(jnp.zeros(4))
    ref[...] = write
    return read(ref[...])


def ref_in_scan(first, second, read):
    """Reads a ref in each iteration before it is written there."""
    ref = jax.new_ref(first)

    def body(total, _):
        total = total + read(ref[...]).sum()
        ref[...] = second
        return total, None

    return scan(body, 0.0, None)[0]


def sum_into_ref(w, result):
    ref, other = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(4))

    def body(_, v):
        ref[...] = psum(w * v)
        other[...] = w * v
        return (), None

    scan(body, (), jnp.ones(3))
    return result(ref, other)
