"""The command line of a program: flags read, `--help` by group, every mistake in one line."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

Groups = Mapping[str, Sequence[str]]  # title: names of flags; the order is that of --help
HELP = {"--help", "-help", "--helpshort", "-h", "-?"}


def parse(
    program: str,
    groups: Groups,
    define: Callable[[flags.FlagValues], None],
    argv: Sequence[str],
    values: flags.FlagValues,
    manual: str,
) -> list[str]:
    """Define the flags, then read `argv`; `--help` prints the manual, an error is one line."""
    define(values)
    if HELP & set(argv[1:]):
        print(manual.strip(), help_text(values, groups), sep="\n\n")
        sys.exit(0)
    try:
        rest = values(argv)
    except flags.Error as error:
        said = str(error).removeprefix("ERROR:: ")  # absl's of a flag file
        sys.exit(f"{program}: {' '.join(said.split())}")
    if rest[1:]:
        sys.exit(f"{program}: {rest[1]!r} is not a flag; flags are written --name=value.")
    return rest


def define_json(values: flags.FlagValues, text: str) -> None:
    """Define --json, a file to write at the end."""
    define_file(values, "json", text)


def define_file(values: flags.FlagValues, name: str, text: str) -> None:
    """Define a file to write at the end; that it can be is checked at the start."""
    flags.DEFINE_string(name, None, text, flag_values=values)

    @flags.validator(name, flag_values=values)
    def _file(path: str | None) -> bool:
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            raise flags.ValidationError(f"there is no directory {os.path.dirname(path)}.")
        if path and os.path.isdir(path):
            raise flags.ValidationError("is a directory; name a file in it.")
        return True

    del _file  # registered


def help_text(values: flags.FlagValues, groups: Groups) -> str:
    """Return the flags by group, each with its units and default."""
    lines = ["Flags (also from a file, one a line: --flagfile=PATH)"]
    for group, names in groups.items():
        lines.append(f"\n{group}:")
        for name in names:
            default = values[name].default
            default = ",".join(default) if isinstance(default, list) else default
            text = values[name].help.split(";\n")[0]  # absl adds how to repeat a flag
            text += "" if default is None else f" Default: {default}."
            lines.append(f"  --{name}")
            lines.append(textwrap.fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def chosen(values: flags.FlagValues, groups: Groups) -> dict[str, Any]:
    """Return the value of every flag, by name."""
    return {name: values[name].value for names in groups.values() for name in names}


def write_json(path: str, results: Mapping[str, Any]) -> None:
    """Write what a program found, as JSON."""
    with open(path, "w") as stream:
        json.dump(results, stream, indent=1)
        stream.write("\n")
