"""The microbatch loop: cotangents added in place (refs) where that is right, by value elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from optax.microbatching import AccumulationType

from gradaccum import _contracts, _jaxpr
from gradaccum._arguments import Role
from gradaccum._mesh import vary, varying_axes
from gradaccum._microbatch import fold_key
from gradaccum._reduce import Rows, Sums, sum_dtype


@dataclasses.dataclass(frozen=True)
class Loop:
    """One device's microbatches as a program: what to evaluate, differentiate and add up.

    Attributes:
      loss: the traced loss of one microbatch: array leaves -> loss, *aux leaves.
      weight: the traced weight of one microbatch: array leaves -> weight; or None.
      aux_types: how each aux leaf is accumulated.
      roles: the role of each array leaf.
      differentiated: for each array leaf, whether its gradient is wanted.
      dtypes: for each array leaf, its accumulator's dtype.
      scale: the constant factor of every gradient, 1 / (k n) for a mean.
      microbatches: k.
      fused: allow accumulation inside the backward pass.
      overlap: peel the last microbatch out of the loop.
      unroll: as in `jax.lax.scan`.
      hook: gradients of broadcast leaves by their index, and the microbatch's global index -> what
        is accumulated in their place.
    """

    loss: Any
    weight: Any
    aux_types: Sequence[AccumulationType]
    roles: Sequence[Role]
    differentiated: Sequence[bool]
    dtypes: Sequence[Any]
    scale: float
    microbatches: int
    fused: bool
    overlap: bool
    unroll: int
    hook: Callable[[dict[int, jax.Array], jax.Array], dict[int, jax.Array]] | None = None

    @property
    def loss_dtype(self) -> Any:
        return self.loss.out_avals[0].dtype

    @property
    def scalar_dtype(self) -> Any:
        """The dtype of weights and of the accumulated loss: float32 at least."""
        return jnp.promote_types(self.loss_dtype, jnp.float32)

    @property
    def wanted(self) -> list[int]:
        return [i for i, d in enumerate(self.differentiated) if d]

    @property
    def seeds_exactly(self) -> bool:
        """Whether weight and scale can be the cotangent itself, not a factor afterwards.

        Not if the loss's dtype would round them, nor where any of the loss is in float16, which
        would over- or underflow, nor where a hook is to see the gradient without them.
        """
        exact = self.loss_dtype == self.scalar_dtype and self.hook is None
        return bool(exact and not _jaxpr.computes_in(self.loss, jnp.float16))

    def in_place(self) -> list[int]:
        """Returns the leaves whose cotangents may be added in place, inside the backward pass."""
        weighted = self.weight is not None and not self.seeds_exactly
        if not self.fused or self.hook is not None or weighted:
            return []
        by_value = [
            i
            for i in self.wanted
            if self.roles[i] is not Role.BROADCAST
            or self.dtypes[i] != self.loss.in_avals[i].dtype
            or self.dtypes[i] == jnp.float16
        ]
        return _jaxpr.in_place_inputs(self.loss, self.wanted, by_value)


class _NotInPlaceError(Exception):
    """The backward pass cannot add into these refs."""


def as_function(program: Any) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function of arrays to arrays; a constant output may be a literal."""
    fun = jex_core.jaxpr_as_fun(program)

    def arrays(*args: Any) -> list[Any]:
        outputs = zip(fun(*args), program.out_avals, strict=True)
        return [x if isinstance(x, jax.Array) else jnp.asarray(x, a.dtype) for x, a in outputs]

    return arrays


def _evaluate(
    loop: Loop, targets: Sequence[Any], index: Any, weight: jax.Array, arrays: Sequence[Any]
) -> tuple[Any, list[Any], list[Any]]:
    """Returns loss, aux leaves and, for the wanted leaves, scale * w * gradient.

    A target is a ref to add the gradient into, or None for its value. `index` is the hook's.
    """
    fun = as_function(loop.loss)

    def of_wanted(values: list[Any]) -> tuple[Any, list[Any]]:
        merged = list(arrays)
        for i, value in zip(loop.wanted, values, strict=True):
            merged[i] = value
        loss, *aux = fun(*merged)
        return loss, aux

    if not loop.wanted:
        return (*of_wanted([]), [])
    loss, vjp, aux = jax.vjp(of_wanted, [arrays[i] for i in loop.wanted], has_aux=True)
    factor = weight * loop.scale
    seed = factor if loop.seeds_exactly else jnp.ones((), loss.dtype)
    seed = vary(seed.astype(loss.dtype), varying_axes(loss))
    if any(t is not None for t in targets):
        by_value = jax.ad.GradValue()  # type: ignore[attr-defined]
        refs = [by_value if t is None else t for t in targets]
        vjp = vjp.with_refs(refs)  # type: ignore[attr-defined]
    try:
        (grads,) = vjp(seed)
    except Exception as e:
        # Some transpose rule takes no ref. An error of the user's own comes back by value.
        if any(t is not None for t in targets):
            raise _NotInPlaceError from e
        raise
    grads = [None if t is not None else g for t, g in zip(targets, grads, strict=True)]
    if not loop.seeds_exactly:
        by_leaf = dict(zip(loop.wanted, grads, strict=True))
        own = {i: g.astype(loop.dtypes[i]) for i, g in by_leaf.items() if g is not None}
        if loop.hook is not None:
            shared = {i: g for i, g in own.items() if loop.roles[i] is Role.BROADCAST}
            own |= loop.hook(shared, index)
        scaled = {i: g * factor.astype(g.dtype) for i, g in own.items()}
        grads = [scaled.get(i) for i in loop.wanted]
    return loss, aux, grads


