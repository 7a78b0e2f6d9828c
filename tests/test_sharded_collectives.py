"""What sharded parameters communicate, byte for byte, in the compiled program."""

import collections
import functools
import re

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS

import gradaccum
from gradaccum import audit

K = 4


def shapes(tree, mesh, specs):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
        tree,
        specs,
    )


def lower(layout, kind, platforms=None, **options):
    """Returns the lowered value_and_grad of the model."""
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], kind)
    fun = gradaccum.accumulate(
        layouts.loss_of(**layout.operators()), microbatches=K, **layout.options(), **options
    )
    with jax.set_mesh(mesh):
        params = shapes(layouts.init(), mesh, layout.placed())
        rows = jax.tree.map(lambda x: P(layout.data), layouts.make_batch())
        args = params, shapes(layouts.make_batch(), mesh, rows)
        return jax.jit(fun.value_and_grad()).trace(*args).lower(lowering_platforms=platforms)


def compiled(layout, kind, **options):
    return lower(layout, kind, **options).compile(compiler_options=helpers.COMPILE_FAST)


def expected(layout, known):
    """Returns the bytes over the data axes by kind and axes: each once, and loss beside them.

    Args:
      layout: the layout.
      known: how gradients lie on an automatic model axis is known (or there is none).
    """
    sizes, data = layouts.MESHES[layout.mesh], layout.data
    found = collections.Counter({("all-reduce", data): 4})
    params, grads = layout.placed(), layout.placed(grads=True)

    def axes_of(spec):
        """The data axes of a spec, the major one of a dimension first."""
        dims = (d if isinstance(d, tuple) else (d,) for d in spec)
        return [a for d in dims for a in d if a in data]

    for name, x in layouts.init().items():
        size = x.nbytes
        for axis in ("mp",) if "mp" in str(params[name]) else ():
            size //= sizes[axis]
        shard = size
        for axis in axes_of(params[name]):
            shard //= sizes[axis]
        for axis in reversed(axes_of(params[name])):
            shard *= sizes[axis]
            found["all-gather", (axis,)] += shard
        left = list(data)
        for axis in axes_of(grads[name]) if known else ():
            found["reduce-scatter", (axis,)] += size
            size //= sizes[axis]
            left.remove(axis)
        if left:
            found["all-reduce", tuple(left)] += size
    return dict(found)


def over_data(report, layout):
    """Returns the same of a report, all of which runs once a call, in no branch."""
    found = collections.Counter()
    for row in report:
        if set(row.axes) & set(layout.data):
            assert not row.conditional, str(report)
            assert row.executions == 1, str(report)
            assert "mp" not in row.axes, str(report)
            found[row.kind, row.axes] += row.bytes
    return dict(found)


