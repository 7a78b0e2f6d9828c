"""`audit.assert_one_reduction` over several axes, parts of one, and the slices of a TPU."""

import jax
import jax.numpy as jnp
import pytest
from audit_fixtures.programs import GRAD, TREE, compiled, mesh_of, program, shaped
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import aot, audit, hooks
from gradaccum.tensor_parallel import all_gather_to, reduce_from, scatter_to


def scatter_then_sum(params, x):
    grads = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "dp", tiled=True), GRAD(params, x))
    return jax.lax.psum(grads, "r")


def test_hsdp_is_one_mean_over_two_axes():
    made = program(scatter_then_sum, mesh_of(r=2, dp=4), ("r", "dp"), out=P("dp"))
    audit.assert_one_reduction(made, axis_name=("r", "dp"))
    rows = audit.collectives(made)
    assert sum(row.bytes for row in rows if row.axes == ("dp",)) == TREE
    assert sum(row.bytes for row in rows if row.axes == ("r",)) == TREE // 4


def two_slices(value_and_grad):
    """Compile for two TPU slices, a batch over both."""
    mesh = aot.tpu_mesh("v5e:2x4", {"r": 2, "dp": 8}, num_slices=2)
    w = shaped((512, 512), mesh)
    x = shaped((64, 512), mesh, ("r", "dp"))
    return mesh, jax.jit(lambda w, x: value_and_grad(mesh)(w, x)).lower(w, x).compile()


def square(w, x):
    return jnp.mean((x @ w) ** 2)


@pytest.mark.parametrize("hook", [hooks.bf16_compress, hooks.fp16_compress])
def test_scalars_that_are_padded_between_slices_are_scalars(hook):
    """A weight of 4 bytes fills 128 lanes where it leaves a TPU slice: it is no gradient."""

    def compressed(mesh):
        options = {"microbatches": 2, "axis_name": ("r", "dp"), "mesh": mesh}
        return jax.value_and_grad(
            gradaccum.accumulate(square, comm_hook=hook(axis_name="r"), **options)
        )

    mesh, made = two_slices(compressed)
    sent = [row.shapes for row in audit.collectives(made, mesh=mesh).over("r")]
    assert ("f32[1,1,128]",) in sent
    audit.assert_one_reduction(made, axis_name=("r", "dp"), mesh=mesh)


def test_a_loss_alone_between_slices_is_no_mean_of_gradients():
    def forgotten(mesh):
        def local(w, x):
            value, grads = jax.lax.psum(jax.value_and_grad(square)(w, x), "dp")
            return jax.lax.psum(value, "r"), grads

        specs = P(), P(("r", "dp"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    mesh, made = two_slices(forgotten)
    with pytest.raises(AssertionError, match=r"no gradient is reduced over r=2: of 1 operations"):
        audit.assert_one_reduction(made, axis_name=("r", "dp"), mesh=mesh)


def test_a_leaf_that_misses_one_data_axis_is_caught():
    def step(params, x):
        first, second = GRAD(params, x)
        return jax.lax.psum(first, ("r", "dp")), jax.lax.psum(second, "dp")

    made = program(step, mesh_of(r=2, dp=4), ("r", "dp"))
    with pytest.raises(AssertionError, match=r"over dp .* is not reduced over all of r=2: 1 red"):
        audit.assert_one_reduction(made, axis_name=("r", "dp"))
    audit.assert_one_reduction(made, axis_name="dp")


HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
ACROSS = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([HALVES], r"is not reduced over all of dp=8: 1 reduction\(s\) of it, .* of 4 devices"),
        ([HALVES, HALVES], r"the same bytes are reduced twice over dp"),
        ([HALVES, ACROSS], None),
    ],
    ids=["halves", "halves twice", "halves, then across"],
)
def test_reductions_within_parts_of_an_axis(stages, reason):
    def step(params, x):
        grads = GRAD(params, x)
        for groups in stages:
            grads = jax.lax.psum(grads, "dp", axis_index_groups=groups)
        return grads

    made = program(step, mesh_of(dp=8), out=P("dp"))
    assert {row.axes for row in audit.collectives(made)} == {("dp",)}
    if reason is None:
        audit.assert_one_reduction(made, axis_name="dp")
    else:
        with pytest.raises(AssertionError, match=reason):
            audit.assert_one_reduction(made, axis_name="dp")


def test_a_data_axis_of_one_device_needs_no_reduction():
    mesh = jax.make_mesh((1, 8), ("dp", "mp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    made = program(lambda p, x: jax.lax.psum(GRAD(p, x), "dp"), mesh)
    assert len(audit.collectives(made)) == 0
    audit.assert_one_reduction(made, axis_name="dp")
    with pytest.raises(AssertionError, match=r"no gradient is reduced over mp=8: of 0 operations"):
        audit.assert_one_reduction(made, axis_name=("dp", "mp"))


def test_a_product_of_parameters_and_activations_gathered_over_different_axes():
    """FSDP over dp beside sequence parallelism over mp: nothing is summed over dp in a product."""
    mesh = jax.make_mesh((2, 2), ("dp", "mp"), (jax.sharding.AxisType.Auto,) * 2)
    specs = (P("dp", "mp"), P("dp"))

    @gradaccum.accumulate(microbatches=2, axis_name="dp", mesh=mesh, in_specs=specs)
    def sharded(w, x):
        h = scatter_to(x, "mp", 1)
        h = all_gather_to(h @ jnp.eye(16), "mp", 1)  # computed, as no input of a product counts
        return reduce_from(jnp.mean(jnp.square(h @ w)), "mp")

    made = compiled(jax.value_and_grad(sharded), jnp.ones((16, 8)), jnp.ones((8, 4, 16)))
    assert ("all-gather", ("dp",)) in {(row.kind, row.axes) for row in audit.collectives(made)}
    audit.assert_one_reduction(made, axis_name="dp", mesh=mesh)
