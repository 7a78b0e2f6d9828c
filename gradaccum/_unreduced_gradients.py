"""`unreduced_value_and_grad`: a loss and its gradients, accumulated and not yet averaged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.microbatching import AccumulationType

from gradaccum import _call, _checks, _device, _gradient_hooks, _unreduced_checks
from gradaccum._accumulate import accumulate
from gradaccum._arguments import Role
from gradaccum._decorated import Accumulated, Method
from gradaccum._layout import Layouts, gradient_spec
from gradaccum._means import Awaited
from gradaccum._mesh import axis_name_of, is_typed, vary
from gradaccum._microbatch import merge
from gradaccum._options import Call
from gradaccum._shard import shard_over_data
from gradaccum._unreduced import Unreduced, new_guard


def unreduced_value_and_grad(
    loss_fn: Callable[..., Any], argnums: int | Sequence[int] = 0, **options: Any
) -> Callable[..., Any]:
    """Compute a loss and its gradients without the cross-device mean, for `MultiSteps` to take.

    Over the k microbatches of one call on data device d, with weights w (without `weight_fn`, the
    number of its examples):

        sum[d] = sum(w_i * value_i),   weight[d] = sum(w_i),   i < k

    for the loss and every gradient, so that `sum(sum) / sum(weight)` over devices and calls is the
    full batch's value, also of calls whose batches differ in size. With `loss_reduction="sum"` the
    weight is 1/n: the mean is the sum over one call's microbatches and devices, averaged over
    calls.

    Communication: none, except what the loss itself does, and one all-gather of each parameter
    that `in_specs` splits over a data axis.

    Args:
      loss_fn: the loss of one microbatch, as `gradaccum.accumulate` takes it; or one so decorated,
        whose options then hold.
      argnums: the positional argument or arguments to differentiate. Not batch ones: their
        gradient belongs to one device and has no mean.
      **options: those of `gradaccum.accumulate`, except `comm_hook`; `microbatches` here is 1 if
        not given: the batch of a call is one microbatch a device (an `accumulator_dtype` holds sums
        over examples: float16 overflows early). `in_specs`, `grad_specs` and `reduce_dtype` say how
        the mean, once it is taken, is reduced and laid out. Hooks change the rows, loss excepted.

    Returns:
      A function of the loss's own arguments, to `(loss, grads)`, or `((loss, aux), grads)` with
      `has_aux`. The loss, and each leaf of grads (and of aux, unless it is CONCAT), is an
      `Unreduced`, `[n, *shape]`, in the accumulator's dtype. Jit it together with the update.

    Raises:
      ValueError: the gradient of a batch argument is asked for; a `comm_hook` is given; else as
        `gradaccum.accumulate`, in its words, before anything is computed.
      TypeError: options beside a loss that is decorated already; else as `gradaccum.accumulate`.

    Cost:
      Collectives: none; with `in_specs` over a data axis one all-gather of each such parameter, its
      bytes once. Memory: one row a device, of the whole gradient in the accumulator's dtype.

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> mesh = jax.make_mesh((8,), ("dp",))
      >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> fun = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp", mesh=mesh)
      >>> loss, grad = fun(jnp.ones((3,)), jnp.ones((16, 3)))
      >>> grad
      Unreduced(float32[3] in 8 rows over 'dp', awaiting gradaccum.mean)
      >>> gradaccum.mean(grad).tolist()
      [6.0, 6.0, 6.0]
    """
    if isinstance(loss_fn, Accumulated | Method):
        decorated = loss_fn
    else:
        _checks.check_function(loss_fn)
        _check_no_comm_hook(options.get("comm_hook"))
        decorated = accumulate(loss_fn, **{"microbatches": 1, **options})
    if options and decorated is loss_fn:
        raise TypeError(
            f"unreduced_value_and_grad: {', '.join(options)} given beside a loss that "
            "gradaccum.accumulate has decorated already. Give options in one place."
        )

    @functools.wraps(loss_fn)
    def fun(*args: Any, **kwargs: Any) -> Any:
        call, arrays, pick = decorated.prepare_gradients(argnums, args, kwargs)
        _check_no_comm_hook(call.options.comm_hook)
        wanted = call.differentiated or (False,) * len(arrays)
        leaf = zip(call.form.paths(call.options.fun), call.form.roles, wanted, strict=True)
        batch = [path for path, role, w in leaf if w and role is Role.BATCH]
        _unreduced_checks.check_no_batch_gradient(batch)
        loss, aux, grads = _assemble(_run(call, arrays), call)
        return ((loss, aux) if call.options.has_aux else loss), pick(grads)

    return fun


def _check_no_comm_hook(hook: Any) -> None:
    """Raises ValueError for a communication hook where no mean is taken."""
    if hook is not None:
        raise ValueError(
            f"unreduced_value_and_grad: comm_hook is {hook!r}, which replaces the cross-device "
            "mean; here none is taken. Give it to what takes the mean: gradaccum.MultiSteps or "
            "gradaccum.all_reduce_mean."
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """What a run knows beside its arrays."""

    awaited: tuple[Awaited | None, ...]  # of each array leaf's gradient
    aux_tree: Any
    aux_types: tuple[AccumulationType, ...]
    dtypes: tuple[Any, ...]  # of the loss and of each aux leaf
    axis_name: Any
    rows: int


class _Found(NamedTuple):
    """What a trace of one device learned."""

    device: _device.OneDevice
    weight: int  # of its row, by a count of microbatches or examples


def _local(call: Call, layouts: Layouts, found: list[_Found], *arrays: jax.Array) -> dict[str, Any]:
    """Accumulates this device's microbatches: everything becomes a row."""
    options, where = call.options, call.where
    k, mean = options.microbatches, options.loss_reduction == "mean"
    roles = zip(arrays, call.form.roles, strict=True)
    examples = next(x.shape[0] for x, role in roles if role is Role.BATCH) // k
    factor = examples if options.weight_fn is None else 1  # the weight of a microbatch, beside w
    one = _device.accumulate(
        call, layouts, arrays, scale=float(factor) if mean else 1.0, replicated=False
    )
    found.append(_Found(one, k * factor if mean else k))
    sums = one.sums
    count = jnp.float32(k * factor) if sums.weight is None else sums.weight
    weight = count if mean else jnp.float32(1 / where.size)
    aux = [
        x if x is None or kind is AccumulationType.SUM else x * factor
        for kind, x in zip(one.aux_types, sums.aux, strict=True)
    ]
    typed = where.axis_names if is_typed(where.axis_names) else ()

    def row(x: Any) -> Any:
        return None if x is None else vary(x[None], typed)

    return {
        "shared": {},
        "rows": {
            "loss": row(sums.loss * factor if mean else sums.loss),
            "weight": row(weight.astype(jnp.float32)),
            "count": row(count.astype(jnp.float32)),
            "aux": [row(x) for x in aux],
            "concat": jax.tree.map(merge, one.own.aux),
        },
        "grads": [row(g) for g in sums.grads],
    }


