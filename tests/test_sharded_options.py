"""Sharded parameters beside the other options, and under JAX's transformations and frameworks."""

import functools

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import B, in_float64, init_pair, jit, pair_batch, pair_loss

import gradaccum

WITHIN = 2e-5
SPECS = {"up": P("dp"), "down": P(None, "dp"), "bias": P()}
ZERO, FSDP = {"grad_specs": (SPECS,)}, {"in_specs": (SPECS,)}


@functools.cache
def mesh_of(**sizes):
    return layouts.mesh_of(sizes)


def run(fun=pair_loss, *args, mesh=None, argnums=0, **options):
    """Returns loss and gradients of the decorated loss, on eight devices along dp."""
    mesh = mesh or mesh_of(dp=8)
    f = gradaccum.accumulate(fun, **{"microbatches": 2, "axis_name": "dp", "mesh": mesh} | options)
    return jit(jax.value_and_grad(f, argnums))(*args)


@functools.cache
def expected():
    return in_float64(jax.value_and_grad(pair_loss), init_pair(), pair_batch())


# --- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [ZERO, FSDP], ids=["zero", "fsdp"])
def test_a_sum_is_summed(layout):
    def total(p, batch):
        return pair_loss(p, batch) * batch["x"].shape[0]

    got = run(total, init_pair(), pair_batch(), loss_reduction="sum", **layout)
    helpers.assert_close(got, jax.tree.map(lambda x: x * B, expected()), within=WITHIN)


@pytest.mark.parametrize("layout", [ZERO, FSDP], ids=["zero", "fsdp"])
def test_bfloat16_on_the_wire(layout):
    got = run(pair_loss, init_pair(), pair_batch(), reduce_dtype=jnp.bfloat16, **layout)
    assert {str(g.dtype) for g in jax.tree.leaves(got)} == {"float32"}
    helpers.assert_close(got, expected(), within=2e-2)
    errors = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), got[1], expected()[1])
    assert all(e > WITHIN for e in jax.tree.leaves(errors))  # it is rounded


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [ZERO, FSDP], ids=["zero", "fsdp"])
def test_narrow_parameters(layout, dtype):
    params = init_pair(dtype)
    want = in_float64(jax.value_and_grad(pair_loss), params, pair_batch())
    got = run(pair_loss, params, pair_batch(), **layout)
    assert {g.dtype for g in jax.tree.leaves(got[1])} == {np.dtype(dtype)}
    helpers.assert_close(got[1], want[1])


@pytest.mark.parametrize("layout", ["grad_specs", "in_specs"])
def test_narrow_on_the_wire_is_accumulated_in_float32(layout):
    """In bfloat16, 512 ones stop at 256."""
    fun = lambda w, x: jnp.sum(w[None] * x)  # noqa: E731
    specs = {layout: (P("dp"),)}
    _, grad = run(
        fun, np.ones(8, np.float32), np.ones((4096, 8), np.float32), microbatches=512,
        loss_reduction="sum", reduce_dtype=jnp.bfloat16, **specs,
    )  # fmt: skip
    assert grad.tolist() == [4096] * 8


@pytest.mark.parametrize("layout", [ZERO, FSDP], ids=["zero", "fsdp"])
def test_keys_are_folded_as_for_replicated_parameters(layout):
    """The same dropout masks, one a microbatch."""

    def dropped(p, batch, key):
        keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return pair_loss(p, batch | {"x": batch["x"] * keep})

    args = init_pair(), pair_batch(), jax.random.key(3)
    got, want = (run(dropped, *args, key_argnums=2, **given) for given in (layout, {}))
    helpers.assert_close(got, jax.device_get(want), within=WITHIN)


def test_gradients_of_the_batch_beside_those_of_sharded_parameters():
    want = in_float64(jax.value_and_grad(pair_loss, (0, 1)), init_pair(), pair_batch())
    got = run(pair_loss, init_pair(), pair_batch(), argnums=(0, 1), in_specs=(SPECS, P("dp")))
    layouts.assert_lies(got[1], mesh_of(dp=8), (SPECS, {"x": P("dp"), "y": P("dp")}))
    helpers.assert_close(got, want, within=WITHIN)


def test_gradients_of_the_batch_alone():
    want = in_float64(jax.value_and_grad(pair_loss, 1), init_pair(), pair_batch())
    helpers.assert_close(
        run(pair_loss, init_pair(), pair_batch(), argnums=1, **FSDP), want, within=WITHIN
    )


def test_integers_none_and_static_leaves_among_sharded_ones():
    """Integers are gathered too, and have no gradient; a leading size of B is meant if it is."""

    def fun(p, batch, constants):
        assert p["none"] is None
        assert constants["name"] == "static"
        p = {n: p[n] for n in ("up", "down", "bias")}
        weights = constants["order"].astype(jnp.float32)  # [B]
        return pair_loss(p, batch) * jnp.sin(jnp.sum(weights * constants["scale"]))

    params = init_pair() | {"none": None}
    constants = {"order": np.arange(B), "scale": np.float32(0.1), "name": "static"}
    plain = lambda p, batch: fun(p | {"none": None}, batch, constants)  # noqa: E731
    loss, grads = in_float64(jax.value_and_grad(plain), init_pair(), pair_batch())
    specs = SPECS | {"none": None}, None, {"order": P("dp"), "scale": P(), "name": None}
    f = gradaccum.accumulate(fun, microbatches=2, mesh=mesh_of(dp=8), in_specs=specs)
    got = jit(lambda p, batch: jax.value_and_grad(f)(p, batch, constants))(params, pair_batch())
    helpers.assert_close(got, (loss, grads | {"none": None}), within=WITHIN)


