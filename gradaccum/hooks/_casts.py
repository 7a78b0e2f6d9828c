"""Communication hooks without a state: as it is, in another dtype, or nothing at all."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gradaccum import _reduce
from gradaccum._mesh import AxisName, is_typed
from gradaccum.hooks._arguments import check, check_no_state
from gradaccum.hooks._averaging import Local, average, check_axes, is_compressible


@dataclasses.dataclass(frozen=True)
class _Stateless:
    """A hook without a state."""

    axis_name: AxisName | None = None
    manual_model_axes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self)

    def init(self, unreduced: Any) -> Any:
        """Return the state of the hook: none, `()`."""
        check_axes(self, unreduced)
        return ()

    def __call__(self, unreduced: Any, state: Any) -> tuple[Any, Any]:
        check_no_state(type(self).__name__, state)
        mean, _, _ = average(self, unreduced)
        return mean, state

    def average(
        self, local: Local, residuals: list[Any], shared: Any
    ) -> tuple[list[jax.Array], list[Any], Any]:
        return self._means(local), residuals, shared

    def _means(self, local: Local) -> list[jax.Array]:
        raise NotImplementedError


def _in_dtype(local: Local, dtype: Any) -> list[jax.Array]:
    """Takes the mean with the compressible leaves in a dtype on the wire, None for their own."""
    dtypes = [dtype if is_compressible(x[None]) else None for x in local.sums]
    total = local.reduce(local.sums, dtypes)
    return [local.divided(x, i, total.weight) for i, x in enumerate(total.grads)]


@dataclasses.dataclass(frozen=True)
class allreduce(_Stateless):  # noqa: N801 (as DDP's)
    """Take the mean as it is taken without a hook.

        mean = sum_d s_d / W,   s_d device d's weighted sum, W = sum_d w_d of the weights

    Communication: one `psum` over the data axes, of leaves and weights together, each in its own
    dtype (`reduce_dtype` of the decorator is not used beside a hook).

    Args:
      axis_name: no matter here: all data axes are summed over in full.

    Raises:
      TypeError, ValueError: the argument is no tree of `Unreduced`, as `gradaccum.mean`; the state
        has arrays.

    Cost:
      Each gradient byte once, 4 bytes of each different weight. No state.

    Example:
      >>> import jax.numpy as jnp, gradaccum
      >>> rows = gradaccum.Unreduced(jnp.array([[8.0, 4.0]]), jnp.array([4.0]), axis_name=None)
      >>> mean, state = gradaccum.hooks.allreduce()(rows, ())
      >>> mean.tolist()
      [2.0, 1.0]
    """

    def _means(self, local: Local) -> list[jax.Array]:
        return _in_dtype(local, None)


@dataclasses.dataclass(frozen=True)
class noop(_Stateless):  # noqa: N801
    """Communicate nothing, to measure how much time communication takes: the result is NO mean.

        "mean" = this device's sum / this device's weight

    Every device goes on with its own gradient, so that parameters drift apart, though JAX takes
    them for replicated. Of gradients that are to be split (FSDP) each device keeps its part. Time
    steps with it and throw the result away.

    Args:
      axis_name: the data axes to leave out; over the others the mean is taken. None: all.

    Raises:
      TypeError: inside a `jax.shard_map` with `check_vma=True`, where such a result has no type;
        else as `gradaccum.mean`.
      ValueError: as `gradaccum.mean`; `axis_name` is none of the data axes.

    Cost:
      No collective over the axes that are left out. No state.

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
      >>> rows = jnp.array([[1.0], [5.0]])
      >>> with jax.set_mesh(mesh):
      ...     both = gradaccum.Unreduced(rows, jnp.ones(2), axis_name="dp")
      ...     gradaccum.hooks.allreduce()(both, ())[0].tolist()
      ...     gradaccum.hooks.noop()(both, ())[0].tolist()  # of device 0; device 1 has 5
      [3.0]
      [1.0]
    """

    def _means(self, local: Local) -> list[jax.Array]:
        if is_typed(local.where.axis_names):
            raise TypeError(
                "noop: inside a shard_map with check_vma=True; its result differs between devices, "
                "which a mean's type may not. Measure with check_vma=False there."
            )
        own = [local.divided(x, i, local.weights) for i, x in enumerate(local.sums)]
        return [
            _reduce.cut(x, (*layout.scattered, *layout.sliced))
            for x, layout in zip(own, local.layouts.leaves, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class bf16_compress(_Stateless):  # noqa: N801
    """Send gradients in bfloat16: half of float32's bytes.

        mean = float32(sum_d bfloat16(s_d)) / W,   s_d device d's weighted sum, W the weights' sum

    Communication: one `psum` over the data axes (two where `axis_name` names some of them, the
    first in full). Scalars, weights, integers and complex leaves travel as they are; float64 is
    rounded to bfloat16 too. The error is that of rounding, 2^-8 of each row, and of adding n
    rounded numbers in the order of the reduction; it has no memory (no error feedback).

    Args:
      axis_name: the data axes to compress on, e.g. HSDP's slow one; over the others the sum is
        taken first, in full. None: all.

    Raises:
      ValueError: `axis_name` is none of the data axes; a gradient is split over it beside others
        (`grad_specs`); else as `gradaccum.mean`.
      TypeError: as `gradaccum.mean`.

    Cost:
      2 bytes an element instead of float32's 4: of 268,435,460 bytes 134,217,736, compiled for a
      TPU v5e 2x4 (XLA's CPU backend adds in float32, and sends that). The cast is a copy. No state.

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
      >>> with jax.set_mesh(mesh):
      ...     rows = jnp.array([[1.001, 2.0], [1.0, 4.0]])
      ...     both = gradaccum.Unreduced(rows, jnp.ones(2), axis_name="dp")
      ...     gradaccum.hooks.bf16_compress()(both, ())[0].tolist()
      [1.0, 3.0]

    References:
      `bf16_compress_hook` of PyTorch's DistributedDataParallel.
    """

    def _means(self, local: Local) -> list[jax.Array]:
        return _in_dtype(local, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class fp16_compress(_Stateless):  # noqa: N801
    """Send gradients in float16, scaled so that none overflows: half of float32's bytes.

        mean = sum_d float16(s_d / scale) * scale / W,   scale = max over d and entries of |s_d|

    with s_d device d's weighted sum, W the sum of weights, and one scale a leaf, so that small
    gradients do not underflow either: what is less than 2^-25 of its leaf's largest entry becomes
    0. Sums of n rows then are at most n in size. An inf or NaN of any device makes its whole leaf
    NaN, so that a check for finite gradients sees it.

    Communication: a `pmax` of one float32 a leaf, then one `psum`. Scalars, weights, integers and
    complex leaves travel as they are.

    Args:
      axis_name: the data axes to compress on, as of `bf16_compress`.

    Raises:
      ValueError, TypeError: as `bf16_compress`.

    Cost:
      2 bytes an element instead of 4, and 4 bytes a leaf: of 268,435,460 bytes 134,217,740,
      compiled for a TPU v5e 2x4. One small reduction before the large one. No state.

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
      >>> with jax.set_mesh(mesh):
      ...     rows = jnp.array([[1e6, 1e-9], [3e6, 1e6]])  # float16 ends at 65,504
      ...     both = gradaccum.Unreduced(rows, jnp.ones(2), axis_name="dp")
      ...     [round(x, -3) for x in gradaccum.hooks.fp16_compress()(both, ())[0].tolist()]
      [2000000.0, 500000.0]

    References:
      `fp16_compress_hook` of PyTorch's DistributedDataParallel, which divides by n alone.
    """

    def _means(self, local: Local) -> list[jax.Array]:
        small = [is_compressible(x[None]) for x in local.sums]
        largest = [
            jnp.max(jnp.abs(x), initial=0) for x, s in zip(local.sums, small, strict=True) if s
        ]
        scales = iter(_reduce.largest(largest, local.where))
        scale = [jnp.where((a := next(scales)) == 0, 1, a) if s else None for s in small]
        scaled = [x if s is None else x / s for x, s in zip(local.sums, scale, strict=True)]
        total = local.reduce(scaled, [jnp.float16 if s else None for s in small])
        return [
            local.divided(x if s is None else x * s, i, total.weight)
            for i, (x, s) in enumerate(zip(total.grads, scale, strict=True))
        ]
