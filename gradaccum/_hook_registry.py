"""Which hooks a decorated loss has: given at decoration, or registered before its first call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from gradaccum._checks import API
from gradaccum._comm import check_hook
from gradaccum._options import Options

Hook = Callable[..., Any]

# Each kind by its argument of `accumulate`: its field in `Options`, and the keywords of its calls.
_FIELDS = {"hook": "hooks", "post_accumulate_hook": "post_accumulate_hooks"}
_KEYWORDS = {"hook": ("index",), "post_accumulate_hook": ()}


def as_hooks(kind: str, given: Any) -> tuple[Hook, ...]:
    """Returns the hooks of one kind, given as None, one or a sequence, or raises TypeError."""
    if given is None:
        return ()
    several = isinstance(given, list | tuple) and not callable(given)
    return tuple(_check_hook(kind, fn) for fn in (given if several else [given]))


def _check_hook(kind: str, fn: Any) -> Any:
    call = f"fn({', '.join(['grads', *(f'{k}={k}' for k in _KEYWORDS[kind])])})"
    if not callable(fn):
        raise TypeError(f"{API}: {kind} is {fn!r}; it must be a function, called as {call}.")
    _check_hash(kind, fn)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return fn  # a builtin: the call will tell
    try:
        signature.bind(None, **dict.fromkeys(_KEYWORDS[kind]))
    except TypeError as e:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise TypeError(
            f"{API}: {kind} {name}{signature} cannot be called as {call}: {e}. A hook takes "
            "(grads, *, index), a post_accumulate_hook (grads)."
        ) from None
    return fn


def _check_hash(kind: str, hook: Any) -> None:
    try:
        hash(hook)
    except TypeError:
        raise TypeError(
            f"{API}: {kind}, a {type(hook).__name__}, has no hash to find its program by. Give a "
            "function, or an object of a frozen dataclass with hashable fields."
        ) from None


class HookHandle:
    """What a `register_*` method returns: `remove()` takes the hook off again."""

    def __init__(self, registry: Registry, kind: str):
        self._registry = registry
        self.kind = kind

    def __repr__(self) -> str:
        return f"<gradaccum handle of a {self.kind}>"

    def remove(self) -> None:
        """Remove the hook; a second time does nothing.

        Raises:
          ValueError: the loss was called or traced since the hook was registered.
        """
        self._registry.remove(self)


class Registry:
    """The hooks of one decorated loss: those given at decoration, then those registered."""

    def __init__(self, options: Options):
        self._options = options
        self._hooks: dict[HookHandle, Hook] = {}
        self._used: Options | None = None

    def _check_unused(self, change: str) -> None:
        if self._used is not None:
            name = getattr(self._options.fun, "__qualname__", type(self._options.fun).__name__)
            raise ValueError(
                f"{API}: {change} after {name} was called or traced: a step that is compiled "
                "already would not see it. Register and remove hooks before the first call, or "
                "decorate the loss anew, gradaccum.accumulate(..., hook=...)."
            )

    def add(self, kind: str, hook: Any) -> HookHandle:
        """Registers a hook, or raises ValueError, TypeError."""
        self._check_unused(f"register_{kind}")
        hook = check_hook(API, hook) if kind == "comm_hook" else _check_hook(kind, hook)
        if kind == "comm_hook" and (hook is None or self._options_now().comm_hook is not None):
            self._refuse_comm_hook(hook)
        handle = HookHandle(self, kind)
        self._hooks[handle] = hook
        return handle

    def _refuse_comm_hook(self, hook: Any) -> None:
        if hook is None:
            raise TypeError(
                f"{API}: register_comm_hook(None). To have no communication hook, remove() its "
                "handle."
            )
        raise ValueError(
            f"{API}: register_comm_hook({hook!r}), but there is {self._options_now().comm_hook!r} "
            "already, and the mean is taken once. Remove that one, or wrap it in a hook that takes "
            "another."
        )

    def remove(self, handle: HookHandle) -> None:
        """Removes a handle's hook, unless that was done before."""
        if handle in self._hooks:
            self._check_unused("remove")
            del self._hooks[handle]

    def _options_now(self) -> Options:
        """Returns the options with the hooks that are registered now."""
        registered: dict[str, list[Any]] = {}
        for handle, hook in self._hooks.items():
            registered.setdefault(handle.kind, []).append(hook)
        changes: dict[str, Any] = {
            field: getattr(self._options, field) + tuple(registered.get(kind, ()))
            for kind, field in _FIELDS.items()
        }
        if "comm_hook" in registered:
            (changes["comm_hook"],) = registered["comm_hook"]
        return dataclasses.replace(self._options, **changes)

    def use(self) -> Options:
        """Returns the options with all hooks, for a call: from now on they stay what they are."""
        if self._used is None:
            self._used = self._options_now()
        return self._used
