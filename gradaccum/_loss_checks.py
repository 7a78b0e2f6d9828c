"""What is checked of a traced loss: what it returns, and what it communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec
from optax.microbatching import AccumulationType

from gradaccum._activity import OWN_RULE, Collective
from gradaccum._checks import API
from gradaccum._copies import Entry, Misuses


def check_unchanged(classes: Sequence[str]) -> None:
    """Raises ValueError if the loss changed arguments in place: the change would be lost."""
    if classes:
        raise ValueError(
            f"{API}: the loss changed an argument in place, a {', '.join(classes)}: that change "
            "(batch statistics, counts of a random stream) would be lost. Pass the state as an "
            "argument and return it as aux. Of a Flax nnx module: graph, params, rest = "
            "nnx.split(model, nnx.Param, ...) outside, nnx.merge(graph, params, rest) inside."
        )


def split_output(output: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns `(loss, aux)` of what the loss function returned, or raises TypeError."""
    aux = None
    if has_aux:
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise TypeError(
                f"{API}: has_aux=True, but the loss function returned {_kind(output)} instead of "
                "a pair (loss, aux)."
            )
        output, aux = output
    elif isinstance(output, tuple | list):
        raise TypeError(
            f"{API}: the loss function returned {_kind(output)}; give has_aux=True if it is "
            "(loss, aux), or return the loss alone."
        )
    shape, dtype = _shape_and_dtype(output)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.floating):
        got = _kind(output) if shape is None else f"one of shape {shape} and dtype {dtype}"
        raise TypeError(
            f"{API}: the loss of a microbatch must be a real scalar, got {got}. Take its mean (or "
            "its sum, with loss_reduction='sum') over the microbatch."
        )
    return output, aux


def _shape_and_dtype(x: Any) -> tuple[Any, Any]:
    return (jnp.shape(x), jnp.result_type(x)) if jex_core.valid_jaxtype(x) else (None, None)


def _kind(output: Any) -> str:
    if isinstance(output, jax.Array):
        return f"an array of shape {output.shape} and dtype {output.dtype}"
    name = type(output).__name__
    return f"a {name} of {len(output)}" if isinstance(output, tuple | list) else f"a {name}"


def check_weight(weight: Any) -> None:
    """Raises TypeError if `weight_fn` did not return a real scalar."""
    shape, dtype = _shape_and_dtype(weight)
    if shape != () or jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{API}: weight_fn must return one real scalar >= 0 a microbatch, got "
            f"{_kind(weight)}. Sum it, e.g. mask.sum()."
        )


