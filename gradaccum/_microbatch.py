"""Which arguments are batch, and what one microbatch of them is; pure."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from gradaccum._mesh import UNSET, Unset


class Role(enum.Enum):
    """What becomes of one array leaf in each microbatch."""

    BATCH = "batch"  # split along its leading axis
    BROADCAST = "broadcast"  # the same in every microbatch
    KEY = "key"  # a PRNG key, folded with the global microbatch index


class Static:
    """A leaf that is no array: compared by type and value, or by identity where it has none."""

    def __init__(self, value: Any):
        self.value = value
        try:
            # repr tells 0.0 from -0.0, and makes a NaN equal to itself.
            self._key = (type(value), repr(value) if isinstance(value, float) else value)
            self._hash = hash(self._key)
        except TypeError:
            self._key = (type(value), id(value))
            self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and bool(self._key == other._key)


def is_array(x: Any) -> bool:
    """True for what is traced; Python scalars, NumPy booleans and all else stay static."""
    if isinstance(x, bool | int | float | complex | np.bool_):
        return False
    return bool(jex_core.valid_jaxtype(x))


def is_key(x: Any) -> bool:
    """True for a typed PRNG key array."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _is_raw_key(x: Any) -> bool:
    return bool(x.dtype == jnp.uint32 and x.ndim >= 1 and x.shape[-1] in (2, 4))


Name = int | str


@dataclasses.dataclass(frozen=True)
class Selection:
    """Arguments named by position or keyword; a parameter that has both may be given either way."""

    positions: tuple[int, ...]
    keywords: tuple[str, ...]

    @classmethod
    def of(
        cls, fun: Callable[..., Any], argnums: int | Sequence[int], argnames: str | Sequence[str]
    ) -> Selection:
        """Completes positions with their parameters' names, and the reverse."""
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
        params = positional_parameters(fun)
        nums += tuple(params.index(n) for n in names if n in params)
        names += tuple(params[i] for i in nums if 0 <= i < len(params) and params[i] not in names)
        return cls(nums, names)

    def has(self, name: Name, num_positional: int) -> bool:
        """True if the argument, of a call with so many positional ones, is selected."""
        if isinstance(name, str):
            return name in self.keywords
        return name in self.positions or name - num_positional in self.positions


