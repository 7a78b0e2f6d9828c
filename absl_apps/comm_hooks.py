"""Communication hooks of a command line: `powersgd:rank=2` read into a hook of an optimizer.

A hook is its name, then its fields after a colon, by comma: `name:field=value,field=value`. Values
are Python's; a word stands for itself (`rounding=stochastic`). A field that is a hook comes last,
and what follows is all its own: `gradient_noise_scale:decay=0.9,hook=powersgd:rank=2`.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from gradaccum import hooks

# noop takes no mean: parameters would drift apart. absl_apps.bench measures with it.
NAMES = (
    "allreduce",
    "bf16_compress",
    "fp16_compress",
    "int8_quantize",
    "powersgd",
    "gradient_noise_scale",
)


########################################### Its text #############################################


def parse(text: str) -> Any:
    """Return the hook that a text says.

    Raises:
      ValueError: no such hook, or field, or a value that the hook does not take.
    """
    name, colon, rest = text.partition(":")
    if name not in NAMES:
        why = " takes no mean: time it with absl_apps.bench" if name == "noop" else " is no hook"
        raise ValueError(f"{name!r}{why}; there are {', '.join(NAMES)}.")
    kind = getattr(hooks, name)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    takes = ", ".join(f"{key}={_text(value)}" for key, value in defaults.items())
    given: dict[str, Any] = {}
    while colon and rest is not None:
        match = re.fullmatch(r"(\w+)=(.*?)(?:,(?=\w+=)(.*))?", rest)
        key = rest.partition("=")[0] if match is None else match[1]
        if match is None or key not in defaults or key in given:
            said = " once more" if key in given else "" if match else ", not field=value"
            raise ValueError(f"{name}: got {key!r}{said}; it takes {takes}, each once.")
        if hasattr(defaults[key], "init"):
            given[key], rest = parse(rest.partition("=")[2]), None
            if isinstance(given[key], kind):
                raise ValueError(f"{name}: {key}={name} again; one measures.")
        else:
            given[key], rest = _value(name, key, match[2], defaults[key]), match[3]
    return kind(**given)  # what is out of range, it says itself


def _text(default: Any) -> str:
    return type(default).__name__ if hasattr(default, "init") else str(default)


def _value(name: str, key: str, text: str, default: Any) -> Any:
    """Returns the value of a field: of its default's type, or axes of a mesh where that is None."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if default is None:
        axes = [value] if isinstance(value, str) else value
        if value is None or (
            isinstance(axes, list | tuple)
            and axes
            and all(isinstance(axis, str) and axis.isidentifier() for axis in axes)
        ):
            return tuple(value) if isinstance(value, list) else value
        needed = "an axis of the mesh, as replica, or several, as ('replica','dp')"
    else:
        # An int is no bool here, but serves as a float.
        number = isinstance(default, float) or key == "min_compression_rate"
        kinds = {int, float} if number else {type(default)}
        if type(value) in kinds:
            return value
        needed = f"{' or '.join(sorted(kind.__name__ for kind in kinds))}, as {default}"
    raise ValueError(f"{name}: {key}={text}; it takes {needed}.")


def check_axes(hook: Any, data_axes: Sequence[str]) -> None:
    """Raise ValueError unless the axes that a hook compresses on are data axes of the mesh."""
    axes = getattr(hook, "axis_name", None)
    unknown = [a for a in ([axes] if isinstance(axes, str) else axes or ()) if a not in data_axes]
    if unknown:
        raise ValueError(
            f"--comm_hook: axis_name={axes!r}, but the mesh's data axes are "
            f"{', '.join(data_axes)}; name of these the ones to compress on, or none for all."
        )
    if hasattr(hook, "hook"):
        check_axes(hook.hook, data_axes)


def check_devices(hook: Any, devices: int) -> None:
    """Raise ValueError where a hook compares devices, and there is one along the data axes."""
    if devices == 1 and isinstance(hook, hooks.gradient_noise_scale):
        raise ValueError(
            "--comm_hook=gradient_noise_scale: compares devices, and there is 1 along the data "
            "axes; give 2 or more, or leave it out."
        )


######################################### In a program ###########################################


def in_branch(hook: Any) -> bool:
    """Whether its mean stands in a branch: plain until the start step, compressed after it."""
    return getattr(hook, "start_step", 0) > 0 or (hasattr(hook, "hook") and in_branch(hook.hook))


def audited_axes(hook: Any, data_axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the axes to check together for one mean.

    That a factor of PowerSGD is of sums over the axes that it does not compress on, the program's
    text does not tell: then these are checked apart.
    """
    while hasattr(hook, "hook"):
        hook = hook.hook
    named = hook.axis_name if isinstance(hook, hooks.powersgd) else None
    named = (named,) if isinstance(named, str) else named
    compressed = tuple(a for a in data_axes if named is None or a in named)
    rest = tuple(a for a in data_axes if a not in compressed)
    return [axes for axes in (compressed, rest) if axes]


def measured(state: Any) -> dict[str, float]:
    """Return what a hook measures: the noise scale, in examples; nothing where it is unknown.

    Args:
      state: any tree that holds the hook's.
    """
    scale = optax.tree.get(state, "noise_scale", None)
    return {} if scale is None or not math.isfinite(scale) else {"noise_scale": float(scale)}


def told(measured: Mapping[str, float]) -> str:
    """Return a line for the end of a run, empty without a measurement."""
    scale = measured.get("noise_scale")
    return "" if scale is None else f"gradient noise scale: {scale:.1f} sequences\n"
