"""Compare a tensor-parallel model's gradients with the unsharded model's, leaf by leaf.

    pip install -e '.[apps]'
    python -m absl_apps.tensor_parallel

Three models, on meshes of a data axis dp and a model axis mp of 8 devices (accelerators where there
are any, else simulated on the CPU): the second seed's in Haiku, a transformer, and the same with
activations sharded along the sequence. Each runs under gradaccum.accumulate in 4 microbatches; the
unsharded one on one device, with JAX and optax alone. Printed is the largest difference of each
gradient, relative to the leaf's largest entry, then what the compiled program communicates over
each axis. Expected: all within about 1e-6 (2e-5 is allowed), and one all-reduce over dp, checked in
the compiled program. The exit status is 1, and the leaves are named, where a difference is larger
than allowed, in every mode; and where a program reduces more than once.

    python -m absl_apps.tensor_parallel --dtype=float64              # within 1e-14; 1e-12 allowed
    python -m absl_apps.tensor_parallel --check_vma --meshes='dp=2,mp=4;dp=1,mp=2' --models=haiku

What each operator is for: break one rule and see which gradients go wrong, and by what factor.

    python -m absl_apps.tensor_parallel --break_rule=no_f             # or plain_psum
    python -m absl_apps.tensor_parallel --break_rule=bias_before_sum  # Haiku: others have no bias

Expected on dp=2,mp=4: the refusal of gradaccum.accumulate; then, from a plain jax.shard_map in its
place, what goes wrong, and so exit status 1:
  no_f             a right loss and a right gradient of the last projection; all others too small
  plain_psum       a right loss, and a right gradient of what follows the last sum; what lies before
                   it 4 times too large in Haiku's last feed-forward layer, about 9 times in the
                   one before; the transformers' layers 7 to 13 times
  bias_before_sum  a loss 3.5 % too large, and no gradient right

Compiled for a TPU that need not be here (pip install -e '.[apps,aot-tpu]'):

    python -m absl_apps.tensor_parallel --topology=v5e:2x4 --models=transformer,sequence_parallel

Expected on dp=4,mp=2: one all-reduce of 920,068 bytes over dp, and over mp, in the loop over
microbatches, 48 all-reduces of the transformer; the sequence-parallel one has 56 all-gathers and 36
reduce-scatters, and all-reduces of the embedding, the losses and, outside the loop, the norms'
scales. An all-reduce counts its bytes once, the reduce-scatter and the all-gather it is made of
count them twice.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from absl_apps import environment, flag_parsing, meshes, tensor_parallel_flags
from absl_apps.layers import PLAIN, Layers
from absl_apps.meshes import DATA_AXIS
from absl_apps.tensor_parallel_models import MODELS, Model, tokens
from absl_apps.tensor_parallel_report import (
    collectives_table,
    compare,
    leaves_table,
    summary,
    too_large,
    traffic,
)
from absl_apps.tensor_parallel_rules import RULES, by_hand
from gradaccum import aot, audit


def unsharded(model: Model, key: jax.Array, batch: np.ndarray) -> tuple[Any, Any]:
    """Return parameters, and loss and gradients of the whole batch on one device, as NumPy arrays.

    This is the reference: no shard_map, no microbatches, none of gradaccum.
    """
    device = jax.devices()[0]
    params, batch = jax.device_put((model.init(key), batch), device)
    values = jax.jit(jax.value_and_grad(lambda p, x: model.loss(p, x, PLAIN)))(params, batch)
    return jax.device_get((params, values))


def accumulated(
    model: Model, layers: Layers, mesh: jax.sharding.Mesh, microbatches: int, check_vma: bool
) -> Any:
    """Return (params, tokens) -> (loss, grads), sharded, in microbatches, with one mean."""

    @gradaccum.accumulate(
        microbatches=microbatches,
        axis_name=DATA_AXIS,
        mesh=mesh,
        in_specs=(model.specs, P(DATA_AXIS)),
        check_vma=check_vma,
    )
    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return model.loss(params, batch, layers)

    return jax.value_and_grad(loss_fn)


def shardings(model: Model, mesh: jax.sharding.Mesh) -> tuple[Any, NamedSharding]:
    """Return where parameters and tokens lie."""
    of_params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), model.specs)
    return of_params, NamedSharding(mesh, P(DATA_AXIS))


def compiled(fun: Any, model: Model, mesh: jax.sharding.Mesh, arguments: Any) -> Any:
    """Compile for arguments that lie as `shardings` says; on devices here they need not be yet."""

    def described(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.jit(fun).lower(*jax.tree.map(described, arguments, shardings(model, mesh))).compile()


############################## What a mesh shows, of one model ####################################


def check_model(
    model: Model,
    mesh: jax.sharding.Mesh,
    arguments: Any,
    want: Any,
    FLAGS: flags.FlagValues,  # noqa: N803
) -> dict[str, Any]:
    """Audit the compiled program and, unless `want` is None, run it and compare.

    Returns:
      What --json holds: collectives; leaves, if it ran; problem, what the program does over the
      data axis beside one mean, or None.
    """
    fun = accumulated(model, model.layers, mesh, FLAGS.microbatches, FLAGS.check_vma)
    program = compiled(fun, model, mesh, arguments)
    result: dict[str, Any] = {"collectives": traffic(audit.collectives(program, mesh=mesh))}
    if want is not None:
        got = program(*jax.device_put(arguments, shardings(model, mesh)))
        result["leaves"] = compare(got, want, model.specs)
        print(leaves_table(result["leaves"], factors=False))
    print(collectives_table(result["collectives"]))
    result["problem"] = problem(program, mesh)
    alone = f"{DATA_AXIS} has one device: nothing to reduce over it"
    one = f"one reduction over {DATA_AXIS}, checked in the compiled program"
    sound = one if mesh.shape[DATA_AXIS] > 1 else alone
    print(f"  {result['problem'] or sound}", flush=True)
    return result


def problem(program: Any, mesh: jax.sharding.Mesh) -> str | None:
    """Return what a compiled program does over the data axis beside one mean, if anything."""
    try:
        audit.assert_one_reduction(program, axis_name=DATA_AXIS, mesh=mesh)
    except AssertionError as error:
        return str(error)
    return None


def break_model(
    model: Model,
    mesh: jax.sharding.Mesh,
    arguments: Any,
    want: Any,
    FLAGS: flags.FlagValues,  # noqa: N803
) -> dict[str, Any]:
    """Show what a broken rule does: what accumulate says of it, then the gradients."""
    layers = RULES[FLAGS.break_rule].broken(model.layers, model.sequence_axis)
    refusal = None
    try:
        fun = accumulated(model, layers, mesh, FLAGS.microbatches, check_vma=False)
        jax.eval_shape(fun, *arguments)
    except ValueError as error:
        refusal = str(error)
    print(
        f"  gradaccum.accumulate refuses this: {refusal}"
        if refusal
        else "  gradaccum.accumulate does not see this"
    )
    program = compiled(by_hand(model, layers, mesh), model, mesh, arguments)
    got = program(*jax.device_put(arguments, shardings(model, mesh)))
    leaves = compare(got, want, model.specs)
    print(f"  In a plain jax.shard_map instead:\n{leaves_table(leaves, factors=True)}", flush=True)
    return {"refusal": refusal, "leaves": leaves}


########################################### The program ##########################################


def run(FLAGS: flags.FlagValues) -> list[str]:  # noqa: N803
    """Run the whole program; return a line for each mesh and model that is not as it should be."""
    # Before any array is made; and in full float32 where an accelerator would take fewer bits.
    with jax.enable_x64(FLAGS.dtype == "float64"), jax.default_matmul_precision("highest"):
        return _run(FLAGS, flag_parsing.chosen(FLAGS, tensor_parallel_flags.GROUPS))


def _run(FLAGS: flags.FlagValues, chosen: dict[str, Any]) -> list[str]:  # noqa: N803
    tensor_parallel_flags.check(chosen)

    def make(axes: dict[str, int], asked: str) -> jax.sharding.Mesh:
        return aot.tpu_mesh(FLAGS.topology, axes) if FLAGS.topology else meshes.make(axes, asked)

    grids = {
        text: make(axes, f"--meshes={text}")
        for text, axes in tensor_parallel_flags.chosen_meshes(chosen).items()
    }
    models = tensor_parallel_flags.chosen_models(chosen)
    tolerance = FLAGS.tolerance
    if tolerance is None:
        tolerance = tensor_parallel_flags.TOLERANCES[FLAGS.dtype]

    key = jax.random.key(FLAGS.seed)
    batch = tokens(FLAGS.seed, FLAGS.batch_size, tensor_parallel_flags.sizes(chosen))
    if FLAGS.topology:
        references = {name: (jax.eval_shape(m.init, key), None) for name, m in models.items()}
    else:
        references = {name: unsharded(m, key, batch) for name, m in models.items()}

    shape = f"{FLAGS.batch_size} sequences of {FLAGS.seq_len} bytes, {FLAGS.dtype}"
    if FLAGS.break_rule:
        print(f"{shape}; broken rule: {FLAGS.break_rule}. {RULES[FLAGS.break_rule].lesson}")
        if FLAGS.models is None and (rest := [name for name in MODELS if name not in models]):
            print(f"Left out, as there a bias follows no sum: {', '.join(rest)}.")
    else:
        print(f"{shape}, in {FLAGS.microbatches} microbatches; check_vma={FLAGS.check_vma}")
    show = break_model if FLAGS.break_rule else check_model
    runs, failures = [], []
    for text, mesh in grids.items():
        results = {}
        for name, model in models.items():
            print(f"\n{text} {name}")
            params, want = references[name]
            results[name] = show(model, mesh, (params, batch), want, FLAGS)
            runs.append({"mesh": dict(mesh.shape), "model": name, **results[name]})
        if not FLAGS.topology:
            leaves = {name: result["leaves"] for name, result in results.items()}
            print(f"\n{text}: {summary(leaves, tolerance)}", flush=True)
        for name, result in results.items():
            failures += [f"{text} {name}: {line}" for line in faults(result, tolerance)]
    if FLAGS.json:
        here = environment.environment(max(grids.values(), key=lambda mesh: mesh.size))
        here["devices"]["ran"] = not FLAGS.topology
        written = {"flags": chosen, **here, "tolerance": tolerance, "runs": runs}
        flag_parsing.write_json(FLAGS.json, written)
    return failures


def faults(result: dict[str, Any], tolerance: float) -> list[str]:
    """Return a line for each way in which one model's result is not as it should be."""
    lines = []
    if far := too_large(result.get("leaves", ()), tolerance):
        lines.append(f"differs by more than {tolerance:g}: {', '.join(far)}")
    if result.get("problem"):
        lines.append(result["problem"])
    return lines


def main(argv: list[str]) -> None:
    del argv  # tensor_parallel_flags.parse has refused all but flags
    FLAGS = flags.FLAGS
    try:
        asked = flag_parsing.chosen(FLAGS, tensor_parallel_flags.GROUPS)
        grids = tensor_parallel_flags.chosen_meshes(asked).values()
        meshes.prepare_platform(max(math.prod(axes.values()) for axes in grids))
        meshes.first_query()
        failures = run(FLAGS)
    except (ValueError, OSError) as error:
        sys.exit(f"tensor_parallel: {error}")
    if failures:
        sys.exit("\n".join(f"tensor_parallel: {failure}" for failure in failures))


if __name__ == "__main__":
    app.run(
        main,
        flags_parser=lambda argv: tensor_parallel_flags.parse(argv, flags.FLAGS, __doc__ or ""),
    )
