"""Where the data axes live: no mesh, by argument, in context, Auto, Explicit, already manual."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "auto-explicit": (AUTO, EXPLICIT),
    "explicit-auto": (EXPLICIT, AUTO),
}


def loss_fn(params, batch):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, batch["x"], params["w"])
    return jnp.mean((h @ params["s"] - batch["y"]) ** 2)


def case():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4, 4)).astype(np.float32), "s": np.ones(4, np.float32)}
    batch = {"x": rng.normal(size=(64, 4)).astype(np.float32), "y": np.ones(64, np.float32)}
    return params, batch, jax.value_and_grad(loss_fn)(params, batch)


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("given", ["argument", "context"])
@pytest.mark.parametrize("kinds", KINDS)
def test_v17_model_axis_stays_sharded_beside_the_data_axis(kinds, given):
    params, batch, want = case()
    mesh = jax.make_mesh((4, 2), ("dp", "mp"), axis_types=KINDS[kinds])
    params = {
        "w": jax.device_put(params["w"], NamedSharding(mesh, P(None, None, "mp"))),
        "s": jax.device_put(params["s"], NamedSharding(mesh, P())),
    }
    batch = jax.device_put(batch, NamedSharding(mesh, P("dp")))
    f = gradaccum.accumulate(
        loss_fn, microbatches=4, axis_name="dp", mesh=mesh if given == "argument" else None
    )

    def check():
        loss, grads = jax.jit(jax.value_and_grad(f))(params, batch)
        assert_close((loss, grads), want)
        assert grads["w"].sharding.spec == P(None, None, "mp")
        assert_close(jax.jit(f)(params, batch), want[0])
        assert_close(jax.jit(f.value_and_grad())(params, batch), want)

    if given == "argument":
        check()
    else:
        with jax.set_mesh(mesh):
            check()
            assert_close(jax.value_and_grad(f)(params, batch), want)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_eager_calls_on_host_arrays(kind):
    params, batch, want = case()
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(kind,))
    f = gradaccum.accumulate(loss_fn, microbatches=2)  # the mesh's only axis
    with jax.set_mesh(mesh):
        assert_close(jax.value_and_grad(f)(params, batch), want)
        assert_close(f(params, batch), want[0])


def test_two_data_axes_split_the_batch_in_their_order():
    params, batch, want = case()
    mesh = jax.make_mesh((2, 4), ("r", "d"), axis_types=(AUTO, AUTO))
    f = gradaccum.accumulate(loss_fn, microbatches=2, axis_name=("r", "d"), mesh=mesh)
    assert_close(jax.jit(jax.value_and_grad(f))(params, batch), want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("manual", [("dp", "mp"), ("dp",), ("mp",)], ids="-".join)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "equal"])
def test_inside_an_outer_shard_map(check_vma, manual, weighted):
    params, batch, want = case()
    mesh = jax.make_mesh((4, 2), ("dp", "mp"), axis_types=(AUTO, AUTO))
    weight_fn = (lambda batch: batch["y"].sum()) if weighted else None
    f = gradaccum.accumulate(loss_fn, microbatches=2, axis_name="dp", weight_fn=weight_fn)
    rows = P("dp") if "dp" in manual else P()

    def both(params, batch):
        return jax.value_and_grad(f)(params, batch), f.value_and_grad()(params, batch)

    outer = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(P(), rows),
        out_specs=P(),
        axis_names=set(manual),
        check_vma=check_vma,
    )
    for got in jax.jit(outer)(params, batch):
        assert_close(got, want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_eager_outer_shard_map(check_vma):
    params, batch, want = case()
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AUTO,))
    f = gradaccum.accumulate(loss_fn, microbatches=4, axis_name="dp")
    outer = jax.shard_map(
        jax.value_and_grad(f),
        mesh=mesh,
        in_specs=(P(), P("dp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    assert_close(outer(params, batch), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_a_manual_batch_are_its_own_rows(check_vma):
    params, batch, _ = case()
    want = jax.grad(loss_fn, argnums=1)(params, batch)
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AUTO,))
    f = gradaccum.accumulate(loss_fn, microbatches=4, axis_name="dp")
    outer = jax.shard_map(
        jax.grad(f, argnums=1),
        mesh=mesh,
        in_specs=(P(), P("dp")),
        out_specs=P("dp"),
        check_vma=check_vma,
    )
    assert_close(jax.jit(outer)(params, batch), want)


def test_no_axis_means_no_collective_and_no_mesh():
    params, batch, want = case()
    f = gradaccum.accumulate(loss_fn, microbatches=4, axis_name=None)
    assert_close(jax.value_and_grad(f)(params, batch), want)
    assert "psum" not in str(jax.make_jaxpr(jax.value_and_grad(f))(params, batch))


def test_one_device_of_a_mesh():
    params, batch, want = case()
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(AUTO,), devices=jax.devices()[:1])
    f = gradaccum.accumulate(loss_fn, microbatches=4, mesh=mesh)
    assert_close(jax.value_and_grad(f)(params, batch), want)


def test_a_pjit_tensor_parallel_loss_with_constraints_inside():
    params, batch, want = case()
    mesh = jax.make_mesh((4, 2), ("dp", "mp"), axis_types=(AUTO, AUTO))

    def constrained(params, batch):
        def layer(h, w):
            h = jax.lax.with_sharding_constraint(h @ w, P(None, "mp"))
            return jnp.tanh(h), None

        h, _ = jax.lax.scan(layer, batch["x"], params["w"])
        return jnp.mean((h @ params["s"] - batch["y"]) ** 2)

    f = gradaccum.accumulate(constrained, microbatches=2, axis_name="dp")
    with jax.set_mesh(mesh):
        w = jax.device_put(params["w"], NamedSharding(mesh, P(None, None, "mp")))
        got = jax.jit(jax.value_and_grad(f))({**params, "w": w}, batch)
    assert_close(got, want)
    assert got[1]["w"].sharding.spec == P(None, None, "mp")


def test_v14_sync_batch_norm_stays_right_and_warns():
    _, batch, _ = case()
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AUTO,))

    def sync(params, x):
        y = x * params
        mean = jax.lax.pmean(jnp.mean(y, axis=0), "dp")
        return jnp.mean((y - mean[None]) ** 2 * jnp.arange(4.0)[None])

    def full(params, x):  # microbatch i of every device shares its statistics
        rows = x.reshape(8, 2, 4, 4)
        y = rows * params
        mean = jnp.mean(y, axis=(0, 2), keepdims=True)
        return jnp.mean((y - mean) ** 2 * jnp.arange(4.0)[None, None, None])

    f = gradaccum.accumulate(sync, microbatches=2, axis_name="dp", mesh=mesh)
    params = jnp.linspace(0.5, 2.0, 4)[None]
    with pytest.warns(UserWarning, match=r"communicates over the data axis dp \(psum\).* 2 times"):
        got = jax.value_and_grad(f)(params, batch["x"])
    want = jax.value_and_grad(lambda p, x: full(p[None, None], x))(params, batch["x"])
    assert_close(got, want)


def test_several_devices_without_a_mesh_are_refused():
    params, batch, _ = case()
    f = gradaccum.accumulate(loss_fn, microbatches=2)
    with pytest.raises(ValueError, match=r"no mesh, and 8 devices. .* `with jax.set_mesh\(mesh\)"):
        f(params, batch)


@pytest.mark.parametrize(
    ("axis_name", "message"),
    [
        pytest.param({}, r"the mesh has 2 axes, \(a=4, b=2\). Give axis_name", id="unset"),
        pytest.param({"axis_name": ("a", "q")}, r"has 'q', but the mesh's axes", id="unknown"),
    ],
)
def test_axes_that_the_context_mesh_does_not_settle_are_refused(axis_name, message):
    params, batch, _ = case()
    f = gradaccum.accumulate(loss_fn, microbatches=2, **axis_name)
    with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"))), pytest.raises(ValueError, match=message):
        f(params, batch)


def test_an_unknown_axis_of_a_given_mesh_is_refused_at_decoration():
    mesh = jax.make_mesh((8,), ("dp",))
    with pytest.raises(ValueError, match=r"has 'q', but the mesh's axes are \(dp=8\)"):
        gradaccum.accumulate(loss_fn, microbatches=2, axis_name="q", mesh=mesh)


def test_data_axes_that_are_half_manual_are_refused():
    params, batch, _ = case()
    mesh = jax.make_mesh((4, 2), ("r", "d"), axis_types=(AUTO, AUTO))
    f = gradaccum.accumulate(loss_fn, microbatches=2, axis_name=("r", "d"))
    outer = jax.shard_map(
        f, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), axis_names={"d"}, check_vma=False
    )
    with pytest.raises(ValueError, match=r"of the data axes r, d, only d is manual"):
        jax.jit(outer)(params, batch)


def test_a_default_mesh_by_argument_takes_host_arrays():
    """`jax.make_mesh` makes Explicit axes; outside `jax.set_mesh` they are taken as Auto."""
    params, batch, want = case()
    mesh = jax.make_mesh((8,), ("dp",))
    f = gradaccum.accumulate(loss_fn, microbatches=2, mesh=mesh)
    assert_close(jax.value_and_grad(f)(params, batch), want)
    assert_close(jax.jit(jax.value_and_grad(f))(params, batch), want)
    placed = jax.device_put(params, NamedSharding(mesh, P()))
    assert_close(jax.jit(jax.value_and_grad(f))(placed, batch), want)


# Arrays placed on Explicit axes want jax.set_mesh in eager calls, from JAX itself.
STEPS = [
    (jit, start, context)
    for jit in ("eager", "jit")
    for start in ("host", "auto", "params", "batch", "all")
    for context in ("argument", "both")
    if not (jit == "eager" and start in ("params", "batch", "all") and context == "argument")
    and not (start == "auto" and context == "both")
]


@pytest.mark.parametrize(("jit", "start", "context"), STEPS, ids="-".join)
def test_steps_on_a_default_mesh_take_each_others_results(jit, start, context):
    """A training loop fed its own output, on the Explicit axes that `jax.make_mesh` makes."""
    params, batch, _ = case()
    mesh = jax.make_mesh((8,), ("dp",))
    auto = jax.make_mesh((8,), ("dp",), axis_types=(AUTO,))
    f = gradaccum.accumulate(loss_fn, microbatches=2, mesh=mesh)

    def step(fun, params, batch):
        loss, grads = fun(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    want = params
    for _ in range(3):
        want, want_loss = step(jax.value_and_grad(loss_fn), want, batch)
    if start in ("auto", "params", "all"):
        params = jax.device_put(params, NamedSharding(auto if start == "auto" else mesh, P()))
    if start in ("batch", "all"):
        batch = jax.device_put(batch, NamedSharding(mesh, P("dp")))
    for fun in (jax.value_and_grad(f), f.value_and_grad()):
        run = functools.partial(step, fun)
        run = jax.jit(run) if jit == "jit" else run
        with jax.set_mesh(mesh) if context == "both" else contextlib.nullcontext():
            got = params
            for _ in range(3):
                got, loss = run(got, batch)
        assert_close((got, loss), (want, want_loss))


def test_a_mesh_other_than_the_contexts_is_refused():
    params, batch, _ = case()
    f = gradaccum.accumulate(loss_fn, microbatches=2, mesh=jax.make_mesh((8,), ("dp",)))
    with (
        jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"))),
        pytest.raises(ValueError, match=r"mesh=\(dp=8\) was given .* jax.set_mesh is \(a=4, b=2\)"),
    ):
        f(params, batch)
