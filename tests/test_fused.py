"""Accumulation inside the backward pass: the gradient of by-value accumulation and of one batch.

jax 0.10 adds cotangents into refs wrongly, and silently, where one array reaches a call twice. So
every way for a parameter to be used that could mislead the library's choice is a case here.
"""

import functools

import helpers
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
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


@pytest.mark.parametrize("name", TWICE)
def test_a_layer_that_reaches_a_call_twice(name):
    """The layer's slice of the stack is both operands, inside the scan's body."""

    def program(p, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ TWICE[name](w, w)), None), x, p["w"])[0]

    assert_equal_gradients(program)


@pytest.mark.parametrize("name", TWICE)
def test_a_parameter_that_reaches_a_call_twice(name):
    """Outside of any scan over layers: a whole matrix, and the first of a stack."""

    def program(p, x):
        return jnp.tanh(x @ TWICE[name](p["m"], p["m"])) @ TWICE[name](p["w"][0], p["w"][0])

    rng = np.random.default_rng(2)
    params = {n: jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for n, s in
              {"m": (D, D), "w": (L, D, D)}.items()}  # fmt: skip
    assert_equal_gradients(program, params)
    assert in_place(program, params) == 0


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


@pytest.mark.parametrize("name", JVP_RULES)
def test_a_rule_that_uses_its_tangent_twice(name):
    """Nothing in the program before differentiation shows it."""
    fun = JVP_RULES[name]
    assert_equal_gradients(
        lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ fun(w)), None), x, p["w"])[0]
    )


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


@pytest.mark.parametrize("name", LAYERS)
def test_a_use_inside_the_layer(name):
    assert_equal_gradients(per_layer(LAYERS[name]))


def test_a_stack_that_is_scanned_but_not_used():
    assert_equal_gradients(per_layer(lambda h, w, unused: jnp.tanh(h @ w), ("w", "v")))


def test_layers_that_are_also_the_outputs_of_their_scan():
    def program(p, x):
        h, ws = lax.scan(lambda h, w: (jnp.tanh(h @ w), (w, w)), x, p["w"])
        return h @ jitted(*(w[0] for w in ws)) @ jitted(ws[0][1], p["w"][1])

    assert_equal_gradients(program)


def test_a_layer_that_becomes_the_carry():
    def program(p, x):
        _, hs = lax.scan(lambda before, w: (w, x @ jitted(before, w)), jnp.eye(D), p["w"])
        return jnp.sum(hs, axis=0)

    assert_equal_gradients(program)


# --- What a program can do with a stack ----------------------------------------------------------

layer = lambda h, w: jnp.tanh(h @ w)  # noqa: E731
stack = lambda h, ws, **options: lax.scan(lambda h, w: (layer(h, w), None), h, ws, **options)[0]  # noqa: E731
pair = jax.jit(lambda h, a, b: stack(h, a) + stack(h, jnp.sin(b)))


def xs_and_constant(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w + h @ p["w"][0]), None), x, p["w"])[0]


def xs_and_whole_constant(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w @ p["w"].sum(0)), None), x, p["w"])[0]


def tied_remat(p, x):
    return jax.checkpoint(lambda x, a, b: stack(stack(x, a), b))(x, p["w"], p["w"])


def positions_static(p, x):
    return stack(x + p["w"][0, :1] + p["vec"][:2].sum(0)[None], p["v"])


def positions_dynamic(p, x):
    at = jnp.argmax(p["w"][0, 0])
    here = lax.dynamic_slice_in_dim(p["vec"], at % 2, 2).sum(0) + p["vec"][at % 3]
    return stack(x + here[None], p["v"])


def in_one_jit_twice(p, x):
    run = jax.jit(stack)
    return run(run(x, p["w"]), p["w"])


def scan_of_the_pair(p, x):
    return lax.scan(lambda h, ab: (layer(layer(h, ab[0]), ab[1]), None), x, (p["w"], p["w"]))[0]


def regularised(p, x):
    return stack(x, p["w"]) + 0.1 * jnp.sum(p["w"] ** 2)


