"""allreduce, noop, bf16_compress, fp16_compress: values, range, what travels, what is refused."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import hooks
from gradaccum._means import Awaited

N, D = 8, 48
HALF = {"bf16": (hooks.bf16_compress(), 2.0**-8), "fp16": (hooks.fp16_compress(), 2.0**-11)}
half = pytest.mark.parametrize(("hook", "unit"), HALF.values(), ids=list(HALF))


@functools.cache
def mesh_of(*sizes):
    return layouts.mesh_of(dict(sizes or (("dp", N),)))


def unreduced(rows, weights=None, axis_name="dp", mesh=None):
    mesh = mesh or mesh_of()
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P(axis_name)))  # noqa: E731
    weights = place(jnp.ones(N) if weights is None else jnp.asarray(weights))
    make = functools.partial(gradaccum.Unreduced, awaited=Awaited(mesh=mesh))
    return jax.tree.map(lambda x: make(place(x), weights, axis_name), rows)


def call(hook, tree):
    return layouts.jit(lambda u: hook(u, ())[0])(tree)


def exact(rows, weights):
    wide = lambda x: np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)  # noqa: E731
    return jax.tree.map(lambda x: wide(x).sum(0) / np.sum(weights), rows)


def random_rows(step, *shape):
    return jnp.asarray(helpers.normal(step, N, *shape), jnp.float32)


@half
def test_the_error_is_that_of_rounding_in_each_of_100_steps(hook, unit):
    """n roundings of the rows, and n of the sums: each of half a unit of what is rounded."""
    weights = np.arange(N, dtype=np.float32)  # one row has none
    step, worst, off = layouts.jit(lambda u: hook(u, ())[0]), [], []
    for i in range(100):
        rows = random_rows(i, D, 4) * weights[:, None, None]
        error = np.asarray(step(unreduced(rows, weights)), np.float64) - exact(rows, weights)
        allowed = 2 * unit * np.abs(np.asarray(rows, np.float64)).sum(0) / weights.sum()
        worst.append(np.max(np.abs(error) / (allowed + unit * np.abs(rows).max() / weights.sum())))
        off.append(np.abs(error).max())
    assert max(worst) <= 1
    assert max(worst) > 0.05  # it is rounded at all
    assert max(off[50:]) < 2 * max(off[:50])  # and keeps nothing from step to step


@half
def test_one_device_alone_is_rounded_once(hook, unit):
    rows = random_rows(0, D, 4).at[1:].set(0)
    error = np.asarray(call(hook, unreduced(rows)), np.float64) - exact(rows, np.ones(N))
    relative = np.abs(error) / np.abs(exact(rows, np.ones(N)))
    assert 0 < relative.max() <= 1.01 * unit


@pytest.mark.parametrize("size", [1e30, 1e6, 1e-6, 1e-30])
def test_float16_neither_overflows_nor_underflows(size):
    """Its own range ends at 65,504 and 6e-8; a plain cast loses all of these."""
    rows = random_rows(0, D, 4) * np.float32(size)
    got = call(hooks.fp16_compress(), unreduced(rows))
    helpers.assert_close(got, exact(rows, np.ones(N)), within=3e-3)
    with np.errstate(over="ignore"):
        plain = np.asarray(rows).astype(np.float16).astype(np.float32)
    assert not np.any(plain) or not np.all(np.isfinite(plain)) or size == 1e-6
    # Of 64 rows times large weights, as sums over examples are, too.
    weights = np.full(N, 1e4, np.float32)
    got = call(hooks.fp16_compress(), unreduced(rows, weights))
    helpers.assert_close(got, exact(rows, weights), within=3e-3)


def test_each_leaf_has_its_own_scale():
    rows = {"large": random_rows(0, D) * 1e6, "small": random_rows(1, D) * 1e-6}
    got = call(hooks.fp16_compress(), unreduced(rows))
    helpers.assert_close(got, exact(rows, np.ones(N)), within=3e-3)


def test_zeros_stay_zeros():
    got = call(hooks.fp16_compress(), unreduced({"a": jnp.zeros((N, D)), "b": jnp.zeros((N, 0))}))
    assert got["b"].shape == (0,)
    assert not np.any(got["a"])


@half
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_shows(hook, unit, bad):
    rows = {"a": random_rows(0, D).at[3, 5].set(bad), "b": random_rows(1, D)}
    got = call(hook, unreduced(rows))
    assert not np.isfinite(got["a"][5])
    helpers.assert_close(got["b"], exact(rows, np.ones(N))["b"], within=2e-2)


MIXED = {
    "matrix": (N, 4, 6),
    "scalar": (N,),
    "none": None,
    "integers": np.arange(N * 3, dtype=np.int32).reshape(N, 3),
    "complex": (helpers.normal(1, N, 3) + 1j * helpers.normal(2, N, 3)).astype(np.complex64),
    "bfloat16": (N, 5),
}


def mixed_rows():
    def make(name, x):
        if not isinstance(x, tuple):
            return None if x is None else jnp.asarray(x)
        return random_rows(3, *x[1:]).astype("bfloat16" if name == "bfloat16" else "float32")

    return {name: make(name, x) for name, x in MIXED.items()}


@pytest.mark.parametrize("hook", [hooks.allreduce(), *(h for h, _ in HALF.values())])
def test_a_tree_of_all_kinds(hook):
    rows = mixed_rows()
    got = call(hook, unreduced(rows))
    want = exact(rows, np.ones(N))
    assert got.pop("none") is None
    assert {n: str(x.dtype) for n, x in got.items()} == {
        "matrix": "float32",
        "scalar": "float32",
        "integers": "float32",
        "complex": "complex64",
        "bfloat16": "bfloat16",
    }
    for name, x in got.items():
        exactly = name in ("scalar", "integers", "complex") or isinstance(hook, hooks.allreduce)
        within = 2e-2 if not exactly or name == "bfloat16" else 1e-6
        helpers.assert_close(np.asarray(x, want[name].dtype), want[name], within=within)


def test_noop_is_each_devices_own_mean_and_sends_nothing():
    rows, weights = random_rows(0, D), np.arange(1, N + 1, dtype=np.float32)
    tree = unreduced(rows, weights)
    program = layouts.jit(lambda u: hooks.noop()(u, ())[0])
    assert not gradaccum.audit.collectives(program, tree, mesh=mesh_of()).rows
    for shard in program(tree).addressable_shards:
        i = list(mesh_of().devices.flat).index(shard.device)
        np.testing.assert_allclose(shard.data, rows[i] / weights[i], rtol=1e-6)


def test_noop_on_one_axis_takes_the_mean_over_the_other():
    axes = ("replica", "fsdp")
    mesh = mesh_of(("replica", 2), ("fsdp", 4))
    rows = random_rows(0, D)
    tree = unreduced(rows, axis_name=axes, mesh=mesh)
    program = layouts.jit(lambda u: hooks.noop(axis_name="replica")(u, ())[0])
    report = gradaccum.audit.collectives(program, tree, mesh=mesh)
    assert {row.axes for row in report.rows} == {("fsdp",)}
    for shard in program(tree).addressable_shards:
        i = list(mesh.devices.flat).index(shard.device) // 4
        np.testing.assert_allclose(shard.data, np.mean(rows[4 * i : 4 * i + 4], 0), rtol=1e-5)


def test_noop_has_no_type():
    def local(x):
        u = gradaccum.Unreduced(x, jax.lax.pcast(jnp.ones(1), "dp", to="varying"), "dp")
        return hooks.noop()(u, ())[0]

    region = jax.shard_map(local, mesh=mesh_of(), in_specs=P("dp"), out_specs=P())
    with pytest.raises(TypeError, match="noop: inside a shard_map with check_vma=True"):
        jax.eval_shape(region, jax.ShapeDtypeStruct((N, 3), jnp.float32))


def test_what_travels():
    """In float16 the matrices, in full all else. (A CPU adds bfloat16 in float32.)"""
    tree = unreduced(mixed_rows())
    program = layouts.jit(lambda u: hooks.fp16_compress()(u, ())[0])
    report = gradaccum.audit.collectives(program, tree, mesh=mesh_of())
    sizes = {row.dtype: row.bytes for row in report.rows if row.dtype == "f16"}
    assert sizes == {"f16": 2 * (4 * 6 + 5)}
    gradaccum.audit.assert_one_reduction(program, tree, axis_name="dp", mesh=mesh_of())
    lowered = layouts.jit(lambda u: hooks.bf16_compress()(u, ())[0]).lower(tree).as_text()
    reduced = [line for line in lowered.splitlines() if "(tensor<" in line and "-> tensor<" in line]
    assert sum("tensor<4x6xbf16>) -> tensor<4x6xbf16>" in line for line in reduced) == 1


def test_an_axis_that_also_splits_the_gradient():
    """Scattered over both, compressed on one: the order of the two matters, so it is refused."""
    layout = layouts.LAYOUTS["hsdp-gradients-over-both"]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh])
    grads = jax.eval_shape(
        gradaccum.unreduced_value_and_grad(layouts.loss_of(), mesh=mesh, **layout.options()),
        layouts.init(),
        layouts.make_batch(),
    )[1]
    with pytest.raises(ValueError, match=r"axis_name=\('replica',\) is compressed alone.*\(HSDP\)"):
        jax.eval_shape(lambda g: hooks.bf16_compress(axis_name="replica")(g, ()), grads)


def test_hooks_are_values():
    assert hooks.bf16_compress(axis_name="dp") == hooks.bf16_compress("dp")
    assert len({hooks.fp16_compress(), hooks.fp16_compress(), hooks.allreduce()}) == 2
    assert repr(hooks.bf16_compress()) == "bf16_compress(axis_name=None)"
