"""What `powersgd` sends: two reductions of factors, and no matrix over a model axis."""

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import Unreduced, audit
from gradaccum.hooks import powersgd

jit = layouts.jit
RANK = 2

SHAPES = {"bias": (20,), "stack": (2, 32, 24), "table": (40, 32)}
FACTORS = [4 * 2 * RANK * n + 4 * RANK * t for n, t in ((32, 40), (24, 32))]  # left, right
EXACT = 4 * (20 + 1)


def program(hook, mesh, data, specs=None):
    """Returns the compiled hook on rows of SHAPES, split over model axes as specs say."""
    n = int(np.prod([mesh.shape[a] for a in data]))
    specs = {k: (specs or {}).get(k, ()) for k in SHAPES}
    rows = {k: jnp.ones((n, *s)) for k, s in SHAPES.items()}
    rows = {k: jax.device_put(x, NamedSharding(mesh, P(data, *specs[k]))) for k, x in rows.items()}
    weights = jax.device_put(jnp.ones(n), NamedSharding(mesh, P(data)))
    share = lambda rows, w: jax.tree.map(lambda x: Unreduced(x, w, axis_name=data), rows)  # noqa: E731
    with jax.set_mesh(mesh):
        state = hook.init(share(rows, weights))
        fun = jit(lambda rows, w, state: hook(share(rows, w), state))
        return fun.lower(rows, weights, state).compile()


@pytest.mark.parametrize("rank", [1, 2])
def test_two_reductions_of_factors_alone(rank):
    mesh = helpers.data_mesh(8)
    compiled = program(powersgd(rank=rank), mesh, ("dp",))
    audit.assert_one_reduction(compiled, axis_name="dp", mesh=mesh)
    report = audit.collectives(compiled, mesh=mesh)
    assert [(row.kind, row.axes, row.executions) for row in report] == [
        ("all-reduce", ("dp",), 1)
    ] * 2
    left, right = (x * rank // RANK for x in FACTORS)
    assert [row.bytes for row in report] == [left + EXACT, right]
    plain = program(gradaccum.hooks.allreduce(), mesh, ("dp",))
    sizes = 4 * sum(int(np.prod(s)) for s in SHAPES.values()) + 4
    assert [row.bytes for row in audit.collectives(plain, mesh=mesh)] == [sizes]


def test_start_step_adds_the_plain_mean_in_a_branch():
    mesh = helpers.data_mesh(8)
    compiled = program(powersgd(rank=RANK, start_step=9), mesh, ("dp",))
    audit.assert_one_reduction(compiled, axis_name="dp", mesh=mesh, conditional=True)
    report = audit.collectives(compiled, mesh=mesh)
    assert len(report) == 3
    assert all(row.conditional for row in report)


@pytest.mark.parametrize("specs", [{"stack": (None, "mp"), "table": (None, "mp")},
                                   {"stack": (None, None, "mp"), "table": ("mp",)},
                                   {"stack": ("mp",)}], ids=str)  # fmt: skip
def test_no_matrix_is_gathered_over_a_model_axis(specs):
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})
    report = audit.collectives(program(powersgd(rank=RANK), mesh, ("dp",), specs), mesh=mesh)
    over_data = [row for row in report if row.axes == ("dp",)]
    assert len(over_data) <= 3  # XLA may part the second, which awaits sums over the model axis
    assert sum(row.bytes for row in over_data) <= sum(FACTORS) + EXACT
    smallest = 4 * 2 * 32 * 24 // 2
    assert all(row.bytes < smallest / 3 for row in report if "dp" not in row.axes)
    assert all(row.bytes <= max(FACTORS) + EXACT for row in report)