CASES = [
    pytest.param(name, kind, id=f"{name}-{kind.name.lower()}")
    for name in LAYOUTS
    for kind in (AxisType.Auto, AxisType.Explicit)
    # Explicit changes what is known of a model axis; elsewhere one of each is enough
    if kind == AxisType.Auto or name in ("zero", "hsdp", "auto-zero", "auto-fsdp", "manual-fsdp")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_byte_once(name, kind):
    """Gathered once, scattered once, or reduced once; nothing in the loop, and no batch moved."""
    layout = LAYOUTS[name]
    program = compiled(layout, kind)
    report = audit.collectives(program)
    known = layout.model != "auto" or kind == AxisType.Explicit
    assert over_data(report, layout) == expected(layout, known), str(report)
    # What the model axis carries belongs to the loss, in the loop: k times.
    assert {row.executions for row in report if row.axes == ("mp",)} <= {K, 2 * K}, str(report)
    audit.assert_one_reduction(program, axis_name=layout.data)
    _, grads = program.output_shardings
    for (path, got), spec, x in zip(
        jax.tree_util.tree_leaves_with_path(grads),
        jax.tree.leaves(layout.placed(grads=True)),
        jax.tree.leaves(layouts.init()),
        strict=True,
    ):
        want = NamedSharding(program.output_shardings[0].mesh, spec)
        assert got.is_equivalent_to(want, x.ndim), f"{jax.tree_util.keystr(path)}: {got.spec}"


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"fused": False},
        {"unroll": 2},
        {"weight_fn": helpers.count_tokens},
        {"loss_reduction": "sum"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("name", ["zero", "hsdp"])
def test_options_change_nothing_of_it(name, options):
    layout = LAYOUTS[name]
    report = audit.collectives(compiled(layout, AxisType.Auto, **options))
    want = expected(layout, True)
    if "weight_fn" in options:
        want["all-reduce", layout.data] += 4  # the weight
    assert over_data(report, layout) == want, str(report)


@pytest.mark.parametrize(("dtype", "wire"), [(jnp.bfloat16, "bf16"), (jnp.float16, "f16")])
@pytest.mark.parametrize("name", ["hsdp-zero", "manual-fsdp", "named-zero"])
def test_gradients_are_scattered_in_the_reduce_dtype(name, dtype, wire):
    """And summed over what is left in it; scalars and the gathered parameters stay float32."""
    layout = LAYOUTS[name]
    # On CPUs bfloat16 is summed in float32: look at what is asked of a TPU's compiler.
    text = lower(layout, AxisType.Auto, ("tpu",), reduce_dtype=dtype).as_text()
    typed = r'"stablehlo.{}".*?: \(tensor<([^>]*)>\) -> tensor'
    of = {
        kind: [t.split("x")[-1] for t in re.findall(typed.format(kind), text, flags=re.S)]
        for kind in ("reduce_scatter", "all_reduce", "all_gather")
    }
    matrices = [x for x in layouts.init().values() if x.ndim > 1]
    assert of["reduce_scatter"] == [wire] * len(matrices)
    assert set(of["all_reduce"]) == {"f32", wire}
    assert set(of["all_gather"]) <= {"f32"}


# --- One stack: what is next to it --------------------------------------------------------------

LAYERS, B, D = 8, 64, 64
TREE = 4 * LAYERS * D * D  # bytes


def loss_fn(w, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
    return jnp.mean(h**2)


@functools.cache
def mesh_of(**sizes):
    return layouts.mesh_of(sizes)


def arguments(mesh, spec, data="dp"):
    return (
        shapes(np.zeros((LAYERS, D, D), np.float32), mesh, spec),
        shapes(np.zeros((B, D), np.float32), mesh, P(data)),
    )


def accumulated(mesh, data="dp", **options):
    return gradaccum.accumulate(loss_fn, microbatches=K, mesh=mesh, axis_name=data, **options)


def test_a_loop_that_gathers_and_scatters_is_seen():
    """The control: what the partitioner makes of FSDP by sharding alone."""
    mesh = mesh_of(dp=8)

    def naive(w, x):
        rows = NamedSharding(mesh, P(None, "dp"))
        parts = jax.lax.with_sharding_constraint(x.reshape(K, B // K, D), rows)

        def body(total, x):
            grads = jax.lax.with_sharding_constraint(
                jax.grad(loss_fn)(w, x), NamedSharding(mesh, P(None, "dp"))
            )
            return total + grads, None

        return jax.lax.scan(body, jnp.zeros_like(w), parts)[0]

    args = arguments(mesh, P(None, "dp"))
    report = audit.collectives(jax.jit(naive), *args)
    assert any((row.executions or 0) >= K for row in report if "dp" in row.axes), str(report)
    with pytest.raises(AssertionError, match="times a call"):
        audit.assert_one_reduction(jax.jit(naive), *args, axis_name="dp")
    ours = jax.jit(jax.grad(accumulated(mesh, in_specs=(P(None, "dp"),))))
    audit.assert_one_reduction(ours, *args, axis_name="dp")


def test_undifferentiated_it_gathers_and_reduces_scalars_only():
    mesh = mesh_of(dp=8)
    fun = jax.jit(accumulated(mesh, in_specs=(P(None, "dp"),)))
    report = audit.collectives(fun, *arguments(mesh, P(None, "dp")))
    found = {row.kind: row.bytes * row.executions for row in report}
    assert found == {"all-gather": TREE, "all-reduce": 4}


def test_what_is_not_differentiated_is_gathered_alone():
    mesh = mesh_of(dp=8)

    def fun(b, x, w):
        return loss_fn(w, x) * jnp.sum(b)

    f = gradaccum.accumulate(
        fun, microbatches=K, mesh=mesh, in_specs=(P("dp"), None, P(None, "dp"))
    )
    w, x = arguments(mesh, P(None, "dp"))
    b = shapes(np.zeros(D, np.float32), mesh, P("dp"))
    rows = audit.collectives(jax.jit(jax.value_and_grad(f)), b, x, w)
    found = collections.Counter()
    for row in rows:
        found[row.kind] += row.bytes * row.executions
    assert found == {"all-gather": TREE + 4 * D, "reduce-scatter": 4 * D, "all-reduce": 4}


def adamw_step(fun, mesh, params_spec, grads_spec):
    """One step of AdamW with clipping, all of it in one program, and its arguments."""
    import optax

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    w, x = arguments(mesh, params_spec)
    state = jax.eval_shape(tx.init, w)
    state = shapes(state, mesh, jax.tree.map(lambda s: grads_spec if s.ndim else P(), state))

    def step(w, state, x):
        loss, grads = fun.value_and_grad()(w, x)
        part = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, grads_spec))
        updates, state = tx.update(grads, state, part)
        w = jax.lax.with_sharding_constraint(part + updates, NamedSharding(mesh, params_spec))
        return w, state, loss

    return jax.jit(step, donate_argnums=(0, 1)), (w, state, x)


BOTH_WAYS = {"reduce-scatter", "all-gather"}
STEPS = {
    "replicated": ({}, P(), P(), {"all-reduce"}),
    "zero": ({"grad_specs": (P("dp"),)}, P(), P("dp"), BOTH_WAYS),
    "fsdp": ({"in_specs": (P("dp"),)}, P("dp"), P("dp"), BOTH_WAYS),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_moves_the_parameters_once_each_way(name):
    """Optimizer and clipping add the norm's scalar alone; ZeRO gathers what was updated."""
    mesh = mesh_of(dp=8)
    options, params_spec, grads_spec, kinds = STEPS[name]
    step, args = adamw_step(accumulated(mesh, **options), mesh, params_spec, grads_spec)
    report = audit.collectives(step, *args)
    found = collections.Counter()
    for row in report:
        assert row.executions == 1, str(report)
        found[row.kind] += row.bytes
    assert kinds <= set(found) <= kinds | {"all-reduce"}, str(report)
    for kind, size in found.items():  # beside them at most loss and norm
        assert 0 <= size - (TREE if kind in kinds else 0) <= 8, str(report)
    audit.assert_one_reduction(step, *args, axis_name="dp")


def test_sharded_gradients_and_state_take_less_memory():
    """Bytes of a step on one device, in parameters: the arguments and what is temporary."""
    mesh = mesh_of(dp=8)

    def memory(name):
        options, params_spec, grads_spec, _ = STEPS[name]
        step, args = adamw_step(accumulated(mesh, **options), mesh, params_spec, grads_spec)
        found = step.lower(*args).compile().memory_analysis()
        return found.argument_size_in_bytes / TREE, found.temp_size_in_bytes / TREE

    (whole, temporary), (zero, zero_temporary), (fsdp, _) = map(memory, STEPS)
    assert zero_temporary < 0.8 * temporary
    assert whole > 3  # parameters and two moments
    assert zero < 1.3  # parameters, and an eighth of each moment
    assert fsdp < 0.45  # an eighth of each
