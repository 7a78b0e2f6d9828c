"""`Unreduced`: a value still split over the data axes, and the one mean that it awaits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import _unreduced_checks
from gradaccum._means import Awaited, means
from gradaccum._mesh import AxisName, DataMesh, axis_name_of, axis_tuple, find_mesh
from gradaccum._shard import explicit_as_auto


def new_guard(rows: int) -> Any:
    """Returns a leaf that no arithmetic accepts: float0, [rows, 1]."""
    return np.zeros((rows, 1), jax.dtypes.float0)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sum", "weight", "guard"],
    meta_fields=["axis_name", "awaited"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Unreduced:
    """A value that is still split over the data axes: n weighted sums, which await the one mean.

        mean = sum over rows of `sum` / sum over rows of `weight`

    One stands for each leaf of the gradients, so that `optax.masked` and `optax.multi_transform`
    can select (by trees of masks and labels; functions would see inside it; what they leave out
    stays unreduced: freeze parameters inside `MultiSteps`, not beside it). It goes to
    `gradaccum.MultiSteps`, `gradaccum.all_reduce_mean`, `gradaccum.mean` or `gradaccum.add`. Other
    transformations, which would clip or scale rows and weights instead of the mean, raise: JAX's
    TypeError (it speaks of float0) or optax's error of a structure that it does not know.

    Attributes:
      sum: `[n, *shape]`, row i on the i-th data device: its sum of weight times value. Inside a
        `jax.shard_map` over the data axes `[1, *shape]`, this device's row.
      weight: float32 `[n]`, what the rows add up to: examples, or `weight_fn`'s unit (rounded to
        float32). One array for all leaves of one call's gradients.
      axis_name: the data axis or axes.
      awaited: how the mean is to be taken; the default is an all-reduce in the sum's dtype.
      guard: an array of float0, which no arithmetic accepts; made if not given.

    Cost:
      None: a device holds its own row, as large as the value.

    Example:
      >>> import jax.numpy as jnp, gradaccum
      >>> rows = jnp.array([[1.0, 2.0], [5.0, 6.0]])
      >>> gradaccum.Unreduced(sum=rows, weight=jnp.array([1.0, 3.0]), axis_name="dp")
      Unreduced(float32[2] in 2 rows over 'dp', awaiting gradaccum.mean)
    """

    sum: jax.Array
    weight: jax.Array
    axis_name: AxisName | None
    awaited: Awaited = Awaited()  # noqa: RUF009 (immutable)
    guard: Any = None

    def __post_init__(self) -> None:
        # Made by hand; JAX makes one of whatever leaves it has, too, and of a guard.
        if self.guard is None and isinstance(self.sum, jax.Array | np.ndarray):
            _unreduced_checks.check_made(self.sum, self.weight)
            axes = axis_tuple(self.axis_name)
            made = {
                "sum": jnp.asarray(self.sum),
                "weight": jnp.asarray(self.weight, jnp.float32),
                "axis_name": axis_name_of(axes),
                "guard": new_guard(self.sum.shape[0]),
            }
            for name, value in made.items():
                object.__setattr__(self, name, value)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"{self!r}: it is no number yet. gradaccum.mean(...) takes the mean, once for all that "
            "you need of a window."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __array__ = _refuse

    def is_whole(self) -> bool:
        """Whether the leaves still belong together: nothing has computed with some of them."""
        kinds = [getattr(x, "dtype", None) for x in (self.guard, self.weight)]
        rows, weights = (getattr(x, "shape", ()) for x in (self.sum, self.weight))
        typed = kinds == [jax.dtypes.float0, jnp.float32]
        return typed and len(weights) == 1 and rows[:1] == weights

    def __repr__(self) -> str:
        shape = getattr(self.sum, "shape", None)
        if not shape:
            return f"Unreduced(sum={self.sum!r}, weight={self.weight!r}, {self.axis_name!r})"
        value = f"{self.sum.dtype}[{','.join(map(str, shape[1:]))}]"
        axes = "no axis" if self.axis_name is None else repr(self.axis_name)
        awaits = "its sum, by gradaccum.mean" if self.awaited.total else "gradaccum.mean"
        return f"Unreduced({value} in {shape[0]} rows over {axes}, awaiting {awaits})"


def is_unreduced(x: Any) -> bool:
    return isinstance(x, Unreduced)


def flatten(api: str, tree: Any) -> tuple[dict[str, Unreduced], Any]:
    """Flattens a tree of nothing but `Unreduced`, untouched and of the same axes, or raises."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_unreduced)
    leaves = {jax.tree_util.keystr(path) or "the tree": x for path, x in keyed}
    _unreduced_checks.check_all_unreduced(
        api, {p: x for p, x in leaves.items() if not is_unreduced(x)}
    )
    _unreduced_checks.check_untouched(api, [p for p, x in leaves.items() if not x.is_whole()])
    _unreduced_checks.check_same_axes(api, {p: x.axis_name for p, x in leaves.items()})
    return leaves, treedef


