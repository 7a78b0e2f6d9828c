"""`PartitionSpec` prefixes, as the user gives them for arguments and as dimensions of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gradaccum._arguments import Arguments, positional_parameters

Dims = tuple[tuple[str, ...], ...]  # the mesh axes of each dimension, the major one first


@dataclasses.dataclass(frozen=True)
class Specs:
    """One prefix of PartitionSpecs per positional argument; None stands for the default.

    Hashable: a part of the cache's key.
    """

    name: str  # in_specs or grad_specs
    prefixes: tuple[tuple[tuple[PartitionSpec | None, ...], Any], ...] = ()  # leaves, structure

    @classmethod
    def of(cls, api: str, name: str, specs: Any) -> Specs:
        """Takes what the user gave.

        Raises:
          TypeError: that is no tuple, or holds anything but plain PartitionSpecs and None.
        """
        if specs is None:
            return cls(name)
        if not isinstance(specs, tuple | list):
            raise TypeError(
                f"{api}: {name} is {specs!r}; it must be a tuple with one PartitionSpec, or a "
                "pytree prefix of them, per positional argument."
            )
        prefixes = [jax.tree.flatten(s, is_leaf=_is_spec) for s in specs]
        _check_plain(api, name, [x for leaves, _ in prefixes for x in leaves])
        return cls(name, tuple((tuple(leaves), tree) for leaves, tree in prefixes))

    @property
    def axes(self) -> list[str]:
        """The mesh axes that they name."""
        specs = [s for leaves, _ in self.prefixes for s in leaves if s is not None]
        return list(dict.fromkeys(a for s in specs for a in axes_in(dims_of(s))))

    def of_leaves(
        self, api: str, form: Arguments, fun: Callable[..., Any]
    ) -> list[PartitionSpec | None]:
        """Returns the spec of each array leaf of a call; None where none was given.

        Raises:
          ValueError: there are more of them than arguments, or one is no prefix of its argument.
        """
        places = form.positions(fun)
        given = 1 + max((p for p in places if p is not None), default=-1)
        count = max(given, len(positional_parameters(fun)))
        if len(self.prefixes) > count:
            raise ValueError(
                f"{api}: {self.name} has {len(self.prefixes)} entries, but this call has {count} "
                "positional arguments. Give one PartitionSpec, or prefix, for each."
            )
        found: list[PartitionSpec | None] = []
        for place, tree in zip(places, form.trees, strict=True):
            if place is None or place >= len(self.prefixes):
                found += [None] * tree.num_leaves
            else:
                found += self._spread(api, place, tree)
        return [s for s, static in zip(found, form.static, strict=True) if static is None]

    def _spread(self, api: str, place: int, tree: Any) -> list[PartitionSpec | None]:
        leaves, prefix = self.prefixes[place]
        specs = jax.tree.unflatten(prefix, leaves)
        return _spread(f"{api}: {self.name}[{place}]", specs, tree)


def spread(api: str, specs: Any, tree: Any) -> list[PartitionSpec]:
    """Returns the spec of each leaf of a tree, from a pytree prefix of them; None is replicated.

    Raises:
      TypeError: the prefix holds anything but plain PartitionSpecs and None.
      ValueError: it is no prefix of the tree.
    """
    _check_plain(api, "specs", jax.tree.leaves(specs, is_leaf=_is_spec))
    found = _spread(f"{api}: specs", specs, jax.tree.structure(tree))
    return [PartitionSpec() if s is None else s for s in found]


def _check_plain(api: str, name: str, leaves: Sequence[Any]) -> None:
    bad = [repr(x) for x in leaves if not _is_plain(x)]
    if bad:
        raise TypeError(
            f"{api}: {name} holds {', '.join(bad)}; its leaves must be "
            "jax.sharding.PartitionSpec of axis names (of a NamedSharding, its .spec), or "
            "None for the default."
        )


def _spread(what: str, specs: Any, tree: Any) -> list[PartitionSpec | None]:
    """Returns the spec of each leaf of a tree of this structure."""
    argument = jax.tree.unflatten(tree, range(tree.num_leaves))
    found: list[PartitionSpec | None] = []
    try:  # not jax.tree.broadcast: None is a spec here, and a node without leaves there
        jax.tree.map(
            lambda spec, part: found.extend([spec] * len(jax.tree.leaves(part))),
            specs,
            argument,
            is_leaf=_is_spec,
        )
    except (ValueError, TypeError) as e:
        raise ValueError(
            f"{what} is not a pytree prefix of its argument: {_difference(specs, argument)}."
        ) from e
    return found


def _difference(specs: Any, argument: Any) -> str:
    """Says where specs are no prefix of an argument: by path, or by kind where paths agree."""
    given, there = (
        [path for path, _ in jax.tree_util.tree_flatten_with_path(x, is_leaf=_is_spec)[0]]
        for x in (specs, argument)
    )
    say = jax.tree_util.keystr
    missing = [say(path) for path in there if not any(path[: len(s)] == s for s in given)]
    extra = [say(s) for s in given if not any(path[: len(s)] == s for path in there)]
    if not any((*missing, *extra)) or "" in missing:
        kinds = (jax.tree.structure(x, is_leaf=_is_spec) for x in (specs, argument))
        return "it is {}, that {}".format(*kinds)
    parts = [f"it has nothing for {', '.join(missing)}"] if missing else []
    return "; ".join(parts + ([f"the argument has no {', '.join(extra)}"] if extra else []))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _is_plain(x: Any) -> bool:
    """True for None and for a spec of axis names alone."""
    if not isinstance(x, PartitionSpec):
        return x is None
    if x.unreduced or x.reduced:
        return False
    named = [a for d in x for a in (d if isinstance(d, tuple) else (d,))]
    return all(a is None or isinstance(a, str) for a in named)


def dims_of(spec: PartitionSpec) -> Dims:
    """Returns the axes of each dimension that the spec mentions."""
    return tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec)


def spec_of(dims: Iterable[Sequence[str]], others: Any = None) -> PartitionSpec:
    """Returns the `PartitionSpec` of dimensions, with `others` for those that have no axis."""
    return PartitionSpec(*[others if not d else d[0] if len(d) == 1 else tuple(d) for d in dims])


def axes_in(dims: Dims) -> tuple[str, ...]:
    """Returns all axes of the dimensions."""
    return tuple(a for d in dims for a in d)


def without(dims: Dims, axes: Iterable[str]) -> Dims:
    """Returns the dimensions, not split over these axes."""
    return only(dims, set(axes_in(dims)).difference(axes))


def only(dims: Dims, axes: Iterable[str]) -> Dims:
    """Returns the dimensions with none but these axes."""
    axes = set(axes)
    return tuple(tuple(a for a in d if a in axes) for d in dims)
