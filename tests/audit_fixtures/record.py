"""Record what compilers write of this project's programs, for tests to read without them.

    pip install -e '.[apps,test,aot-tpu,aot-gpu]'
    python -m tests.audit_fixtures.record               # the names
    python -m tests.audit_fixtures.record seed_naive_v3 overlap_h100

What jax 0.12 compiles has names that end in _jax12; the others are from jax 0.10.2 and libtpu
0.0.52, which cannot write the text of these training steps for v6e.

Each is compiled for devices that need not be here. Layouts, names, operands and the order of
instructions stay as compiled. Cut are the source positions, the names of operations that do not
communicate, and of backend_config all but trip counts and what it says of asynchronous forms.
Texts over 45 KB are compressed.
"""

from __future__ import annotations

import functools
import gzip
import math
import pathlib
import re
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from absl_apps import bench_steps, meshes, train_program
from absl_apps.bench_problem import Problem
from gradaccum import aot

HERE = pathlib.Path(__file__).parent
LARGEST_TEXT = 45_000  # characters

# Of the tables that follow the header line, and of the attributes of an instruction.
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n*", re.M)
_HEADER = re.compile(r"(is_scheduled|replica_count|num_partitions)=\w+")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:\\.|[^"\\])*"|\{[^{}]*\})*\}')
_OP_NAME = re.compile(r'op_name="(?:\\.|[^"\\])*"')
_COMMUNICATES = re.compile(r" (all|reduce-scatter|ragged|collective|async|send)[\w\-]*\(")
_KEPT = re.compile(
    r'"is_sync":true|"known_trip_count":\{"n":"\d+"\}|"async_collective_fusion_config":\{[^{}]*\}'
)


def trim(text: str) -> str:
    """Cut from a compiled program's text what no test reads."""
    header, _, body = text.partition("\n")
    name = header.split(",")[0]
    kept = [match[0] for match in _HEADER.finditer(header)]
    lines = [", ".join([name, *kept])]
    for line in _TABLES.sub("", body).splitlines():
        rest, mark, backend = line.partition(", backend_config=")
        metadata = _METADATA.search(rest)
        named = metadata and _COMMUNICATES.search(rest) and _OP_NAME.search(metadata[0])
        rest = _METADATA.sub(f", metadata={{{named[0]}}}" if named else "", rest)
        facts = _KEPT.findall(backend)
        lines.append(rest + f"{mark}{{{','.join(facts)}}}" if facts else rest)
    return "\n".join(lines).rstrip() + "\n"


############################################ Programs ############################################

DEVICES: dict[str, Callable[[], jax.sharding.Mesh]] = {
    "v3": lambda: aot.tpu_mesh("v3:2x2", {"dp": 8}),
    "v5e": lambda: aot.tpu_mesh("v5e:2x4", {"dp": 8}),
    "v5e_two_slices": lambda: aot.tpu_mesh("v5e:2x4", {"replica": 2, "dp": 8}, num_slices=2),
    "v5e_two_slices_mp": lambda: aot.tpu_mesh(
        "v5e:2x4", {"replica": 2, "dp": 2, "mp": 4}, num_slices=2
    ),
    "v6e": lambda: aot.tpu_mesh("v6e:2x4", {"dp": 8}),
    "h100": lambda: aot.gpu_mesh("H100", {"dp": 8}),
}


def seed(contender: str, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """The first seed's step, 16 layers of 64 in 64 microbatches, as absl_apps.bench writes it."""
    problem = Problem(mesh, 64, 64 * mesh.devices.size, 64, 16, jnp.dtype("float32"))
    step = bench_steps.CONTENDERS[contender](problem)
    return step.jitted.lower(*step.shapes)


def training(zero: int, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """The step of absl_apps.train: 2 layers of 64, sgd, 4 microbatches."""
    axes = meshes.data_axes(mesh)
    chosen = {
        "d_model": 64,
        "n_layer": 2,
        "n_head": 2,
        "seq_len": 32,
        "compute_dtype": "bfloat16",
        "vocab_size": None,
        "dropout": 0.0,
        "remat": "layer",
        "optimizer": "sgd",
        "every_k": 1,
        "zero": zero,
        "sequence_parallel": False,
        "comm_hook": None,
        "reduce_dtype": None,
        "global_batch": 4 * math.prod(mesh.shape[axis] for axis in axes),
    }
    program = train_program.describe(chosen, mesh)
    return program.step(4).lower(*program.args)


def layers(overlap: bool, mesh: jax.sharding.Mesh, width: int = 2048) -> jax.stages.Lowered:
    """Three layers that are in no scan, too wide for XLA to combine their all-reduces."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for weights in params:
            x = x + jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    @jax.jit
    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, x)
        return jax.tree.map(jnp.subtract, params, grads), loss

    mean_loss = gradaccum.accumulate(
        loss, microbatches=4, axis_name="dp", mesh=mesh, overlap=overlap
    )
    whole, split = (NamedSharding(mesh, spec) for spec in (P(), P("dp")))
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=whole)] * 3
    batch = jax.ShapeDtypeStruct((4096, width), jnp.float32, sharding=split)
    return step.lower(params, batch)


def exchange(mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """An all-to-all over the data axes of two slices, beside a model axis."""
    spec = P(("replica", "dp"), "mp")

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, ("replica", "dp"), 0, 0, tiled=True)

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    rows = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=NamedSharding(mesh, spec))
    return step.lower(rows)


PROGRAMS = {
    f"{name}_{device}": (program, device)
    for device in ("v3", "v5e", "v5e_two_slices", "v6e", "h100")
    for name, program in {
        "seed_naive": functools.partial(seed, "naive"),
        "seed_gradaccum": functools.partial(seed, "gradaccum"),
        "train": functools.partial(training, 0),
        "train_fsdp": functools.partial(training, 3),
    }.items()
} | {
    "overlap_h100": (functools.partial(layers, True), "h100"),
    "no_overlap_h100": (functools.partial(layers, False), "h100"),
    "exchange_v5e_two_slices": (exchange, "v5e_two_slices_mp"),
}


def record(name: str, folder: pathlib.Path = HERE, suffix: str = "") -> pathlib.Path:
    """Compile one program and write its text; return the file."""
    program, device = PROGRAMS[name]
    text = trim(program(DEVICES[device]()).compile().as_text())
    path = folder / f"{name}{suffix}.txt"
    if len(text) <= LARGEST_TEXT:
        path.write_text(text)
        return path
    path = folder / f"{name}{suffix}.txt.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path


def read(name: str) -> str:
    """The text of a recorded program."""
    path = HERE / f"{name}.txt"
    return (
        path.read_text()
        if path.exists()
        else gzip.decompress(path.with_suffix(".txt.gz").read_bytes()).decode()
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    unknown = sorted(set(sys.argv[1:]) - set(PROGRAMS))
    if unknown or not sys.argv[1:]:
        sys.exit(f"record: {', '.join(unknown) or 'no name'}; the names are: {', '.join(PROGRAMS)}")
    for asked in sys.argv[1:]:
        written = record(asked, suffix="_jax12" if jax.__version_info__ >= (0, 12) else "")
        print(f"{written}: {written.stat().st_size:,} bytes")
