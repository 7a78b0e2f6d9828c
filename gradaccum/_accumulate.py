"""The decorator: a loss function becomes the same loss function, microbatched, with one mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from optax.microbatching import AccumulationType

from gradaccum import _checks
from gradaccum._arguments import Selection
from gradaccum._comm import check_hook
from gradaccum._decorated import Accumulated
from gradaccum._hook_registry import as_hooks
from gradaccum._mesh import UNSET, AxisName, Unset, check_axes
from gradaccum._options import Options
from gradaccum._specs import Specs


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
    in_specs: Any = None,
    grad_specs: Any = None,
    accumulator_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    check_vma: bool = False,
    fused: bool = True,
    overlap: bool = False,
    unroll: int = 1,
    hook: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    post_accumulate_hook: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    comm_hook: Any = None,
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

    Communication: after the loop one `psum` over the data axes, of gradients, loss, weight and aux
    together. Where specs name data axes, parameters are gathered once before the loop and
    gradients reduce-scattered once after it. None in the loop, unless the loss itself communicates
    over the data axes (sync batch norm), which warns.

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
        real scalar >= 0 (not checked), such as its number of tokens, without a gradient. One of
        weight 0 adds nothing (its CONCAT rows are 0); all weights 0 give loss 0, gradients 0.
      key_argnums: positions of arguments with PRNG keys, into which the global microbatch index
        `device * k + i` is folded. A typed key that is not named is an error, a raw one cannot be
        told from data. `()`: the keys are meant to be shared.
      key_argnames: the same, by keyword.
      in_specs: how the arguments lie on the mesh, as `jax.shard_map` takes it: a tuple with one
        `PartitionSpec`, or pytree prefix of them, per positional argument (None, or left out at the
        end: the default, batch over the data axes, all else replicated). A *data* axis on a
        parameter's dimension (FSDP): that leaf is gathered once before the loop, its gradient
        reduce-scattered once after it. A *model* axis named here is manual inside `fun`, which sees
        its device's shard and communicates through `gradaccum.tensor_parallel`; on a dimension
        that has both, the model axis comes first. Model axes that are not named stay automatic.
      grad_specs: how the gradients are to lie, the same form; default as `in_specs`. A data axis
        that `in_specs` does not name for the leaf (ZeRO-1 and 2): one reduce-scatter instead of
        the all-reduce. Data axes not named are summed after it, on the shard (HSDP). An
        *automatic* model axis named here says where the leaf is split over it already: give these
        if you have them, see Cost. On Explicit axes, where a cotangent lies as its primal does,
        use `.value_and_grad`.
      accumulator_dtype: of the gradient sums; default float32, or the gradient's own if wider.
        Gradients return in their parameter's dtype, cast after the mean.
      reduce_dtype: of the gradients on the wire, e.g. bfloat16; default the accumulator's.
      check_vma: as in `jax.shard_map`. False: any loss. What varies over a manual model axis is
        then followed in the traced loss, and refused are: a loss or aux that varies; where it is
        differentiated, a replicated value that enters sharded computation without `copy_to`, and
        `psum`, `pmean`, `all_gather`, whose transposes would be wrong; and a `copy_to` too many, or
        of what varies. Inside an outer `shard_map` that is known of the axes that `in_specs` names;
        without, raw collectives alone are found. True: raw collectives are right, replicated values
        need no `copy_to`, and the loss must type-check; what a type cannot say, such as a
        `reduce_from` forgotten where another sum follows, is not found. Inside an outer
        `shard_map` that one's holds. Operators of `tensor_parallel` take model axes alone.
      fused: add gradients in place, inside the backward pass, for parameters that are scanned
        over as a stack of layers, cast before that scan or not. False: by value throughout, same
        values; `jax.vmap` of its gradient, second derivatives, and differentiating through a
        `lax.scan` that holds it need that.
      overlap: peel the last microbatch out of the loop, so that the compiler can reduce a
        gradient while the rest of that backward pass computes. Twice the program, same values. It
        helps layers that are written out, on GPUs; the gradient of scanned layers is whole only
        after their scan, and TPUs kept plain all-reduces synchronous (compiled, see the audit).
      unroll: microbatches per iteration of the loop, as in `jax.lax.scan`.
      hook: `fn(grads, *, index) -> grads`, or a sequence of such: on each microbatch's own mean
        gradient, before its weight, as `Accumulated.register_hook` says. Fused accumulation is off.
      post_accumulate_hook: `fn(grads) -> grads`, or a sequence of such: once a call, on this
        device's weighted mean (`Accumulated.register_post_accumulate_hook`).
      comm_hook: a communication hook of `gradaccum.hooks`, which replaces the cross-device mean
        (`Accumulated.register_comm_hook`).

    Returns:
      An `Accumulated`: the loss function, with `.value_and_grad` beside it. The caller's cotangent
      multiplies finished gradients, so loss scaling belongs inside `fun`.

    Raises:
      ValueError, TypeError: at decoration or when traced, before anything is computed: what the
        arguments or shapes have, what is needed, and the remedy. Differentiating through aux too.

    Cost:
      Collectives: without specs one all-reduce a call (XLA may split or merge it), of the
      differentiated parameters' bytes in `reduce_dtype` plus loss, weight and aux. Memory: one
      accumulator of these parameters, and one microbatch's gradient of those that are not scanned
      over once in their accumulator's dtype; with a `hook`, of all parameters. Program size does
      not depend on k (x2 with `overlap`).
      With specs that name data axes: one all-gather a call of each leaf that `in_specs` splits, one
      reduce-scatter of each gradient that is split, one all-reduce of what is left; the gathered
      parameters and one full accumulator stay on each device during the call. Split the first
      dimension where you can: a scatter along another takes one more gradient tree on GPUs and
      CPUs (a transposed copy). Beside an automatic
      model axis a gradient is reduce-scattered if the leaf's layout over that axis is known, from
      its Explicit type or from `grad_specs`; else it is all-reduced and cut, still split over the
      model axis as far as the partitioner keeps it, at twice the bytes on the wire.

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

      Hooks: gradients 5 and -1 of two microbatches, each clipped to 1, or their mean 2 clipped:

      >>> def clipped(**hook):
      ...     fun = gradaccum.accumulate(
      ...         lambda w, x: jnp.mean(w * x), microbatches=2, axis_name=None, **hook)
      ...     return float(jax.grad(fun)(0.0, jnp.array([5.0, -1.0])))
      >>> clipped(hook=lambda g, *, index: jnp.clip(g, -1, 1))
      0.0
      >>> clipped(post_accumulate_hook=lambda g: jnp.clip(g, -1, 1))
      1.0

    References:
      Microbatching: `optax.microbatch`. Unreduced gradients: the JAX documentation of
      `jax.shard_map`.
    """
    _checks.check_bools(fused=fused, overlap=overlap, check_vma=check_vma)
    _checks.check_reduction(loss_reduction, weight_fn)
    _checks.check_accumulator(aux_accumulator, has_aux)
    _checks.check_axis_name(axis_name)
    if mesh is not None:
        _checks.check_mesh(mesh)
        check_axes(_checks.API, axis_name, mesh)
    specs = Specs.of(_checks.API, "in_specs", in_specs)
    gradient_specs = Specs.of(_checks.API, "grad_specs", grad_specs)
    for given in (specs, gradient_specs):
        _checks.check_spec_axes(given.name, given.axes, axis_name, mesh)
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
        in_specs=specs,
        grad_specs=gradient_specs,
        accumulator_dtype=_checks.check_dtype("accumulator_dtype", accumulator_dtype),
        reduce_dtype=_checks.check_dtype("reduce_dtype", reduce_dtype),
        check_vma=check_vma,
        fused=fused,
        overlap=overlap,
        unroll=_checks.check_count("unroll", unroll, "microbatches per iteration"),
        hooks=as_hooks("hook", hook),
        post_accumulate_hooks=as_hooks("post_accumulate_hook", post_accumulate_hook),
        comm_hook=check_hook(_checks.API, comm_hook),
    )

    def decorate(fun: Callable[..., Any]) -> Accumulated:
        _checks.check_function(fun)
        batch = Selection.of(_checks.API, "batch", fun, batch_argnums, batch_argnames)
        keys = Selection.of(
            _checks.API,
            "key",
            fun,
            () if key_argnums is UNSET else key_argnums,
            () if key_argnames is UNSET else key_argnames,
        )
        return Accumulated(make(fun=fun, batch=batch, keys=keys if keyed else UNSET))

    return decorate if fun is None else decorate(fun)
