"""`Unreduced` inside an outer shard_map."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P
from layouts import WITHIN
from unreduced_rows import is_rows, jit, kinds_over, pair

import gradaccum
from gradaccum import Unreduced, audit
from gradaccum.tensor_parallel import copy_to, reduce_from

VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])

SPLIT = {"up": P("dp"), "down": P(None, "dp"), "bias": P()}
WHOLE = dict.fromkeys(SPLIT, P())
# how the parameters enter, how the gradients lie, options
REGIONS = {
    "plain": (WHOLE, WHOLE, {}),
    "fsdp": (SPLIT, SPLIT, {"in_specs": (SPLIT,)}),
    "zero": (WHOLE, SPLIT, {"grad_specs": (SPLIT,)}),
}


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [("plain", False), ("plain", True), ("fsdp", False), ("fsdp", True), ("zero", False)],
)
def test_inside_a_shard_map_over_the_data_axis(name, check_vma):
    """The mean there, or of what it returned; or there, of what was made outside or returned."""
    params, batch, want = pair()
    mesh = helpers.data_mesh(8)
    places, lies, options = REGIONS[name]
    make = functools.partial(
        gradaccum.unreduced_value_and_grad,
        layouts.pair_loss, axis_name="dp", microbatches=2, **options,
    )  # fmt: skip
    fun, shapes = make(), []
    region = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    entered = {"in_specs": (places, P("dp"))}

    def row(params, batch):
        tree = fun(params, batch)
        shapes.extend(x.sum.shape for x in jax.tree.leaves(tree, is_leaf=is_rows))
        return gradaccum.add(tree, tree)

    inside = region(lambda *args: gradaccum.mean(row(*args)), **entered, out_specs=(P(), lies))
    placed = layouts.place((params, batch), mesh, (places, dict.fromkeys(batch, P("dp"))))
    compiled = jit(inside).lower(*placed).compile()
    got = compiled(*placed)
    assert_close(got, want, within=WITHIN)
    layouts.assert_lies(got[1], mesh, lies)
    assert shapes == [(1,), (1, 8), (1, 16, 8), (1, 8, 16)]
    kinds = {"all-reduce"} if lies is WHOLE else {"all-reduce", "reduce-scatter"}
    report = audit.collectives(compiled, mesh=mesh)
    assert set(kinds_over(report, ["dp"])) - {"all-gather"} == kinds

    returned = jit(region(row, **entered, out_specs=P("dp")))(params, batch)
    with jax.set_mesh(mesh):
        assert_close(gradaccum.mean(returned), want, within=WITHIN)

    taken = region(gradaccum.mean, in_specs=P("dp"), out_specs=(P(), lies))
    for tree in (make(mesh=mesh)(params, batch), returned):
        assert_close(jax.jit(taken)(tree), want, within=WITHIN)


@pytest.mark.parametrize("manual", ["mp", "dp", "dp-mp"])
@VMA
def test_beside_a_model_axis_in_a_shard_map(check_vma, manual):
    """Either axis, or both, are manual; the model axis is then a matter of the loss."""
    params, batch, want = pair()
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})
    places = {"up": P(None, "mp"), "down": P("mp"), "bias": P()}
    axes = set(manual.split("-"))
    by_hand = {"f": lambda x: copy_to(x, "mp"), "g": lambda x: reduce_from(x, "mp")}
    typed = {"g": lambda x: jax.lax.psum(x, "mp")}
    operators = (typed if check_vma else by_hand) if "mp" in axes else {}
    fun = gradaccum.unreduced_value_and_grad(
        functools.partial(layouts.pair_loss, **operators), axis_name="dp", microbatches=2
    )
    named = lambda s: P(*(d if d in axes else None for d in s))  # noqa: E731
    enters = {n: named(s) for n, s in places.items()}
    region = jax.shard_map(
        lambda params, batch: gradaccum.mean(fun(params, batch)),
        mesh=mesh,
        in_specs=(enters, named(P("dp"))),
        out_specs=(P(), enters),
        axis_names=axes,
        check_vma=check_vma,
    )
    got = jit(region)(layouts.place(params, mesh, places), batch)
    assert_close(got, want, within=WITHIN)
    layouts.assert_lies(got[1], mesh, places)


def test_whole_rows_inside_a_shard_map_are_refused():
    mesh = helpers.data_mesh(8)
    rows = Unreduced(np.ones(8, np.float32), np.ones(8, np.float32), "dp")
    region = jax.shard_map(gradaccum.mean, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    message = r"an Unreduced of 8 rows; inside a shard_map over the data axes each device has 1"
    with pytest.raises(ValueError, match=message):
        jax.jit(region)(rows)


@VMA
def test_a_row_made_by_hand_inside_a_shard_map(check_vma):
    mesh = helpers.data_mesh(8)

    def local(x):
        grad = jax.grad(lambda w: jnp.sum(w * x))(jax.lax.axis_index("dp") * 1.0)
        return gradaccum.mean(Unreduced(grad[None], jnp.ones(1), "dp"))

    region = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=check_vma)
    assert float(jax.jit(region)(np.arange(16.0, dtype=np.float32))) == 15
