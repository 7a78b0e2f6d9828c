"""The gradient noise scale, estimated by what the one mean of n rows shows anyway."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum import _reduce
from gradaccum._layout import Layouts
from gradaccum._means import Awaited
from gradaccum._mesh import AxisName, DataMesh, describe, vary, varying_axes
from gradaccum._unreduced import Unreduced, flatten, where_of
from gradaccum.hooks._arguments import check_state
from gradaccum.hooks._casts import allreduce

API = "gradient_noise_scale"


class NoiseScaleState(NamedTuple):
    """The state of `gradient_noise_scale`; `optax.tree.get(opt_state, "noise_scale")` reads it.

    Attributes:
      measurements: int32 `[]`, how many windows were measured.
      signal: float32 `[]`, the smoothed |G|^2; NaN before the first measurement.
      noise: float32 `[]`, the smoothed S = tr(Sigma), the variance of one example's gradient.
      noise_scale: float32 `[]`, noise / signal, in examples; infinite where signal <= 0.
      inner: the state of the hook that takes the mean.
    """

    measurements: jax.Array
    signal: jax.Array
    noise: jax.Array
    noise_scale: jax.Array
    inner: Any


class _Extra(NamedTuple):
    """What is averaged beside the gradients: scalars, which every hook sends as they are.

    Their means are sum(w |r|^2) / W, the part of the rows that are not empty, and W / n.
    """

    squares: Unreduced
    occupied: Unreduced
    weight: Unreduced


@dataclasses.dataclass(frozen=True)
class gradient_noise_scale:  # noqa: N801 (as DDP's hooks)
    """Estimate the simple noise scale, tr(Sigma) / |G|^2, beside the mean that a hook takes.

    It says up to which size a larger batch pays: well below it a batch twice as large makes nearly
    twice the progress a step, well above it hardly more. Of the rows r_d = sum_d / weight_d of the
    data devices, w_d their weights, W the sum of these, n the number of rows with w_d > 0:

        S     = W / (n - 1) * (sum(w_d |r_d|^2) / W - |mean|^2)
        |G|^2 = |mean|^2 - S / W
        noise_scale = average(S) / average(|G|^2)

    Both are unbiased, whatever the weights, as E|r_d|^2 = |G|^2 + S / w_d and E|mean|^2 =
    |G|^2 + S / W; a ratio of single ones is not, so each is averaged over windows first, with
    weights that fall by `decay`, and without a bias to 0 at the start. Of equal rows it is
    McCandlish et al.'s estimate with B_small = W / n, B_big = W.

    The unit is that of the weights: examples, as `gradaccum.unreduced_value_and_grad` counts them,
    or `weight_fn`'s (tokens, each taken as independent of the others: then the scale of sequences
    is not this number divided by their length). Where a weight is no count of examples, multiply:
    of plain gradients inside a `jax.shard_map` (weight 1 a call) by the examples of one device and
    call, with `loss_reduction="sum"` (weight 1/n) by those of all devices in one call; with
    `MultiSteps(use_grad_mean=False)` by the calls of a window.

    Communication: the hook's own reduction, with four scalars more in it. Where means are split
    over devices (FSDP), or rows over a model axis, their squares are summed in small reductions
    more: by the partitioner; inside a `jax.shard_map` by this hook.

    It lives in the optax state, of `MultiSteps(..., comm_hook=...)` or `all_reduce_mean`. The state
    stays as it was where nothing can be measured: one device (it runs, to debug on, and reads NaN),
    fewer than two rows with a weight, an inf or NaN in any row. Where the averaged |G|^2 is not
    above 0, too little was averaged to tell the gradient from noise: noise_scale is inf, as
    "larger than any batch" is the right reading, and NaN remains that nothing was measured.

    Weights are those of the first leaf, for all leaves. Squares are added up in float32 at least.
    Integer leaves, and sums that are no means, are not looked at. The mean is the hook's, in the
    gradient's dtype: what a compression takes from it (`powersgd`) counts as noise.

    Args:
      hook: the communication hook that takes the mean: an instance.
      decay: of the averages, in [0, 1): windows older than 1 / (1 - decay) count little.

    Raises:
      ValueError: decay is outside [0, 1); inside a `jax.shard_map` that is manual over a model
        axis, where a device has the norm of its shard alone; else as `hook`.
      TypeError: hook is no communication hook; else as `hook`.

    Cost:
      16 bytes more in the reduction at most (XLA merges what is equal: 12 in `MultiSteps`), and 4 a
      leaf that is split. One pass more over each device's row or mean; compiled for a TPU v5e 2x4,
      0.05 MB of temporary memory beside 67 MB of gradients. State: 16 bytes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, gradaccum
      >>> from gradaccum.hooks import gradient_noise_scale
      >>> mesh = jax.make_mesh((8,), ("dp",))
      >>> loss_fn = lambda w, x: jnp.mean(x @ w)  # an example's gradient is x itself
      >>> hook = gradient_noise_scale(decay=0.99)
      >>> with jax.set_mesh(mesh):
      ...     grad_fn = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp")
      ...     def measure(state, key):
      ...         x = 1 + 2 * jax.random.normal(key, (64, 10))  # |G|^2 = 10, S = 10 * 2^2 = 40
      ...         _, grads = grad_fn(jnp.zeros(10), x)
      ...         return hook(grads, state)[1], None
      ...     state = hook.init(grad_fn(jnp.zeros(10), jnp.zeros((64, 10)))[1])
      ...     keys = jax.random.split(jax.random.key(0), 50)
      ...     state, _ = jax.jit(lambda *args: jax.lax.scan(measure, *args))(state, keys)
      >>> print(f"{optax.tree.get(state, 'noise_scale'):.1f}")
      4.0

    References:
      McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162,
      appendix A.1.
    """

    hook: Any = allreduce()  # noqa: RUF009 (immutable)
    decay: float = 0.95

    def __post_init__(self) -> None:
        inits = callable(getattr(self.hook, "init", None))
        if not callable(self.hook) or not inits or isinstance(self.hook, type):
            raise TypeError(
                f"{API}: hook={self.hook!r} is no communication hook; required: an instance with "
                "init(unreduced) and __call__(unreduced, state), as gradaccum.hooks.allreduce()."
            )
        if isinstance(self.hook, gradient_noise_scale):
            raise ValueError(f"{API}: hook={self.hook!r} measures already. Wrap what it wraps.")
        if not isinstance(self.decay, numbers.Real) or not 0 <= self.decay < 1:
            raise ValueError(
                f"{API}: decay={self.decay!r}; required: 0 <= decay < 1, e.g. 0.95 for 20 windows."
            )

    @property
    def axis_name(self) -> AxisName | None:
        """The axes that the hook compresses on, of which its residuals have rows."""
        return getattr(self.hook, "axis_name", None)

    def init(self, unreduced: Any) -> NoiseScaleState:
        """Return the state before the first window: nothing measured.

        Args:
          unreduced: a tree of `Unreduced`, of which only types and layouts matter.
        """
        leaves = [x for x in flatten(API, unreduced)[0].values() if _is_measured(x)]
        extra = _extra_of(leaves, jnp.zeros_like(leaves[0].weight)) if leaves else None
        unknown = jnp.full((), jnp.nan, jnp.float32)
        return NoiseScaleState(
            measurements=jnp.zeros((), jnp.int32),
            signal=unknown,
            noise=jnp.copy(unknown),  # its own buffer: the state can be donated
            noise_scale=jnp.copy(unknown),
            inner=self.hook.init((unreduced, extra)),
        )

    def __call__(self, unreduced: Any, state: NoiseScaleState) -> tuple[Any, NoiseScaleState]:
        check_state(API, state, NoiseScaleState)
        named, tree = flatten(API, unreduced)
        leaves = [x for x in named.values() if _is_measured(x)]
        if not leaves:
            (mean, _), inner = self.hook((unreduced, None), state.inner)
            return mean, state._replace(inner=inner)
        where = where_of(API, leaves, leaves[0].axis_name, None)
        _check_whole(where)
        squares = _row_squares([x.sum for x in leaves], leaves[0].weight)
        (mean, extra), inner = self.hook((unreduced, _extra_of(leaves, squares)), state.inner)
        pairs = zip(named.values(), tree.flatten_up_to(mean), strict=True)
        with jax.named_scope("gradaccum/noise_scale"):
            rows, occupied, weight = (_over_all(x, (), where) for x in extra)
            whole = _mean_squares([pair for pair in pairs if _is_measured(pair[0])], where)
            count = jnp.round(occupied * where.size)
            # A variance: below 0 by rounding alone.
            spread = jnp.maximum(rows - whole, 0) / jnp.where(count > 1, count - 1, 1)
            noise, signal = spread * weight * where.size, whole - spread
            valid = (count > 1) & jnp.isfinite(noise) & jnp.isfinite(signal)
            return mean, self._averaged(noise, signal, valid, state)._replace(inner=inner)

    def _averaged(
        self, noise: jax.Array, signal: jax.Array, valid: jax.Array, state: NoiseScaleState
    ) -> NoiseScaleState:
        """Returns the state after one more window, or as it was where that shows nothing."""
        count = state.measurements + 1
        # The share of the newest in an average whose weights fall by `decay` and sum up to 1.
        rate: Any = 1.0
        if self.decay > 0:
            rate = (self.decay - 1) / jnp.expm1(count.astype(jnp.float32) * math.log(self.decay))

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(state.measurements == 0, new, old + rate * (new - old))

        signal, noise = average(state.signal, signal), average(state.noise, noise)
        ratio = jnp.where(signal > 0, noise / jnp.where(signal > 0, signal, 1), jnp.inf)
        new = state._replace(
            measurements=count, signal=signal, noise=noise, noise_scale=ratio, inner=()
        )
        kept: NoiseScaleState = jax.tree.map(
            functools.partial(jnp.where, valid), new, state._replace(inner=())
        )
        return kept


def _is_measured(x: Unreduced) -> bool:
    return bool(jnp.issubdtype(x.sum.dtype, jnp.inexact)) and not x.awaited.total


def _extra_of(leaves: Sequence[Unreduced], squares: jax.Array) -> _Extra:
    """Returns the scalars of each row that are to be averaged: means alone, which any hook takes.

    Args:
      leaves: those measured.
      squares: float32 `[n]`, w |r|^2 of each row.
    """
    first = dataclasses.replace(leaves[0], awaited=Awaited(mesh=leaves[0].awaited.mesh))
    weight = first.weight
    each = vary(jnp.ones_like(weight), varying_axes(weight))
    return _Extra(
        squares=dataclasses.replace(first, sum=squares),
        occupied=dataclasses.replace(first, sum=(weight > 0).astype(jnp.float32), weight=each),
        weight=dataclasses.replace(first, sum=weight, weight=each),
    )


def _square(x: jax.Array) -> jax.Array:
    """Returns |x|^2 of each entry, in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.real(wide) ** 2 + jnp.imag(wide) ** 2 if jnp.iscomplexobj(x) else wide**2


