"""What computes with an `Unreduced`, which raises, and what it goes through."""

import copy

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from unreduced_rows import MESH, ON_MESH, ROWS, N, case, fun, is_rows, jit, leaves_of, loss_fn

import gradaccum
from gradaccum import audit

# --- Nothing computes with it --------------------------------------------------------------------

# Those that pair gradients with parameters fail on the structure, in JAX's words.
BEFORE_THE_MEAN = {
    "clip_by_global_norm": (optax.clip_by_global_norm(1.0), TypeError),
    "clip": (optax.clip(1.0), TypeError),
    "clip_by_block_rms": (optax.clip_by_block_rms(1.0), TypeError),
    "scale": (optax.scale(0.5), TypeError),
    "scale_by_schedule": (optax.scale_by_schedule(lambda step: 0.5), TypeError),
    "centralize": (optax.centralize(), TypeError),
    "zero_nans": (optax.zero_nans(), TypeError),
    "masked scale": (optax.masked(optax.scale(0.5), {"w1": 1, "b1": 0, "w2": 0}), TypeError),
    "sgd": (optax.sgd(0.1), TypeError),
    "scale_by_adam": (optax.scale_by_adam(), (TypeError, ValueError)),
    "add_decayed_weights": (optax.add_decayed_weights(0.1), (TypeError, ValueError)),
    "MultiSteps": (optax.MultiSteps(optax.sgd(0.1), 2), (TypeError, ValueError)),
    "cast": (
        optax.stateless(lambda g, _: optax.tree.cast(g, jnp.bfloat16)),
        (TypeError, ValueError),  # NumPy's ValueError, of a guard that is still its own
    ),
    "add": (optax.stateless(lambda g, _: optax.tree.add(g, g)), TypeError),
    "minus": (optax.stateless(lambda g, _: jax.tree.map(lambda x: -x, g)), TypeError),
    "mean of rows": (
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x.mean(0), g)),
        TypeError,
    ),
}


WAYS = {
    "eager": lambda update, params, batch: update(fun(params, batch)[1]),
    "from jit": lambda update, *_: update(case()[2][1]),
    "jit": lambda update, *_: jax.jit(update)(case()[2][1]),
    "one jit": lambda update, *args: jax.jit(lambda p, b: update(fun(p, b)[1]))(*args),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BEFORE_THE_MEAN)
def test_what_computes_with_it_raises(name, way):
    """Before the mean or in it: on arrays, on what a jit returned, on tracers of both."""
    tx, error = BEFORE_THE_MEAN[name]
    params, batch, _, _ = case()
    state = tx.init(params)

    def update(grads):
        return gradaccum.mean(tx.update(grads, state, params)[0])

    with pytest.raises(error):
        WAYS[way](update, params, batch)


def test_a_cast_is_found_in_the_mean():
    _, _, (_, grads), _ = case()
    cast = jax.jit(lambda g: optax.tree.cast(g, jnp.bfloat16))(grads)
    message = (
        r"mean: \['b1'\], \['w1'\], \['w2'\]: the parts of this .* inside MultiSteps, or after"
    )
    with pytest.raises(TypeError, match=message):
        gradaccum.mean(cast)


def test_trees_of_masks_and_labels_select_leaves():
    params, _, (_, grads), (_, want) = case()
    mask = {"w1": True, "b1": False, "w2": True}
    selected = optax.masked(optax.identity(), mask)
    got, _ = selected.update(grads, selected.init(params))
    assert all(is_rows(x) for x in leaves_of(got))
    assert_close(gradaccum.mean(got), want)

    half = optax.chain(gradaccum.all_reduce_mean("dp"), optax.scale(0.5))
    whole = gradaccum.all_reduce_mean("dp")
    both = optax.multi_transform(
        {"a": half, "b": whole}, jax.tree.map(lambda m: "a" if m else "b", mask)
    )
    got, _ = both.update(grads, both.init(params))
    assert_close(got, {n: g / 2 if mask[n] else g for n, g in want.items()})


@pytest.mark.parametrize("how", ["mean", "all_reduce_mean"])
def test_leaves_that_were_set_to_zero_leave_the_others_alone(how):
    """Frozen by a mask: zeros, of weight 0."""
    params, _, (_, grads), (_, want) = case()
    frozen = optax.masked(optax.set_to_zero(), {"w1": False, "b1": True, "w2": False})
    grads, _ = frozen.update(grads, frozen.init(params))
    if how == "mean":
        got = gradaccum.mean(grads)
    else:
        tx = gradaccum.all_reduce_mean("dp")
        got, _ = tx.update(grads, tx.init(params))
    assert_close(got, want | {"b1": np.zeros(5)})