def regularised_by_scan(p, x):
    penalty, _ = lax.scan(lambda c, w: (c + jnp.sum(w**2), None), 0.0, p["w"])
    return stack(x, p["w"]) + 0.1 * penalty


def unrolled_by_hand(p, x):
    for i in range(L):
        x = layer(x, p["w"][i])
    return x


def fori_over_layers(p, x):
    return lax.fori_loop(0, L, lambda i, h: layer(h, p["w"][i]), x)


def mapped_whole(p, x):
    return jnp.tanh(x @ lax.map(lambda w: jnp.sin(w) @ w, p["w"]).sum(0))


def mapped_in_batches(p, x):
    return jnp.tanh(x @ lax.map(lambda w: jnp.sin(w) @ w, p["w"], batch_size=2).sum(0))


def associative(p, x):
    return jnp.tanh(x @ lax.associative_scan(jnp.matmul, p["w"])[-1])


def vmapped_stack(p, x):
    return jax.vmap(lambda row: stack(row[None], p["w"])[0])(x)


def vmapped_over_stack(p, x):
    return jax.vmap(lambda w: layer(x, w))(p["w"]).sum(0)


def branch_on_a_stack(p, x):
    return lax.cond(jnp.sum(p["w"]) > 0, stack, lambda h, w: h @ w[0], x, p["w"])


def scanned_backwards_and_forwards(p, x):
    return stack(stack(x, p["w"]), p["w"], reverse=True)


def sorted_before(p, x):
    return stack(x, p["w"][jnp.array([2, 0, 1])])


def identity_jit_before(p, x):
    same = jax.jit(lambda w: w)(p["w"])
    return lax.scan(lambda h, ab: (h @ jitted(*ab), None), x, (same, p["w"]))[0]


def jit_returns_it_too(p, x):
    h, same = jax.jit(lambda h, w: (stack(h, w), w))(x, p["w"])
    return h @ same[0]


def chained_in_place_then_sliced(p, x):
    return stack(x, p["w"]) @ jax.jit(lambda w: w[0])(p["w"])


def stacks_of_stacks_and_inner_constant(p, x):
    def outer(h, ws):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w @ ws[0]), None), h, ws)[0], None

    return lax.scan(outer, x, p["deep"])[0]


TIED = [
    lambda p, x: pair(x, p["w"], p["w"]),
    xs_and_constant,
    xs_and_whole_constant,
    tied_remat,
    in_one_jit_twice,
    scan_of_the_pair,
    regularised,
    regularised_by_scan,
    unrolled_by_hand,
    fori_over_layers,
    associative,
    vmapped_over_stack,
    scanned_backwards_and_forwards,
    sorted_before,
    identity_jit_before,
    jit_returns_it_too,
    chained_in_place_then_sliced,
]
TIED[0].__name__ = "jit_twice"


@pytest.mark.parametrize("program", TIED, ids=lambda f: f.__name__)
def test_a_stack_with_another_use_goes_by_value(program):
    params = {"w": make_params()["w"]}
    assert_equal_gradients(program, params)
    assert in_place(program, params) == 0


OTHER = [
    positions_static,
    positions_dynamic,
    mapped_whole,
    mapped_in_batches,
    vmapped_stack,
    branch_on_a_stack,
    stacks_of_stacks_and_inner_constant,
]


@pytest.mark.parametrize("program", OTHER, ids=lambda f: f.__name__)
def test_other_uses_of_a_stack(program):
    assert_equal_gradients(program)


# --- Where it is taken ---------------------------------------------------------------------------


def two_stacks(p, x):
    return per_layer(lambda h, w, v, b: jnp.tanh(h @ w + b[None]) @ v, ("w", "v", "vec"))(p, x)


def deep_stack(p, x):
    return lax.scan(lambda h, ws: (stack(h, ws), None), x, p["deep"])[0]


def dict_of_stacks(p, x):
    tree = {"attention": {"w": p["w"]}, "mlp": [p["v"], {"bias": p["vec"]}]}

    def body(h, t):
        return jnp.tanh(h @ t["attention"]["w"]) @ t["mlp"][0] + t["mlp"][1]["bias"][None], None

    return lax.scan(jax.checkpoint(body), x, tree)[0]


