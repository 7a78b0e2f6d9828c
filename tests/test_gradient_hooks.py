"""Hooks on gradients: their values against the definition in float64, and one mean as before."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS

import gradaccum
from gradaccum import audit
from gradaccum.tensor_parallel import global_norm

WITHIN = 3e-5  # of the largest entry of a leaf, float32

FACTORS = {
    "layout": (
        *("replicated", "fsdp", "hsdp"),
        *("auto-fsdp", "manual-fsdp", "typed-fsdp"),
    ),
    "axis": ("Auto", "Explicit"),
    "through": ("grad", "method"),
    "k": (1, 4),
    "reduction": ("mean", "tokens", "sum"),
    "hooks": ("each", "mean", "both"),
    "overlap": (True, False),
    "unroll": (1, 2),
    "fused": (True, False),
}
GRID = helpers.pairwise(FACTORS)


def name_of(case):
    flags = [name for name in ("fused", "overlap") if case[name]]
    words = [case[name] for name in ("layout", "axis", "through", "reduction", "hooks")]
    return "-".join([*words, f"k{case['k']}", f"unroll{case['unroll']}", *flags])


def on_each(norm):
    """Two hooks that are not linear, couple the leaves, depend on the index, do not commute."""

    def squash(grads, *, index):
        factor = (1 + 0.1 * index) / (1 + norm(grads))
        return jax.tree.map(lambda g: factor.astype(g.dtype) * g, grads)

    def shift(grads, *, index):
        return jax.tree.map(lambda g: g + 0.01 * (1 + index) * jnp.cos(10 * g), grads)

    return [squash, shift]


def on_mean(norm):
    """The same of a mean. What is 0 comes back as 0.1: of a device without weight it must not."""

    def bend(grads):
        factor = 2 / (0.5 + norm(grads))
        return jax.tree.map(lambda g: factor * g + 0.1 * jnp.cos(g), grads)

    return [bend, lambda grads: jax.tree.map(lambda g: g**2 + g, grads)]


def hooks_of(case, norm=optax.tree.norm):
    each = on_each(norm) if case["hooks"] != "mean" else []
    return each, on_mean(norm) if case["hooks"] != "each" else []


def by_hand(loss_fn, n, k, each, after, reduction):
    """Returns the gradients as a function of parameters and batch: the definition, step by step."""

    def total(x, w):  # of rows that have weight; what the others hold is nothing
        w = w.reshape(w.shape + (1,) * (x.ndim - w.ndim))
        return jnp.sum(jnp.where(w == 0, 0, w * x), axis=1)

    def run(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(n * k, -1, *x.shape[1:]), batch)
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, parts)
        for hook in each:
            grads = jax.vmap(lambda g, i: hook(g, index=i))(grads, jnp.arange(n * k))  # noqa: B023
        weights = jnp.sum(parts["mask"], 1) if reduction == "tokens" else jnp.ones(n * k)
        weights = weights.reshape(n, k)
        own = jax.tree.map(lambda g: total(g.reshape(n, k, *g.shape[1:]), weights), grads)
        weights = jnp.ones(n) if reduction == "sum" else weights.sum(1)
        mean = jax.tree.map(lambda g: g / jnp.expand_dims(weights, range(1, g.ndim)), own)
        for hook in after:
            mean = jax.vmap(hook)(mean)
        divisor = 1.0 if reduction == "sum" else weights.sum()
        return jax.tree.map(lambda g: total(g[None], weights[None])[0] / divisor, mean)

    return run


@functools.cache
def expected(n, k, hooks, reduction):
    each, after = hooks_of({"hooks": hooks})
    loss_fn = layouts.loss_of(reduction)
    run = by_hand(loss_fn, n, k, each, after, reduction)
    return layouts.in_float64(run, layouts.init(), layouts.make_batch())


def make(case, **options):
    """Returns the decorated loss of a case, its hooks given or registered."""
    layout = LAYOUTS[case["layout"]]
    norm = optax.tree.norm
    if layout.manual:  # a hook sees whole parameters over data axes, this device's part of the rest
        norm = lambda grads: global_norm(grads, layouts.specs_of(model="mp"), "mp")  # noqa: E731
    each, after = hooks_of(case, norm)
    if case["reduction"] == "tokens":
        options["weight_fn"] = helpers.count_tokens
    if case["reduction"] == "sum":
        options["loss_reduction"] = "sum"
    fun = gradaccum.accumulate(
        layouts.loss_of(case["reduction"], **layout.operators()),
        microbatches=case["k"],
        hook=each[:1],
        **{name: case[name] for name in ("fused", "overlap", "unroll")},
        **layout.options(),
        **options,
    )
    for hook in each[1:]:
        fun.register_hook(hook)
    for hook in after:
        fun.register_post_accumulate_hook(hook)
    return fun


@pytest.mark.parametrize("case", GRID, ids=name_of)
def test_gradients_are_those_written_out(case):
    layout = LAYOUTS[case["layout"]]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], getattr(AxisType, case["axis"]))
    fun = make(case)
    # On Explicit axes a cotangent lies as its primal does.
    method = case["through"] == "method" or (
        case["axis"] == "Explicit" and layout.grads != layout.params
    )
    grad = fun.value_and_grad() if method else jax.value_and_grad(fun)
    with jax.set_mesh(mesh):
        params = layouts.place(layouts.init(), mesh, layout.placed())
        rows = jax.tree.map(lambda x: P(layout.data), layouts.make_batch())
        batch = layouts.place(layouts.make_batch(), mesh, rows)
        program = layouts.jit(grad).lower(params, batch).compile()
        loss, grads = program(params, batch)
        layouts.assert_lies(grads, mesh, layout.placed(grads=True))
    want = expected(layout.devices, case["k"], case["hooks"], case["reduction"])
    helpers.assert_close(grads, want, within=WITHIN)
    whole = layouts.in_float64(
        layouts.loss_of(case["reduction"]), layouts.init(), layouts.make_batch()
    )
    helpers.assert_close(loss, whole, within=WITHIN)
    # CASES H4: hooks do not make it sync in every microbatch; H1: it does sync.
    audit.assert_one_reduction(program, axis_name=layout.data)
    assert any(layout.data[-1] in row.axes for row in audit.collectives(program).rows)


def test_the_reference_tells_hooks_and_their_order_apart():
    """The negative control: what must make a difference makes one far above the tolerance."""
    loss_fn, data = layouts.loss_of(), (layouts.init(), layouts.make_batch())
    each, after = on_each(optax.tree.norm), on_mean(optax.tree.norm)

    def of(each, after):
        return layouts.in_float64(by_hand(loss_fn, 2, 2, each, after, "mean"), *data)

    got = [of(each, after), of(each[::-1], after), of(each, after[::-1]), of(each, []), of([], [])]
    for i, a in enumerate(got):
        for b in got[:i]:
            assert max(np.max(np.abs(a[n] - b[n])) for n in a) > 0.02


# --- The index, and who is not evaluated ----------------------------------------------------------


def indices(weights=None, n=2, k=4, b=2, **options):
    """Returns the sums of the microbatches' indices that a hook is given, one bit each."""
    fun = gradaccum.accumulate(
        lambda p, x: jnp.mean(x) * p,
        microbatches=k,
        axis_name="dp" if n > 1 else None,
        mesh=helpers.data_mesh(n) if n > 1 else None,
        hook=lambda grads, *, index: 2.0**index,
        **({} if weights is None else {"weight_fn": lambda x: x[0]}),
        **options,
    )
    x = jnp.ones(n * k * b) if weights is None else jnp.repeat(jnp.asarray(weights, float), b)
    return float(jax.grad(fun)(1.0, x))


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"unroll": 4}, {"check_vma": True}])
def test_each_microbatch_has_its_global_index(options):
    assert indices(**options) * 8 == 0b1111_1111
    assert indices(n=1, **options) * 4 == 0b1111