def test_integer_parameters_as_jax_grad():
    def fun(p, batch):
        return pair_loss({n: x for n, x in p.items() if n != "shift"}, batch) + 0 * p["shift"].sum()

    f = gradaccum.accumulate(
        fun, microbatches=2, mesh=mesh_of(dp=8), in_specs=(SPECS | {"shift": P("dp")},)
    )
    grads = jax.grad(f, allow_int=True)(init_pair() | {"shift": np.arange(8)}, pair_batch())
    assert grads.pop("shift").dtype == jax.dtypes.float0
    helpers.assert_close(grads, expected()[1], within=WITHIN)


def test_undifferentiated_the_loss_is_the_same():
    f = gradaccum.accumulate(pair_loss, microbatches=2, mesh=mesh_of(dp=8), **FSDP)
    helpers.assert_close(jit(f)(init_pair(), pair_batch()), expected()[0], within=WITHIN)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_eager_calls(kind):
    """Arrays from the host, and such as lie where they should; through both ways."""
    mesh = layouts.mesh_of({"dp": 8}, kind)
    f = gradaccum.accumulate(pair_loss, microbatches=2, **FSDP)
    with jax.set_mesh(mesh):
        placed = layouts.place(init_pair(), mesh, SPECS)
        for params in (init_pair(), placed):
            got = f.value_and_grad()(params, pair_batch())
            layouts.assert_lies(got[1], mesh, SPECS)
            helpers.assert_close(got, expected(), within=WITHIN)
        helpers.assert_close(jax.value_and_grad(f)(placed, pair_batch()), expected(), within=WITHIN)


def test_one_device_keeps_every_spec():
    got = run(pair_loss, init_pair(), pair_batch(), mesh=mesh_of(dp=1), **FSDP)
    helpers.assert_close(got, expected(), within=WITHIN)


def test_one_device_without_a_mesh_takes_specs_too():
    """An argument with as many rows as the batch is meant, where its spec is given."""

    def loss_fn(params, batch, rows):
        return pair_loss(params, batch) * jnp.mean(rows)

    rows = np.ones(pair_batch()["x"].shape[0], np.float32)
    fun = gradaccum.accumulate(
        loss_fn, microbatches=2, axis_name="dp", in_specs=(P("dp"), P("dp"), P())
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        got = jit(jax.value_and_grad(fun))(init_pair(), pair_batch(), rows)
    helpers.assert_close(got, expected(), within=WITHIN)


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_data_axis_of_one_device_beside_an_automatic_model_axis(kind, check_vma):
    """XLA cannot compile a psum over an axis of one device there."""
    mesh = layouts.mesh_of({"dp": 1, "mp": 2}, kind)
    places = {"up": P(None, "mp"), "down": P("mp"), "bias": P()}
    fun = gradaccum.accumulate(pair_loss, microbatches=2, axis_name="dp", check_vma=check_vma)
    with jax.set_mesh(mesh):
        got = jit(jax.value_and_grad(fun))(layouts.place(init_pair(), mesh, places), pair_batch())
    layouts.assert_lies(got[1], mesh, places)
    helpers.assert_close(got, expected(), within=WITHIN)


# --- Frameworks ----------------------------------------------------------------------------------


class Net(eqx.Module):
    up: jax.Array
    down: jax.Array
    bias: jax.Array
    activation: object = eqx.field(static=True, default=jnp.tanh)


def as_net(tree):
    return Net(tree["up"], tree["down"], tree["bias"])


def net_loss(net, batch):
    return pair_loss({"up": net.up, "down": net.down, "bias": net.bias}, batch)


@pytest.mark.parametrize(
    "specs",
    [as_net(SPECS), Net(P("dp"), P(None, "dp"), None)],
    ids=["a spec each", "none for the default"],
)
def test_an_equinox_module(specs):
    net = as_net(jax.tree.map(jnp.asarray, init_pair()))
    fun = gradaccum.accumulate(net_loss, microbatches=2, mesh=mesh_of(dp=8), in_specs=(specs,))
    loss, grads = jit(lambda *args: eqx.filter_value_and_grad(fun)(*args))(net, pair_batch())
    layouts.assert_lies(grads, mesh_of(dp=8), as_net(SPECS))
    helpers.assert_close((loss, grads), (expected()[0], as_net(expected()[1])), within=WITHIN)


class Model(nnx.Module):
    def __init__(self, values):
        self.up, self.down, self.bias = (nnx.Param(values[n]) for n in ("up", "down", "bias"))


@pytest.mark.parametrize("form", ["one spec", "a State of specs", "nested dict"])
def test_a_flax_state(form):
    graph, state = nnx.split(Model(jax.tree.map(jnp.asarray, init_pair())))

    def fun(state, batch):
        model = nnx.merge(graph, state)
        return pair_loss(
            {"up": model.up[...], "down": model.down[...], "bias": model.bias[...]}, batch
        )

    if form == "one spec":
        places, specs = jax.tree.map(lambda x: P("dp"), init_pair()), P("dp")
    elif form == "a State of specs":
        places, specs = SPECS, nnx.state(Model(SPECS))
    else:
        places, specs = SPECS, nnx.State({n: nnx.Param(s) for n, s in SPECS.items()})
    f = gradaccum.accumulate(fun, microbatches=2, mesh=mesh_of(dp=8), in_specs=(specs,))
    loss, grads = jit(jax.value_and_grad(f))(state, pair_batch())
    grads = dict(zip(sorted(SPECS), jax.tree.leaves(grads), strict=True))
    layouts.assert_lies(grads, mesh_of(dp=8), places)
    helpers.assert_close((loss, grads), expected(), within=WITHIN)
