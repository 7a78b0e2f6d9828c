"""The first seed's step at full size, compiled for the hardware it is about: one mean on each.

16 layers of 2048 in a scan, 64 microbatches of one row on each device. Nothing is allocated.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from absl_apps import bench_steps
from absl_apps.bench_problem import Problem
from gradaccum import aot, audit

LAYERS, WIDTH, MICROBATCHES = 16, 2048, 64
MESHES = {
    "v2:2x2": lambda: aot.tpu_mesh("v2:2x2", {"dp": 8}),
    "v3:2x2": lambda: aot.tpu_mesh("v3:2x2", {"dp": 8}),
    "v5e:2x4": lambda: aot.tpu_mesh("v5e:2x4", {"dp": 8}),
    "v6e:2x4": lambda: aot.tpu_mesh("v6e:2x4", {"dp": 8}),
    "v5p:8x8x16": lambda: aot.tpu_mesh("v5p:8x8x16", {"dp": 1024}),
    "two-v5e:4x4": lambda: aot.tpu_mesh("v5e:4x4", {"replica": 2, "dp": 16}, num_slices=2),
    "8-H100": lambda: aot.gpu_mesh("H100", {"dp": 8}),
    "1024-H100": lambda: aot.gpu_mesh("H100", {"dp": 1024}, hosts=128),
}


def compiled(contender, mesh, dtype="float32", microbatches=MICROBATCHES):
    rows = microbatches * mesh.size
    problem = Problem(mesh, microbatches, rows, WIDTH, LAYERS, jnp.dtype(dtype))
    step = bench_steps.CONTENDERS[contender](problem)
    return step.jitted.lower(*step.shapes).compile()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MESHES)
def test_the_seeds_step_is_one_mean(name, dtype):
    mesh = MESHES[name]()
    program = compiled("gradaccum", mesh, dtype)
    audit.assert_one_reduction(program, axis_name=mesh.axis_names, mesh=mesh)
    tree = LAYERS * WIDTH**2 * jnp.dtype(dtype).itemsize
    inner = audit.collectives(program, mesh=mesh).over("dp")
    reduced = [row for row in inner if row.kind in ("all-reduce", "reduce-scatter")]
    scalars = 512 if "replica" in mesh.shape else 4  # the loss; padded, where it leaves the slice
    assert sum(row.executions * row.bytes for row in reduced) == tree + scalars


@pytest.mark.parametrize("name", ["v2:2x2", "v3:2x2", "v5p:8x8x16", "8-H100"])
def test_the_naive_step_reduces_1024_times(name):
    mesh = MESHES[name]()
    program = compiled("naive", mesh)
    rows = audit.collectives(program, mesh=mesh)
    loops = [row.executions for row in rows if row.kind == "all-reduce" and row.bytes > 4]
    assert loops == [MICROBATCHES * LAYERS]
    with pytest.raises(AssertionError, match=r"64 x 16 = 1,024 times a call, in 2 nested loops"):
        audit.assert_one_reduction(program, axis_name="dp", mesh=mesh)


def test_between_two_slices_each_device_sends_its_part_once():
    mesh = MESHES["two-v5e:4x4"]()
    sent = {}
    for contender in ("naive", "gradaccum"):
        rows = audit.collectives(compiled(contender, mesh), mesh=mesh).over("replica")
        assert {row.kind for row in rows} == {"send"}
        sent[contender] = sum(row.executions * row.bytes for row in rows)
    part = 4 * LAYERS * WIDTH**2 // 16
    assert part <= sent["gradaccum"] <= part + 1024
    assert sent["naive"] >= MICROBATCHES * part


@pytest.mark.parametrize("name", ["8-H100", "1024-H100"])
def test_on_gpus_the_accumulator_is_reduced_in_place(name):
    temporaries = {
        contender: compiled(contender, MESHES[name]()).memory_analysis().temp_size_in_bytes
        for contender in ("gradaccum", "shard_map")
    }
    assert temporaries["gradaccum"] <= 20_000_000
    assert temporaries["shard_map"] >= 4 * LAYERS * WIDTH**2  # a gradient tree


@pytest.mark.parametrize("name", ["v3:2x2", "8-H100"])
def test_the_program_is_as_long_for_1024_microbatches_as_for_two(name):
    sizes = []
    for k in (1, 2, 64, 1024):
        text = compiled("gradaccum", MESHES[name](), microbatches=k).as_text()
        sizes.append(len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE)))
    one, *loops = sizes
    assert max(loops) <= 1.01 * min(loops)
    assert one < min(loops) <= 1.3 * one  # with one microbatch there is no loop


@pytest.mark.parametrize("name", ["v5e:2x4", "8-H100"])
def test_a_reduction_that_the_combiner_splits_is_one_mean(name):
    """64 leaves of 64 MB: every one is an all-reduce of its own."""
    mesh = MESHES[name]()
    params = {
        f"w{i:02}": jax.ShapeDtypeStruct((4096, 4096), "float32", sharding=NamedSharding(mesh, P()))
        for i in range(64)
    }
    batch = jax.ShapeDtypeStruct((64, 4096), "float32", sharding=NamedSharding(mesh, P("dp")))

    @gradaccum.accumulate(microbatches=2, axis_name="dp", mesh=mesh)
    def loss_fn(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    program = jax.jit(jax.value_and_grad(loss_fn)).lower(params, batch).compile()
    rows = audit.collectives(program, mesh=mesh)
    assert sum(row.bytes > 4 for row in rows) == 64
    assert rows.totals["dp"].bytes == 64 * 4 * 4096**2 + 4
    audit.assert_one_reduction(program, axis_name="dp", mesh=mesh)
