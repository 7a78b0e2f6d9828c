"""What is checked of a user's input: plain exceptions, with the numbers and the remedy."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from optax.microbatching import AccumulationType

from gradaccum._mesh import Unset, describe

API = "accumulate"


def check_count(name: str, value: Any, unit: str) -> int:
    """Returns a Python int >= 1 or raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{API}: {name} is {value!r}; it must be an int >= 1, {unit}.")
    if value < 1:
        raise ValueError(f"{API}: {name} is {value}; it must be >= 1, {unit}.")
    return operator.index(value)


def check_bools(**flags: Any) -> None:
    """Raises TypeError unless all are bools."""
    bad = ", ".join(
        f"{name} is {value!r}" for name, value in flags.items() if not isinstance(value, bool)
    )
    if bad:
        raise TypeError(f"{API}: {bad}; it must be a bool.")


def check_dtype(name: str, value: Any, api: str = API) -> Any:
    """Returns a floating dtype, or None for None, or raises TypeError."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{api}: {name} is {value!r}; it must be a floating dtype.")
    return dtype


def check_axis_name(axis_name: Any, api: str = API) -> None:
    """Raises unless the data axes are a name, distinct names, None or unset."""
    if axis_name is None or isinstance(axis_name, str | Unset):
        return
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else ()
    if not names or not all(isinstance(a, str) for a in names) or len(set(names)) < len(names):
        raise ValueError(
            f"{api}: axis_name is {axis_name!r}; it must be a mesh axis's name, a tuple of "
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


def check_mesh(mesh: Any, api: str = API) -> None:
    """Raises TypeError for what is no mesh."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"{api}: mesh is {mesh!r}; it must be a jax.sharding.Mesh, as jax.make_mesh makes it."
        )


def check_spec_axes(name: str, axes: Sequence[str], axis_name: Any, mesh: Any) -> None:
    """Raises ValueError for axes in specs without a data axis, or that are not the mesh's."""
    if axes and axis_name is None:
        raise ValueError(
            f"{API}: {name} names {', '.join(map(repr, axes))}, but axis_name=None means no mesh. "
            "Name a data axis (it may have size 1)."
        )
    unknown = [a for a in axes if mesh is not None and a not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{API}: {name} names {', '.join(map(repr, unknown))}, but the mesh's axes are "
            f"{describe(mesh.shape.items())}. Name one of these, or give another mesh."
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
    if size == 0:
        raise ValueError(f"{API}: {_shapes(leaves)}: the batch is empty. Give it at least one row.")
    if size % needed:
        product = f"microbatches * data devices = {k} * {devices} = {needed}"
        raise ValueError(
            f"{API}: {_shapes(leaves)}; axis 0 ({size}) is not divisible by {product}. "
            f"Pad the batch with gradaccum.pad_batch(batch, {needed}){_fewer(size, devices)}."
        )
    return size


def _fewer(size: int, devices: int) -> str:
    """Returns the other remedy, where the devices alone divide the batch."""
    if size % devices:
        return ""
    fits = [k for k in range(1, size // devices + 1) if size // devices % k == 0]
    some = ", ".join(map(str, fits if len(fits) < 7 else [*fits[:3], "...", *fits[-3:]]))
    return f", or take a number of microbatches that divides {size // devices}: {some}"


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
            "argument there; if all of it is what you mean, give its in_specs, or close over it."
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
