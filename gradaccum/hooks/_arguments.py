"""What is checked of a hook's arguments when it is made, and of the state that it is given."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gradaccum import _checks


def check(hook: Any, integers: Mapping[str, int] | None = None, bools: Sequence[str] = ()) -> None:
    """Checks fields of a hook, and makes its `axis_name` hashable.

    Args:
      hook: a frozen dataclass with a field `axis_name`.
      integers: which fields are integers, with the least that each may be.
      bools: which are bools.

    Raises:
      ValueError: an integer that is too small, or none; no names of axes.
      TypeError: no bool.
    """
    api = type(hook).__name__
    _checks.check_axis_name(hook.axis_name, api)
    if isinstance(hook.axis_name, list):
        object.__setattr__(hook, "axis_name", tuple(hook.axis_name))
    for name, least in (integers or {}).items():
        value = getattr(hook, name)
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or value < least:
            raise ValueError(f"{api}: {name}={value!r}; required: an int of at least {least}.")
    for name in bools:
        if not isinstance(getattr(hook, name), bool):
            raise TypeError(f"{api}: {name}={getattr(hook, name)!r}; required: True or False.")


def check_state(api: str, state: Any, kind: type) -> None:
    """Raises TypeError for a state of another hook, or of none."""
    if not isinstance(state, kind):
        raise TypeError(
            f"{api}: its state is {_described(state)}; required: the {kind.__name__} that init "
            "returns. To use an older optimizer's state: state._replace(comm_state="
            "tx.init(params).comm_state)."
        )


def check_no_state(api: str, state: Any) -> None:
    """Raises TypeError for a state with arrays, which a hook without one is given."""
    if jax.tree.leaves(state):
        raise TypeError(
            f"{api}: its state is {_described(state)}, but it has none; required: (). To "
            "use an older optimizer's state: state._replace(comm_state=())."
        )


def _described(state: Any) -> str:
    return f"of type {type(state).__name__}" if jax.tree.leaves(state) else "empty"
