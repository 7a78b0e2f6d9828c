"""A user's own step, read from `FILE.py:function`; every mistake in it is told in one line."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from absl_apps.bench_problem import Contender

EXAMPLE = "return step_fn, (state, batch)"


def split(text: str) -> tuple[str, str]:
    """Return the file and the function of `FILE.py:function`.

    Raises:
      ValueError: it is no such text, or there is no such file.
    """
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{text!r} is none of seed, train and FILE.py:function.")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}.")
    return path, name


def load(text: str, mesh: jax.sharding.Mesh) -> Contender:
    """Call the function with the mesh; return the step that it describes.

    Raises:
      ValueError: the file or the function raises, or the function returns no step and arguments
        on the devices of the mesh.
    """
    path, name = split(text)
    module = _run(path, lambda: _module(path))
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if _own(value, module)]
        raise ValueError(
            f"{path} has no function {name}; it has {', '.join(found) or 'no function at all'}."
        )
    returned = _run(path, lambda: function(mesh))
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[0]):
        kind = type(returned).__name__
        size = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        raise ValueError(
            f"{text} returned {kind}{size}; required: a step and its arguments: {EXAMPLE}."
        )
    step, args = returned
    if not isinstance(args, tuple | list):
        raise ValueError(
            f"{text} returned its arguments as {type(args).__name__}; required: a tuple of "
            f"them, also of one: {EXAMPLE}."
        )
    _check_devices(text, args, mesh)
    jitted = step if hasattr(step, "lower") else jax.jit(step)
    # What the step does wrong shows when it is traced.
    _run(path, lambda: jitted.lower(*args))
    return Contender(jitted, tuple(args))


def _check_devices(text: str, args: Any, mesh: jax.sharding.Mesh) -> None:
    """Raise ValueError unless arguments lie on the mesh's devices; a scalar need not say."""
    devices, lie = set(mesh.devices.flat), False
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        sharding = getattr(leaf, "sharding", None)
        if sharding is None:
            continue
        lie = True
        if set(sharding.device_set) != devices:
            raise ValueError(
                f"{text}: argument {jax.tree_util.keystr(path)} lies on "
                f"{_kinds(sharding.device_set)}, the mesh is of {_kinds(devices)}; make its "
                "sharding of the mesh that the function is given."
            )
    if not lie:
        raise ValueError(
            f"{text}: no argument has a sharding, so that the step would be compiled for one "
            "device; write jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(...)))"
        )


def _kinds(devices: Any) -> str:
    devices = list(devices)
    return f"{len(devices):,} {devices[0].device_kind}"


def _module(path: str) -> Any:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # not where the name ends with .py
        raise ValueError(f"{path} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    # As `python FILE.py` does: what lies beside the file can be imported.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _own(value: Any, module: Any) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _run(path: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        _explain(path, error)


def _explain(path: str, error: BaseException) -> NoReturn:
    """Raise ValueError with the error in one line, and the last line of the file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    here = [x for x in frames if os.path.exists(x.filename) and os.path.samefile(x.filename, path)]
    if here:
        at = f"line {here[-1].lineno}: {here[-1].line}"
    elif isinstance(error, SyntaxError):
        at = f"line {error.lineno}: {(error.text or '').strip()}"
    else:
        at = "not in a line of its own"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    said = text.strip().splitlines()
    first = f": {said[0]}" if said else ""
    raise ValueError(f"{path}, {at} -> {type(error).__name__}{first}") from None
