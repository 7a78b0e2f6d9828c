"""`Unreduced`, `mean` and `add`: made by hand, added up, and what has no mean."""

import helpers
import jax
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType as Kind
from unreduced_rows import MESH, ON_MESH, N, case, hand, jit, leaves_of, loss_fn, rows, weights

import gradaccum
from gradaccum import Unreduced

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
