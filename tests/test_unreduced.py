"""`Unreduced`, `mean` and `add`: what computes with one, what it goes through, what it refuses."""

import copy
import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType as Kind

import gradaccum
from gradaccum import Unreduced, audit

jit = layouts.jit
N = 8
MESH = helpers.data_mesh(N)
ROWS = NamedSharding(MESH, P("dp"))
ON_MESH = {"axis_name": "dp", "mesh": MESH}


def rows(*shape, dtype=np.float32, seed=0):
    return helpers.normal(seed, N, *shape).astype(dtype)


def weights(seed=0, dtype=np.float32):
    """Returns unequal whole weights, one of them 0."""
    return np.random.default_rng(seed).permutation(N).astype(dtype)


def loss_fn(params, batch):
    return jnp.mean(helpers.dense(params, batch))


fun = gradaccum.unreduced_value_and_grad(loss_fn, **ON_MESH)


@functools.cache
def case():
    """Returns parameters, a batch, their loss and gradients unreduced, and these in float64."""
    params, batch = helpers.init("dense", np.float32), helpers.make_batch()
    want = helpers.reference("dense", "mean", params, batch)
    return params, batch, jit(fun)(params, batch), want


def is_rows(x):
    return isinstance(x, Unreduced)


def leaves_of(tree):
    return jax.tree.leaves(tree, is_leaf=is_rows)


# --- Made by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_name", ["dp", ("dp",), None], ids=["name", "tuple", "none"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64", "int32"])
def test_a_mean_of_rows_made_by_hand(dtype, axis_name):
    sums, weight = (rows(3) * 10).astype(dtype), weights()
    if axis_name is None:
        sums, weight = sums[:1], weight[:1]
    with jax.set_mesh(MESH):
        got = gradaccum.mean(Unreduced(sum=sums, weight=weight, axis_name=axis_name))
    wide = np.complex128 if dtype == "complex64" else np.float64
    assert got.dtype == ("float32" if dtype == "int32" else dtype)
    assert_close(got, sums.astype(wide).sum(0) / weight.sum())


@pytest.mark.parametrize("weight", [10_000.0, 0.125], ids=["beyond float16", "a fraction"])
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_weights_that_the_sums_dtype_does_not_hold(dtype, weight):
    sums = np.full(N, 1000, dtype)
    with jax.set_mesh(MESH):
        got = gradaccum.mean(Unreduced(sums, np.full(N, weight, np.float32), "dp"))
    assert_close(got, np.float64(1000 / weight), within=helpers.TOLERANCE["float16"])


def test_each_leaf_has_its_own_weight():
    tree = {n: Unreduced(rows(2, seed=i), weights(i), "dp") for i, n in enumerate("ab")}
    tree["c"] = Unreduced(rows(2), np.zeros(N, np.float32), "dp")
    with jax.set_mesh(MESH):
        got = gradaccum.mean(tree)
    want = {n: rows(2, seed=i).sum(0) / weights(i).sum() for i, n in enumerate("ab")}
    assert_close(got, want | {"c": np.zeros(2)})


def test_a_tree_without_leaves():
    assert gradaccum.mean({"a": None}) == {"a": None}
    assert gradaccum.add({}, {}) == {}


def test_any_leaf_may_know_the_mesh():
    """One made by hand knows none; beside one that was given it, in any order, it needs none."""
    _, _, (loss, _), want = case()
    by_hand = Unreduced(rows(), np.ones(N, np.float32), "dp")
    for tree in ([loss, by_hand], [by_hand, loss]):
        got = gradaccum.mean(tree)
        assert_close([x for x, u in zip(got, tree, strict=True) if u is loss], [want[0]])


def test_it_says_what_it_is():
    _, _, (loss, grads), _ = case()
    assert repr(loss) == "Unreduced(float32[] in 8 rows over 'dp', awaiting gradaccum.mean)"
    assert "w1': Unreduced(float32[4,5] in 8 rows over 'dp', awaiting" in str(grads)
    by_hand = Unreduced(np.ones((1, 2), np.float16), np.ones(1, np.float32), None)
    assert repr(by_hand) == "Unreduced(float16[2] in 1 rows over no axis, awaiting gradaccum.mean)"
    seen = []
    jax.jit(lambda x: seen.append(repr(x)))(loss)
    assert seen == [repr(loss)]
    specs = jax.tree.map(lambda x: P("dp"), loss)
    assert "P" in repr(specs)  # JAX makes one of any leaves


# --- add -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "reduction"), [("eager", "tokens"), ("jit", "tokens"), ("jit", "mean")]
)
def test_two_calls_add_up_to_both_batches(how, reduction):
    """Of unequal weights, 40 and 24 examples; all leaves of the sum share one weight."""
    params, batch, _, _ = case()
    run = jit if how == "jit" else lambda f: f
    weigh = {"weight_fn": helpers.count_tokens} if reduction == "tokens" else {}
    call = gradaccum.unreduced_value_and_grad(
        helpers.loss_of("dense", reduction), **weigh, **ON_MESH
    )
    first, second = (jax.tree.map(lambda x, s=s: x[s], batch) for s in (np.s_[:40], np.s_[40:]))
    shared = []

    def both(params):
        total = gradaccum.add(call(params, first), call(params, second))
        shared.append(len({id(x.weight) for x in leaves_of(total)}))
        return total

    total = run(both)(params)
    assert shared == [1]
    want = helpers.reference("dense", reduction, params, batch)
    assert_close(gradaccum.mean(total), want)
    counted = batch["mask"].sum() if weigh else helpers.B
    assert float(total[0].weight.sum()) == counted
    once = jax.tree.leaves(gradaccum.mean(call(params, first)))
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(once, jax.tree.leaves(want), strict=True))