def cast_inside(p, x):
    body = lambda h, w: jnp.tanh(h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))  # noqa: E731
    return per_layer(lambda h, w: body(h, w).astype(jnp.float32))(p, x)


PLAIN = {
    "stack": (lambda p, x: stack(x, p["w"]), 1),
    "reverse": (lambda p, x: stack(x, p["w"], reverse=True), 1),
    "unroll": (lambda p, x: stack(x, p["w"], unroll=2), 1),
    "unrolled_whole": (lambda p, x: stack(x, p["w"], unroll=True), 1),
    "checkpoint_in_scan": (per_layer(jax.checkpoint(layer)), 1),
    "jit_in_scan": (per_layer(jax.jit(layer)), 1),
    "scan_in_jit": (lambda p, x: jax.jit(stack)(x, p["w"]), 1),
    "scan_in_jit_in_jit": (lambda p, x: jax.jit(lambda q, x: jax.jit(stack)(x, q))(p["w"], x), 1),
    "three_stacks": (two_stacks, 3),
    "tree_of_stacks": (dict_of_stacks, 3),
    "stack_of_stacks": (deep_stack, 1),
    "two_scans": (lambda p, x: stack(stack(x, p["w"]), p["v"]), 2),
    "one_plain_one_tied": (lambda p, x: stack(stack(x, p["w"]), p["v"]) @ p["v"][0], 1),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_stack_is_accumulated_in_place(name):
    program, leaves = PLAIN[name]
    assert_equal_gradients(program)
    assert in_place(program) == leaves
    assert in_place(program, fused=False) == 0


def test_a_cast_inside_the_layer_keeps_it_in_place():
    assert_equal_gradients(cast_inside, tolerance="bfloat16")
    assert in_place(cast_inside) == 1


def test_bfloat16_parameters():
    """Their accumulator is float32: a stand-in's; not of those that are cast before the scan."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
    outside = lambda p, x: stack(x, p["w"].astype(jnp.float32))  # noqa: E731
    for program, leaves in ((cast_inside, 1), (outside, 0)):
        assert_equal_gradients(program, params, tolerance="bfloat16")
        assert in_place(program, params) == leaves


def test_a_cast_of_the_stack_before_its_scan():
    program = lambda p, x: stack(x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16))  # noqa: E731
    assert_equal_gradients(lambda p, x: program(p, x).astype(jnp.float32), tolerance="bfloat16")


def test_an_accumulator_as_narrow_as_the_parameter_is_in_place():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
    program = lambda p, x: stack(x.astype(jnp.bfloat16), p["w"]).astype(jnp.float32)  # noqa: E731
    assert_equal_gradients(program, params, tolerance="bfloat16", accumulator_dtype=jnp.bfloat16)
    assert in_place(program, params, accumulator_dtype=jnp.bfloat16) == 1


def test_a_complex_stack():
    params = {"w": make_params()["w"] * (1 + 0.5j)}
    program = lambda p, x: jnp.abs(per_layer(lambda h, w: h @ w)(p, x + 0j))  # noqa: E731
    assert_equal_gradients(program, params, tolerance="complex64")
    assert in_place(program, params) == 1


def test_temporary_memory_of_a_plain_stack_is_smaller_in_place():
    """By value a microbatch's gradient tree exists beside the accumulator; in place it does not."""
    width = 64
    params = jnp.zeros((8, width, width))
    batch = {"x": jnp.zeros((B, width)), "mask": jnp.ones(B)}
    program = lambda p, x: stack(x, p)  # noqa: E731

    def temporaries(fused):
        loss_fn = gradaccum.accumulate(
            loss_of(program), microbatches=K, axis_name=None, fused=fused
        )
        compiled = jax.jit(jax.grad(loss_fn)).lower(params, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(True) <= temporaries(False) - 0.1 * params.nbytes


# --- Values among the refs of one scan ------------------------------------------------------------


def _two_stacks(x, first, second):
    """The two have equal shapes: cotangents that change places are not noticed otherwise."""

    def layer(h, ab):
        return h + jnp.tanh(h @ ab[0] - 2 * h @ ab[1].T), None

    return lax.scan(layer, x, (first, second))[0]


def _computed(x):
    """A stack that no parameter is, but that depends on one."""
    return jnp.tanh(x)[None] * jnp.ones((L, 1, 1))


AMONG_REFS = {
    "tied_before": lambda p, x: _two_stacks(x, p["v"], p["w"]) + p["v"][0, :1],
    "tied_after": lambda p, x: _two_stacks(x, p["v"], p["w"]) + p["w"][0, :1],
    "tied_before_in_jit": lambda p, x: jax.jit(_two_stacks)(x, p["v"], p["w"]) + p["v"][0, :1],
    "tied_inside_the_jit": lambda p, x: jax.jit(lambda v, w: _two_stacks(x, v, w) + v[0, :1])(
        p["v"], p["w"]
    ),
    "cast_before": lambda p, x: _two_stacks(x, 2 * p["v"], p["w"]),
    "cast_after": lambda p, x: _two_stacks(x, p["v"], 2 * p["w"]),
    "computed_before": lambda p, x: _two_stacks(x, _computed(p["v"][0]), p["w"]),
    "two_scans_one_shared": lambda p, x: _two_stacks(
        _two_stacks(x, p["v"], p["w"]), p["v"], jnp.ones_like(p["w"])
    ),
    "inner_scan_constant": lambda p, x: lax.scan(
        lambda h, w: (
            lax.scan(lambda h, s: (h + jnp.tanh(h * s @ w), None), h, p["v"][0, 0, :2])[0],
            None,
        ),
        x,
        p["w"],
    )[0],
}


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("name", AMONG_REFS)
def test_a_value_among_the_refs_of_one_scan(name, weighted):
    assert_equal_gradients(AMONG_REFS[name], weighted=weighted)


def test_a_narrow_stack_before_a_wide_one():
    """The bfloat16 stack goes by value, so the float32 one beside it does too."""
    params = make_params()
    params = {"v": params["v"].astype(jnp.bfloat16), "w": params["w"]}

    def program(p, x):
        return _two_stacks(x, p["v"].astype(jnp.float32), p["w"])

    def cast_inside(p, x):
        def layer(h, ab):
            return h + jnp.tanh(h @ ab[0].astype(jnp.float32) - 2 * h @ ab[1].T), None

        return lax.scan(layer, x, (p["v"], p["w"]))[0]

    for run in (program, cast_inside):
        assert_equal_gradients(run, params, tolerance="bfloat16")


# --- Together with the other options -------------------------------------------------------------

SOME = {
    "stack": lambda p, x: stack(x, p["w"]),
    "stack_of_stacks": deep_stack,
    "tied_jit": lambda p, x: pair(x, p["w"], p["w"]),
    "layer_jit_twice": per_layer(lambda h, w: jnp.tanh(h @ jitted(w, w))),
    "layer_checkpoint": per_layer(jax.checkpoint(lambda h, w: jnp.tanh(h @ jitted(w, w)))),
    "layer_indexed": per_layer(LAYERS["indexed"]),
    "layer_cond": per_layer(LAYERS["cond_closed_over"]),
    "tangent_twice": per_layer(lambda h, w: jnp.tanh(h @ JVP_RULES["jit_twice"](w))),
    "one_plain_one_tied": PLAIN["one_plain_one_tied"][0],
}
OPTIONS = {
    "weighted": {"weighted": True},
    "overlap": {"overlap": True},
    "weighted_overlap_unroll": {"weighted": True, "overlap": True, "unroll": 2},
    "on_eight_devices": {"mesh": 8, "microbatches": 1},
    "on_four_weighted": {"mesh": 4, "microbatches": 2, "weighted": True},
}
SOME_WITH_OPTIONS = [
    # Each program with two of the sets of options, each set with three programs or more.
    (name, list(OPTIONS)[(i + start) % len(OPTIONS)])
    for start in (0, 2)
    for i, name in enumerate(SOME)
]


@pytest.mark.parametrize(("name", "options"), SOME_WITH_OPTIONS)
def test_options(name, options):
    options = dict(OPTIONS[options])
    if "mesh" in options:
        options["mesh"] = helpers.data_mesh(options["mesh"])
    assert_equal_gradients(SOME[name], **options)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"loss_reduction": "sum"}], ids=str)
