"""Native code's lines kept from stderr: compilers complain that their device is not here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard what the process writes to its stderr, from whatever thread.

    Exceptions pass; the last words of code that ends the process do not. Without a stderr nothing
    is done.
    """
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, AttributeError, ValueError):  # closed, or replaced by something without one
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are unset, and take them back: a later run must not see them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
