"""What compilers for devices that are not here write to stderr, left out; all else passes.

Imports nothing of JAX: with its CUDA plugin installed and no GPU, `import jax` itself remarks on
it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

_REMARKS = (
    r"cudart_stub\.cc.*Could not find cuda drivers",
    r"gpu_compiler\.cc.*compile with a GPU present",
    r"All log messages before absl::InitializeLog\(\) is called",
)
_SECONDS = 5  # to wait for the filter, should another process still hold its end of the pipe


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Pass the process's stderr, native code's too, through a filter, if there is a grep.

    The filter is a process of its own: XLA ends this one at a flag that it does not know, and its
    last words must be heard.
    """
    grep = shutil.which("grep")
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, AttributeError, ValueError):  # there is no stderr
        yield
        return
    if grep is None:
        os.close(kept)
        yield
        return
    patterns = [word for remark in _REMARKS for word in ("-e", remark)]
    command = [grep, "-E", "-v", *patterns]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=kept) as filtering:
        assert filtering.stdin is not None
        os.dup2(filtering.stdin.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            filtering.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                filtering.wait(_SECONDS)
