"""The program absl_apps.audit in process: its flags, its table, and the example of its manual."""

import re
import textwrap

from absl import flags

from absl_apps import audit, audit_flags

# The complete file of the manual, which is what a user copies.
EXAMPLE = textwrap.dedent(
    re.search(r"^    import jax\n.*?^        return step, .*?\n", audit.__doc__, re.M | re.S)[0]
)


def parse(*args):
    values = flags.FlagValues()
    audit_flags.parse(["audit", *args], values, manual=audit.__doc__)
    return values


def table(text):
    """The cells of the comparison, by measure and program."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [re.split(r"\s+\|\s+", line) for line in lines]
    assert all(len(row) == len(header) for row in rows)
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def write(folder, text):
    path = folder / "step.py"
    path.write_text(text)
    return path
