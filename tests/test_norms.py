"""`global_norm` and `clip_by_global_norm` inside a `shard_map` are optax's of the whole arrays."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from layouts import jit, mesh_of
from model_axis import modes
from norm_runs import SPECS, clip_of, norm_of, optax_clip, run, tree_of

from gradaccum import audit
from gradaccum.tensor_parallel import clip_by_global_norm, global_norm

# --- Against optax, of the whole arrays ----------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "m"),
    [("float32", 1), ("float32", 2), ("float32", 4)]
    + [(dtype, 4) for dtype in ("bfloat16", "float16", "complex64")],
)
@modes
def test_the_norm_is_optaxs(typed, dtype, m):
    tree = tree_of(dtype)
    norm = norm_of(tree, typed=typed, mp=m)
    wide = {n: np.asarray(x).astype(complex).ravel() for n, x in tree.items()}
    assert norm.dtype == "float32"
    np.testing.assert_allclose(norm, np.linalg.norm(np.concatenate(list(wide.values()))), rtol=1e-6)
    np.testing.assert_allclose(norm, optax.tree.norm(tree), rtol=1e-2 if "16" in dtype else 1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 1e3], ids=["clips", "keeps"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@modes
def test_clipping_is_optaxs(typed, dtype, max_norm):
    tree = tree_of(dtype)
    got = clip_of(tree, max_norm, typed=typed)
    assert {x.dtype for x in got.values()} == {jnp.dtype(dtype)}
    if max_norm == 1e3:
        for name in tree:
            np.testing.assert_array_equal(got[name], tree[name])
    else:
        helpers.assert_close(got, optax_clip(tree, max_norm))
        assert abs(float(optax.tree.norm(got)) - max_norm) < 1e-2 * max_norm


@modes
def test_float64_stays(typed):
    with jax.enable_x64(True):
        tree = tree_of("float64") | {"norm": tree_of("float32")["norm"]}
        norm = norm_of(tree, typed=typed)
        assert norm.dtype == "float64"
        np.testing.assert_allclose(norm, optax.tree.norm(tree), rtol=1e-12)
        single = {name: x.astype(np.float32) for name, x in tree.items()}
        assert norm_of(single, typed=typed).dtype == "float32"


@modes
def test_integers(typed):
    tree = {"w": np.arange(8, dtype=np.int32), "s": np.int8(-100)}
    norm = norm_of(tree, {"w": P("mp"), "s": P()}, typed=typed)
    np.testing.assert_allclose(norm, np.sqrt(np.sum(np.arange(8) ** 2) + 100**2), rtol=1e-6)


def test_squares_of_half_precision_do_not_overflow():
    tree = tree_of("float16", 1e3)  # their squares are beyond float16's 65,504
    want = np.sqrt(sum(np.sum(np.asarray(x, float) ** 2) for x in tree.values()))
    np.testing.assert_allclose(norm_of(tree), want, rtol=1e-6)


@modes
def test_zero(typed):
    zeros = jax.tree.map(jnp.zeros_like, tree_of())
    assert norm_of(zeros, typed=typed) == 0
    for x in clip_of(zeros, 1.0, typed=typed).values():
        np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=str)
@modes
def test_one_entry_that_is_not_finite_shows_as_in_optax(typed, bad):
    """On one device only: all know of it, so that replicated leaves stay equal."""
    tree = tree_of()
    tree["up"] = tree["up"].at[1, 5].set(bad)
    np.testing.assert_array_equal(norm_of(tree, typed=typed), optax.tree.norm(tree))
    got, want = clip_of(tree, 1.0, typed=typed), optax_clip(tree, 1.0)
    for name in tree:
        np.testing.assert_array_equal(got[name], want[name])


@modes
def test_no_leaves(typed):
    assert norm_of({}, {}, typed=typed) == 0
    assert clip_of({}, 1.0, {}, typed=typed) == {}


def test_masked_leaves_take_no_part():
    tree = tree_of()
    clip = optax.masked(clip_by_global_norm(0.5, SPECS, "mp"), {n: n != "up" for n in SPECS})
    got = run(lambda g: clip.update(g, clip.init(g))[0], tree)
    np.testing.assert_array_equal(got.pop("up"), tree.pop("up"))
    helpers.assert_close(got, optax_clip(tree, 0.5))


# --- Layouts -------------------------------------------------------------------------------------

FSDP, BOTH, OTHER = "fsdp", ("fsdp", "mp"), ("mp", "fsdp")
LAYOUTS = {  # and the number of different sets of axes
    "two axes, each alone": ({"up": P(None, "mp"), "down": P(FSDP), "norm": P()}, 2),
    "two axes, and one": ({"up": P(None, OTHER), "down": P(FSDP), "norm": P()}, 2),
    "two axes, in two dimensions": ({"up": P(None, "mp"), "w": P("fsdp", "mp")}, 2),
    "two axes, in either order": ({"up": P(None, BOTH), "down": P(OTHER), "norm": None}, 1),
}


def tree_over(specs):
    leaves = tree_of() | {"w": helpers.normal(1, 4, 8).astype(np.float32)}
    return {name: leaves[name] for name in specs}


@pytest.mark.parametrize("case", LAYOUTS)
@modes
def test_leaves_over_several_axes(typed, case):
    specs, _ = LAYOUTS[case]
    tree = tree_over(specs)
    options = {"specs": specs, "axis_name": ("fsdp", "mp"), "fsdp": 2, "mp": 4, "typed": typed}
    np.testing.assert_allclose(norm_of(tree, **options), optax.tree.norm(tree), rtol=1e-6)
    helpers.assert_close(clip_of(tree, 0.5, **options), optax_clip(tree, 0.5))


@modes
def test_a_data_axis_with_its_own_gradients_is_left_alone(typed):
    """Each data device has other gradients, and gets its own norm of them."""
    tree = {"w": helpers.normal(0, 2, 8).astype(np.float32)}
    fun = functools.partial(global_norm, specs={"w": P(None, "mp")}, axis_name="mp")
    norms = run(
        lambda t: fun(t)[None], tree, {"w": P("dp", "mp")}, P("dp"), typed=typed, dp=2, mp=4
    )
    np.testing.assert_allclose(norms, np.linalg.norm(tree["w"], axis=1), rtol=1e-6)


@modes
def test_prefixes(typed):
    tree = {"layer": {"w": np.ones((2, 4), np.float32), "v": np.ones((1, 8), np.float32)}}
    norm = norm_of(tree, {"layer": P(None, "mp")}, typed=typed)
    np.testing.assert_allclose(norm, 4, rtol=1e-6)
    replicated = functools.partial(global_norm, specs=None, axis_name="mp")
    assert run(replicated, tree, {"layer": P()}, P(), typed=typed) == 4


# --- Steps ---------------------------------------------------------------------------------------


def steps(tx, params):
    state = tx.init(params)
    for i in range(3):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 3)) * 10, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@modes
def test_in_a_chain(typed):
    """Three steps inside the shard_map equal those of the whole arrays."""
    inside = optax.chain(clip_by_global_norm(1.0, SPECS, "mp"), optax.adamw(0.1))
    outside = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    got = run(functools.partial(steps, inside), tree_of(), typed=typed)
    helpers.assert_close(got, jit(functools.partial(steps, outside))(tree_of()), within=1e-4)


def test_eagerly():
    tree = {"w": np.ones(8, np.float32)}
    got = clip_of(tree, 1.0, {"w": P("mp")}, compiled=False)
    helpers.assert_close(got, optax_clip(tree, 1.0))


@modes
def test_its_gradient(typed):
    """A penalty on the norm, inside the loss."""
    specs = {name: spec or P() for name, spec in SPECS.items()}
    fun = jax.grad(functools.partial(global_norm, specs=SPECS, axis_name="mp"))
    got = run(fun, tree_of(), specs, typed=typed)
    helpers.assert_close(got, jax.grad(optax.tree.norm)(tree_of()))


def test_t13_lamb_belongs_outside():
    """Its trust ratio is of whole leaves: of a shard it is another one. Outside, sharded, right."""
    tx = optax.lamb(0.1)
    params = tree_of()
    params["up"] = params["up"].at[:, :2].multiply(10)
    want = jit(functools.partial(steps, tx))(params)
    inside = run(functools.partial(steps, tx), params)
    with pytest.raises(AssertionError, match=r"'down'.: off by"):
        helpers.assert_close(inside, want, within=1e-2)
    helpers.assert_close(inside["norm"], want["norm"])  # replicated: whole on each device
    mesh = mesh_of({"mp": 4})
    place = {n: jax.NamedSharding(mesh, s or P()) for n, s in SPECS.items()}
    placed = jax.device_put(params, place)
    outside = jit(functools.partial(steps, tx), out_shardings=place)(placed)
    assert outside["up"].sharding.spec == P(None, "mp")
    helpers.assert_close(outside, want, within=1e-4)
    assert "optax.lamb" in clip_by_global_norm.__doc__


# --- Collectives ---------------------------------------------------------------------------------


@modes
def test_one_all_reduce(typed):
    specs = {name: spec or P() for name, spec in SPECS.items()}
    clip = clip_by_global_norm(1.0, SPECS, "mp")
    for fun, out in (
        (functools.partial(global_norm, specs=SPECS, axis_name="mp"), P()),
        (lambda g: clip.update(g, clip.init(g))[0], specs),
    ):
        options = {"in_specs": (specs,), "out_specs": out, "check_vma": typed}
        sharded = jax.shard_map(fun, mesh=mesh_of({"dp": 2, "mp": 4}), **options)
        rows = audit.collectives(jit(sharded), tree_of())
        found = [(r.kind, r.axes, r.dtype, r.bytes, r.executions) for r in rows]
        assert found == [("all-reduce", ("mp",), "f32", 4, 1)]


@pytest.mark.parametrize("case", LAYOUTS)
def test_one_all_reduce_for_each_set_of_axes(case):
    specs, sets = LAYOUTS[case]
    tree = tree_over(specs)
    fun = functools.partial(global_norm, specs=specs, axis_name=("fsdp", "mp"))
    placed = {n: s or P() for n, s in specs.items()}
    options = {"in_specs": (placed,), "out_specs": P(), "check_vma": False}
    sharded = jax.shard_map(fun, mesh=mesh_of({"fsdp": 2, "mp": 4}), **options)
    rows = audit.collectives(jit(sharded), tree)
    assert [(r.kind, r.bytes) for r in rows] == [("all-reduce", 4)] * sets


def test_an_infinite_max_norm_keeps_all():
    got = clip_of(tree_of(), float("inf"))
    for name, x in tree_of().items():
        np.testing.assert_array_equal(got[name], x)
