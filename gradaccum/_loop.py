"""The microbatch loop of one device: a scan over what each microbatch adds to the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import _contracts, _jaxpr
from gradaccum._arguments import Role
from gradaccum._contribution import Loop, trace, zeros
from gradaccum._mesh import vary
from gradaccum._microbatch import fold_key
from gradaccum._reduce import Rows, Sums


def accumulate(
    loop: Loop, leaves: Sequence[Any], first_index: Any, axes: Sequence[str]
) -> tuple[Sums, Rows]:
    """Runs the microbatches of one device, one after the other.

    Args:
      loop: the program.
      leaves: the array leaves, batch ones split, `[k, b, ...]`.
      first_index: int32 `[]`, the global index of this device's first microbatch.
      axes: the data axes, where values are typed by what they vary over (`check_vma=True`).

    Returns:
      `(Sums, Rows)`, unreduced.
    """
    is_batch = [role is Role.BATCH for role in loop.roles]

    def microbatch(index: Any, batch: list[Any]) -> list[Any]:
        rows = iter(batch)
        return [
            next(rows) if role is Role.BATCH
            else fold_key(x, first_index + index) if role is Role.KEY
            else x
            for role, x in zip(loop.roles, leaves, strict=True)
        ]  # fmt: skip

    def weigh(arrays: list[Any]) -> jax.Array:
        if loop.weight is None:
            return vary(jnp.ones((), loop.scalar_dtype), axes)
        (weight,) = _jaxpr.as_function(loop.weight)(*arrays)
        return vary(weight.astype(loop.scalar_dtype), axes)

    def numbered(index: Any) -> Any:
        return None if loop.hook is None else vary(first_index + index, axes)

    batch = [x for x, b in zip(leaves, is_batch, strict=True) if b]
    sample = microbatch(0, [x[0] for x in batch])
    traced = trace(loop, numbered(jnp.int32(0)), weigh(sample), sample)
    run = _jaxpr.as_function(traced.program)
    form = jax.tree.structure(traced.form)

    def step(sums: Sums, x: tuple[Any, list[Any]]) -> tuple[Sums, Rows]:
        arrays = microbatch(*x)
        weight = weigh(arrays)

        def taken(sums: Sums) -> tuple[Sums, Rows]:
            flat = run(*jax.tree.leaves((traced.refs, numbered(x[0]), weight, arrays)))
            more, rows = jax.tree.unflatten(form, flat)
            return jax.tree.map(jnp.add, sums, more), rows

        def skipped(sums: Sums) -> tuple[Sums, Rows]:
            return sums, jax.tree.map(zeros, traced.form[1])

        # Not `weight > 0`: a NaN weight is to be seen in the result, not skipped.
        return (
            taken(sums) if loop.weight is None else jax.lax.cond(weight != 0, taken, skipped, sums)
        )

    start = jax.tree.map(zeros, traced.form[0])
    sums, rows = _scan(loop, step, start, batch)
    grads = list(sums.grads)
    for i, ref in zip(traced.in_place, traced.refs, strict=True):
        g = jax.ref.freeze(ref)
        # What the seed did not scale is scaled here; then there are no weights (see in_place).
        grads[i] = g if loop.seeds_exactly else g * jnp.asarray(loop.scale, g.dtype)
    wanted = [i for i in loop.wanted if loop.roles[i] is Role.BROADCAST]
    _contracts.check_accumulators(
        [grads[i] for i in wanted], [leaves[i] for i in wanted], [loop.dtypes[i] for i in wanted]
    )
    return sums._replace(grads=grads), rows


def _scan(loop: Loop, step: Any, sums: Sums, batch: list[Any]) -> tuple[Sums, Rows]:
    """Scans the microbatches, or all but the last, which then follows outside the loop."""
    indices = jnp.arange(loop.microbatches, dtype=jnp.int32)
    with jax.named_scope("gradaccum/microbatches"):
        if not loop.overlap:
            return jax.lax.scan(step, sums, (indices, batch), unroll=loop.unroll)
        xs = (indices, batch)
        but_last, last = jax.tree.map(lambda x: x[:-1], xs), jax.tree.map(lambda x: x[-1], xs)
        sums, rows = jax.lax.scan(step, sums, but_last, unroll=loop.unroll)
        sums, row = step(sums, last)
        return sums, jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), rows, row)