def _trace(call: Call, arrays: Sequence[Any]) -> tuple[dict[str, Any], list[Any], _Static]:
    call, layouts = _call.prepare(call, arrays)
    options, where = call.options, call.where
    wanted = call.differentiated or (False,) * len(arrays)
    found: list[_Found] = []
    local, placed, given, wants = _gradient_hooks.with_values(_local, call, layouts, found, arrays)
    out = shard_over_data(
        local,
        where,
        placed,
        given,
        wants,
        check_vma=options.check_vma or is_typed(where.manual_axes),
        reduced=False,
    )
    awaited = tuple(
        Awaited(
            dtype=x.dtype,
            reduce_dtype=options.reduce_dtype,
            scale=1 / (found[-1].weight * where.size),
            layout=layout.globally() if where.manual else layout,
            manual=layouts.manual,
            automatic=layouts.automatic,
            spec=gradient_spec(x, layout, where),
            mesh=options.mesh,
        )
        if w
        else None
        for x, layout, w in zip(arrays, layouts.leaves, wanted, strict=True)
    )
    axes = where.axis_names
    form = _Static(
        awaited=awaited,
        aux_tree=found[-1].device.aux_tree,
        aux_types=found[-1].device.aux_types,
        dtypes=tuple(found[-1].device.dtypes),
        axis_name=axis_name_of(axes),
        rows=1 if where.manual else where.size,
    )
    return out["rows"], out["grads"][: len(arrays)], form


_traced = jax.jit(_trace, static_argnums=0)


def _run(call: Call, arrays: Sequence[Any]) -> tuple[dict[str, Any], list[Any], _Static]:
    """Runs under jit; eager calls share one cache (as `_call.run`)."""
    out: tuple[dict[str, Any], list[Any], _Static]
    if _gradient_hooks.is_traced(call, arrays):
        out = jax.jit(functools.partial(_trace, call))(list(arrays))
    else:
        out = _traced(call, list(arrays))
    return out


def _assemble(
    run: tuple[dict[str, Any], list[Any], _Static], call: Call
) -> tuple[Unreduced, Any, list[Unreduced | None]]:
    """Makes `Unreduced` of the rows; all share the arrays of weights and guards."""
    rows, grads, form = run
    shared = new_guard(form.rows)

    def unreduced(x: jax.Array, weight: jax.Array, awaited: Awaited) -> Unreduced:
        return Unreduced(x, weight, form.axis_name, awaited, shared)

    def aux(i: int, kind: AccumulationType) -> Any:
        if kind is AccumulationType.CONCAT:
            return rows["concat"][i]
        total = kind is AccumulationType.SUM
        # Integers that are summed keep the width that they were summed in.
        dtype = form.dtypes[i + 1] if jnp.issubdtype(form.dtypes[i + 1], jnp.inexact) else None
        how = Awaited(dtype=dtype, total=total, mesh=call.options.mesh)
        return unreduced(rows["aux"][i], rows["count"], how)

    loss = unreduced(
        rows["loss"], rows["weight"], Awaited(dtype=form.dtypes[0], mesh=call.options.mesh)
    )
    leaves = [aux(i, kind) for i, kind in enumerate(form.aux_types)]
    return (
        loss,
        jax.tree.unflatten(form.aux_tree, leaves),
        [
            None if g is None or how is None else unreduced(g, rows["weight"], how)
            for g, how in zip(grads, form.awaited, strict=True)
        ],
    )
