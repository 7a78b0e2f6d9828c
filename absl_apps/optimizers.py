"""The optimizers of absl_apps.train, and the schedule of their learning rate."""

from __future__ import annotations

import functools

import optax


def make_schedule(peak: float, warmup_steps: int | None, steps: int) -> optax.Schedule:
    """Return a linear warmup and then a cosine to peak / 10; both count optimizer steps."""
    warmup = steps // 10 if warmup_steps is None else warmup_steps
    cosine = optax.cosine_decay_schedule(peak, max(1, steps - warmup), alpha=0.1)
    if not warmup:
        return cosine
    # From peak / (warmup + 1): a first step at rate 0 would be wasted.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, cosine], [warmup])


def make_optimizer(name: str, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Return the optax optimizer of that name, after clipping to global norm 1."""
    optimizers = {
        "adamw": functools.partial(optax.adamw, b2=0.95),
        "lion": optax.lion,
        "sgd": functools.partial(optax.sgd, momentum=0.9),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optimizers[name](learning_rate))
