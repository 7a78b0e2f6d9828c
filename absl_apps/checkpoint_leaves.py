"""What a checkpoint says of a state's arrays, and how two states differ."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

_FLOAT0 = "float0"
_LISTED = 5  # leaves named in an error


@dataclasses.dataclass
class Leaf:
    """An array of a state, as it is saved: keys as their words."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None  # the implementation, if these are keys
    sharding: jax.sharding.Sharding | None = None
    fingerprint: int = 0

    def json(self) -> dict[str, Any]:
        """Return what is kept of it."""
        kept = "path", "shape", "dtype", "key", "fingerprint"
        return {name: getattr(self, name) for name in kept}

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def words(self) -> jax.ShapeDtypeStruct:
        """What is written of it: of keys, uint32 with one more axis; of float0, nothing."""
        where = self.sharding or SingleDeviceSharding(jax.local_devices()[0])
        if self.dtype == _FLOAT0:
            return jax.ShapeDtypeStruct((0,), np.uint8, sharding=where)
        if self.key is None:
            return jax.ShapeDtypeStruct(self.shape, np.dtype(self.dtype), sharding=where)
        make = functools.partial(jax.random.key, 0, impl=self.key)
        one = jax.eval_shape(lambda: jax.random.key_data(make()))
        return jax.ShapeDtypeStruct((*self.shape, *one.shape), one.dtype, sharding=where)

    def written(self, x: jax.Array) -> jax.Array:
        """Return the array to write."""
        if self.dtype == _FLOAT0:
            return jnp.zeros((0,), jnp.uint8)
        return x if self.key is None else jax.random.key_data(x)

    def restored(self, x: jax.Array) -> Any:
        """Return the leaf that was written as this array."""
        if self.dtype == _FLOAT0:
            return np.zeros(self.shape, jax.dtypes.float0)
        return x if self.key is None else jax.random.wrap_key_data(x, impl=self.key)


def of(tree: Any) -> tuple[list[Leaf], Any]:
    """Return the leaves of a tree of arrays or of `jax.ShapeDtypeStruct`, and its structure.

    Raises:
      TypeError: at another leaf.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [_leaf(jax.tree_util.keystr(path), x) for path, x in found], structure


def from_json(kept: Sequence[dict[str, Any]]) -> list[Leaf]:
    """Return the leaves that `Leaf.json` described."""
    return [Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in kept]


def unlike(saved: Sequence[Leaf], needed: Sequence[Leaf]) -> list[str]:
    """Return the leaves that differ in path, shape or dtype, in words; none: they can be read."""
    old, new = ({leaf.path: str(leaf) for leaf in leaves} for leaves in (saved, needed))
    found = []
    for path in {**old, **new}:
        if path not in new:
            found.append(f"{path} {old[path]} is not needed")
        elif path not in old:
            found.append(f"{path} {new[path]} is not in it")
        elif old[path] != new[path]:
            found.append(f"{path} is {old[path]}, needed {new[path]}")
    if not found and list(old) != list(new):  # which array is whose, their order says
        found.append("its leaves are in another order")
    return found


def first(texts: Sequence[str]) -> str:
    """Return the first few texts, and how many more there are."""
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f", and {more} more" if more > 0 else "")


def _leaf(path: str, x: Any) -> Leaf:
    dtype = getattr(x, "dtype", None)
    if dtype == jax.dtypes.float0:  # what an `Unreduced` is guarded by: no array of JAX's
        return Leaf(path, x.shape, _FLOAT0, None)
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(f"Checkpoints: state{path} is a {type(x).__name__}; give a jax.Array.")
    if jax.process_count() > 1 and isinstance(x, jax.Array) and x.is_fully_addressable:
        raise TypeError(
            f"Checkpoints: state{path} is in process {jax.process_index()} alone, of "
            f"{jax.process_count()}; give an array on a mesh of all."
        )
    return Leaf(path, x.shape, str(dtype), _implementation(x), x.sharding)


def _implementation(x: Any) -> str | None:
    """Returns how keys make numbers, or None where these are not keys."""
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return None
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), x)  # takes no struct itself
    return str(found[0])
