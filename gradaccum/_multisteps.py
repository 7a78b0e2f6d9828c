"""`MultiSteps`: the optax transformation that accumulates over calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from gradaccum import _checks
from gradaccum._all_reduce_mean import checked_axes
from gradaccum._mesh import AxisName, check_axes
from gradaccum._rows import resize
from gradaccum._state import MultiStepsState
from gradaccum._window import API, Window, schedule_of
from gradaccum._window_checks import check_arguments, check_comm_hook


class MultiSteps(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """Accumulate gradients over k calls; the mean over devices and the inner step run once.

    A drop-in for `optax.MultiSteps` that is itself an `optax.GradientTransformationExtraArgs`, so
    it stands in `optax.chain`, `masked`, `multi_transform` and `inject_hyperparams` as it is. Each
    call adds its gradients up; the k-th one gives the inner optimizer

        sum(gradients) / k,   or, of `Unreduced` ones,   sum(sum) / sum(weight)

    over the calls and devices of the window, and returns its updates; all other calls return zeros.

    Without `axis_name` gradients are a plain tree, averaged over devices already, as in optax. With
    it they are `gradaccum.Unreduced`, from `gradaccum.unreduced_value_and_grad`; or, inside a
    `jax.shard_map` over these axes, a plain tree: this device's gradient, a mean over its own
    examples, all devices alike.

    Communication: with `axis_name`, one reduction a window, in the taken branch of a `lax.cond` on
    counters that are the same on all devices. Without, none.

    What differs from `optax.MultiSteps`:

    - The inner optimizer runs in the taken branch alone, where optax runs it every call.
    - An inf or NaN does not outlive its window: the accumulator is reset by a select, not by a
      multiplication (0 * NaN is NaN for ever).
    - The mean divides by what the window holds: one that a changed schedule made shorter or longer
      is still a mean.
    - `has_updated` is true after a call that updated and no other: not after a skipped call.
    - Accumulators are float32 at least; float64 and complex gradients keep their own dtype.
    - k < 1 is an error. `flush` and `resize` are new, and so are two fields of the state.
    - `should_skip_update_fn` is asked of plain gradients in every call, as in optax; of `Unreduced`
      ones and one device's own once a window, of their mean. True there drops the window: the inner
      state stays bitwise as it was, `mini_step` is 0.

    Clip, scale, freeze and check for NaN in the inner optimizer, where they see the mean; a
    transformation before this one meets an `Unreduced` and raises. With ZeRO (`grad_specs`), `init`
    it with parameters that are laid out so, and gather the updates inside too, last in a chain;
    after this one they would be gathered in every call.
    Extra arguments (`value=`) are those of the call that updates; an `Unreduced` among them, such
    as the loss, reaches the inner optimizer as its mean. Update an average of parameters only where
    `has_updated` is true.

    Args:
      opt: the inner optimizer.
      every_k_schedule: k >= 1, in calls; or a function of `gradient_step` (int32 `[]`) to it.
      use_grad_mean: False: the sum over calls, of means over devices (with weights: the weighted
        mean, as many times as there were calls).
      should_skip_update_fn: `(gradients, gradient_step, params) -> (skip, skip_state)`, as
        `optax.skip_not_finite`; skip is bool `[]`. Over a manual model axis it sees one device's
        shard of a mean: any device's True skips on all, but its skip_state must agree by itself.
      accumulator_dtype: of the sums; default float32, or the parameter's own if wider.
      axis_name: the data axis or axes of the mesh.
      mesh: the mesh, if it is not that of `jax.set_mesh`. Where neither is given, `init` and
        `flush` take it from the parameters, if those are concrete and lie on it.
      comm_hook: takes the mean in place of the all-reduce, once a window, as
        `gradaccum.hooks.powersgd()`; its state is the field `comm_state`. Needs `axis_name`.

    Raises:
      ValueError: k < 1; gradients of another structure or shape than the parameters; no mesh;
        `comm_hook` without `axis_name`, or a state that holds a hook's where none was given.
      TypeError: `Unreduced` without `axis_name`; with it, a plain tree outside a manual region, or
        one that JAX has summed over devices (`check_vma=True`); an `Unreduced` that a
        transformation has computed with; what is no communication hook.

    Cost:
      Collectives: none in k - 1 of k calls; in the k-th each byte of gradients and `Unreduced`
      arguments once, 4 more a leaf (and over manual axes a flag of `should_skip_update_fn`), or
      what `comm_hook` says. Not
      under `jax.vmap` over states, which makes the branch a select: map the loss instead.
      Memory: one accumulator a device, whole over the data axes, else laid out as the parameters.
      All of the state may be donated, and is then updated in place.

    Example:
      >>> import jax, jax.numpy as jnp, optax, gradaccum
      >>> mesh = jax.make_mesh((8,), ("dp",))
      >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> grad_fn = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp", mesh=mesh)
      >>> tx = gradaccum.MultiSteps(optax.sgd(0.1), every_k_schedule=2, axis_name="dp", mesh=mesh)
      >>> w = jnp.ones((3,))
      >>> state = tx.init(w)
      >>> @jax.jit
      ... def train_step(w, state, x):
      ...     loss, grads = grad_fn(w, x)
      ...     updates, state = tx.update(grads, state, w)
      ...     return optax.apply_updates(w, updates), state
      >>> for x in jnp.ones((4, 16, 3)):
      ...     w, state = train_step(w, state, x)
      ...     print(bool(tx.has_updated(state)), [round(float(x), 2) for x in w])
      False [1.0, 1.0, 1.0]
      True [0.4, 0.4, 0.4]
      False [0.4, 0.4, 0.4]
      True [0.16, 0.16, 0.16]

      Clip inside, where the mean is. Of gradients -1.5, 0.5, 0.5 and 0.5 it is 0; outside, each
      is clipped to 1 first, and the mean is 0.125:

      >>> clip, sgd = optax.clip_by_global_norm(1.0), optax.sgd(1.0)
      >>> inside = gradaccum.MultiSteps(optax.chain(clip, sgd), 4)
      >>> outside = optax.chain(clip, gradaccum.MultiSteps(sgd, 4))
      >>> for tx in (inside, outside):
      ...     state = tx.init(0.0)
      ...     for grad in (-1.5, 0.5, 0.5, 0.5):
      ...         update, state = tx.update(jnp.float32(grad), state)
      ...     print(abs(float(update)))
      0.0
      0.125

    References:
      `optax.MultiSteps`.
    """

    def __new__(
        cls,
        opt: optax.GradientTransformation,
        every_k_schedule: int | jax.Array | Callable[[jax.Array], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[..., Any] | None = None,
        accumulator_dtype: DTypeLike | None = None,
        *,
        axis_name: AxisName | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        comm_hook: Any = None,
    ) -> MultiSteps:
        axis_name = checked_axes(API, axis_name, mesh)
        check_comm_hook(comm_hook, axis_name)
        check_arguments(opt, use_grad_mean)
        window = Window(
            opt=optax.with_extra_args_support(opt),
            every_k=schedule_of(every_k_schedule),
            use_grad_mean=use_grad_mean,
            should_skip=should_skip_update_fn,
            accumulator_dtype=_checks.check_dtype("accumulator_dtype", accumulator_dtype, API),
            axis_name=axis_name,
            mesh=mesh,
            comm_hook=comm_hook,
        )
        self: MultiSteps = super().__new__(cls, window.init, window.update)
        return self

    def __copy__(self) -> MultiSteps:  # nothing of it can change
        return self

    def __deepcopy__(self, memo: Any) -> MultiSteps:
        return self

    @property
    def _window(self) -> Window:
        # Of the functions, so that one with another of them, by `_replace`, has it too.
        given = (getattr(fun, "__self__", None) for fun in self)
        found = [x for x in given if isinstance(x, Window)]
        if not found:
            raise AttributeError(f"{API}: init and update were replaced; replace one, or neither.")
        return found[0]

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped optimizer."""
        return self._window.opt

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return this transformation itself, as `optax.MultiSteps` returns one of its own."""
        return self

    def has_updated(self, state: MultiStepsState) -> jax.Array:
        """Return whether the last call made a step: bool `[]`.

        Where the inner optimizer is a `MultiSteps` too: whether that made one.

        Args:
          state: the state that the call returned. In a chain, this transformation's part of it.
        """
        inner = self.inner_opt
        if isinstance(inner, MultiSteps):
            return jnp.logical_and(state.updated, inner.has_updated(state.inner_opt_state))
        return jnp.asarray(state.updated)

    def flush(
        self, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        """Make a step of an incomplete window, e.g. at the end of an epoch.

        Args:
          state: the state.
          params: the parameters, as for `update`.
          **extra_args: for the inner optimizer.

        Returns:
          `(updates, state)` as `update` would on the window's last call: the mean is over the calls
          that it holds. Of an empty window zeros; then the inner state is as it was.

        Raises:
          TypeError: a state of something else.
          ValueError: parameters that are not those of `init`; no mesh (under jit give `mesh=` to
            `MultiSteps`, or use `jax.set_mesh`).

        Cost:
          As the k-th call of `update`, by an all-reduce also where that is a reduce-scatter.
        """
        return self._window.flush(state, params, **extra_args)

    def resize(self, state: Any, mesh: Mesh | AbstractMesh) -> Any:
        """Move a state to a mesh with another number of data devices, sums and weights kept.

        To restore a checkpoint of 8 devices on 4, ask for the shapes that it was saved with, laid
        out on the devices that are here, and move what is restored:

            saved = tx.resize(tx.init(params), jax.sharding.AbstractMesh((8,), ("dp",)))
            state = tx.resize(checkpointer.restore(path, saved), mesh)

        Args:
          state: a state of this transformation, or any tree that holds such states (of a chain).
          mesh: the mesh, with the data axes by the same names. An abstract one moves shapes alone.

        Returns:
          The same tree with as many rows as `mesh` has data devices, on it, split by the same specs
          as far as that divides. For an abstract mesh `jax.ShapeDtypeStruct`s, with shardings on
          the mesh that `state` lies on: rows split if they divide, else whole on every device.

        Raises:
          ValueError: the mesh does not have the data axes.

        Cost:
          One copy of the state.
        """
        if self._window.axis_name is not None:
            check_axes(f"{API}.resize", self._window.axis_name, mesh)
        hook = self._window.comm_hook
        compressed = getattr(hook, "axis_name", None) or self._window.axis_name
        return resize(state, self._window.axis_name, mesh, compressed)


# As a pytree, which JAX takes every named tuple for, it is its two functions. Not made of them by
# `__new__`, which takes other arguments.
jax.tree_util.register_pytree_node(
    MultiSteps,
    lambda tx: (tuple(tx), None),
    lambda _, functions: tuple.__new__(MultiSteps, functions),
)
