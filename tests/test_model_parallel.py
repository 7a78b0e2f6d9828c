"""Accumulated gradients on dp x mp equal the whole model's on one device, in every library."""

import itertools

import equinox as eqx
import jax
import numpy as np
import parallel_models as models
import pytest
from helpers import assert_close
from parallel_models import MESHES, MODELS

import gradaccum
from gradaccum import audit

# As the issue has it, of the largest entry of each leaf.
WITHIN = {"float32": 2e-5, "float64": 1e-12}

# Every model on every mesh in float32, and once in float64; modes and k alternate along both.
GRID = [
    (model, mesh, dtype, (i // 4 if wide else i + j) % 2 == 1, 2 if (i + j // 2) % 2 else 4)
    for (i, model), (j, mesh), (wide, dtype) in itertools.product(
        enumerate(MODELS), enumerate(MESHES), enumerate(WITHIN)
    )
    if not wide or i % 4 == j
]
MODES = {False: "untyped", True: "typed"}


def name_of(case):
    model, mesh, dtype, typed, k = case
    return f"{model}-{mesh}-{dtype}-{MODES[typed]}-k{k}"


def accumulated(model, mesh, typed, k, **options):
    fun = gradaccum.accumulate(
        model.sharded,
        microbatches=k,
        mesh=models.mesh_of(mesh),
        check_vma=typed,
        **model.options() | options,
    )
    return models.value_and_grad(fun)


def run(fun, model, mesh, dtype):
    """Returns the compiled program's loss and gradients, and what it communicates."""
    cast = lambda x: np.asarray(x, dtype) if eqx.is_array(x) else x  # noqa: E731
    params, static = eqx.partition(jax.tree.map(cast, model.init()), eqx.is_array)
    params = models.place(params, models.mesh_of(mesh), model.specs)
    program = models.jit(lambda p, batch: fun(eqx.combine(p, static), batch))
    program = program.lower(params, batch := models.make_batch()).compile()
    return program(params, batch), program


@pytest.mark.parametrize("case", GRID, ids=name_of)
def test_loss_and_gradients_are_the_whole_models(case):
    name, mesh, dtype, typed, k = case
    model = MODELS[name]
    with jax.enable_x64(dtype == "float64"):
        got, program = run(accumulated(model, mesh, typed, k), model, mesh, dtype)
        want = models.reference(name)
        assert_close(models.arrays(got), models.arrays(want), within=WITHIN[dtype])
    assert {str(x.dtype) for x in jax.tree.leaves(models.arrays(got[1]))} == {dtype}
    audit.assert_one_reduction(program, axis_name="dp")
    report = audit.collectives(program)
    assert models.over(report, "mp") == {
        kind: k * count for kind, count in model.counts.items() if MESHES[mesh][1] > 1
    }, str(report)


def test_the_grid_holds_every_pair_and_each_model_on_each_mesh():
    full = {case[:2] for case in GRID if case[2] == "float32"}
    assert full == set(itertools.product(MODELS, MESHES))
    for a, b in itertools.combinations(range(5), 2):
        values = [{case[i] for case in GRID} for i in (a, b)]
        if {a, b} == {0, 1} or {a, b} <= {1, 2, 3, 4}:
            assert {(case[a], case[b]) for case in GRID} == set(itertools.product(*values)), (a, b)
    assert {case[:1] + case[3:4] for case in GRID} == set(itertools.product(MODELS, MODES))


@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_of_the_reference_is_zero(name):
    """Or nothing would be compared: every parameter matters, biases and scales too."""
    for path, x in jax.tree_util.tree_leaves_with_path(models.reference(name)[1]):
        assert np.abs(x).max() > 1e-3, path
    params = MODELS[name].init()
    assert all(np.abs(x).max() > 1e-2 for x in jax.tree.leaves(models.arrays(params)))