# --- What it goes through ------------------------------------------------------------------------


def through_cond(tree, flag):
    zeros = lambda: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    return jax.lax.cond(flag, lambda: tree, zeros)


THROUGH = {
    "jit": jax.jit(lambda tree: tree),
    "jit with shardings": jax.jit(lambda tree: tree, in_shardings=ROWS, out_shardings=ROWS),
    "donated": lambda tree: jax.jit(lambda x: x, donate_argnums=0)(jax.tree.map(jnp.copy, tree)),
    "cond": lambda tree: jax.jit(through_cond)(tree, True),
    "constraint": jax.jit(lambda tree: jax.lax.with_sharding_constraint(tree, ROWS)),
    "checkpoint": jax.checkpoint(lambda tree: tree),
    "stop_gradient": jax.lax.stop_gradient,
    "device_put": lambda tree: jax.device_put(tree, ROWS),
    "device_put whole": lambda tree: jax.device_put(tree, NamedSharding(MESH, P())),
    "device_get": jax.device_get,
    "deepcopy": copy.deepcopy,
    "flat": lambda tree: jax.tree.unflatten(*jax.tree.flatten(tree)[::-1]),
    "as NumPy": lambda tree: jax.tree.map(np.asarray, tree),
}


@pytest.mark.parametrize("name", THROUGH)
def test_it_passes_through(name):
    _, _, tree, want = case()
    assert_close(gradaccum.mean(THROUGH[name](tree)), want)


def test_a_branch_of_zeros_has_a_mean_of_zeros():
    _, _, tree, want = case()
    got = gradaccum.mean(jax.jit(through_cond)(tree, False))
    assert_close(got, jax.tree.map(np.zeros_like, want))


def test_shapes_alone():
    params, batch, _, want = case()
    shapes = jax.eval_shape(fun, params, batch)
    assert shapes[1]["w1"].sum.shape == (N, 4, 5)
    means = jax.eval_shape(gradaccum.mean, shapes)
    assert jax.tree.map(np.shape, want) == jax.tree.map(lambda x: x.shape, means)


def test_stacked_ones_have_their_means_at_once():
    """Outputs of a scan: one reduction of all."""
    params, batch, _, _ = case()
    batches = jax.tree.map(lambda x: x.reshape(2, 32, *x.shape[1:]), batch)
    stacked = jit(lambda p, bs: jax.lax.scan(lambda c, b: (c, fun(p, b)), 0, bs)[1])(
        params, batches
    )
    mean = jax.jit(jax.vmap(gradaccum.mean))
    want = [helpers.reference("dense", "mean", params, jax.tree.map(lambda x, i=i: x[i], batches))
            for i in range(2)]  # fmt: skip
    assert_close(mean(stacked), jax.tree.map(lambda *x: np.stack(x), *want))
    audit.assert_one_reduction(mean, stacked, axis_name="dp", mesh=MESH)
    assert [row.kind for row in audit.collectives(mean, stacked, mesh=MESH)] == ["all-reduce"]


def test_it_is_carried_by_a_scan():
    params, batch, _, want = case()
    batches = jax.tree.map(lambda x: x.reshape(4, 16, *x.shape[1:]), batch)

    @jax.jit
    def loop(params, batches):
        first = fun(params, jax.tree.map(lambda x: x[0], batches))
        start = jax.tree.map(jnp.zeros_like, first)
        add = lambda total, b: (gradaccum.add(total, fun(params, b)), None)  # noqa: E731
        return gradaccum.mean(jax.lax.scan(add, start, batches)[0])

    assert_close(loop(params, batches), want)
    audit.assert_one_reduction(loop, params, batches, axis_name="dp", mesh=MESH)


def test_vmap_over_models():
    params, batch, _, want = case()
    by_value = gradaccum.unreduced_value_and_grad(loss_fn, fused=False, microbatches=2, **ON_MESH)
    several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    got = jit(jax.vmap(lambda p: gradaccum.mean(by_value(p, batch))))(several)
    assert_close(jax.tree.map(lambda x: x[0], got), want)
    double = helpers.reference("dense", "mean", jax.tree.map(lambda x: 2 * x, params), batch)
    assert_close(jax.tree.map(lambda x: x[1], got), double)
