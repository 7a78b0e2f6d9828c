"""The flags of how many microbatches a step has: a number, or the fewest that fit."""

from __future__ import annotations

import re

from absl import flags

AUTO = "auto"


class _Microbatches(flags.ArgumentParser):
    """A number of microbatches, or that it is to be found."""

    syntactic_help = f"an integer of at least 1, or {AUTO}"

    def parse(self, argument: str | int) -> str | int:
        if argument == AUTO:
            return AUTO
        if not re.fullmatch(r"[0-9]+", str(argument)) or int(argument) < 1:
            raise ValueError(f"is not {self.syntactic_help}")
        return int(argument)

    def flag_type(self) -> str:
        return f"integer or {AUTO}"


def define(values: flags.FlagValues, default: int) -> None:
    """Define --microbatches, and --hbm_gb for a number that is to be found."""
    flags.DEFINE(
        _Microbatches(),
        "microbatches",
        default,
        f"Forward and backward passes of a call on each device; {AUTO}: the fewest that fit its "
        "memory, of the divisors of its batch, found by compiling.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "hbm_gb",
        None,
        "GB (10^9 bytes) of a device that a step may take, for a number of microbatches that is to "
        "be found. Default: what the device has for programs; a CPU has no such limit.",
        flag_values=values,
    )

    @flags.validator("hbm_gb", "must be more than 0, and less than a billion", flag_values=values)
    def _hbm(size: float | None) -> bool:
        return size is None or 0 < size < 1e9

    del _hbm  # registered


def check(microbatches: str | int, hbm_gb: float | None) -> None:
    """Raise ValueError where a limit is given and nothing is to be found."""
    if hbm_gb is not None and microbatches != AUTO:
        raise ValueError(
            f"--hbm_gb={hbm_gb:g}: is for --microbatches={AUTO}, and --microbatches is "
            f"{microbatches}; give one of them."
        )


def memory_limit(hbm_gb: float | None) -> int | None:
    """Return --hbm_gb in bytes."""
    return None if hbm_gb is None else round(hbm_gb * 1e9)
