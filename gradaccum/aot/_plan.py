"""The fewest microbatches that fit the memory of a device, by the compiler's own figures."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from gradaccum.aot._memory import memory_limit as limit_of
from gradaccum.aot._memory import peak_bytes
from gradaccum.aot._quiet import silent_stderr

API = "aot.plan_microbatches"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One number of microbatches that was compiled; bytes are those of each device.

    Attributes:
      microbatches: k.
      fits: whether the peak is within the limit.
      peak_bytes: the compiler's peak; None where it refused the program for want of memory.
      argument_bytes: arguments: parameters, optimizer state, batch.
      output_bytes: results that take no donated argument's place; None as above.
      temp_bytes: everything between; None as above.
      seconds: what tracing and compiling took.
      refusal: the compiler's words where it refused, else empty.
    """

    microbatches: int
    fits: bool
    peak_bytes: int | None
    argument_bytes: int
    output_bytes: int | None
    temp_bytes: int | None
    seconds: float
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan_microbatches` found; `str` gives the table of what was compiled.

    Attributes:
      microbatches: the fewest that fit.
      peak_bytes: their peak memory on each device.
      memory_limit: bytes that were allowed.
      trials: every number that was compiled, in the order of the numbers.
    """

    microbatches: int
    peak_bytes: int
    memory_limit: int
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        return _table(self.trials, self.memory_limit)


def plan_microbatches(
    make_step: Callable[[int], Callable[..., Any]],
    *args: Any,
    candidates: Iterable[int],
    memory_limit: int | None = None,
) -> Plan:
    """Find the fewest microbatches whose step fits in a device's memory, without running it.

    The step is compiled for some of the candidates, and its peak memory is the compiler's own
    (`peak_bytes`): first for the fewest, then, if these do not fit, by bisection, since more
    microbatches are smaller ones. The answer has itself been compiled and fits; the next fewer
    candidate has been compiled and does not.

    Args:
      make_step: k -> the step with k microbatches, a jitted function (a plain one is jitted; jit
        it yourself to donate).
      *args: the step's arguments for every k: arrays or `jax.ShapeDtypeStruct`s, with the
        shardings that the real ones have. Their devices may be `tpu_mesh`'s or `gpu_mesh`'s.
      candidates: numbers of microbatches to choose from, in any order: divisors of the batch on
        one device.
      memory_limit: bytes on each device. None: the device's own (`aot.memory_limit`).

    Returns:
      A `Plan`.

    Raises:
      TypeError: `make_step` cannot be called, or gives what cannot.
      ValueError: no candidates, or one that is no int of at least 1; a limit that is no int of at
        least 1, or none that is known; or nothing fits, with what takes the memory and the table
        of what was compiled. What `make_step` and tracing raise passes: a candidate that does not
        divide the batch, for instance.

    Cost:
      One compilation where the fewest fit, else about log2(number of candidates) + 2. Nothing runs.
      For devices that are not here, what the process writes to stderr meanwhile is discarded,
      unless XLA_FLAGS is set.

    Example:
      >>> import jax, jax.numpy as jnp, gradaccum
      >>> from gradaccum import aot
      >>> mesh = jax.make_mesh((8,), ("dp",), (jax.sharding.AxisType.Auto,))
      >>> def make_step(k):
      ...     def loss(w, x):
      ...         return jnp.mean(jnp.tanh(x @ w) ** 2)
      ...     loss = gradaccum.accumulate(loss, microbatches=k, axis_name="dp", mesh=mesh)
      ...     return jax.jit(jax.value_and_grad(loss))
      >>> w, x = jnp.ones((64, 64)), jnp.ones((4096, 64))
      >>> plan = aot.plan_microbatches(
      ...     make_step, w, x, candidates=(1, 2, 4, 8), memory_limit=290_000
      ... )
      >>> plan.microbatches, plan.peak_bytes <= 290_000
      (4, True)
    """
    ks = _candidates(candidates)
    if not callable(make_step):
        raise TypeError(
            f"{API}: make_step is {make_step!r}. Required: a function from a number of "
            "microbatches to the step."
        )
    limit = _limit(memory_limit, args)
    held = _argument_bytes(args)
    trials: dict[int, Trial] = {}
    low, high = 0, len(ks)  # ks[:low] do not fit, ks[high:] do
    while low < high:
        # The fewest first: without a loop, one microbatch may take less than two.
        middle = (low + high) // 2 if trials else 0
        trial = _try(make_step, ks[middle], args, limit, held)
        trials[ks[middle]] = trial
        low, high = (low, middle) if trial.fits else (middle + 1, high)
    tried = tuple(trials[k] for k in sorted(trials))
    if high == len(ks):
        raise ValueError(_nothing_fits(tried, limit))
    best = trials[ks[high]]
    assert best.peak_bytes is not None  # it fits
    return Plan(best.microbatches, best.peak_bytes, limit, tried)


def _candidates(candidates: Iterable[int]) -> list[int]:
    given = list(candidates) if isinstance(candidates, Iterable) else []
    bad = [k for k in given if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1]
    if bad or not given:
        raise ValueError(
            f"{API}: candidates are {given or candidates!r}. Required: at least one number of "
            "microbatches, each an int of at least 1. Pass the divisors of the batch on one device."
        )
    return sorted({int(k) for k in given})


def _limit(given: int | None, args: tuple[Any, ...]) -> int:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 1:
            raise ValueError(
                f"{API}: memory_limit is {given!r}. Required: an int of bytes, at least 1."
            )
        return int(given)
    devices = _devices(args) or jax.devices()
    here = [device for device in devices if device.process_index == jax.process_index()]
    device = (here or devices)[0]
    limit = limit_of(device)
    if limit is None:
        raise ValueError(
            f"{API}: memory_limit is None, and a device of kind {device.device_kind!r} has no "
            "limit that is known. Required: bytes on each device. Pass memory_limit, for example "
            "16 * 2**30, or arguments with shardings on the mesh that is compiled for."
        )
    return limit


def _devices(args: tuple[Any, ...]) -> list[Any]:
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    return [device for s in shardings if s is not None for device in s.device_set]


def _argument_bytes(args: tuple[Any, ...]) -> int:
    """What the arguments take on one device: also known where a program is refused."""

    def held(leaf: Any) -> int:
        leaf = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
        sharding = getattr(leaf, "sharding", None)
        whole: tuple[int, ...] = leaf.shape
        shape = whole if sharding is None else sharding.shard_shape(whole)
        return math.prod(shape) * int(leaf.dtype.itemsize)

    return sum(map(held, jax.tree.leaves(args)))


def _try(
    make_step: Callable[[int], Callable[..., Any]],
    k: int,
    args: tuple[Any, ...],
    limit: int,
    held: int,
) -> Trial:
    started = time.perf_counter()
    step: Any = make_step(k)
    if not callable(step):
        raise TypeError(
            f"{API}: make_step({k}) returned an object of type {type(step).__name__}. Required: "
            "the step, a function of the arguments."
        )
    if isinstance(step, jax.stages.Compiled):
        raise TypeError(
            f"{API}: make_step({k}) returned a compiled program. Required: the step, jitted or "
            "not, which is compiled here."
        )
    lowered = (step if hasattr(step, "lower") else jax.jit(step)).lower(*args)
    here = set(_devices(args)) <= set(jax.devices())
    try:
        # libtpu ends the process at a flag that it does not know: then its last words are all.
        heard = here or "XLA_FLAGS" in os.environ
        with contextlib.nullcontext() if heard else silent_stderr():
            program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        # The device's own limit, which the compiler knows, is passed; by how much, it may say.
        seconds = time.perf_counter() - started
        refusal = str(error).strip().splitlines()[0]
        return Trial(k, False, None, held, None, None, seconds, refusal)
    seconds = time.perf_counter() - started
    peak = peak_bytes(program)
    memory: Any = program.memory_analysis()
    return Trial(
        k,
        peak <= limit,
        peak,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        seconds,
    )


def _nothing_fits(trials: tuple[Trial, ...], limit: int) -> str:
    measured = [(t.peak_bytes, t) for t in trials if t.peak_bytes is not None]
    if measured:
        peak, best = min(measured, key=lambda pair: pair[0])
        what = (
            f"the smallest peak, with {best.microbatches:,} microbatches, is {peak:,} bytes on "
            f"each device (arguments {best.argument_bytes:,}, results {best.output_bytes:,}, "
            f"temporaries {best.temp_bytes:,})"
        )
    else:
        best = trials[-1]
        what = f"with {best.microbatches:,} microbatches the compiler says: {best.refusal}"
    held = best.argument_bytes
    remedy = (
        f"The arguments alone take {held:,}: split parameters or optimizer state over more devices "
        "(in_specs, grad_specs), or make the model smaller."
        if held > limit
        else "Allow more microbatches, donate what the step replaces, or split parameters, "
        "gradients or optimizer state over the devices (in_specs, grad_specs)."
    )
    return (
        f"{API}: no candidate fits: {what}. Required: at most {limit:,}. {remedy}\n"
        f"{_table(trials, limit)}"
    )


def _table(trials: tuple[Trial, ...], limit: int) -> str:
    def number(value: int | None) -> str:
        return "refused" if value is None else f"{value:,}"

    header = ("microbatches", "peak bytes", "arguments", "results", "temporaries", "fits", "s")
    cells = [
        header,
        *(
            (
                f"{t.microbatches:,}",
                number(t.peak_bytes),
                f"{t.argument_bytes:,}",
                number(t.output_bytes),
                number(t.temp_bytes),
                "yes" if t.fits else "no",
                f"{t.seconds:.1f}",
            )
            for t in trials
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
    return "\n".join([*lines, f"limit: {limit:,} bytes on each device"])
