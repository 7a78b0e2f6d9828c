"""What is checked of a user's input: plain exceptions, with the numbers and the remedy."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, Mesh
from optax.microbatching import AccumulationType

from gradaccum._mesh import Unset

API = "accumulate"


def check_count(name: str, value: Any, unit: str) -> int:
    """Returns a Python int >= 1 or raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{API}: {name} is {value!r}; it must be an int >= 1, {unit}.")
    if value < 1:
        raise ValueError(f"{API}: {name} is {value}; it must be >= 1, {unit}.")
    return operator.index(value)


def check_dtype(name: str, value: Any) -> Any:
    """Returns a floating dtype, or None for None, or raises TypeError."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{API}: {name} is {value!r}; it must be a floating dtype.")
    return dtype


def check_axis_name(axis_name: Any) -> None:
    """Raises unless the data axes are a name, distinct names, None or unset."""
    if axis_name is None or isinstance(axis_name, str | Unset):
        return
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else ()
    if not names or not all(isinstance(a, str) for a in names) or len(set(names)) < len(names):
        raise ValueError(
            f"{API}: axis_name is {axis_name!r}; it must be a mesh axis's name, a tuple of "
            "different ones, or None for no cross-device mean."
        )


def check_function(fun: Any) -> None:
    """Raises TypeError for what is no function, or has no hash to find its program by."""
    if not callable(fun):
        raise TypeError(f"{API}: {fun!r} is not a function of (params, batch, ...).")
    try:
        hash(fun)
    except TypeError:
        raise TypeError(
            f"{API}: the loss, a {type(fun).__name__}, has no hash. Decorate a function that "
            "takes it as an argument."
        ) from None


def check_mesh(mesh: Any) -> None:
    """Raises TypeError for what is no mesh."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"{API}: mesh is {mesh!r}; it must be a jax.sharding.Mesh, as jax.make_mesh makes it."
        )


def check_reduction(loss_reduction: str, weight_fn: Any) -> None:
    """Raises ValueError for an unknown reduction, or weights beside a sum."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(
            f"{API}: loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum', what the "
            "loss is over its own microbatch."
        )
    if weight_fn is not None and not callable(weight_fn):
        raise TypeError(f"{API}: weight_fn is {weight_fn!r}; it must be a function of the batch.")
    if loss_reduction == "sum" and weight_fn is not None:
        raise ValueError(
            f"{API}: weight_fn given with loss_reduction='sum'. A sum needs no weights: leave one "
            "of the two out."
        )


def check_accumulator(accumulator: Any, has_aux: bool) -> None:
    """Raises if the aux accumulator holds anything but `AccumulationType`, or there is no aux."""
    leaves = jax.tree.leaves(accumulator)
    bad = [x for x in leaves if not isinstance(x, AccumulationType)]
    if bad:
        raise TypeError(
            f"{API}: aux_accumulator holds {', '.join(map(repr, bad))}; its leaves must be "
            "optax.microbatching.AccumulationType (MEAN, SUM, RUNNING_MEAN or CONCAT)."
        )
    if not has_aux and accumulator is not AccumulationType.MEAN:
        raise ValueError(f"{API}: aux_accumulator given, but has_aux is False. Give has_aux=True.")


def check_batch(leaves: Mapping[str, Any], arguments: Sequence[Any], k: int, devices: int) -> int:
    """Returns B, the batch's one leading size here, or raises ValueError naming every bad leaf.

    Args:
      leaves: the batch leaves of rank >= 1 by path.
      arguments: the names of the call's arguments.
      k: microbatches.
      devices: n, or 1 where the batch is local already.
    """
    if not leaves:
        raise ValueError(
            f"{API}: no batch to split: the call's {len(arguments)} arguments "
            f"({', '.join(map(str, arguments))}) have no array of rank >= 1 among those that "
            "batch_argnums and batch_argnames name."
        )
    if len({x.shape[0] for x in leaves.values()}) > 1:
        listed = ", ".join(f"{path} has {x.shape[0]}" for path, x in leaves.items())
        raise ValueError(
            f"{API}: the leading sizes of the batch disagree: {listed}. Every batch leaf must "
            "have the batch as its axis 0; pass what has not as an argument of its own."
        )
    size: int = next(iter(leaves.values())).shape[0]
    needed = k * devices
    if size == 0 or size % needed:
        product = f"microbatches * data devices = {k} * {devices} = {needed}"
        raise ValueError(
            f"{API}: {_shapes(leaves)}; axis 0 ({size}) is not divisible by {product}. "
            f"Pad the batch with gradaccum.pad_batch(batch, {needed})."
        )
    return size


def _shapes(leaves: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} has shape {tuple(x.shape)}" for path, x in leaves.items())


def check_shared_keys(keys: Mapping[str, Any]) -> None:
    """Raises ValueError if there are typed keys in broadcast leaves that nothing names."""
    if keys:
        raise ValueError(
            f"{API}: {', '.join(keys)}: a PRNG key that every microbatch and device would share, "
            "the same dropout mask in each. Name its argument in key_argnums (or key_argnames) to "
            "fold the microbatch's index into it, or say key_argnums=() to share it."
        )


def check_named_keys(missing: Sequence[Any]) -> None:
    """Raises ValueError if there are arguments that are named as keys but hold none."""
    if missing:
        raise ValueError(
            f"{API}: key_argnums or key_argnames names {', '.join(map(repr, missing))}, which "
            "holds no PRNG key to fold (jax.random.key, or a raw uint32 one)."
        )


def check_forgotten(leaves: Mapping[str, Any], size: int) -> None:
    """Raises ValueError if there are broadcast leaves that look like a forgotten batch."""
    if leaves:
        raise ValueError(
            f"{API}: {_shapes(leaves)}: axis 0 is the batch's, B = {size}, but it is not named in "
            "batch_argnums or batch_argnames, so every microbatch would see all of it. Name its "
            "argument there; if all of it is what you mean, close over it instead."
        )


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


def check_weight_collectives(names: Sequence[str], axis_names: Sequence[str]) -> None:
    """Raises ValueError if `weight_fn` communicates over the data axes."""
    if names:
        raise ValueError(
            f"{API}: weight_fn communicates over the data axis {', '.join(axis_names)} "
            f"({', '.join(sorted(set(names)))}). Return this device's own count: the weights are "
            "summed over devices with the gradients."
        )


def raise_aux_differentiated() -> NoReturn:
    """Raises the TypeError for a cotangent that reaches aux."""
    raise TypeError(
        f"{API}: the auxiliary output was differentiated. Its gradient is not accumulated: make "
        "it part of the loss, or jax.lax.stop_gradient it where it is used."
    )


def check_differentiable(path: str, x: Any) -> None:
    """Raises TypeError as `jax.grad` does for an argument that has no gradient."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        got = f"dtype {dtype}" if dtype is not None else f"a {type(x).__name__}"
        raise TypeError(
            f"{API}: value_and_grad requires real or complex inputs (float or complex dtype), but "
            f"{path} is {got}. Leave it out of argnums, or split the tree."
        )
