"""What a checkpoint says of a state's arrays, and how two states differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

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
        """What the file holds: keys are uint32, with one more axis."""
        if self.key is None:
            return jax.ShapeDtypeStruct(self.shape, np.dtype(self.dtype), sharding=self.sharding)
        make = lambda: jax.random.key_data(jax.random.key(0, impl=self.key))  # noqa: E731
        one = jax.eval_shape(make)
        shape = *self.shape, *one.shape
        return jax.ShapeDtypeStruct(shape, one.dtype, sharding=self.sharding)


def of(tree: Any) -> tuple[list[Leaf], Any]:
    """Return the leaves of a tree of arrays, or of `jax.ShapeDtypeStruct`, and its structure.

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
    found = [
        f"{path or 'the state'} is {old.get(path, 'missing')}, needed {new.get(path, 'nothing')}"
        for path in {**old, **new}
        if old.get(path) != new.get(path)
    ]
    if not found and list(old) != list(new):  # which array is whose, their order says
        found.append("its leaves are in another order")
    return found


def first(texts: Sequence[str]) -> str:
    """Return the first few texts, and how many more there are."""
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f", and {more} more" if more > 0 else "")


def _leaf(path: str, x: Any) -> Leaf:
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(f"Checkpoints: state{path} is a {type(x).__name__}; give an array.")
    if jax.process_count() > 1 and isinstance(x, jax.Array) and x.is_fully_addressable:
        raise TypeError(
            f"Checkpoints: state{path} is in process {jax.process_index()} alone, of "
            f"{jax.process_count()}; give an array on a mesh of all."
        )
    return Leaf(path, x.shape, str(x.dtype), _implementation(x), x.sharding)


def _implementation(x: Any) -> str | None:
    """Returns how keys make numbers, or None where these are not keys."""
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return None
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), x)  # takes no struct itself
    return str(found[0])