def aux_types(accumulator: Any, aux: Any) -> list[AccumulationType]:
    """Returns the `AccumulationType` of each aux leaf, from a pytree prefix."""
    types: list[AccumulationType] = []

    def spread(kind: AccumulationType, part: Any) -> None:
        types.extend([kind] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(spread, accumulator, aux)
    except (ValueError, TypeError) as e:
        raise ValueError(
            f"{API}: aux_accumulator is not a prefix of aux: it is "
            f"{jax.tree.structure(accumulator)}, aux is {jax.tree.structure(aux)}."
        ) from e
    means = (AccumulationType.MEAN, AccumulationType.RUNNING_MEAN)
    keyed, _ = jax.tree_util.tree_flatten_with_path(aux)
    bad = [
        f"aux{jax.tree_util.keystr(path)} ({jnp.result_type(x)})"
        for (path, x), kind in zip(keyed, types, strict=True)
        if kind in means and not jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    ]
    if bad:
        raise TypeError(
            f"{API}: {', '.join(bad)} cannot be averaged. Give aux_accumulator SUM (exact for "
            "integers) or CONCAT for it, or return it as a float."
        )
    return types


def check_data_collectives(
    names: Sequence[str], axis_names: Sequence[str], k: int, weighted: bool
) -> str | None:
    """Returns the warning for a loss that itself communicates over the data axes, if it does."""
    if not names:
        return None
    axes = ", ".join(axis_names)
    what = f"the loss communicates over the data axis {axes} ({', '.join(sorted(set(names)))})"
    if weighted:
        raise ValueError(
            f"{API}: {what} and weight_fn is given: a device that skips a microbatch of weight 0 "
            "would leave the others waiting. Drop one of them."
        )
    return f"{API}: {what}, which runs in every microbatch, {k} times a call. The result is right."


def check_operators(sources: Sequence[str], axis_names: Sequence[str]) -> None:
    """Raises ValueError for operators of `tensor_parallel` that are given a data axis."""
    if sources:
        raise ValueError(
            f"{API}: gradaccum.tensor_parallel is used over the data axis {', '.join(axis_names)} "
            f"(at {'; '.join(dict.fromkeys(sources))}). Its operators take what all devices of an "
            "axis share or are given their shards of; of a data axis each has a batch of its own. "
            "Give them the model axis alone, named in in_specs and not in axis_name; a sum over "
            "the batches of all devices is jax.lax.psum."
        )


def check_weight_collectives(names: Sequence[str], axis_names: Sequence[str]) -> None:
    """Raises ValueError if `weight_fn` communicates over the data axes."""
    if names:
        raise ValueError(
            f"{API}: weight_fn communicates over the data axis {', '.join(axis_names)} "
            f"({', '.join(sorted(set(names)))}). Return this device's own count: the weights are "
            "summed over devices with the gradients."
        )


def check_weight_invariant(varying: Sequence[str]) -> None:
    """Raises ValueError if there are model axes over which each device has a weight of its own."""
    if varying:
        axes = ", ".join(varying)
        raise ValueError(
            f"{API}: in_specs splits the batch over the model axis {axes} too, so weight_fn sees a "
            f"part of its microbatch. The devices of {axes} must agree on the weight: return that "
            f"of all parts, jax.lax.psum(weight, {axes!r})."
        )


def raise_aux_differentiated() -> NoReturn:
    """Raises the TypeError for a cotangent that reaches aux."""
    raise TypeError(
        f"{API}: the auxiliary output was differentiated. Its gradient is not accumulated: make "
        "it part of the loss, or jax.lax.stop_gradient it where it is used."
    )


def _typed(outer: bool) -> str:
    return "the outer jax.shard_map check_vma=True" if outer else "check_vma=True"


def check_raw_collectives(found: Sequence[Collective], outer: bool) -> None:
    """Raises ValueError for collectives over manual model axes whose transpose would be wrong."""
    if not found:
        return
    raw = "; ".join(
        dict.fromkeys(f"{x.primitive} over {', '.join(x.axes)} at {x.source}" for x in found)
    )
    ops = "gradaccum.tensor_parallel"
    raise ValueError(
        f"{API}: the loss is differentiated through a raw collective over a manual model axis "
        f"({raw}); with check_vma=False its gradient would be too large by the axis's size. Use "
        f"{ops}.reduce_from instead of psum (divide by the axis's size for pmean), or "
        f"copy_to(reduce_from(x)) where the sum feeds sharded computation again; {ops}.gather_from "
        "instead of all_gather; and copy_to where replicated values enter sharded computation. Or "
        f"give {_typed(outer)}, where raw collectives are right."
    )


def check_invariant(varying: Sequence[str]) -> None:
    """Raises ValueError if loss or aux are not the same on all devices of a model axis."""
    if varying:
        axes = ", ".join(varying)
        raise ValueError(
            f"{API}: in_specs names the model axis {axes}, so the loss sees one device's shard "
            "and the loss, or its aux, varies over it: each device would have a value of its own. "
            "Sum it with gradaccum.tensor_parallel.reduce_from (or, with check_vma=True, "
            "jax.lax.psum). A loss that is written for jit wants the axis left out of in_specs; "
            "an axis that the batch is split over belongs in axis_name."
        )


def check_copies(found: Misuses, axis: str, outer: bool) -> None:
    """Raises ValueError for values that lack a `copy_to`, or have one that they should not."""
    copy_to = f"gradaccum.tensor_parallel.copy_to(x, {axis!r})"
    if found.missing:
        raise ValueError(
            f"{API}: a value that is the same on all devices of {axis} is used where each has a "
            f"part of its own ({_where(found.missing)}), so each would have a part of its gradient "
            f"only. Pass it through {copy_to} there, or give {_typed(outer)}. (Logits, weights and "
            f"tables of which each device is to have a part are no such values: split them over "
            f"{axis} in in_specs, and do not gather logits before cross_entropy.)"
        )
    if found.extra:
        raise ValueError(
            f"{API}: a value that has been through {copy_to}, or all_gather_to, is used where all "
            f"devices compute alike ({_where(found.extra)}), so what each adds to its gradient "
            "would be counted on all of them. Use the value from before copy_to there, and copy_to "
            "once on each path, where computation with this device's shards begins; gather_from "
            f"where all compute alike after a gather; or give {_typed(outer)}."
        )
    if found.foreign:
        raise ValueError(
            f"{API}: {copy_to}, or scatter_to, is given a value of which each device of {axis} has "
            f"its own ({_where(found.foreign)}), so the gradients of different values would be "
            "summed. Leave it out there: it takes what is the same on all devices."
        )


def _where(entries: Sequence[Entry]) -> str:
    names = dict.fromkeys(OWN_RULE, "an operator")
    return "; ".join(
        dict.fromkeys(f"{names.get(x.primitive, x.primitive)} at {x.source}" for x in entries)
    )


def check_cotangents(
    leaves: Mapping[str, Any], specs: Sequence[PartitionSpec], manual: bool
) -> None:
    """Raises ValueError if there are leaves whose gradient cannot be a cotangent of `jax.grad`."""
    if not leaves:
        return
    moved = "; ".join(
        f"{path}, {jax.typeof(x)}, has its gradient as {spec}"
        for (path, x), spec in zip(leaves.items(), specs, strict=True)
    )
    where = "inside shard_map it has its local shape" if manual else "on Explicit axes its sharding"
    raise ValueError(
        f"{API}: {moved}. A cotangent must have its primal's type, {where}. Use "
        "loss_fn.value_and_grad(...), which can return gradients laid out by grad_specs, instead "
        "of jax.grad; or place the argument as its gradient is to be."
    )


def check_shared(leaves: Mapping[str, Any], axis_names: Sequence[str]) -> None:
    """Raises ValueError for differentiated parameters of which each data device has its own."""
    if not leaves:
        return
    axes = ", ".join(axis_names)
    names = "; ".join(f"{path}, {jax.typeof(x)}" for path, x in leaves.items())
    raise ValueError(
        f"{API}: {names} is differentiated and varies over the data axis {axes}: each device would "
        "have a value of its own, and one mean is no cotangent of them. Give the parameters as "
        "they are outside; a jax.lax.pcast of them is not needed, the mean is taken here. Of a "
        "sharded parameter, name the data axis in in_specs."
    )