@jax.jit
def _row_squares(sums: Sequence[jax.Array], weight: jax.Array) -> jax.Array:
    """Returns w |r|^2 of each row, `[n]`: of its own device's data alone. 0 where the weight is."""
    with jax.named_scope("gradaccum/noise_scale"):
        inverse = 1 / jnp.where(weight > 0, weight, 1)

        def norm(x: jax.Array) -> jax.Array:
            scale = jnp.expand_dims(inverse, range(1, x.ndim))
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            total = jnp.sum(_square(wide * scale.astype(wide.dtype)), axis=range(1, x.ndim))
            return total.astype(jnp.float32)

        total = functools.reduce(operator.add, map(norm, sums))
        return jnp.where(weight > 0, weight * total, 0)


@jax.jit
def _norm_squared(means: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, [jnp.sum(_square(m)).astype(jnp.float32) for m in means])


def _mean_squares(pairs: Sequence[tuple[Unreduced, jax.Array]], where: DataMesh) -> jax.Array:
    """Returns |mean|^2; inside a manual region of means that are split over data axes too."""
    groups: dict[frozenset[str], list[jax.Array]] = {}
    for x, mean in pairs:
        cut = {a for _, a in x.awaited.layout.cut} if where.manual else set()
        groups.setdefault(frozenset(cut), []).append(mean)
    sums = [_over_all(_norm_squared(g), axes, where) for axes, g in groups.items()]
    return functools.reduce(operator.add, sums)


def _over_all(x: jax.Array, split: Iterable[str], where: DataMesh) -> jax.Array:
    """Sums a scalar over the axes that split it, and those of one device that it varies over."""
    wanted = {*split, *varying_axes(x)}
    axes = tuple(a for a, _ in where.sizes if a in wanted)
    if not axes:
        return x
    size = math.prod(n for a, n in where.sizes if a in axes)
    on = dataclasses.replace(where, axis_names=axes, size=size)
    total: jax.Array = _reduce.reduce_sum(
        _reduce.Sums(None, [x], [], []), on, Layouts(()), []
    ).weight[0]
    return total


def _check_whole(where: DataMesh) -> None:
    """Raises ValueError where each device of a manual model axis has a shard of the gradients."""
    model = [
        (a, n)
        for a, n in where.sizes
        if a in where.manual_axes and a not in where.axis_names and n > 1
    ]
    if model:
        raise ValueError(
            f"{API}: inside a shard_map that is manual over the model axes {describe(model)}: a "
            "device has the norm of its own shard alone. Make the data axes alone manual, or call "
            "it outside the shard_map, with what gradaccum.unreduced_value_and_grad returns."
        )
