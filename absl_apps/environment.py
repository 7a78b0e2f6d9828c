"""What a run's numbers depend on: versions, devices, and the commit of the source."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import jax
import jaxlib
import numpy as np
import optax

import gradaccum

PACKAGES = ("gradaccum", "absl_apps")  # where uncommitted changes may change what runs
_GIT_SECONDS = 20  # for a working tree on a slow file system


def environment(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return `"versions"`, `"devices"` and `"commit"`, for a program's JSON."""
    device = mesh.devices.flat[0]
    return {
        "versions": versions(),
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": mesh.devices.size,
        },
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that computes."""
    modules = gradaccum, jax, jaxlib, np, optax
    named = {module.__name__: module.__version__ for module in modules}
    return {"python": platform.python_version(), **named}


def distributions(*names: str) -> dict[str, str | None]:
    """Return the version of each installed distribution, None of one that is not."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit(package: str = os.path.dirname(gradaccum.__file__)) -> str | None:
    """Return the git commit that a package is imported from.

    Args:
      package: its directory.

    Returns:
      The hash, and "-dirty" after it where a file of the programs or of the package is changed or
      new; None without git, or where the package is no part of the commit: one installed inside a
      repository of something else, whose commit would say nothing of it.
    """
    try:
        # Tracked, and at the repository's top, as in this project's own.
        inside = _git(package, "ls-files", "--full-name", "--error-unmatch", "--", "__init__.py")
        if inside.strip() != f"{os.path.basename(package)}/__init__.py":
            return None
        found = _git(package, "rev-parse", "--verify", "HEAD").strip()
        paths = [f":(top){name}" for name in PACKAGES]
        changed = _git(package, "status", "--porcelain", "--untracked-files=normal", "--", *paths)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found}-dirty" if changed else found


def _git(directory: str, *arguments: str) -> str:
    # Below a git hook they name its repository, whatever the directory.
    named = "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"
    variables = {name: value for name, value in os.environ.items() if name not in named}
    return subprocess.run(
        ["git", "-C", directory, *arguments],
        env=variables | {"GIT_OPTIONAL_LOCKS": "0"},  # in nobody's way
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        text=True,
        timeout=_GIT_SECONDS,
    ).stdout