def hand(*shape, axis_name="dp", n=N, **options):
    return Unreduced(np.ones((n, *shape), np.float32), np.ones(n, np.float32), axis_name, **options)


NOT_ADDED = {
    "structure": ({"a": hand()}, {"b": hand()}, ValueError, r"add: the trees differ in structure"),
    "shape": (
        {"a": hand(3), "b": hand(2)},
        {"a": hand(4), "b": hand(2)},
        ValueError,
        r"add: rows of different shapes: \['a'\] \(8, 3\) and \(8, 4\); required: the same",
    ),
    "rows": (
        hand(),
        hand(n=4),
        ValueError,
        r"shapes: the tree \(8,\) and \(4,\)",
    ),
    "axis": (
        hand(),
        hand(axis_name=("r", "d")),
        ValueError,
        r"add: values of different data axes: a over 'dp', b over \('r', 'd'\)",
    ),
    "plain": ({"a": hand()}, {"a": np.ones(8)}, TypeError, r"\['a'\] is an array float64\[8\]"),
    "touched": (
        [hand(), hand()],
        [hand(), jax.tree.map(lambda x: x[0], hand())],
        TypeError,
        r"add: \[1\]: the parts of this gradaccum.Unreduced do not belong together",
    ),
}


@pytest.mark.parametrize("name", NOT_ADDED)
def test_what_does_not_add_up(name):
    a, b, error, message = NOT_ADDED[name]
    with pytest.raises(error, match=message):
        gradaccum.add(a, b)


def test_a_mean_and_a_sum_do_not_add_up():
    params, batch, _, _ = case()
    options = {"has_aux": True, "aux_accumulator": Kind.SUM, **ON_MESH}
    with_aux = gradaccum.unreduced_value_and_grad(lambda p, b: (loss_fn(p, b), 1.0), **options)
    (loss, count), _ = with_aux(params, batch)
    assert float(gradaccum.mean(count)) == N
    with pytest.raises(ValueError, match="add: "):
        gradaccum.add(loss, count)


# --- What mean refuses ---------------------------------------------------------------------------

NO_MEAN = {
    "plain": (
        {"w": np.ones((3, 2), np.float32), "v": hand(), "s": 1.0},
        TypeError,
        r"mean: \['s'\] is a float, \['w'\] is an array float32\[3, 2\]; every leaf must be a",
    ),
    "plain alone": (np.ones(8, np.float32), TypeError, r"mean: the tree is an array float32\[8\]"),
    "axes": (
        {"a": hand(), "b": hand(axis_name=None, n=1)},
        ValueError,
        r"mean: values of different data axes: \['a'\] over 'dp', \['b'\] over None. Give the same",
    ),
    "rows": (hand(n=4), ValueError, r"an Unreduced of 4 rows; the data axes \(dp=8\) need 8"),
    "unknown axis": (hand(axis_name="q"), ValueError, r"'q', but the mesh's axes are \(dp=8\)"),
    "one row of several": (
        jax.tree.map(lambda x: x[0], hand(3)),
        TypeError,
        r"mean: the tree: the parts of this gradaccum.Unreduced do not belong together",
    ),
}


@pytest.mark.parametrize("name", NO_MEAN)
def test_what_has_no_mean(name):
    tree, error, message = NO_MEAN[name]
    with jax.set_mesh(MESH), pytest.raises(error, match=message):
        gradaccum.mean(tree)


def test_rows_of_another_mesh_are_refused():
    _, _, tree, _ = case()
    message = r"mesh=\(dp=8\) was given .* jax.set_mesh is \(dp=4\)"
    with jax.set_mesh(helpers.data_mesh(4)), pytest.raises(ValueError, match=message):
        gradaccum.mean(tree)


def test_without_a_mesh_the_remedy_is_one_that_mean_has():
    with pytest.raises(ValueError, match=r"mean: no mesh, and 8 devices") as e:
        gradaccum.mean(hand())
    assert "jax.set_mesh(mesh)" in str(e.value)
    assert "Give mesh=" not in str(e.value)


@pytest.mark.parametrize(
    "weight",
    [np.ones(N, np.int32), np.ones(N), np.float32(1), [1.0] * N],
    ids=["int32", "float64", "scalar", "list"],
)
def test_a_weight_made_wrong_is_taken_or_named(weight):
    """Nothing has computed with it, so no message may say so."""
    try:
        rows = Unreduced(np.ones(N, np.float32), weight, "dp")
    except (TypeError, ValueError) as e:
        assert "weight" in str(e)  # noqa: PT017
    else:
        with jax.set_mesh(MESH):
            assert float(gradaccum.mean(rows)) == 1


def test_parts_that_cannot_belong_together_are_refused_where_they_are_made():
    message = r"Unreduced: sum has shape \(8, 3\) and weight \(4,\); required: \[n, \*shape\]"
    with pytest.raises(ValueError, match=message):
        Unreduced(np.ones((N, 3), np.float32), np.ones(4, np.float32), "dp")
    with pytest.raises(TypeError, match=r"sum is an array bool\[8\]; it must hold numbers"):
        Unreduced(np.ones(N, bool), np.ones(N, np.float32), "dp")


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
