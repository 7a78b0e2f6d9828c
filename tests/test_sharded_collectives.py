"""What sharded parameters communicate, byte for byte, in the compiled program."""

import collections
import re

import helpers
import jax
import jax.numpy as jnp
import layouts
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS, shapes

import gradaccum
from gradaccum import audit

K = 4


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
