"""What a call's arguments are: arrays or static; batch, key or the same in every microbatch."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
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
    is_scalar = isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic)
    if is_scalar or isinstance(x, np.bool_):
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
        cls,
        api: str,
        kind: str,
        fun: Callable[..., Any],
        argnums: int | Sequence[int],
        argnames: str | Sequence[str],
    ) -> Selection:
        """Completes positions with their parameters' names, and the reverse; kind: batch or key.

        Raises:
          TypeError: `argnums` are no ints or `argnames` no strings.
          ValueError: one is given twice, or `fun` has no such parameter.
        """
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
        _check_selection(api, kind, fun, nums, names)
        params = positional_parameters(fun)
        nums += tuple(params.index(n) for n in names if n in params)
        names += tuple(params[i] for i in nums if 0 <= i < len(params) and params[i] not in names)
        return cls(nums, names)

    def has(self, name: Name, num_positional: int) -> bool:
        """True if the argument, of a call with so many positional ones, is selected."""
        if isinstance(name, str):
            return name in self.keywords
        return name in self.positions or name - num_positional in self.positions


def _check_selection(
    api: str, kind: str, fun: Callable[..., Any], nums: Sequence[Any], names: Sequence[Any]
) -> None:
    if any(isinstance(i, bool) or not isinstance(i, int) for i in nums) or not all(
        isinstance(n, str) for n in names
    ):
        raise TypeError(
            f"{api}: {kind}_argnums must be ints and {kind}_argnames strings, got {nums!r} and "
            f"{names!r}."
        )
    if len({*nums}) < len(nums) or len({*names}) < len(names):
        raise ValueError(
            f"{api}: {kind}_argnums={nums!r} or {kind}_argnames={names!r} names an argument twice. "
            "Name it once."
        )
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return  # a builtin: the call will tell
    kinds = {p.kind for p in parameters.values()}
    count = len(positional_parameters(fun))
    many, more = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    missing = [i for i in nums if not many and not -count <= i < count]
    missing += [n for n in names if not more and n not in parameters]
    if missing:
        positions = f"positions from 0 to {count - 1}, or " if count else ""
        raise ValueError(
            f"{api}: {', '.join(map(repr, missing))} in {kind}_argnums or {kind}_argnames is no "
            f"parameter of {getattr(fun, '__name__', fun)}({', '.join(parameters)}). Give "
            f"{positions}names of these."
        )


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

    def batch_arguments(
        self, fun: Callable[..., Any], arrays: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the batch arguments alone, in the order of the parameters of `fun`.

        What `fun` takes by keyword only comes by keyword.
        """
        order = positional_parameters(fun)
        positional: dict[int, Any] = {}
        keyword: dict[str, Any] = {}
        for name, tree, is_batch in zip(
            self.names, self.trees_of(arrays), self.is_batch, strict=True
        ):
            if is_batch and isinstance(name, int):
                positional[name] = tree
            elif is_batch and name in order:
                positional[order.index(str(name))] = tree
            elif is_batch:
                keyword[str(name)] = tree
        return [positional[i] for i in sorted(positional)], keyword

    def positions(self, fun: Callable[..., Any]) -> list[int | None]:
        """Returns each argument's position among the parameters of `fun`, None without one."""
        params = positional_parameters(fun)
        return [
            name if isinstance(name, int) else params.index(name) if name in params else None
            for name in self.names
        ]

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


def objects(tree: Any) -> list[Any]:
    """Returns the outermost pytree nodes that are objects, such as modules, not containers.

    A mapping of some library's own (a state of Flax nnx) is a container too.
    """
    plain = (dict, list, tuple, type(None))
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: not isinstance(x, plain))
    return [x for x in nodes if not isinstance(x, Mapping) and not jax.tree_util.all_leaves([x])]


def changed(objects: Sequence[Any], before: Sequence[Sequence[Any]]) -> list[str]:
    """Returns the names of the classes whose objects have other leaves than `before`."""
    return [
        type(x).__name__
        for x, leaves in zip(objects, before, strict=True)
        if not _same(jax.tree.leaves(x), leaves)
    ]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
