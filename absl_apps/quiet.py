"""What compilers for devices that are not here write to stderr, left out; all else passes.

Imports nothing of JAX: with its CUDA plugin installed and no GPU, `import jax` itself remarks on
it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_REMARKS = re.compile(
    r"cudart_stub\.cc.*Could not find cuda drivers"
    r"|gpu_compiler\.cc.*compile with a GPU present"
    r"|All log messages before absl::InitializeLog\(\) is called"
)


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Hold the process's stderr back, native code's too, then write it without the remarks.

    Not where XLA_FLAGS is set: XLA ends the process at a flag that it does not know, and its last
    words would be lost.
    """
    if "XLA_FLAGS" in os.environ:
        yield
        return
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, AttributeError, ValueError):  # there is none
        yield
        return
    with tempfile.TemporaryFile() as held:
        try:
            os.dup2(held.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if not _REMARKS.search(line):
                    sys.stderr.write(line)
