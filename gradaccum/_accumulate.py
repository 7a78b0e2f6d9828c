"""The decorator: a loss function becomes the same loss function, microbatched, with one mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from optax.microbatching import AccumulationType

from gradaccum import _call, _checks
from gradaccum._arguments import Arguments, Selection, flatten_call
from gradaccum._mesh import UNSET, AxisName, Unset, check_axes, data_mesh
from gradaccum._options import Call, Options


class Accumulated:
    """A loss function that runs in microbatches and takes one cross-device mean.

    Made by `gradaccum.accumulate`. Call it, differentiate it and jit it as the function that it
    wraps (`__wrapped__`).
    """

    def __init__(self, options: Options):
        self._options = options
        functools.update_wrapper(self, options.fun)

    def __repr__(self) -> str:
        fun = self._options.fun
        name = getattr(fun, "__qualname__", type(fun).__name__)
        return f"<gradaccum.accumulate({name}, microbatches={self._options.microbatches})>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, list[Any]]:
        options = self._options
        where = data_mesh(_checks.API, options.axis_name, options.mesh)
        form, arrays = flatten_call(args, kwargs, options.batch, options.keys)
        return Call(options, form, where), arrays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, arrays = self._prepare(args, kwargs)
        loss, aux = _call.differentiable(call, *arrays)
        return (loss, aux) if self._options.has_aux else loss

    def value_and_grad(self, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
        """Return the function that computes the loss and its gradients, without a `custom_vjp`.

        The same values as `jax.value_and_grad(loss_fn, argnums, has_aux)`, which rather takes
        them through the rule of differentiation of the decorated loss.

        Args:
          argnums: the positional argument or arguments to differentiate.

        Returns:
          A function of the loss's own arguments, to `(loss, grads)`, or `((loss, aux), grads)`
          with `has_aux`; grads has the structure of the argument, or is a tuple of such.

        Raises:
          TypeError: a differentiated leaf is no real or complex array; as `jax.value_and_grad`.

        Cost:
          As `gradaccum.accumulate`.

        Example:
          >>> import jax.numpy as jnp, gradaccum
          >>> loss_fn = lambda w, x: jnp.mean((w * x) ** 2)
          >>> fun = gradaccum.accumulate(loss_fn, microbatches=2, axis_name=None)
          >>> loss, grad = fun.value_and_grad()(3.0, jnp.array([1.0, 2.0]))
          >>> float(loss), float(grad)
          (22.5, 15.0)
        """

        @functools.wraps(self._options.fun)
        def fun(*args: Any, **kwargs: Any) -> Any:
            nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
            nums = tuple(i + len(args) if i < 0 else i for i in nums)
            if any(not 0 <= i < len(args) for i in nums):
                raise TypeError(
                    f"{_checks.API}: value_and_grad(argnums={argnums}) of a call with "
                    f"{len(args)} positional arguments. Give the differentiated ones by position."
                )
            args = tuple(_as_arrays(a) if i in nums else a for i, a in enumerate(args))
            call, arrays = self._prepare(args, kwargs)
            wanted = _differentiated(call.form, args, nums)
            call = dataclasses.replace(call, differentiated=wanted)
            loss, aux, grads = _call.run(call, arrays)
            trees = call.form.trees_of(grads)
            picked = tuple(trees[i] for i in nums)
            value = (loss, aux) if self._options.has_aux else loss
            return value, picked[0] if isinstance(argnums, int) else picked

        return fun


@dataclasses.dataclass(frozen=True)
class _Method:
    """A decorated method of an instance, which is the function's argument 0."""

    function: Accumulated
    instance: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.instance, *args, **kwargs)

    def value_and_grad(self, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
        """As `Accumulated.value_and_grad`; positions are those of the method's own arguments."""
        one = isinstance(argnums, int)
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        shifted = tuple(i + 1 if i >= 0 else i for i in nums)
        fun = self.function.value_and_grad(shifted[0] if one else shifted)
        return functools.partial(fun, self.instance)


def _as_arrays(tree: Any) -> Any:
    """Makes arrays of Python floats, which are static elsewhere but have a gradient."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, float | complex) else x, tree)


def _differentiated(form: Arguments, args: Sequence[Any], nums: Sequence[int]) -> tuple[bool, ...]:
    """Returns which array leaves are in the arguments `nums`; all leaves there must be floats."""
    for i in nums:
        keyed, _ = jax.tree_util.tree_flatten_with_path(args[i])
        for path, x in keyed:
            _checks.check_differentiable(f"args[{i}]{jax.tree_util.keystr(path)}", x)
    return tuple(owner in nums for owner in form.owners())


def accumulate(
    fun: Callable[..., Any] | None = None,
    *,
    microbatches: int,
    axis_name: AxisName | Unset | None = UNSET,
    mesh: Mesh | AbstractMesh | None = None,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    has_aux: bool = False,
    aux_accumulator: Any = AccumulationType.MEAN,
    loss_reduction: str = "mean",
    weight_fn: Callable[..., Any] | None = None,
    key_argnums: int | Sequence[int] | Unset = UNSET,
    key_argnames: str | Sequence[str] | Unset = UNSET,
    accumulator_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    fused: bool = True,
    overlap: bool = False,
    unroll: int = 1,
) -> Any:
    """Run a loss function in microbatches, with exactly one cross-device mean of its gradients.

    Over k microbatches on each of n devices, with weights w (1 without `weight_fn`):

        loss = sum(w_i * loss_i) / sum(w_i),   grads = sum(w_i * grads_i) / sum(w_i),   i < k * n

    which is the full batch's loss and gradient, for a loss that is a mean over its examples (or,
    with `weight_fn`, over what the weight counts). A term that is not additive over examples, such
    as a load-balance loss or a batch norm's statistics, is averaged over the microbatches; that
    is not its full-batch value. Do not divide by k or n yourself.

    The result is still a loss function of the same signature: `jax.grad`, `jax.value_and_grad`
    (any `argnums`; `has_aux`), `jax.jit`, Equinox's and Flax's own transformations use it as they
    did. Undifferentiated it returns the loss alone, without gradient work. As with any
    `jax.custom_vjp`, parameters are arguments (a value that is differentiated but closed over
    raises JAX's UnexpectedTracerError), and forward-mode differentiation raises. What `fun` closes
    over, or has as a default argument, every microbatch sees whole. Arguments that are no arrays,
    Python numbers too, reach `fun` as they are; a new value of one is a new trace.

    Communication: one `psum` over the data axes after the loop, of gradients, loss, weight and
    aux together; none before it, and none in it unless the loss itself communicates over the data
    axes (sync batch norm), which warns.

    Args:
      fun: the loss function of one microbatch, to a real scalar, or to `(scalar, aux)` with
        `has_aux`. Left out, `accumulate` returns the decorator.
      microbatches: k >= 1, per data-parallel shard.
      axis_name: the data axis or axes of the mesh; unset, the mesh's only axis. `None`: no
        collective at all, the caller's batch is split as it is. Sharding constraints in `fun` may
        name the other axes only: inside, the batch is one device's.
      mesh: the mesh, Auto or Explicit; default, the one of `jax.set_mesh`. Inside an outer
        `shard_map` over the data axes the batch is local already. One device needs none. Arrays
        placed on Explicit axes want `jax.set_mesh` for eager calls, as everywhere in JAX.
      batch_argnums: positions of the arguments to split along axis 0; each of their leaves is
        `[B, ...]` with B divisible by `k * n`, or of rank 0 and then broadcast. In decorating a
        method, self is position 0.
      batch_argnames: the same, by keyword.
      has_aux: `fun` returns `(loss, aux)`.
      aux_accumulator: a pytree prefix of aux of `optax.microbatching.AccumulationType`. MEAN:
        weighted like the loss, not for integers (RUNNING_MEAN is the same here). SUM: integers stay
        exact (int32 at least). CONCAT: rows `[b, ...]` of the microbatches, back in the batch's
        order `[B, ...]`; scalars become `[k * n]`.
      loss_reduction: "mean", or "sum": the loss sums over its microbatch, and loss and gradients
        are summed over microbatches and devices.
      weight_fn: the batch arguments of a microbatch, in the order of the parameters of `fun`, ->
        real scalar >= 0, such as its number of tokens. No gradient flows through it. A microbatch
        of weight 0 adds nothing (its CONCAT rows are 0); all weights 0 give loss 0, gradients 0.
      key_argnums: positions of arguments with PRNG keys, into which the global microbatch index
        `device * k + i` is folded. A typed key that is not named is an error, a raw one cannot be
        told from data. `()`: the keys are meant to be shared.
      key_argnames: the same, by keyword.
      accumulator_dtype: of the gradient sums; default float32, or the gradient's own if wider.
        Gradients return in their parameter's dtype, cast after the mean.
      reduce_dtype: of the gradients on the wire, e.g. bfloat16; default the accumulator's.
      fused: add gradients in place, inside the backward pass, for parameters that are scanned
        over as a stack of layers. False: by value throughout, same values; `jax.vmap` of its
        gradient, second derivatives, and differentiating through a `lax.scan` that holds it need
        that.
      overlap: peel the last microbatch out of the loop, so that the compiler can reduce a
        gradient while the rest of that backward pass computes. Twice the program, same values.
      unroll: microbatches per iteration of the loop, as in `jax.lax.scan`.

    Returns:
      An `Accumulated`: the loss function, with `.value_and_grad` beside it. The caller's cotangent
      multiplies finished gradients, so loss scaling belongs inside `fun`.

    Raises:
      ValueError, TypeError: at decoration or when traced, before anything is computed: what the
        arguments or shapes have, what is needed, and the remedy. Differentiating through aux too.

    Cost:
      Collectives: one all-reduce a call (XLA may split or merge it): the differentiated
      parameters' bytes in `reduce_dtype` plus loss, weight and aux. Memory: one accumulator of
      the differentiated parameters, and one microbatch's gradient of those that are not scanned
      over once in their accumulator's dtype. Program size does not depend on k (x2 with `overlap`).

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> mesh = jax.make_mesh((8,), ("dp",))
      >>> @gradaccum.accumulate(microbatches=4, axis_name="dp", mesh=mesh)
      ... def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> params = {"w": jnp.ones((3,))}
      >>> batch = {"x": jnp.ones((64, 3)), "y": jnp.ones((64,))}
      >>> loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
      >>> float(loss), grads["w"].tolist()
      (4.0, [4.0, 4.0, 4.0])

    References:
      Microbatching: `optax.microbatch`. Unreduced gradients: the JAX documentation of
      `jax.shard_map`.
    """
    if not isinstance(fused, bool) or not isinstance(overlap, bool):
        raise TypeError(f"{_checks.API}: fused is {fused!r}, overlap is {overlap!r}; give bools.")
    _checks.check_reduction(loss_reduction, weight_fn)
    _checks.check_accumulator(aux_accumulator, has_aux)
    _checks.check_axis_name(axis_name)
    if mesh is not None:
        _checks.check_mesh(mesh)
        check_axes(_checks.API, axis_name, mesh)
    keyed = key_argnums is not UNSET or key_argnames is not UNSET
    aux_leaves, aux_tree = jax.tree.flatten(aux_accumulator)
    make = functools.partial(
        Options,
        microbatches=_checks.check_count("microbatches", microbatches, "per data-parallel shard"),
        axis_name=tuple(axis_name) if isinstance(axis_name, list) else axis_name,
        mesh=mesh,
        has_aux=bool(has_aux),
        aux_leaves=tuple(aux_leaves),
        aux_tree=aux_tree,
        loss_reduction=loss_reduction,
        weight_fn=weight_fn,
        accumulator_dtype=_checks.check_dtype("accumulator_dtype", accumulator_dtype),
        reduce_dtype=_checks.check_dtype("reduce_dtype", reduce_dtype),
        fused=fused,
        overlap=overlap,
        unroll=_checks.check_count("unroll", unroll, "microbatches per iteration"),
    )

    def decorate(fun: Callable[..., Any]) -> Accumulated:
        _checks.check_function(fun)
        batch = Selection.of(_checks.API, fun, batch_argnums, batch_argnames)
        keys = Selection.of(
            _checks.API,
            fun,
            () if key_argnums is UNSET else key_argnums,
            () if key_argnames is UNSET else key_argnames,
        )
        return Accumulated(make(fun=fun, batch=batch, keys=keys if keyed else UNSET))

    return decorate if fun is None else decorate(fun)
