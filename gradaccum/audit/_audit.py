"""The two questions one asks of a compiled program."""

from __future__ import annotations

from typing import Any

from gradaccum.audit._one_reduction import Check
from gradaccum.audit._program import AnyMesh, read
from gradaccum.audit._report import Report


def collectives(fn: Any, *args: Any, mesh: AnyMesh | None = None) -> Report:
    """List every collective operation of a compiled program.

    Each row counts one operation at one place. Executions per call are the product of the trip
    counts of the loops around it: annotated by XLA (CPU, GPU), or worked out from a loop's
    condition (TPU). Its mesh axes are those along which the devices of one replica group
    differ. Groups of one device move nothing and are left out.

    Args:
      fn: a jitted function (a plain one is jitted); or a `jax.stages.Lowered` or `Compiled`
        program; or the text of a compiled one (`compiled.as_text()`).
      *args: the function's arguments: arrays or `jax.ShapeDtypeStruct`s, with the shardings
        that the real ones have. None for a program.
      mesh: the mesh whose axes name the groups; by default that of the program's inputs and
        outputs, or the one that jax 0.12 writes into the text. Without any, axes are `("?",)`.

    Returns:
      A sequence of `Collective` rows that prints as a table, with totals per axis.

    Raises:
      TypeError: `fn` is none of the above, or arguments come with a program.
      ValueError: the text is not HLO, the compiler cannot write it, or the mesh does not fit
        the program.

    Cost:
      One compilation (none for a compiled program or text), and a pass over its text on the
      host, less than half a second a megabyte. Nothing runs on a device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from gradaccum import audit
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("dp",))
      >>> def total(x):
      ...     return jax.lax.psum(x.sum(0), "dp")
      >>> step = jax.shard_map(total, mesh=mesh, in_specs=P("dp"), out_specs=P())
      >>> report = audit.collectives(jax.jit(step), jnp.ones((16, 4)), mesh=mesh)
      >>> [(row.kind, row.axes, row.dtype, row.bytes, row.executions) for row in report]
      [('all-reduce', ('dp',), 'f32', 16, 1)]
      >>> print(report)  # doctest: +ELLIPSIS
      jit_total: 1 collective on 8 devices, mesh dp=8
      kind        axes  dtype  arrays  bytes  executions  branch  op
      all-reduce  dp    f32         1     16           1          jit(total)/...
      total over dp: executions 1, bytes 16, sent by each device 28

    References:
      XLA's operation semantics, https://openxla.org/xla/operation_semantics.
    """
    return read("audit.collectives", fn, args, mesh)[2]


def assert_one_reduction(
    fn: Any,
    *args: Any,
    axis_name: str | tuple[str, ...],
    mesh: AnyMesh | None = None,
    conditional: bool = False,
) -> None:
    """Assert that a compiled step does one cross-device mean: each gradient byte reduced once.

    Every operation over a data axis must run once a call, in no loop and no branch, and every
    array of more than one element that is reduced over the data axes must be reduced over all
    of them, over each exactly once. XLA may split the mean into several operations or chain
    them over axes; the gathers and scatters of sharded parameters, and an exchange that is then
    summed (a quantised mean), are legal.

    "The same bytes" are followed through casts, scaling, elementwise arithmetic, reshapes,
    slices, loops and calls. Caught are: a reduction given the result of another over the same
    devices; one operand given to two reductions; the results of two reductions added to each
    other (microbatches reduced one by one); an all-gather whose pieces are then summed locally.
    An exchange that is then summed counts as a reduction, also of what was quantised for it.
    Matrix products, reductions and table lookups end the trail: of PowerSGD's factors the text
    does not tell of what, so its means added without a loop, or beside a plain one, pass; so do
    two exchanges of one array. `collectives` shows their bytes. Where the text cannot tell
    otherwise, the check is strict: a product of two gathered operands, at least one of them
    computed, counts as a local sum, and any array over one element counts as a gradient.

    Args:
      fn, *args, mesh: as in `collectives`.
      axis_name: the data axis, or a tuple of them. Axes of size 1 need no reduction.
      conditional: allow the operations to stand in a branch (`MultiSteps` has its one mean in
        the taken branch of a `lax.cond`).

    Raises:
      AssertionError: with what is wrong in the first line, and the table of `collectives`.
      ValueError: the mesh is unknown or lacks an axis of `axis_name`; and as `collectives`.
      TypeError: as `collectives`.

    Cost:
      As `collectives`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from gradaccum import audit
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("dp",))
      >>> def mean(x):
      ...     return jax.lax.pmean(x.mean(0), "dp")
      >>> step = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("dp"), out_specs=P()))
      >>> audit.assert_one_reduction(step, jnp.ones((16, 4)), axis_name="dp", mesh=mesh)
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    api = "audit.assert_one_reduction"
    module, flow, report = read(api, fn, args, mesh, axes)
    unknown = [axis for axis in axes if axis not in report.mesh]
    if unknown or not axes:
        has = ", ".join(f"{name}={size}" for name, size in report.mesh.items()) or "no known mesh"
        raise ValueError(
            f"{api}: axis_name={axis_name!r} names {len(unknown)} axes that program "
            f"{report.program} does not have ({', '.join(unknown) or 'none given'}); it has {has}. "
            "Required: axes of its mesh. Pass the mesh as mesh=, or correct axis_name."
        )
    problems = list(Check(module, flow, report, axes).problems(conditional=conditional))
    if problems:
        first, *others = problems
        also = "".join(f"\n  also: {problem}" for problem in others)
        raise AssertionError(f"{api}: {first}{also}\n{report}")
