"""Accumulation inside the backward pass: programs, and their gradients by value and of one batch.

jax 0.10 adds cotangents into refs wrongly, and silently, where one array reaches a call twice. So
every way for a parameter to be used that could mislead the library's choice is a case here.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import gradaccum

L, D, B, K = 3, 4, 8, 4


def make_params():
    """Returns w, v: stacks of layers; vec: a stack of vectors; deep: a stack of stacks."""
    rng = np.random.default_rng(0)
    shapes = {"w": (L, D, D), "v": (L, D, D), "vec": (L, D), "deep": (2, L, D, D)}
    return {n: jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for n, s in shapes.items()}


def make_batch(weighted=False):
    """Returns rows with a mask; weighted: unequal counts, and one microbatch without any."""
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 1] if weighted else [1] * B, np.float32)
    rows = np.random.default_rng(1).normal(size=(B, D)).astype(np.float32)
    return {"x": rows, "mask": mask}


def loss_of(program):
    """Returns the masked mean over rows of what a program (parameters, rows) makes of them."""

    def loss_fn(params, batch):
        losses = jnp.mean(program(params, batch["x"]) ** 2, axis=-1)
        return jnp.sum(batch["mask"] * losses) / jnp.sum(batch["mask"])

    return loss_fn


def assert_equal_gradients(
    program,
    params=None,
    *,
    mesh=None,
    weighted=False,
    tolerance="float32",
    may_vanish=False,
    **options,
):
    """Asserts the fused gradients equal to the by-value ones and to those of one full batch."""
    params = make_params() if params is None else params
    loss_fn = loss_of(program)
    options |= {"microbatches": options.get("microbatches", K), "mesh": mesh}
    options["axis_name"] = None if mesh is None else "dp"
    if weighted:
        options["weight_fn"] = lambda batch: batch["mask"].sum()
    functions = {
        "fused": gradaccum.accumulate(loss_fn, **options),
        "by value": gradaccum.accumulate(loss_fn, fused=False, **options),
        "full": loss_fn,
    }

    @functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)
    def run(params, batch):
        return {name: jax.value_and_grad(f)(params, batch) for name, f in functions.items()}

    got = run(params, make_batch(weighted))
    helpers.assert_close(got["by value"], got["full"], tolerance)
    helpers.assert_close(got["fused"], got["full"], tolerance)
    # There is something to get wrong.
    assert may_vanish or any(np.max(np.abs(g)) > 1e-4 for g in jax.tree.leaves(got["full"][1]))


def in_place(program, params=None, **options):
    """Returns how many of the parameters' leaves are accumulated in refs."""
    options = {"microbatches": K, "axis_name": None} | options
    grad = jax.grad(gradaccum.accumulate(loss_of(program), **options))
    return helpers.count_in_place(grad, make_params() if params is None else params, make_batch())


# --- Functions with two operands, to be called with one array twice ------------------------------

plain = lambda a, b: a @ jnp.sin(b)  # noqa: E731
jitted = jax.jit(plain)
rematted = jax.checkpoint(plain)


@jax.custom_jvp
def with_jvp(a, b):
    return plain(a, b)


@with_jvp.defjvp
def _(primals, tangents):
    return jax.jvp(plain, primals, tangents)


@jax.custom_vjp
def with_vjp(a, b):
    return plain(a, b)


with_vjp.defvjp(lambda a, b: jax.vjp(plain, a, b), lambda vjp, ct: vjp(ct))


def scanned(a, b):
    """Scans over the rows of a, with b as the constant."""
    _, rows = lax.scan(lambda c, row: (c, row @ jnp.sin(b)), 0.0, a)
    return rows


def scanned_both(a, b):
    return lax.scan(lambda c, ab: (c + ab[0][:, None] * jnp.sin(ab[1])[None], None), 0 * a, (a, b))[
        0
    ]


def carried_both(a, b):
    """Swaps the two carries in each iteration."""
    (a, b, c), _ = lax.scan(lambda c, _: ((c[1], c[0], c[2] @ c[0]), None), (a, b, a), length=3)
    return c


def branched(a, b):
    return lax.cond(jnp.sum(a) > 0, plain, lambda a, b: b @ a, a, b)


TWICE = {
    "jit": jitted,
    "jit_in_jit": jax.jit(lambda a, b: jitted(b, a)),
    "checkpoint": rematted,
    "checkpoint_of_jit": jax.checkpoint(jitted),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "scan_xs_and_constant": scanned,
    "scan_xs_twice": scanned_both,
    "scan_carry_twice": carried_both,
    "cond": branched,
    "vmap": lambda a, b: jax.vmap(jitted)(a[:, None], jnp.stack([b] * D))[:, 0],
    "optimization_barrier": lambda a, b: plain(*lax.optimization_barrier((a, b))),
    "jit_of_its_own_outputs": lambda a, b: jitted(*jax.jit(lambda a, b: (b, a))(a, b)),
    "checkpoint_of_its_own_outputs": lambda a, b: rematted(*jax.checkpoint(lambda a: (a, a))(a)),
    "scan_of_its_own_outputs": lambda a, b: jitted(
        *lax.scan(lambda c, row: (c, (row, row)), 0.0, a)[1]
    ),
    "output_and_operand": lambda a, b: jitted(jax.jit(lambda a: a)(a), b),
    "stop_gradient": lambda a, b: jitted(a, lax.stop_gradient(b)),
    "transposed": lambda a, b: jitted(a, b.T),
    "associative_scan": lambda a, b: lax.associative_scan(jnp.add, a) @ jitted(a, b),
    "map": lambda a, b: lax.map(lambda ab: ab[0] * jnp.sin(ab[1]), (a, b)),
    "inner_gradient": lambda a, b: a + jax.grad(lambda a: jnp.sum(jitted(a, b) ** 2))(a),
}