def _contribution(
    loop: Loop, targets: Sequence[Any], index: Any, weight: jax.Array, arrays: Sequence[Any]
) -> tuple[Sums, Rows]:
    """Returns what one microbatch adds to the sums, and its own rows."""
    _contracts.check_scalars(loop.loss.out_avals[0], weight)
    loss, aux, grads = _evaluate(loop, targets, index, weight, arrays)
    loss = loss.astype(loop.scalar_dtype)
    counted = None if loop.weight is None else weight
    sums = Sums(loss * weight, counted, [None] * len(aux), [None] * len(arrays))
    rows = Rows([None] * len(aux), [None] * len(arrays))
    for i, (kind, x) in enumerate(zip(loop.aux_types, aux, strict=True)):
        if kind is AccumulationType.CONCAT:
            rows.aux[i] = x
        elif kind is AccumulationType.SUM:
            sums.aux[i] = x.astype(sum_dtype(x.dtype))
        else:
            wide = sum_dtype(x.dtype)
            sums.aux[i] = x.astype(wide) * weight.astype(wide)
    for i, g in zip(loop.wanted, grads, strict=True):
        if loop.roles[i] is Role.BATCH:
            rows.grads[i] = g
        elif g is not None:
            sums.grads[i] = g.astype(loop.dtypes[i])
    return sums, rows


class _Traced(NamedTuple):
    """One microbatch's contribution as a program of (refs, index, weight, arrays)."""

    program: Any
    form: Any  # the structure of (Sums, Rows), with their avals
    in_place: list[int]  # the leaves that have a ref
    refs: list[Any]


def _trace(
    loop: Loop, in_place: list[int], index: Any, weight: Any, arrays: Sequence[Any]
) -> _Traced:
    refs = [jax.new_ref(_zeros(loop.loss.in_avals[i])) for i in in_place]

    def contribution(refs: list[Any], *rest: Any) -> tuple[Sums, Rows]:
        targets = dict(zip(in_place, refs, strict=True))
        return _contribution(loop, [targets.get(i) for i in loop.wanted], *rest)

    given = (refs, index, weight, list(arrays))
    traced, form = jax.make_jaxpr(contribution, return_shape=True)(*given)
    return _Traced(traced, form, in_place, refs)


def _trace_safely(loop: Loop, index: Any, weight: Any, arrays: Sequence[Any]) -> _Traced:
    """Traces with refs where they are right; if the trace shows otherwise, by value throughout."""
    in_place = loop.in_place()
    if in_place:
        try:
            traced = _trace(loop, in_place, index, weight, arrays)
            if not _jaxpr.has_aliased_ref(traced.program):
                return traced
        except _NotInPlaceError:
            pass
    return _trace(loop, [], index, weight, arrays)


def _zeros(aval: Any) -> jax.Array:
    return vary(jnp.zeros(aval.shape, aval.dtype), varying_axes(aval))


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
        (weight,) = as_function(loop.weight)(*arrays)
        return vary(weight.astype(loop.scalar_dtype), axes)

    def numbered(index: Any) -> Any:
        return None if loop.hook is None else vary(first_index + index, axes)

    batch = [x for x, b in zip(leaves, is_batch, strict=True) if b]
    sample = microbatch(0, [x[0] for x in batch])
    traced = _trace_safely(loop, numbered(jnp.int32(0)), weigh(sample), sample)
    run = as_function(traced.program)
    form = jax.tree.structure(traced.form)

    def step(sums: Sums, x: tuple[Any, list[Any]]) -> tuple[Sums, Rows]:
        arrays = microbatch(*x)
        weight = weigh(arrays)

        def taken(sums: Sums) -> tuple[Sums, Rows]:
            flat = run(*jax.tree.leaves((traced.refs, numbered(x[0]), weight, arrays)))
            more, rows = jax.tree.unflatten(form, flat)
            return jax.tree.map(jnp.add, sums, more), rows

        def skipped(sums: Sums) -> tuple[Sums, Rows]:
            return sums, jax.tree.map(_zeros, traced.form[1])

        # Not `weight > 0`: a NaN weight is to be seen in the result, not skipped.
        return (
            taken(sums) if loop.weight is None else jax.lax.cond(weight != 0, taken, skipped, sums)
        )

    start = jax.tree.map(_zeros, traced.form[0])
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