@pytest.mark.parametrize("narrow", ["bfloat16_loss", "float16_leaf"])
def test_scale_where_the_cotangent_cannot_hold_it(narrow, options):
    """A narrow loss cannot be seeded with the factor 1/(k n), which is due all the same."""

    def loss_fn(p, batch):
        h = stack(batch["x"], p["w"]) * p["scale"][None]
        loss = jnp.mean(h**2) if "loss_reduction" not in options else jnp.sum(h**2)
        return loss.astype(jnp.bfloat16 if narrow == "bfloat16_loss" else jnp.float32)

    params = {"w": make_params()["w"], "scale": jnp.full(D, 1.5, jnp.float32)}
    if narrow == "float16_leaf":
        params["scale"] = params["scale"].astype(jnp.float16)
    fun = gradaccum.accumulate(loss_fn, microbatches=K, axis_name=None, **options)
    got, want = (jax.jit(jax.grad(f))(params, make_batch()) for f in (fun, loss_fn))
    helpers.assert_close(got["w"], want["w"])
    helpers.assert_close(got["scale"], want["scale"])


# --- Random programs -----------------------------------------------------------------------------

OPERATIONS = {
    "plain": plain,
    "sliced": lambda a, b: jnp.concatenate([a[:2], b[2:]]),
    "indexed": lambda a, b: a * b[0][None],
} | {n: TWICE[n] for n in ("jit", "checkpoint", "custom_vjp", "scan_xs_and_constant", "cond")}
WRAPPERS = {"none": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}
STACKS = ("w", "v", "u")

