"""One cross-device mean, proved in the compiled program; and what else is not in it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType as Kind

import gradaccum
from gradaccum import _jaxpr, audit

LAYERS, D, B = 3, 16, 64


def loss_fn(params, batch):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, batch["x"], params["stack"])
    loss = jnp.mean((h @ params["out"] - batch["y"]) ** 2)
    return loss, {"loss": loss, "n": jnp.int32(1), "rows": h}


AUX = {"loss": Kind.MEAN, "n": Kind.SUM, "rows": Kind.CONCAT}


def shapes(mesh, axes, model=None):
    def of(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = {"stack": of((LAYERS, D, D), P(None, None, model)), "out": of((D,), P())}
    batch = {"x": of((B, D), P(axes)), "y": of((B,), P(axes))}
    return params, batch


def step(mesh, axes, **options):
    f = gradaccum.accumulate(
        loss_fn, axis_name=axes, mesh=mesh, has_aux=True, aux_accumulator=AUX, **options
    )
    return jax.jit(jax.value_and_grad(f, has_aux=True))


GRADIENT_BYTES = 4 * (LAYERS * D * D + D)

OPTIONS = {
    "plain": {},
    "by value": {"fused": False},
    "weighted": {"weight_fn": lambda b: (b["y"] > 0).sum()},
    "weighted by value": {"weight_fn": lambda b: (b["y"] > 0).sum(), "fused": False},
    "sum": {"loss_reduction": "sum"},
    "overlap": {"overlap": True},
    "unroll": {"unroll": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_mean(name):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    report = audit.collectives(
        step(mesh, "dp", microbatches=4, **OPTIONS[name]), *shapes(mesh, "dp")
    )
    audit.assert_one_reduction(
        step(mesh, "dp", microbatches=4, **OPTIONS[name]), *shapes(mesh, "dp"), axis_name="dp"
    )
    assert {row.kind for row in report} == {"all-reduce"}
    assert all(row.executions == 1 and not row.conditional for row in report)
    total = sum(row.bytes for row in report)
    assert GRADIENT_BYTES <= total <= GRADIENT_BYTES + 32  # loss, aux, count, weight


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("shape", "names", "axes", "model"),
    [
        pytest.param((2, 4), ("r", "d"), ("r", "d"), None, id="two data axes"),
        pytest.param((4, 2), ("dp", "mp"), ("dp",), "mp", id="a model axis beside it"),
    ],
)
def test_v22_one_mean_over_some_axes(kind, shape, names, axes, model):
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        args = shapes(mesh, axes, model)
        compiled = step(None, axes, microbatches=4).lower(*args).compile()
    audit.assert_one_reduction(compiled, axis_name=axes)
    rows = [row for row in audit.collectives(compiled) if set(row.axes) & set(axes)]
    assert {row.kind for row in rows} == {"all-reduce"}
    # Sharded over the model axis, each device reduces its own part of the stack alone.
    stack = 4 * LAYERS * D * D // (2 if model else 1)
    assert stack <= sum(row.bytes for row in rows) <= stack + 4 * D + 32


def test_the_naive_step_is_caught():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))

    def naive(params, batch):
        def body(grads, batch):
            g = jax.grad(lambda p, b: loss_fn(p, b)[0])(params, batch)
            return jax.tree.map(jnp.add, grads, g), None

        parts = jax.tree.map(lambda x: x.reshape(4, B // 4, *x.shape[1:]), batch)
        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)[0]

    with pytest.raises(AssertionError, match=r"runs 4 x 3 = 12 times a call"):
        audit.assert_one_reduction(jax.jit(naive), *shapes(mesh, "dp"), axis_name="dp")


def test_the_traced_program_sums_each_leaf_once_outside_the_loop():
    """`jax.lax.psum` of a tree is one equation a leaf; XLA makes one all-reduce of each dtype."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    traced = jax.make_jaxpr(step(mesh, "dp", microbatches=4))(*shapes(mesh, "dp"))
    sums = [eqn for eqn in _jaxpr.equations(traced.jaxpr) if eqn.primitive.name == "psum"]
    # loss, aux "loss" and "n", two gradients
    assert sorted(str(eqn.invars[0].aval.str_short()) for eqn in sums) == sorted(
        ["float32[]", "float32[]", "int32[]", "float32[16]", "float32[3,16,16]"]
    )
    scans = [eqn for eqn in _jaxpr.equations(traced.jaxpr) if eqn.primitive.name == "scan"]
    assert scans
    for scan in scans:
        assert not [e for e in _jaxpr.equations(scan.params["jaxpr"]) if "psum" in str(e.primitive)]


def test_an_undifferentiated_call_reduces_scalars_only():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    f = gradaccum.accumulate(loss_fn, microbatches=4, mesh=mesh, has_aux=True, aux_accumulator=AUX)
    report = audit.collectives(jax.jit(f), *shapes(mesh, "dp"))
    assert sum(row.bytes * row.executions for row in report) <= 32


