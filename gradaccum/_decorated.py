"""The decorated loss function: what `accumulate` returns, and its calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import _call, _checks
from gradaccum._arguments import Arguments, flatten_call
from gradaccum._hook_registry import HookHandle, Registry
from gradaccum._mesh import data_mesh
from gradaccum._options import Call, Options


class Accumulated:
    """A loss function that runs in microbatches and takes one cross-device mean.

    Made by `gradaccum.accumulate`. Call it, differentiate it and jit it as the function that it
    wraps (`__wrapped__`).
    """

    def __init__(self, options: Options):
        functools.update_wrapper(self, options.fun)
        self._options = options  # as decorated: calls take the registry's
        self._registry = Registry(options)

    def __repr__(self) -> str:
        fun = self._options.fun
        name = getattr(fun, "__qualname__", type(fun).__name__)
        return f"<gradaccum.accumulate({name}, microbatches={self._options.microbatches})>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else Method(self, instance)

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, list[Any]]:
        options = self._registry.use()
        where = data_mesh(_checks.API, options.axis_name, options.mesh)
        form, arrays = flatten_call(args, kwargs, options.batch, options.keys)
        return Call(options, form, where), arrays

    def prepare_gradients(
        self, argnums: int | Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, list[Any], Callable[[Sequence[Any]], Any]]:
        """Prepares a call whose gradients are wanted: not of public use.

        Returns:
          The call, its arrays, and what makes the gradients of `argnums` of one for each array.
        """
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

        def pick(grads: Sequence[Any]) -> Any:
            trees = call.form.trees_of(grads)
            picked = tuple(trees[i] for i in nums)
            return picked[0] if isinstance(argnums, int) else picked

        return dataclasses.replace(call, differentiated=wanted), arrays, pick

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
            call, arrays, pick = self.prepare_gradients(argnums, args, kwargs)
            loss, aux, grads = _call.run(call, arrays)
            return ((loss, aux) if self._options.has_aux else loss), pick(grads)

        return fun

    def register_hook(self, fn: Callable[..., Any]) -> HookHandle:
        """Register a function that changes each microbatch's own gradient.

        `sum(w_i * fn(grads_i, index=i)) / sum(w_i)`: before the weight, and before the mean over
        microbatches and devices. With `loss_reduction="sum"` it is the gradient of the
        microbatch's own sum. A microbatch of weight 0 has none, and its hooks do not run. As a hook
        sees one device, it must not communicate over a data axis.

        Args:
          fn: `fn(grads, *, index) -> grads`. `grads` has the structure of the differentiated
            argument (of several: a tuple of them, in positional order), leaves in the
            accumulator's dtype, and None where there is no gradient: static and integer leaves.
            Batch arguments are left out, as their gradients belong to their examples. `index` is
            int32 `[]`, the microbatch's global one, `device * k + i`. What it returns has the same
            structure and shapes; dtypes are cast back. Parameters split over data axes are whole
            here; over a *manual* model axis there is this device's shard, of which a norm is
            `gradaccum.tensor_parallel.global_norm`.

        Returns:
          The handle, not `fn`: `remove()` takes the hook off again. So this is no decorator.
          Several hooks run in the order of their registration, after those given as `hook=`.

        Raises:
          ValueError: the loss was called or traced before, as a compiled step would not see the
            change. In a call: what `fn` returns has another structure or shape; it communicates
            over a data axis; what devices of a model axis share would differ between them.
          TypeError: `fn` is no function of `(grads, *, index)`, or has no hash.

        Cost:
          No collective. Fused accumulation is off: every gradient goes by value, one gradient tree
          more, and is read and written once more in each microbatch.

        Example:
          Clipping the parts is not clipping the mean. Of microbatches with gradients -1.5, 0.5, 0.5
          and 0.5 the mean is 0, whatever it is clipped to; clipped to 1 each, it is 0.125:

          >>> import jax, jax.numpy as jnp, optax, gradaccum
          >>> x, clip = jnp.array([-1.5, 0.5, 0.5, 0.5]), optax.clip_by_global_norm(1.0)
          >>> def loss_fn(w, x):
          ...     return jnp.mean(w * x)
          >>> fun = gradaccum.accumulate(loss_fn, microbatches=4, axis_name=None)
          >>> mean = jax.grad(fun)(0.0, x)
          >>> float(clip.update(mean, clip.init(mean))[0])  # or inside gradaccum.MultiSteps
          0.0
          >>> fun = gradaccum.accumulate(loss_fn, microbatches=4, axis_name=None)
          >>> handle = fun.register_hook(lambda g, *, index: clip.update(g, clip.init(g))[0])
          >>> float(jax.grad(fun)(0.0, x))
          0.125

          Noise wants the step's key, with the index folded in: then k microbatches' draws are
          independent, and their mean has deviation 1 / sqrt(k), here 0.5. A `Partial` hands a
          traced key over (closing over it will do except on Explicit axes), and a hook of one
          step is given where the step decorates:

          >>> def noise(key, grads, *, index):
          ...     key = jax.random.fold_in(key, index)
          ...     draws = optax.tree.random_like(key, grads, jax.random.normal)
          ...     return jax.tree.map(jnp.add, grads, draws)
          >>> @jax.jit
          ... def deviation(key, w):
          ...     hook = jax.tree_util.Partial(noise, key)
          ...     fun = gradaccum.accumulate(
          ...         lambda w, x: jnp.mean(x) * w.sum(), microbatches=4, axis_name=None, hook=hook)
          ...     return jnp.std(jax.grad(fun)(w, x))
          >>> print(f"{deviation(jax.random.key(0), jnp.zeros(100_000)):.2f}")
          0.50

          Without `fold_in` they share one draw: 1.00. On a manual model axis all devices draw the
          same: fold in its `jax.lax.axis_index` for the leaves that it splits, and these alone.

        References:
          PyTorch's `Tensor.register_hook`.
        """
        return self._registry.add("hook", fn)

    def register_post_accumulate_hook(self, fn: Callable[..., Any]) -> HookHandle:
        """Register a function that changes this device's accumulated mean, once a call.

        On device d, with weights w (1 without `weight_fn`):

            mean[d] = fn(sum(w_i * grads_i) / sum(w_i)),   weight[d] = sum(w_i),   i < k

        and the result is still `sum(weight * mean) / sum(weight)` over devices, of what was
        returned. With `loss_reduction="sum"` it is the device's sum. A device whose weights are all
        0 adds nothing, whatever `fn` returns there. It runs before the one mean and must not
        communicate over a data axis. Once a *call*: PyTorch's namesake,
        `Tensor.register_post_accumulate_grad_hook`, fires after every backward pass, k times.
        In `gradaccum.unreduced_value_and_grad` the rows hold what it returned.

        Args:
          fn: `fn(grads) -> grads`; trees as `register_hook` has them.

        Returns:
          The handle, as `register_hook`.

        Raises:
          ValueError, TypeError: as `register_hook`.

        Cost:
          No collective; accumulation stays fused. What needs all gradients at once, as a norm does,
          takes from `overlap=True` what it gains.

        Example:
          >>> import jax, jax.numpy as jnp, gradaccum
          >>> @gradaccum.accumulate(microbatches=2, axis_name=None)
          ... def loss_fn(w, x):
          ...     return jnp.mean(w * x)
          >>> handle = loss_fn.register_post_accumulate_hook(lambda g: jnp.clip(g, -1.0, 1.0))
          >>> float(jax.grad(loss_fn)(0.0, jnp.array([5.0, -4.0])))  # parts 5 and -4, mean 0.5
          0.5
        """
        return self._registry.add("post_accumulate_hook", fn)

    def register_comm_hook(self, hook: Any) -> HookHandle:
        """Register the communication hook, which replaces the cross-device mean.

        Args:
          hook: an object of `gradaccum.hooks`, or another frozen dataclass with `init(unreduced) ->
            state` and `__call__(unreduced, state) -> (mean, state)`, that has no state. One alone.

        Returns:
          The handle, as `register_hook`.

        Raises:
          ValueError: there is one already, or the loss was called or traced before.
          TypeError: it is a class instead of an object, lacks a method, or has no hash.

        Cost:
          That of the hook, instead of the one all-reduce.

        References:
          PyTorch's `DistributedDataParallel.register_comm_hook`.
        """
        return self._registry.add("comm_hook", hook)


@dataclasses.dataclass(frozen=True)
class Method:
    """A decorated method of an instance, which is the function's argument 0."""

    function: Accumulated
    instance: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.instance, *args, **kwargs)

    def value_and_grad(self, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
        """As `Accumulated.value_and_grad`; positions are those of the method's own arguments."""
        return functools.partial(self.function.value_and_grad(_shifted(argnums)), self.instance)

    def prepare_gradients(
        self, argnums: int | Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, list[Any], Callable[[Sequence[Any]], Any]]:
        """As `Accumulated.prepare_gradients`."""
        return self.function.prepare_gradients(_shifted(argnums), (self.instance, *args), kwargs)

    def register_hook(self, fn: Callable[..., Any]) -> HookHandle:
        """As `Accumulated.register_hook`; the function is that of all instances."""
        return self.function.register_hook(fn)

    def register_post_accumulate_hook(self, fn: Callable[..., Any]) -> HookHandle:
        """As `Accumulated.register_post_accumulate_hook`, for all instances."""
        return self.function.register_post_accumulate_hook(fn)

    def register_comm_hook(self, hook: Any) -> HookHandle:
        """As `Accumulated.register_comm_hook`, for all instances."""
        return self.function.register_comm_hook(hook)


def _shifted(argnums: int | Sequence[int]) -> int | tuple[int, ...]:
    """Returns positions among a method's own arguments as those of its function."""
    if isinstance(argnums, int):
        return argnums + 1 if argnums >= 0 else argnums
    return tuple(i + 1 if i >= 0 else i for i in argnums)


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