def mean(tree: Any) -> Any:
    """Take the one cross-device mean of a tree of `Unreduced` values.

        mean = sum over rows of `sum` / sum over rows of `weight`;  0 where all weights are 0

    Communication: one `psum` over the data axes for all leaves and weights together; a leaf whose
    `grad_specs` split it over a data axis is reduce-scattered, as by `gradaccum.accumulate`.

    Args:
      tree: a pytree whose leaves are all `Unreduced`, of the same data axes: gradients, losses.

    Returns:
      The same tree, each leaf `[*shape]` in its parameter's dtype. Aux that was accumulated with
      `AccumulationType.SUM` comes back as its sum.

    Raises:
      TypeError: a leaf that is no `Unreduced`, or one that has been computed with.
      ValueError: leaves of different axes, or no mesh that has them.

    Cost:
      Each byte of `sum` once over the data axes, 4 bytes for each different weight. Take it once a
      window; of gradients, `gradaccum.MultiSteps` does. Of losses that a `lax.scan` over calls has
      stacked, `jax.vmap(gradaccum.mean)` is one reduction for all.

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> mesh = jax.make_mesh((8,), ("dp",))
      >>> loss_fn = lambda w, x: jnp.mean(w * x)
      >>> fun = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp", mesh=mesh)
      >>> loss, grad = fun(2.0, jnp.arange(16.0))
      >>> loss, grad
      (Unreduced(float32[] in 8 rows over 'dp', awaiting gradaccum.mean), \
Unreduced(float32[] in 8 rows over 'dp', awaiting gradaccum.mean))
      >>> jax.tree.map(float, gradaccum.mean((loss, grad)))
      (15.0, 7.5)
    """
    named, treedef = flatten("mean", tree)
    if not named:
        return tree
    leaves = list(named.values())
    where = where_of("mean", leaves, leaves[0].axis_name, None)
    sums, weights = [x.sum for x in leaves], [x.weight for x in leaves]
    return treedef.unflatten(means(sums, weights, [x.awaited for x in leaves], where))


def add(a: Any, b: Any) -> Any:
    """Add two trees of `Unreduced` values, sums and weights alike: no communication.

    The mean of the result is the weighted mean of both: of two calls' losses or gradients, what
    one call with both batches would have given.

    Args:
      a: a pytree whose leaves are all `Unreduced`.
      b: another of the same structure, shapes and data axes.

    Returns:
      The same tree of `Unreduced`.

    Raises:
      TypeError: a leaf that is no `Unreduced`, or one that has been computed with.
      ValueError: the structures, shapes or axes differ.

    Cost:
      None but the additions, row by row on each device.

    Example:
      >>> import jax.numpy as jnp, gradaccum
      >>> make = lambda s, w: gradaccum.Unreduced(jnp.array(s), jnp.array(w), axis_name=None)
      >>> total = gradaccum.add(make([8.0], [4.0]), make([2.0], [1.0]))
      >>> float(gradaccum.mean(total))
      2.0
    """
    (named, tree), (named_too, other) = flatten("add", a), flatten("add", b)
    _unreduced_checks.check_addends(tree, other, named, named_too)
    left, right = list(named.values()), list(named_too.values())
    _unreduced_checks.check_same_axes(
        "add", {"a": left[0].axis_name, "b": right[0].axis_name} if left else {}
    )
    sums: dict[tuple[int, int], jax.Array] = {}  # weights that are shared stay so
    added = []
    for x, y in zip(left, right, strict=True):
        pair = (id(x.weight), id(y.weight))
        if pair not in sums:
            sums[pair] = x.weight + y.weight
        scale = min(x.awaited.scale, y.awaited.scale)
        how = dataclasses.replace(x.awaited, scale=scale)
        added.append(dataclasses.replace(x, sum=x.sum + y.sum, weight=sums[pair], awaited=how))
    return tree.unflatten(added)


def where_of(api: str, leaves: Sequence[Unreduced], axis_name: Any, mesh: Any) -> DataMesh:
    """Finds the mesh and the data axes of some leaves; their rows must be as many."""
    given = [x.awaited.mesh for x in leaves if x.awaited.mesh is not None]
    sums = [x.sum for x in leaves]
    remedy = "Call inside `with jax.set_mesh(mesh):`, or make the values with mesh=..."
    where = find_mesh(api, axis_name, given[0] if given else mesh, sums, remedy=remedy)
    where = explicit_as_auto(where, sums)
    _unreduced_checks.check_rows(api, {x.sum.shape[0] for x in leaves}, where)
    return where