def test_a_microbatch_of_weight_0_has_no_hook():
    assert indices([1, 0, 0, 1, 0, 0, 0, 0]) * 2 == 0b0000_1001
    assert indices([0, 2, 1, 0, 0, 0, 4, 1]) * 8 == 2 * 2 + 4 + 4 * 64 + 128
    assert indices([0] * 8) == 0


def test_a_device_without_weight_adds_nothing_whatever_its_hook_returns():
    """Its mean is of nothing: NaN or noise that a hook makes there must not reach the others."""
    fun = gradaccum.accumulate(
        lambda p, x: jnp.mean(x) * p,
        microbatches=2,
        axis_name="dp",
        mesh=helpers.data_mesh(2),
        weight_fn=lambda x: x[0],
        post_accumulate_hook=lambda g: jnp.where(g == 0, jnp.nan, g + 1),
    )
    assert jax.grad(fun)(0.0, jnp.array([3.0, 5.0, 0.0, 0.0])) == (9 + 25) / 8 + 1
    assert jax.grad(fun)(0.0, jnp.zeros(4)) == 0
    assert np.isnan(jax.grad(fun)(0.0, jnp.array([3.0, 5.0, jnp.nan, 1.0])))  # no weight: it shows


# --- Dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_a_float16_losss_hook_sees_the_gradient_without_factors(weighted):
    """1e-6 / (k n) would be lost in float16, and a weight of 7e4 be infinite."""
    seen = lambda g: jnp.where((g > 0.9e-6) & (g < 1.1e-6), 1.0, 0.0)  # noqa: E731
    fun = gradaccum.accumulate(
        lambda p, x: jnp.mean(p * x),
        microbatches=4,
        axis_name="dp",
        mesh=helpers.data_mesh(8),
        weight_fn=(lambda x: jnp.float32(7e4)) if weighted else None,
        hook=lambda grads, *, index: seen(grads),
        post_accumulate_hook=lambda grads: grads + (grads == 1),
    )
    assert jax.grad(fun)(jnp.float16(1), jnp.full((64,), 1e-6, jnp.float16)) == 2
