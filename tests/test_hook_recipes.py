"""What hooks are for, noise from a step's own key and clipping; and under transformations."""

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
from gradaccum.tensor_parallel import global_norm

N, K, SIZE, SIGMA = 4, 4, 4096, 0.5


def loss_fn(params, x):
    return jnp.mean(x) * jnp.sum(params["w"]) + 0.0 * jnp.sum(params["b"])


def zeros():
    return {"w": jnp.zeros(SIZE), "b": jnp.zeros(SIZE // 2)}


def add_noise(key, grads, *, index, folded=True):
    """Adds noise to each microbatch's gradient, with a step's key.

    Not folded is the mistake: the same noise in each microbatch, which no mean makes smaller.
    """
    own = jax.random.fold_in(key, index) if folded else key
    draws = optax.tree.random_like(own, grads, jax.random.normal)
    return jax.tree.map(lambda g, z: g + SIGMA * z, grads, draws)


def closed_over(key, **options):
    return lambda grads, *, index: add_noise(key, grads, index=index, **options)


held = functools.partial(jax.tree_util.Partial, add_noise)

KINDS = {
    "closed over": (AxisType.Auto, closed_over, {}),
    "closed over, typed": (AxisType.Auto, closed_over, {"check_vma": True}),
    "held": (AxisType.Auto, held, {}),
    "held, Explicit": (AxisType.Explicit, held, {}),
    "held, Explicit, typed": (AxisType.Explicit, held, {"check_vma": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_noise_from_the_key_of_a_step(kind):
    axis_type, noise, options = KINDS[kind]
    mesh = helpers.data_mesh(N, axis_type)
    traces = []

    @functools.partial(jax.jit, static_argnames="folded", compiler_options=helpers.COMPILE_FAST)
    def step(params, x, key, folded=True):
        traces.append(1)
        hook = noise(key) if folded else noise(key, folded=False)
        fun = gradaccum.accumulate(loss_fn, microbatches=K, hook=hook, **options)
        by_method = fun.value_and_grad()(params, x)[1]
        assert len(jax.tree.leaves(by_method)) == 2
        return jax.grad(fun)(params, x)

    with jax.set_mesh(mesh), jax.checking_leaks():
        x = jax.device_put(jnp.ones(N * K), jax.NamedSharding(mesh, P("dp")))
        params = jax.device_put(zeros(), jax.NamedSharding(mesh, P()))
        first, again, other = (step(params, x, jax.random.key(i)) for i in (0, 0, 1))
        wrong = step(params, x, jax.random.key(0), folded=False)
    assert len(traces) == 2
    for name in ("w", "b"):
        mean = 1.0 if name == "w" else 0.0
        np.testing.assert_array_equal(first[name], again[name])  # reproducible to the bit
        draws = np.stack([first[name] - mean, other[name] - mean])
        # 16 independent draws: a quarter of sigma, which is known within 1 / sqrt(2 draws).
        right, error = SIGMA / np.sqrt(N * K), 4 / np.sqrt(2 * draws.size)
        assert abs(draws.std() / right - 1) < error
        assert abs(np.mean(draws[0] * draws[1])) / right**2 < 4 / np.sqrt(draws[0].size)
        correlated = (wrong[name] - mean).std()
        assert abs(correlated / SIGMA - 1) < 4 / np.sqrt(2 * wrong[name].size)


def test_each_microbatchs_noise_is_its_own():
    """By a gradient's rows: one device's mean of one microbatch each, before the one mean."""
    fun = gradaccum.accumulate(
        loss_fn, microbatches=1, mesh=helpers.data_mesh(8), hook=held(jax.random.key(0))
    )
    _, grads = gradaccum.unreduced_value_and_grad(fun)(zeros(), jnp.ones(8))
    rows = np.asarray(grads["w"].sum) - 1
    correlation = np.corrcoef(rows)
    assert np.max(np.abs(correlation - np.eye(8))) < 5 / np.sqrt(SIZE)
    assert np.all(np.abs(rows.std(axis=1) / SIGMA - 1) < 4 / np.sqrt(2 * SIZE))


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_hook"])
def test_a_hook_that_closes_over_what_lies_on_explicit_axes_is_told_how(kind):
    mesh = helpers.data_mesh(4, AxisType.Explicit)
    options = {"microbatches": 2, "axis_name": "dp"}

    def step(amount, make):
        fun = gradaccum.accumulate(loss_fn, **options, **{kind: make(amount)})
        return jax.grad(fun)(zeros(), jax.device_put(jnp.ones(8), P("dp")))["w"][0]

    def add(amount, grads, index=None):
        del index
        return jax.tree.map(lambda g: g + amount, grads)

    match = rf"{kind} closes over an array that lies on Explicit axes.*{kind}=jax.tree_util.Partial"
    with jax.set_mesh(mesh):
        amount = jnp.full((), 2.0)
        with pytest.raises(ValueError, match=match):
            jax.jit(lambda a: step(a, lambda a: functools.partial(add, a)))(amount)
        assert jax.jit(lambda a: step(a, lambda a: jax.tree_util.Partial(add, a)))(amount) == 3


def test_a_hook_may_close_over_a_tracer_where_the_arguments_are_concrete():
    """And leaves nothing of the trace behind, in the cache of eager calls."""
    fun = functools.partial(gradaccum.accumulate, loss_fn, microbatches=2, axis_name=None)
    x = jnp.ones(4)

    def step(amount):
        return jax.grad(fun(hook=lambda g, *, index: jax.tree.map(lambda v: v + amount, g)))(
            zeros(), x
        )["w"][0]

    with jax.checking_leaks():
        assert jax.jit(step)(2.0) == 3
        assert jax.jit(step)(5.0) == 6
    np.testing.assert_array_equal(jax.vmap(step)(jnp.arange(3.0)), [1, 2, 3])
    assert jax.lax.scan(lambda c, a: (c + step(a), None), 0.0, jnp.arange(3.0))[0] == 6


# --- Transformations ------------------------------------------------------------------------------


def doubled(**options):
    hook = lambda grads, *, index: jax.tree.map(lambda g: 2 * g, grads)  # noqa: E731
    given = {"microbatches": 2, "mesh": helpers.data_mesh(4), "hook": hook}
    return gradaccum.accumulate(power, **given, **options)


def power(w, x):
    return jnp.mean((w * x) ** 3)


def test_aux_remat_and_second_derivatives():
    x = jnp.arange(1.0, 9.0)
    first, second = 3 * np.mean(x**3), 6 * np.mean(x**3)
    with_aux = gradaccum.accumulate(
        lambda w, x: (power(w, x), w * x[0]),
        microbatches=2,
        mesh=helpers.data_mesh(4),
        has_aux=True,
        hook=lambda grads, *, index: 2 * grads,
    )
    grad, aux = jax.grad(with_aux, has_aux=True)(1.0, x)
    np.testing.assert_allclose(grad, 2 * first, rtol=1e-6)
    np.testing.assert_allclose(aux, np.mean(x), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(doubled()))(1.0, x), 2 * first, rtol=1e-6)
    by_value = doubled(fused=False, post_accumulate_hook=lambda g: 3 * g)
    np.testing.assert_allclose(jax.grad(jax.grad(by_value))(1.0, x), 6 * second, rtol=1e-6)


def test_a_post_accumulate_hook_keeps_accumulation_in_place_a_hook_does_not():
    def stack(params, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
        return jnp.mean(h)

    def count(**options):
        fun = gradaccum.accumulate(stack, microbatches=2, axis_name=None, **options)
        return helpers.count_in_place(jax.grad(fun), jnp.ones((3, 2, 2)), jnp.ones((4, 2)))

    assert count() == 1
    assert count(post_accumulate_hook=lambda g: 2 * g) == 1
    assert count(hook=lambda g, *, index: 2 * g) == 0


# --- Without the mean, and with a window of calls -------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "tokens", "sum"])
def test_unreduced_rows_hold_what_the_hooks_returned(reduction):
    """Their one mean is the decorated loss's, and of two calls the mean of the hooked values."""
    options = {"microbatches": 2, "mesh": layouts.mesh_of(layouts.MESHES["dp"])}
    if reduction == "tokens":
        options["weight_fn"] = helpers.count_tokens
    if reduction == "sum":
        options["loss_reduction"] = "sum"
    options["hook"] = lambda grads, *, index: jax.tree.map(
        lambda g: jnp.sin(g) * (1 + index), grads
    )
    options["post_accumulate_hook"] = lambda grads: jax.tree.map(lambda g: g + g**2, grads)
    loss_fn, params = layouts.loss_of(reduction), layouts.init()
    fun = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp", **options)

    @layouts.jit
    def both(params, batch):
        decorated = gradaccum.accumulate(loss_fn, axis_name="dp", **options)
        return jax.value_and_grad(decorated)(params, batch), gradaccum.mean(fun(params, batch))

    want, got = both(params, layouts.make_batch())
    helpers.assert_close(got, want)
    plain = jax.grad(loss_fn)(params, layouts.make_batch())
    assert np.max(np.abs(plain["up"] - got[1]["up"])) > 1e-2 * np.max(np.abs(plain["up"]))


def test_o15_o24_the_mean_is_clipped_in_multisteps_the_parts_by_a_hook():
    """CASES O15, O24, call by call: microbatches of gradient -1.5, .5, .5, .5; 0 against 0.125."""
    clip = optax.clip_by_global_norm(1.0)
    mesh = helpers.data_mesh(2)
    x = jnp.array([-1.5, 0.5, 0.5, 0.5])

    def run(hook, inner):
        tx = gradaccum.MultiSteps(inner, every_k_schedule=2, axis_name="dp")
        grad = gradaccum.unreduced_value_and_grad(
            lambda w, x: jnp.mean(w * x), axis_name="dp", mesh=mesh, hook=hook
        )
        w = jnp.zeros(())
        with jax.set_mesh(mesh):
            state = tx.init(w)
            for part in (x[:2], x[2:]):
                updates, state = jax.jit(tx.update)(grad(w, part)[1], state, w)
        return float(-updates)

    def clip_each(grads, *, index):
        del index
        return clip.update(grads, clip.init(grads))[0]

    assert run(None, optax.chain(clip, optax.sgd(1.0))) == 0
    assert run(clip_each, optax.sgd(1.0)) == 0.125


# --- A manual model axis --------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["manual", "typed"])
@pytest.mark.parametrize("kind", ["hook", "post_accumulate_hook"])
def test_a_norm_of_this_devices_shards_is_refused(model, kind):
    layout = LAYOUTS[f"{model}-fsdp"]

    def decorate(norm):
        def hook(grads, index=None):
            del index
            return jax.tree.map(lambda g: g / norm(grads), grads)

        fun = gradaccum.accumulate(
            layouts.loss_of(**layout.operators()),
            microbatches=2,
            **layout.options(),
            **{kind: hook},
        )
        with jax.set_mesh(layouts.mesh_of(layouts.MESHES[layout.mesh])):
            return jax.eval_shape(jax.grad(fun), layouts.init(), layouts.make_batch())

    match = (
        rf"accumulate: {kind} makes the gradient of params\['bias'\], params\['scale'\], .*differ "
        r"between the devices of the model axis mp.*global_norm\(grads, specs, 'mp'\)"
    )
    with pytest.raises(ValueError, match=match):
        decorate(optax.tree.norm)
    specs = layouts.specs_of(model="mp")
    assert decorate(lambda grads: global_norm(grads, specs, "mp"))["up"].shape == (8, 16)