stages = st.fixed_dictionaries(
    {
        "xs": st.lists(st.sampled_from(STACKS), min_size=1, max_size=2),
        "constant": st.sampled_from([None, None, *STACKS]),
        "operations": st.lists(
            st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 2), st.integers(0, 2)),
            min_size=1,
            max_size=2,
        ),
        "inside": st.sampled_from(sorted(WRAPPERS)),
        "outside": st.sampled_from(sorted(WRAPPERS)),
        "reverse": st.booleans(),
    }
)


def _stage(h, p, stage):
    def scan_stage(h, xs, constant):
        def body(h, slices):
            slices = [*slices, *([] if constant is None else [constant[1]])]
            for name, i, j in stage["operations"]:
                a, b = slices[i % len(slices)], slices[j % len(slices)]
                h = jnp.tanh(h @ OPERATIONS[name](a, b))
            return h

        body = WRAPPERS[stage["inside"]](body)
        return lax.scan(lambda h, s: (body(h, s), None), h, xs, reverse=stage["reverse"])[0]

    constant = None if stage["constant"] is None else p[stage["constant"]]
    return WRAPPERS[stage["outside"]](scan_stage)(h, [p[n] for n in stage["xs"]], constant)


@hypothesis.settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # each step of shrinking a failure compiles a program
)
@hypothesis.given(
    program=st.lists(stages, min_size=1, max_size=2),
    wrapper=st.sampled_from(sorted(WRAPPERS)),
    regularised=st.booleans(),
    weighted=st.booleans(),
)
def test_random_programs(program, wrapper, regularised, weighted):
    def run(p, x):
        for stage in program:
            x = _stage(x, p, stage)
        return x + 0.1 * jnp.sum(p["u"] ** 2) if regularised else x

    rng = np.random.default_rng(3)
    params = {n: jnp.asarray(rng.normal(size=(L, D, D)) / 2, jnp.float32) for n in STACKS}
    # A product of several layers' small numbers may vanish.
    assert_equal_gradients(WRAPPERS[wrapper](run), params, weighted=weighted, may_vanish=True)
