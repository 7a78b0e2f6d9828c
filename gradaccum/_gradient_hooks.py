"""How gradients pass through a decorated loss's hooks: by microbatch, and on a device's mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import _jaxpr
from gradaccum._arguments import Arguments, is_array
from gradaccum._checks import API
from gradaccum._jaxpr import as_function
from gradaccum._layout import Layout, Layouts
from gradaccum._mesh import vary, varying_axes
from gradaccum._options import Call
from gradaccum._reduce import Sums
from gradaccum._variance import varying_outputs

Hook = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Hooks of one kind, one after the other, as a function of a call's gradients.

    Attributes:
      kind: the argument of `accumulate` that gave them.
      hooks: the hooks, in their order.
      form: the call's form.
      fun: the loss.
      data_axes: the axes that hooks must not communicate over.
      splits: each manual model axis, and which array leaves it splits (`Layouts.splits`).
    """

    kind: str
    hooks: tuple[Hook, ...]
    form: Arguments
    fun: Callable[..., Any]
    data_axes: tuple[str, ...]
    splits: tuple[tuple[str, tuple[bool, ...]], ...]

    def __call__(self, grads: Mapping[int, jax.Array], index: Any = None) -> dict[int, jax.Array]:
        """Returns what the hooks make of gradients, in the same dtypes.

        Args:
          grads: the gradients by the index of their array leaf.
          index: of the microbatch, for hooks that take one.
        """
        if not grads:
            return {}
        order, structure = jax.tree.flatten(tree_of(self.form, self.fun, {i: i for i in grads}))
        keywords = {} if index is None else {"index": index}

        def chain(values: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
            for fn in self.hooks:
                returned = fn(jax.tree.unflatten(structure, values), **keywords)
                values = self._checked(fn, returned, structure, values)
            return list(values)

        values = [grads[i] for i in order]
        with jax.named_scope(f"gradaccum/{self.kind}"):
            try:
                program = jax.make_jaxpr(chain)(values, keywords)
            except NotImplementedError as e:
                self._explain(e)
                raise
            self._check_program(program, order, grads, len(keywords))
            results = as_function(program)(*jax.tree.leaves((values, keywords)))
        return {i: vary(x, varying_axes(grads[i])) for i, x in zip(order, results, strict=True)}

    def _explain(self, error: NotImplementedError) -> None:
        """Raises ValueError for what JAX has no closures for: a step's key on Explicit axes."""
        if "Closing over" in str(error):
            raise ValueError(
                f"{API}: {self.kind} closes over an array that lies on Explicit axes, which "
                "jax.shard_map has no way for. Give the array with the function: "
                f"{self.kind}=jax.tree_util.Partial(fn, array) for a function "
                f"fn(array, grads{', *, index' if self.kind == 'hook' else ''})."
            ) from error

    def _checked(self, fn: Hook, returned: Any, structure: Any, values: Sequence[Any]) -> list[Any]:
        """Returns a hook's results in the dtypes of what it was given, or raises."""
        name = getattr(fn, "__qualname__", type(fn).__name__)
        remedy = "Return gradients of the structure and shapes that it was given."
        paths = _paths(jax.tree.unflatten(structure, values))
        got, found = _paths(returned), jax.tree.structure(returned)
        if found != structure:
            missing = [p for p in paths if p not in got]
            more = [p for p in got if p not in paths]
            what = [f"nothing at {', '.join(missing)}"] if missing else []
            what += [f"something at {', '.join(more)}"] if more else []
            what = what or [f"{found} instead of {structure}"]
            what = ["None"] if returned is None else what
            raise ValueError(f"{API}: {self.kind} {name} returned {' and '.join(what)}. {remedy}")
        bad = []
        for (path, x), g in zip(got.items(), values, strict=True):
            try:
                shape, dtype = jnp.shape(x), jnp.result_type(x)
            except TypeError:
                bad.append(f"{path} is a {type(x).__name__} instead of {jax.typeof(g)}")
                continue
            if shape != g.shape or not jnp.can_cast(dtype, g.dtype, "same_kind"):
                bad.append(f"{path} is {dtype}{list(shape)} instead of {g.dtype}{list(g.shape)}")
        if bad:
            raise ValueError(f"{API}: {self.kind} {name} returned {'; '.join(bad)}. {remedy}")
        return [jnp.asarray(x).astype(g.dtype) for x, g in zip(got.values(), values, strict=True)]

    def _check_program(
        self, program: Any, order: Sequence[int], grads: Mapping[int, Any], keywords: int
    ) -> None:
        """Checks what the traced hooks communicate, and that what is shared stays shared."""
        found = sorted(set(_jaxpr.collectives_over(program, self.data_axes)))
        if found:
            raise ValueError(
                f"{API}: {self.kind} communicates over the data axis {', '.join(self.data_axes)} "
                f"({', '.join(found)}). It sees one device's gradients, before the one mean: what "
                "needs the mean (clipping it) belongs in the optimizer, what replaces the mean is "
                "a comm_hook."
            )
        paths = self.form.paths(self.fun)
        axes: dict[str, list[str]] = {}
        for axis, splits in self.splits:
            varying = varying_outputs(
                program, [splits[i] for i in order] + [False] * keywords, axis
            )
            for i, varies in zip(order, varying, strict=True):
                if varies and not splits[i]:
                    axes.setdefault(axis, []).append(paths[i])
        for i, aval in zip(order, program.out_avals, strict=True):
            for axis in sorted(varying_axes(aval) - varying_axes(grads[i]) - {*self.data_axes}):
                axes.setdefault(axis, []).append(paths[i])
        for axis, names in axes.items():
            raise ValueError(
                f"{API}: {self.kind} makes the gradient of {', '.join(names)} differ between the "
                f"devices of the model axis {axis}, which share that parameter: it computes with "
                "this device's shards of others. A norm of all shards is "
                f"gradaccum.tensor_parallel.global_norm(grads, specs, {axis!r})."
            )


def tree_of(form: Arguments, fun: Callable[..., Any], leaves: Mapping[int, Any]) -> Any:
    """Returns what hooks see: the arguments that have some of these array leaves, in their order.

    One argument's tree is by itself, several are a tuple; None stands for all other leaves.
    """
    owners = form.owners()
    arrays = iter(range(len(owners)))
    parts = iter([leaves.get(next(arrays)) if s is None else None for s in form.static])
    trees = [jax.tree.unflatten(t, [next(parts) for _ in range(t.num_leaves)]) for t in form.trees]
    places = form.positions(fun)
    order = sorted(range(len(trees)), key=lambda a: (places[a] is None, places[a] or 0))
    some = [trees[a] for a in order if a in {owners[i] for i in leaves}]
    return some[0] if len(some) == 1 else tuple(some)


def _paths(tree: Any) -> dict[str, Any]:
    """Returns a tree's leaves by their paths, such as `grads['w']`."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"grads{jax.tree_util.keystr(path)}": x for path, x in keyed}


def chain_of(call: Call, layouts: Layouts, kind: str, hooks: tuple[Hook, ...]) -> Chain | None:
    """Returns the hooks of a differentiated call as one function, or None without any."""
    if not hooks or call.differentiated is None:
        return None
    fun, axes = call.options.fun, call.where.axis_names
    return Chain(kind, hooks, call.form, fun, axes, layouts.splits)


def after_accumulation(call: Call, layouts: Layouts, sums: Sums, scale: float) -> Sums:
    """Passes one device's means through its post-accumulate hooks, and returns sums of them.

    Args:
      call: the call.
      layouts: how its arrays lie.
      sums: what one device accumulated, gradients times `scale`.
      scale: the constant factor of every gradient.
    """
    hooks = call.options.post_accumulate_hooks
    chain = chain_of(call, layouts, "post_accumulate_hook", hooks)
    if chain is None:
        return sums
    count = 1 if call.options.loss_reduction == "sum" else call.options.microbatches
    factor = scale * (float(count) if sums.weight is None else sums.weight)
    some = {i: g for i, g in enumerate(sums.grads) if g is not None}
    hooked = _on_mean(chain, some, factor)
    return sums._replace(grads=[hooked.get(i) for i in range(len(sums.grads))])


def _on_mean(chain: Chain, sums: Mapping[int, jax.Array], factor: Any) -> dict[int, jax.Array]:
    """Passes one device's mean through hooks, where there are its `sums`, `factor` times the mean.

    The factor may be 0, of a device whose weights are: its sums stay 0, whatever hooks return.
    """

    def wide(x: Any, g: jax.Array) -> jax.Array:  # a sum of weights may overflow float16
        return jnp.asarray(x).astype(jnp.promote_types(g.dtype, jnp.float32))

    if isinstance(factor, float):
        means = {i: (wide(g, g) / factor).astype(g.dtype) for i, g in sums.items()}
        return {i: (wide(g, g) * factor).astype(g.dtype) for i, g in chain(means).items()}
    empty = factor == 0
    divisor = jnp.where(empty, 1, factor)
    means = {i: (wide(g, g) / wide(divisor, g)).astype(g.dtype) for i, g in sums.items()}
    return {
        i: jnp.where(empty, 0, wide(g, g) * wide(factor, g)).astype(g.dtype)
        for i, g in chain(means).items()
    }


def is_traced(call: Call, arrays: Sequence[Any]) -> bool:
    """True if a call must leave nothing in a cache: its arrays, or what hooks hold, may be traced.

    What a hook closes over cannot be seen; that anything is being traced can.
    """
    options = call.options
    hooked = call.differentiated and (options.hooks or options.post_accumulate_hooks)
    probe = [jnp.zeros(())] if hooked else []  # a tracer, while anything is traced
    return any(isinstance(x, jax.core.Tracer) for x in (*arrays, *probe))


def with_values(
    local: Callable[..., dict[str, Any]],
    call: Call,
    layouts: Layouts,
    found: list[Any],
    arrays: Sequence[Any],
) -> tuple[Callable[..., dict[str, Any]], Layouts, list[Any], list[bool]]:
    """Makes arrays that hooks hold (`jax.tree_util.Partial`) inputs of each device's computation.

    Over what it closes over a region may fail, on Explicit axes.

    Args:
      local: (call, layouts, found, *arrays) -> what a device returns, `shard_over_data` says.
      call: the call, its hooks too.
      layouts: of the arrays.
      found: where `local` puts what it learns.
      arrays: the array leaves.

    Returns:
      `local` as a function of arrays alone, then layouts, arrays and which of them have a gradient,
      those of hooks at the end of each, replicated.
    """
    options = call.options
    wanted = list(call.differentiated or (False,) * len(arrays))
    held, tree = jax.tree.flatten((options.hooks, options.post_accumulate_hooks))
    values = [x for x in held if is_array(x)] if call.differentiated else []

    def run(*given: Any) -> dict[str, Any]:
        if not values:
            return local(call, layouts, found, *given)
        own, inside = given[: len(arrays)], iter(given[len(arrays) :])
        opened = jax.tree.unflatten(tree, [next(inside) if is_array(x) else x for x in held])
        changes = dict(zip(("hooks", "post_accumulate_hooks"), opened, strict=True))
        changed = dataclasses.replace(call, options=dataclasses.replace(options, **changes))
        out = local(changed, layouts, found, *own)
        return out | {"grads": [*out["grads"], *[None] * len(values)]}

    added = dataclasses.replace(layouts, leaves=(*layouts.leaves, *(Layout() for _ in values)))
    return run, added, [*arrays, *values], [*wanted, *(False for _ in values)]
