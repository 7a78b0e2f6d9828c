"""`int8_quantize`: gradients that cross the devices in int8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradaccum import _reduce
from gradaccum._mesh import AxisName, is_typed
from gradaccum._specs import spec_of
from gradaccum._state import Residual
from gradaccum._unreduced import flatten
from gradaccum.hooks._arguments import check, check_no_state
from gradaccum.hooks._averaging import Local, average, check_axes, is_compressible
from gradaccum.hooks._blocks import Chunks, summed
from gradaccum.hooks._residual import zero_residual

API = "int8_quantize"


class Int8State(NamedTuple):
    """The state of `int8_quantize`, where it has one.

    Attributes:
      steps: int32 `[]`, how many means were taken, which the random numbers of the next depend on.
      residual: what each device could not send yet; None without error feedback.
    """

    steps: jax.Array
    residual: Residual | None


@dataclasses.dataclass(frozen=True)
class int8_quantize:  # noqa: N801 (as DDP's hooks)
    """Send gradients in int8 both ways, a quarter of float32's bytes; add them in float32.

        mean = int8(sum over devices of int8(sum)) / sum(weight)

    where int8(x) rounds each block of `block_size` entries to steps of its own largest entry
    / 127. Each device adds up one part of the gradients, of all devices, and sends the sum on. So
    an entry of the mean is off by (sum over devices of half a step + half a step of the sum) /
    sum(weight) at most; by twice that with stochastic rounding, which is unbiased. A block in which
    any device has an inf or NaN is NaN in the mean.

    With error feedback each device adds what it could not send to what it sends next, its share of
    the sums' rounding too, in units of the mean: residual = error * n / sum(weight). Then, whatever
    the weights of the windows,

        sum over steps of mean = sum over steps of the exact mean - mean over devices of residual

    so that no error adds up. A window that weighs nothing leaves residuals as they are, and so
    does an inf or NaN in its block.

    Communication: one `psum` of what travels in full, with all weights; one all-to-all of int8,
    scales included, for all leaves together; one all-gather of int8. Gradients that are scattered
    over these axes (ZeRO, FSDP: `grad_specs`) need the all-to-all alone, and are rounded once.
    With error feedback the `psum` comes first. Scalars, integers, complex leaves, those of less
    than `min_size` entries, and those for which it would save nothing, travel in full.

    Args:
      axis_name: the data axes to compress on, e.g. HSDP's slow one; over the others the sum is
        taken first, in full. None: all.
      rounding: "nearest", or "stochastic": up with a probability that makes it right on average.
      error_feedback: keep what could not be sent, and send it the next time.
      block_size: how many entries share a float32 scale: fewer are more exact, and cost more, 4
        bytes a block. Multiples of 128 suit a TPU.
      min_size: of a leaf, in entries, as a device holds it: smaller ones, such as biases, cost
        little, and travel in full.
      seed: of stochastic rounding. It also depends on the number of the mean, the leaf and the
        device.

    Raises:
      ValueError: an argument out of range; `axis_name` is none of the data axes; a gradient is
        split over it beside others (`grad_specs`); else as `gradaccum.mean`.
      TypeError: a state of another hook, or of other options; else as `gradaccum.mean`.

    Cost:
      Of N float32 entries on n devices each device sends (n - 1) / n of N + 4 N / block_size bytes
      in the all-to-all, as much in the all-gather, where an all-reduce sends 8 N: about a quarter.
      Compiled for a TPU (v5e:2x4, n = 8), of 4,194,304 entries: s8 all-to-all and all-gather of
      4,259,840 bytes each, 7,454,727 sent by each device; scattered 3,727,367. An all-reduce in
      float32 sends 29,360,135 there, a reduce-scatter 14,680,071. Each leaf is padded to n blocks.
      Rounding is not free, it is for slow networks: 46 bytes an entry cross the memory, where the
      all-reduce has 16, by the compiler's count, and 4 more are held meanwhile; with error feedback
      and stochastic rounding 187 and 9.
      Beside an automatic model axis of m devices, leaves whose layout on it neither `grad_specs`
      nor an Explicit axis tells are gathered over it first, so that all is m times as dear: name
      the axis in `grad_specs`.
      No state with nearest rounding and no error feedback: the decorator takes it then. Else one
      int32, and for error feedback a whole gradient on each device, in float32.

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> mesh = jax.make_mesh((8,), ("dp",))
      >>> loss_fn = lambda w, x: jnp.mean(x @ w)
      >>> hook = gradaccum.hooks.int8_quantize(error_feedback=True)
      >>> with jax.set_mesh(mesh):
      ...     grad_fn = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp")
      ...     x = jax.random.normal(jax.random.key(0), (8, 4096))
      ...     _, rows = grad_fn(jnp.zeros(4096), x)
      ...     exact = gradaccum.mean(rows)
      ...     def step(state, _):
      ...         mean, state = hook(rows, state)
      ...         return state, mean
      ...     _, means = jax.jit(lambda: jax.lax.scan(step, hook.init(rows), length=50))()
      >>> print(f"{abs(means[0] - exact).max():.2f} {abs(means.mean(axis=0) - exact).max():.4f}")
      0.01 0.0002

    References:
      Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback); Alistarh et al. 2017,
      QSGD, arXiv 1610.02132 (stochastic rounding); `quantization_pertensor_hook` of PyTorch's
      DistributedDataParallel, whose all-gather sends n times as much.
    """

    axis_name: AxisName | None = None
    rounding: str = "nearest"
    error_feedback: bool = False
    block_size: int = 256
    min_size: int = 1024
    seed: int = 0
    manual_model_axes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"{API}: rounding={self.rounding!r}; required: 'nearest' or 'stochastic'."
            )
        check(self, {"block_size": 1, "min_size": 0, "seed": 0}, ("error_feedback",))

    def init(self, unreduced: Any) -> Any:
        """Return the state before the first mean; `()` for nearest rounding without error feedback.

        Args:
          unreduced: a tree of `Unreduced`, of which only types and layouts matter.
        """
        check_axes(self, unreduced)
        if not self._has_state:
            return ()
        residual = None
        if self.error_feedback:
            leaves = flatten(API, unreduced)[0].values()
            has = [is_compressible(x.sum) and self._is_large(x.sum.shape[1:]) for x in leaves]
            residual = zero_residual(API, self.axis_name, unreduced, has)
        return Int8State(jnp.zeros((), jnp.int32), residual)

    def __call__(self, unreduced: Any, state: Any) -> tuple[Any, Any]:
        if not self._has_state:
            check_no_state(API, state)
            return average(self, unreduced)[0], state
        if not isinstance(state, Int8State) or self.error_feedback == (state.residual is None):
            raise TypeError(
                f"{API}: a state of {_describe(state)}, for rounding={self.rounding!r} and "
                f"error_feedback={self.error_feedback}; required: what `init` of a hook with the "
                "same options returned."
            )
        mean, residual, means = average(self, unreduced, state.residual, state.steps)
        return mean, Int8State(means, residual)

    @property
    def _has_state(self) -> bool:
        return self.error_feedback or self.rounding == "stochastic"

    def _is_large(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) >= max(self.min_size, 1)

    def _chunks(self, shape: tuple[int, ...], leaf: int, local: Local) -> Chunks:
        sizes = dict(local.where.sizes)
        axes = tuple((a, sizes[a]) for a in local.where.axis_names)
        return Chunks(shape, axes, local.layouts.leaves[leaf].scattered, self.block_size)

    def _compresses(self, x: jax.Array, leaf: int, residual: Any, local: Local) -> bool:
        """Whether a leaf travels in int8: if it may, is large, and that is fewer bytes."""
        if not (is_compressible(x[None]) and self._is_large(x.shape) and local.where.size > 1):
            return False
        if self.error_feedback and residual is None:
            return False
        return self._chunks(x.shape, leaf, local).wire_bytes < x.size * x.dtype.itemsize

    def average(
        self, local: Local, residuals: list[Any], shared: Any
    ) -> tuple[list[jax.Array], list[Any], Any]:
        sums, r = local.sums, local.where.size
        leaves = [
            i
            for i, (x, kept) in enumerate(zip(sums, residuals, strict=True))
            if self._compresses(x, i, kept, local)
        ]
        exact = [None if i in leaves else x for i, x in enumerate(sums)]
        total = local.reduce(exact, [None] * len(sums))
        totals = list(total.grads)
        new = list(residuals)
        if leaves:
            with jax.named_scope("gradaccum/mean"):
                wide = [sums[i].astype(_wide(sums[i].dtype)) for i in leaves]
                # The mean of the devices' residuals is what the mean lacks.
                share = [_weight(total.weight, local.which[i]) / r for i in leaves]
                if self.error_feedback:
                    wide = [
                        x + (c * residuals[i]).astype(x.dtype)
                        for x, c, i in zip(wide, share, leaves, strict=True)
                    ]
                found, errors = self._exchange(wide, leaves, local, shared)
                for i, x, error, c in zip(leaves, found, errors, share, strict=True):
                    totals[i] = _reduce.cut(x, local.layouts.leaves[i].sliced)
                    if error is not None:
                        kept = error / jnp.where(c > 0, c, 1).astype(error.dtype)
                        keep = jnp.isfinite(kept) & (c > 0)
                        new[i] = jnp.where(keep, kept, residuals[i].astype(kept.dtype))
        means = [local.divided(x, i, total.weight) for i, x in enumerate(totals)]
        return means, new, shared + 1 if self._has_state else shared

    def _exchange(
        self, xs: list[jax.Array], leaves: list[int], local: Local, means: Any
    ) -> tuple[list[jax.Array], list[Any]]:
        """Sums leaves over the devices; in a further region where an automatic axis splits them.

        There the partitioner would gather what is flattened.
        """
        axes, sizes = local.where.axis_names, dict(local.where.sizes)
        axes = tuple(a for a in axes if sizes[a] > 1)
        me, key = jax.lax.axis_index(axes), None
        if self.rounding == "stochastic":
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), means), me)
        typed = is_typed(local.where.axis_names)

        def exchange(
            xs: list[jax.Array], me: jax.Array, key: jax.Array | None
        ) -> tuple[list[jax.Array], list[Any]]:
            chunks = [self._chunks(x.shape, i, local) for x, i in zip(xs, leaves, strict=True)]
            return summed(xs, chunks, me, key, typed=typed, errors=self.error_feedback)

        automatic = local.layouts.automatic
        if automatic:
            specs = [spec_of(local.layouts.leaves[i].automatic) for i in leaves]
            whole = PartitionSpec()
            exchange = jax.shard_map(
                exchange,
                in_specs=(specs, whole, whole),
                out_specs=(specs, specs if self.error_feedback else [None] * len(xs)),
                axis_names=set(automatic),
                check_vma=typed,
            )
        return exchange(xs, me, key)


def _weight(weights: Sequence[jax.Array], place: int | None) -> jax.Array:
    return jnp.ones((), jnp.float32) if place is None else weights[place]


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _describe(state: Any) -> str:
    if not isinstance(state, Int8State):
        return f"type {type(state).__name__}"
    return "one without residuals" if state.residual is None else "one with residuals"
