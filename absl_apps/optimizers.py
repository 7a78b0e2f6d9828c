"""The optimizers of absl_apps.train, and the schedules of their learning rate."""

from __future__ import annotations

import functools

import optax

# Peak learning rates that suit absl_apps.train's default sizes, by optimizer.
LEARNING_RATES = {"adamw": 3e-3, "lion": 2e-3, "sgd": 0.3}

SCHEDULES = ("cosine", "linear", "constant")
_END = 0.1  # of the peak, where a cosine or a line ends: after the last step


def make_schedule(
    peak: float, warmup_steps: int | None, steps: int, shape: str = SCHEDULES[0]
) -> optax.Schedule:
    """Return a linear warmup, then `shape` to peak / 10, or to peak; all count optimizer steps.

    Args:
      peak: the largest learning rate.
      warmup_steps: how many steps it rises; None: a tenth of all.
      steps: of the run.
      shape: of SCHEDULES.
    """
    warmup = steps // 10 if warmup_steps is None else warmup_steps
    falling = max(1, steps - warmup)
    after = {
        "cosine": functools.partial(optax.cosine_decay_schedule, peak, falling, alpha=_END),
        "linear": functools.partial(optax.linear_schedule, peak, _END * peak, falling),
        "constant": functools.partial(optax.constant_schedule, peak),
    }[shape]()
    if not warmup:
        return after
    # From peak / (warmup + 1): a first step at rate 0 would be wasted.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(
    name: str,
    learning_rate: optax.Schedule,
    weight_decay: float | None = None,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Return the optax optimizer of that name, after clipping to a global norm.

    Args:
      name: adamw, lion or sgd.
      learning_rate: of each step.
      weight_decay: None: optax's own default; sgd has none.
      clip_norm: the largest global norm; 0: no clipping.
    """
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    optimizers = {
        "adamw": functools.partial(optax.adamw, b2=0.95, **decay),
        "lion": functools.partial(optax.lion, **decay),
        "sgd": functools.partial(optax.sgd, momentum=0.9),
    }
    optimizer = optimizers[name](learning_rate)
    if not clip_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
