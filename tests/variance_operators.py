"""Copies, sums and other functions with rules of their own, for the tests of what varies."""

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum.tensor_parallel import copy_to, reduce_from

# f and g as they stand in textbooks.


@jax.custom_vjp
def text_f(v):
    return v


text_f.defvjp(lambda v: (v, None), lambda _, ct: (lax.psum(ct, "mp"),))


@jax.custom_vjp
def text_g(v):
    return lax.psum(v, "mp")


text_g.defvjp(lambda v: (lax.psum(v, "mp"), None), lambda _, ct: (ct,))


@jax.custom_vjp
def gather_scatter(v):
    """Gathers what enters sharded computation again: Megatron's g of sequence parallelism."""
    return lax.all_gather(v, "mp", tiled=True)


gather_scatter.defvjp(
    lambda v: (gather_scatter(v), None),
    lambda _, ct: (lax.psum_scatter(ct, "mp", tiled=True),),
)


@jax.custom_vjp
def scatter_gather(v):
    """The sum of the devices' parts, of which each takes its slice."""
    return lax.psum_scatter(v, "mp", tiled=True)


scatter_gather.defvjp(
    lambda v: (scatter_gather(v), None),
    lambda _, ct: (lax.all_gather(ct, "mp", tiled=True),),
)


@jax.custom_vjp
def swish(v):
    return v * jax.nn.sigmoid(v)


swish.defvjp(
    lambda v: (swish(v), v),
    lambda v, ct: (ct * jax.nn.sigmoid(v) * (1 + v * (1 - jax.nn.sigmoid(v))),),
)


@jax.custom_vjp
def constant(v):
    return v


constant.defvjp(lambda v: (v, None), lambda _, ct: (jnp.zeros_like(ct),))


@jax.custom_vjp
def apart(a, b):
    return 2 * a, 3 * b


apart.defvjp(lambda a, b: (apart(a, b), None), lambda _, ct: (2 * ct[0], 3 * ct[1]))


@jax.custom_vjp
def noisy(key, v, n):
    return n * v * jax.random.uniform(key, v.shape)


noisy.defvjp(
    lambda key, v, n: (noisy(key, v, n), (key, n)),
    lambda kept, ct: (None, kept[1] * ct * jax.random.uniform(kept[0], ct.shape), None),
)


@jax.custom_vjp
def fused(h, up, down):
    """A block with its f and g in one rule."""
    return lax.psum(jnp.tanh(h @ up) @ down, "mp")


def fused_forward(*args):
    y, transpose = jax.vjp(lambda h, up, down: jnp.tanh(h @ up) @ down, *args)
    return lax.psum(y, "mp"), transpose


def fused_backward(transpose, ct):
    h, up, down = transpose(ct)
    return lax.psum(h, "mp"), up, down


fused.defvjp(fused_forward, fused_backward)


def linear_f(v):
    return jax.custom_derivatives.linear_call(
        lambda _, v: v, lambda _, ct: lax.psum(ct, "mp"), (), v
    )


def double(v):
    return jax.custom_derivatives.linear_call(lambda _, v: 2 * v, lambda _, ct: 2 * ct, (), v)


@jax.custom_jvp
def straight_through(v):
    return v.astype(jnp.int32).astype(v.dtype)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), *tangents))


def f(v):
    return copy_to(v, "mp")


def g(v):
    return reduce_from(v, "mp")


def none(v):
    return v


def index():
    return lax.axis_index("mp")


def norm(h, scale):
    h = h - h.mean(-1, keepdims=True)
    return scale * h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-3)