def test_b15_the_program_does_not_grow_with_k():
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def instructions(k):
        f = gradaccum.accumulate(lambda p, b: loss_fn(p, b)[0], microbatches=k, mesh=mesh)
        args = (jnp.ones((LAYERS, D, D)), jnp.ones((D,))), jnp.ones((2 * k * 2, D))
        compiled = jax.jit(
            jax.grad(lambda p, x: f({"stack": p[0], "out": p[1]}, {"x": x, "y": x[:, 0]}))
        ).lower(*args)
        return compiled.compile().as_text().count(" = ")

    assert instructions(2) == instructions(1024)


def test_b16_b17_memory_is_one_gradient_tree_and_not_k():
    """By hand: gradients as the scan's outputs, and the gradient of a scan over losses."""
    k, w, x = 64, jnp.ones((64, 64)), jnp.ones((64, 64))

    def loss_fn(w, x):
        return jnp.mean((x @ jnp.tanh(w * jnp.mean(x))) ** 2)  # of each row its own matrix

    def outputs(w, x):
        body = lambda c, row: (c, jax.grad(loss_fn)(w, row[None]))  # noqa: E731
        return jnp.mean(jax.lax.scan(body, None, x)[1], axis=0)

    def scan_of_losses(w, x):
        body = lambda c, row: (c + loss_fn(w, row[None]), None)  # noqa: E731
        return jax.lax.scan(body, 0.0, x)[0] / k

    ours = gradaccum.accumulate(loss_fn, microbatches=k, axis_name=None)
    want = jax.jit(jax.grad(loss_fn))(w, x)  # the rows are equal
    trees = []
    for fun in (outputs, jax.grad(scan_of_losses), jax.grad(ours)):
        compiled = jax.jit(fun).lower(w, x).compile()
        trees.append(compiled.memory_analysis().temp_size_in_bytes / w.nbytes)
        np.testing.assert_allclose(compiled(w, x), want, rtol=1e-5)
    assert min(trees[:2]) >= k
    assert trees[2] < 1.5


@pytest.mark.parametrize("accumulated", [False, True], ids=["by hand", "decorated"])
def test_b12_the_batch_is_not_resharded(accumulated):
    """A global reshape to [k, B/k] moves rows between devices before the loop."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    def by_hand(w, x):
        parts = x.reshape(4, B // 4, D)
        parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, "dp")))
        body = lambda grads, rows: (grads + jax.grad(loss_fn)(w, rows), None)  # noqa: E731
        return jax.lax.scan(body, jnp.zeros_like(w), parts)[0] / 4

    fun = jax.grad(gradaccum.accumulate(loss_fn, microbatches=4, mesh=mesh))
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((D,), P()), ((B, D), P("dp")))
    ]
    report = audit.collectives(jax.jit(fun if accumulated else by_hand), *args)
    kinds = {row.kind for row in report}
    assert kinds == {"all-reduce"} if accumulated else "all-to-all" in kinds


def test_a_stack_of_layers_takes_one_accumulator():
    """The temporary memory of an SGD step: by value it holds one more layer than in place."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    stack, x = jnp.ones((4, 128, 128)), jnp.ones((64, 128))

    def temporary(**options):
        def loss_fn(w, x):
            return jnp.mean(jax.lax.scan(lambda h, w: (h @ w + h, None), x, w)[0])

        f = gradaccum.accumulate(loss_fn, microbatches=8, mesh=mesh, **options)
        sgd = jax.jit(lambda w, x: w - 0.1 * jax.grad(f)(w, x))
        return sgd.lower(stack, x).compile().memory_analysis().temp_size_in_bytes / stack.nbytes

    assert temporary() <= 1.05
    assert temporary() < temporary(fused=False)  # 1.03 on jaxlib 0.10.0, 1.2 later


@pytest.mark.parametrize(
    ("dtype", "name"), [(jnp.bfloat16, "bf16"), (jnp.float16, "f16"), (None, "f32")]
)
def test_gradients_travel_in_the_reduce_dtype_and_scalars_in_float32(dtype, name):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    lowered = step(mesh, "dp", microbatches=2, reduce_dtype=dtype).lower(*shapes(mesh, "dp"))
    # XLA's CPU backend promotes bfloat16 sums: look at what was asked of it.
    reduced = re.findall(
        r'"stablehlo.all_reduce".*?: \(tensor<([^>]*)>\) -> tensor', lowered.as_text(), flags=re.S
    )
    assert sorted(reduced) == sorted(
        [
            "f32",
            "f32",
            "i32",
            f"{D}x{name}",
            f"{LAYERS}x{D}x{D}x{name}",
        ]  # loss, aux, count, gradients
    )