def positional_parameters(fun: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that can be given by position."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The form of one call: hashable, without the arrays.

    Attributes:
      names: each argument's position or keyword.
      trees: its tree definition.
      static: for each leaf its static value, or None for an array.
      roles: for each *array* leaf, in order, its `Role`.
      is_batch: for each argument, whether it is a batch argument.
      is_key: for each argument, whether it is named as one that holds PRNG keys.
    """

    names: tuple[Name, ...]
    trees: tuple[Any, ...]
    static: tuple[Static | None, ...]
    roles: tuple[Role, ...]
    is_batch: tuple[bool, ...]
    is_key: tuple[bool, ...]

    def owners(self) -> list[int]:
        """Returns for each array leaf the index of its argument."""
        leaf_owner = [i for i, tree in enumerate(self.trees) for _ in range(tree.num_leaves)]
        return [o for o, s in zip(leaf_owner, self.static, strict=True) if s is None]

    def trees_of(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arguments, in the order of `names`, with these arrays as their leaves."""
        rest = iter(arrays)
        leaves = iter([next(rest) if s is None else s.value for s in self.static])
        return [jax.tree.unflatten(t, [next(leaves) for _ in range(t.num_leaves)])
                for t in self.trees]  # fmt: skip

    def rebuild(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns args and kwargs with these arrays as their leaves."""
        trees = list(zip(self.names, self.trees_of(arrays), strict=True))
        args = [tree for name, tree in trees if isinstance(name, int)]
        return args, {name: tree for name, tree in trees if isinstance(name, str)}

    def batch_arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the batch arguments alone, in the order of the call."""
        return [t for t, b in zip(self.trees_of(arrays), self.is_batch, strict=True) if b]

    def paths(self, fun: Callable[..., Any]) -> list[str]:
        """Returns for each array leaf its path for messages, such as `batch['tokens']`."""
        params = positional_parameters(fun)
        paths = []
        for name, tree in zip(self.names, self.trees, strict=True):
            if isinstance(name, int):
                name = params[name] if name < len(params) else f"args[{name}]"
            numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
            keyed, _ = jax.tree_util.tree_flatten_with_path(numbered)
            paths += [name + jax.tree_util.keystr(path) for path, _ in keyed]
        return [p for p, s in zip(paths, self.static, strict=True) if s is None]


def flatten_call(
    args: Sequence[Any], kwargs: dict[str, Any], batch: Selection, keys: Selection | Unset
) -> tuple[Arguments, list[Any]]:
    """Splits a call into its hashable form and its array leaves."""
    names: list[Name] = [*range(len(args)), *sorted(kwargs)]
    trees: list[Any] = []
    static: list[Static | None] = []
    roles: list[Role] = []
    arrays: list[Any] = []
    is_batch: list[bool] = []
    named_key: list[bool] = []
    for name in names:
        leaves, tree = jax.tree.flatten(args[name] if isinstance(name, int) else kwargs[name])
        trees.append(tree)
        is_batch.append(batch.has(name, len(args)))
        named_key.append(keys is not UNSET and keys.has(name, len(args)))
        for leaf in leaves:
            if not is_array(leaf):
                static.append(Static(leaf))
                continue
            leaf = leaf if hasattr(leaf, "ndim") else jnp.asarray(leaf)
            static.append(None)
            arrays.append(leaf)
            if is_batch[-1] and leaf.ndim > 0:
                roles.append(Role.BATCH)
            elif named_key[-1] and (is_key(leaf) or _is_raw_key(leaf)):
                roles.append(Role.KEY)
            else:
                roles.append(Role.BROADCAST)
    form = Arguments(
        tuple(names), tuple(trees), tuple(static), tuple(roles), tuple(is_batch), tuple(named_key)
    )
    return form, arrays


def split(x: jax.Array, microbatches: int) -> jax.Array:
    """Splits `[k * b, ...]` into `[k, b, ...]`; rows keep their order."""
    return x.reshape((microbatches, x.shape[0] // microbatches, *x.shape[1:]))


def merge(x: jax.Array) -> jax.Array:
    """Joins `[k, b, ...]` to `[k * b, ...]`, and `[k]` to itself: the inverse of `split`."""
    return x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) if x.ndim > 1 else x


def fold_key(key: jax.Array, index: jax.Array) -> jax.Array:
    """Folds the global microbatch index into a key, or into each of an array of keys."""
    batch_ndim = key.ndim if is_key(key) else key.ndim - 1
    fold = jax.random.fold_in
    for _ in range(batch_ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, index)


def pad_batch(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """Pad a ragged last batch on the host to the next multiple, and return the mask of real rows.

    Rows are added by repeating the last one, never as zeros: a loss may be infinite there, and an
    infinite value times a zero mask is NaN. The result is exact with a masked-mean loss *and* the
    mask's sum as `weight_fn`: `sum(mask * loss) / sum(mask)` over the whole batch.

    Args:
      batch: a pytree with leaves `[B, ...]`, B >= 1; rank-0 and non-array leaves stay as they are.
      multiple: what the new leading size must divide by: `microbatches * data devices`.

    Returns:
      `(batch, mask)`: leaves `[B', ...]`, where B' is B rounded up to `multiple`, as NumPy arrays
      (typed keys stay JAX arrays); mask float32 `[B']`, 1 for the B real rows, then 0.

    Raises:
      ValueError: `multiple < 1`, an empty batch, or leading sizes that disagree.

    Cost:
      One host copy of the batch; none if B already divides. No collective.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, gradaccum
      >>> batch, mask = gradaccum.pad_batch({"x": np.array([1.0, 2.0, 9.0])}, 4)
      >>> batch["x"].tolist(), mask.tolist()
      ([1.0, 2.0, 9.0, 9.0], [1.0, 1.0, 1.0, 0.0])
      >>> def loss_fn(w, batch, mask):
      ...     loss = (w * batch["x"]) ** 2
      ...     return jnp.sum(mask * loss) / jnp.sum(mask)
      >>> mean = gradaccum.accumulate(
      ...     loss_fn, microbatches=4, axis_name=None, batch_argnums=(1, 2),
      ...     weight_fn=lambda batch, mask: mask.sum())
      >>> print(f"{mean(1.0, batch, mask):.4f} = (1 + 4 + 81) / 3")
      28.6667 = (1 + 4 + 81) / 3
    """
    if multiple < 1:
        raise ValueError(f"pad_batch: multiple is {multiple}; it must be at least 1.")
    leaves = [x for x in jax.tree.leaves(batch) if is_array(x) and np.ndim(x) > 0]
    sizes = sorted({x.shape[0] for x in leaves})
    if len(sizes) != 1 or sizes[0] == 0:
        raise ValueError(
            f"pad_batch: the leading sizes of the batch's leaves are {sizes}; "
            "all must be one size B >= 1. Leave out what is not per example."
        )
    size = sizes[0]
    padded = -(-size // multiple) * multiple
    rows = np.minimum(np.arange(padded), size - 1)

    def pad(x: Any) -> Any:
        if not is_array(x) or np.ndim(x) == 0:
            return x
        host = x if is_key(x) else np.asarray(x)
        return host if padded == size else host[rows]

    return jax.tree.map(pad, batch), (np.arange(padded) < size).astype(np.float32)