# --- Rules of differentiation that use their one operand's tangent twice, or sliced --------------


def _rule(rule):
    @jax.custom_jvp
    def fun(a):
        return plain(a, a)

    fun.defjvp(lambda primals, tangents: (fun(*primals), rule(primals[0], tangents[0])))
    return fun


_linear = jax.jit(lambda a, s, t: s @ jnp.sin(a) + a @ (jnp.cos(a) * t))
JVP_RULES = {
    "jit_twice": _rule(lambda a, t: _linear(a, t, t)),
    "checkpoint_twice": _rule(lambda a, t: jax.checkpoint(_linear)(a, t, t)),
    "sliced": _rule(
        lambda a, t: jnp.concatenate([t[:1], t[1:]]) @ jnp.sin(a) + a @ (jnp.cos(a) * t)
    ),
    "scan_xs_and_constant": _rule(
        lambda a, t: lax.scan(
            lambda c, st: (c, st[0] @ jnp.sin(a) + st[1] @ (jnp.cos(a) * t)), 0.0, (t, a)
        )[1]
    ),
}


# --- What else a layer can do with its parameters ------------------------------------------------


def per_layer(body, names=("w",), **scan_options):
    """Returns the program that scans `body(h, *layers) -> h` over the stacks of these names."""

    def program(p, x):
        step = lambda h, layers: (body(h, *layers), None)  # noqa: E731
        return lax.scan(step, x, [p[n] for n in names], **scan_options)[0]

    return program


def _fori(h, w):
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w), h)


def _nested_jit(h, w):
    return jax.jit(lambda h, w: jax.jit(lambda w, h: h + jnp.tanh(h * w[1][None]))(w, h))(h, w)


LAYERS = {
    "sliced": lambda h, w: jnp.tanh(h[:, :2] @ w[:2] + h @ w),
    "indexed": lambda h, w: h + jnp.tanh(h * w[0][None]),
    "indexed_by_a_negative": lambda h, w: h + jnp.tanh(h * w[-1][None]),
    "indexed_dynamically": lambda h, w: jnp.tanh(h * w[jnp.argmax(w[0])][None]),
    "sliced_dynamically": lambda h, w: jnp.tanh(
        h[:, :2] @ lax.dynamic_slice_in_dim(w, jnp.argmin(w[0]), 2)
    ),
    "gathered": lambda h, w: jnp.tanh(h @ jnp.take(w, jnp.array([3, 1, 1, 0]), axis=0)),
    "masked": lambda h, w: jnp.tanh(h @ jnp.where(w > 0, w, w / 2)),
    "split": lambda h, w: jnp.tanh(h @ jnp.concatenate(jnp.split(w, 2)[::-1])) @ w,
    "updated": lambda h, w: jnp.tanh(h @ w.at[0].set(w[1])),
    "indexed_in_nested_jit": _nested_jit,
    "indexed_in_checkpoint": jax.checkpoint(lambda h, w: h + jnp.tanh(h * w[0][None])),
    "fori": _fori,
    "fori_over_rows": lambda h, w: lax.fori_loop(
        0, D, lambda i, h: h + jnp.tanh(h * w[i][None]), h
    ),
    "scanned_over_rows": lambda h, w: lax.scan(
        lambda h, row: (h + jnp.tanh(h * row[None]), None), h, w
    )[0],
    "mapped": lambda h, w: jnp.tanh(h @ lax.map(jnp.sin, w)),
    "vmapped": lambda h, w: jax.vmap(lambda row: jnp.tanh(row @ w))(h),
    "vmapped_over_rows": lambda h, w: jnp.tanh(h @ jax.vmap(lambda r: r * r[0])(w)),
    "cond_closed_over": lambda h, w: lax.cond(
        jnp.sum(w) > 0, lambda: jnp.tanh(h @ w), lambda: h @ jitted(w, w)
    ),
    "switch": lambda h, w: lax.switch(
        jnp.argmax(w[0]) % 2, [lambda w: jnp.tanh(h @ w), lambda w: h * w[0][None]], w
    ),
    "cumulated": lambda h, w: jnp.tanh(h @ jnp.cumsum(w, axis=0)),
    "sorted": lambda h, w: jnp.tanh(h @ jnp.sort(w, axis=0)),
    "solved": lambda h, w: jnp.linalg.solve(w @ w.T + 2 * jnp.eye(D), h.T).T,
    "returned_by_jit": lambda h, w: (lambda a, w: a + jnp.tanh(a * w[0][None]))(
        *jax.jit(lambda h, w: (h @ w, w))(h, w)
    ),
}


# --- Stacks ---------------------------------------------------------------------------------------

layer = lambda h, w: jnp.tanh(h @ w)  # noqa: E731
stack = lambda h, ws, **options: lax.scan(lambda h, w: (layer(h, w), None), h, ws, **options)[0]  # noqa: E731
pair = jax.jit(lambda h, a, b: stack(h, a) + stack(h, jnp.sin(b)))


def deep_stack(p, x):
    return lax.scan(lambda h, ws: (stack(h, ws), None), x, p["deep"])[0]
