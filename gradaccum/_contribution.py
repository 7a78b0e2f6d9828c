"""What one microbatch adds to the sums, as a program: in place (refs) where that is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.microbatching import AccumulationType

from gradaccum import _contracts, _jaxpr
from gradaccum._arguments import Role
from gradaccum._mesh import vary, varying_axes
from gradaccum._reduce import Rows, Sums, sum_dtype
from gradaccum._repeated import share_repeated
from gradaccum._stand_ins import with_stand_ins


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
      stand_ins: the leaves for which the loss takes one input more, whose cotangent is theirs.
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
    stand_ins: Sequence[int] = ()

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
        inputs = {self.input_of(i): i for i in self.wanted}
        by_value = [
            at
            for at, i in inputs.items()
            if self.roles[i] is not Role.BROADCAST
            or self.dtypes[i] != self.loss.in_avals[at].dtype
            or self.dtypes[i] == jnp.float16
        ]
        found = _jaxpr.in_place_inputs(self.loss, list(inputs), by_value)
        return [inputs[at] for at in found]

    def input_of(self, leaf: int) -> int:
        """Returns which input of the loss has the leaf's cotangent."""
        if leaf not in self.stand_ins:
            return leaf
        return len(self.roles) + self.stand_ins.index(leaf)


class _NotInPlaceError(Exception):
    """The backward pass cannot add into these refs."""


def _evaluate(
    loop: Loop, targets: Sequence[Any], index: Any, weight: jax.Array, arrays: Sequence[Any]
) -> tuple[Any, list[Any], list[Any]]:
    """Returns loss, aux leaves and, for the wanted leaves, scale * w * gradient.

    A target is a ref to add the gradient into, or None for its value. `index` is the hook's.
    """
    fun = _jaxpr.as_function(share_repeated(loop.loss))
    inputs = [*arrays, *map(zeros, loop.loss.in_avals[len(arrays) :])]
    wanted = [loop.input_of(i) for i in loop.wanted]

    def of_wanted(values: list[Any]) -> tuple[Any, list[Any]]:
        merged = list(inputs)
        for i, value in zip(wanted, values, strict=True):
            merged[i] = value
        loss, *aux = fun(*merged)
        return loss, aux

    if not wanted:
        return (*of_wanted([]), [])
    loss, vjp, aux = jax.vjp(of_wanted, [inputs[i] for i in wanted], has_aux=True)
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


class Traced(NamedTuple):
    """One microbatch's contribution as a program of (refs, index, weight, arrays)."""

    program: Any
    form: Any  # the structure of (Sums, Rows), with their avals
    in_place: list[int]  # the leaves that have a ref
    refs: list[Any]


def _trace_with(
    loop: Loop, in_place: list[int], index: Any, weight: Any, arrays: Sequence[Any]
) -> Traced:
    refs = [jax.new_ref(zeros(loop.loss.in_avals[loop.input_of(i)])) for i in in_place]

    @jax.jit  # one equation: the loop's body need not be traced equation by equation again
    def microbatch(refs: list[Any], *rest: Any) -> tuple[Sums, Rows]:
        targets = dict(zip(in_place, refs, strict=True))
        return _contribution(loop, [targets.get(i) for i in loop.wanted], *rest)

    given = (refs, index, weight, list(arrays))
    traced, form = jax.make_jaxpr(microbatch, return_shape=True)(*given)
    return Traced(traced, form, in_place, refs)


def trace(loop: Loop, index: Any, weight: Any, arrays: Sequence[Any]) -> Traced:
    """Traces with refs where they are right; if the trace shows otherwise, by value throughout."""
    for attempt in (_with_stand_ins(loop, arrays), loop):
        in_place = attempt.in_place()
        if not in_place or not set(attempt.stand_ins) <= set(in_place):
            continue
        try:
            traced = _trace_with(attempt, in_place, index, weight, arrays)
            if not _jaxpr.has_aliased_ref(traced.program):
                return traced
        except _NotInPlaceError:
            pass
    return _trace_with(loop, [], index, weight, arrays)


def _with_stand_ins(loop: Loop, arrays: Sequence[Any]) -> Loop:
    shared = [i for i in loop.wanted if loop.roles[i] is Role.BROADCAST]
    if not loop.fused or loop.hook is not None:
        shared = []
    program, found = with_stand_ins(loop.loss, {i: loop.dtypes[i] for i in shared}, arrays)
    return dataclasses.replace(loop, loss=program, stand_ins=found)


def zeros(aval: Any) -> jax.Array:
    return vary(jnp.zeros(aval.shape, aval.dtype), varying_axes(aval))
