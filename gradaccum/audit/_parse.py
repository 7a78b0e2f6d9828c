"""HLO text to computations of instructions: shapes, operands, attributes. Nothing is judged."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

# Bits an element, where the digits in the name do not say it.
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_COMMENT = re.compile(r"/\*.*?\*/")
_DELIMITER = re.compile(r'"(?:\\.|[^"\\])*"|[()\[\]{},]')
_ARRAY = re.compile(r"([a-z][a-z0-9]*)(?:\[([^\]]*)\])?")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([^\s=]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->\s*.+)?\{\s*$")
_COMPUTATION_TAIL = re.compile(r"\{?, execution_thread=\"[^\"]*\"")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array (or token) of a shape, with its layout dropped."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding; sub-byte types are packed, complex types count both parts."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            bits = int(digits[1]) if digits else 0
        return (self.size * bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape: TypeAlias = "Array | tuple[Shape, ...]"


def leaves(shape: Shape) -> Iterator[Array]:
    """Yield the arrays of `shape`, depth first."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


def split(text: str) -> list[str]:
    """Split at the commas outside every bracket and string."""
    parts, depth, start = [], 0, 0
    for match in _DELIMITER.finditer(text):
        char = match[0]
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    tail = text[start:].strip()
    return [*parts, tail] if tail or parts else []


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for match in _DELIMITER.finditer(text, start):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if depth == 0:
                return match.start()
    raise ValueError(f"audit: unbalanced bracket in the HLO text: {text[start : start + 80]!r}")


def parse_shape(text: str) -> Shape:
    """Parse `f32[8,64]{1,0:T(8,128)}`, `token[]` or a tuple of shapes; bounded dims lose `<=`."""
    text = text.strip()
    if text.startswith("("):
        return tuple(parse_shape(part) for part in split(text[1 : closing(text, 0)]))
    match = _ARRAY.match(text)
    if match is None:
        raise ValueError(f"audit: not a shape in the HLO text: {text[:80]!r}")
    dims = [dim.strip().removeprefix("<=") for dim in (match[2] or "").split(",")]
    return Array(match[1], tuple(int(dim) for dim in dims if dim.isdigit()))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `rest` is the text after the operands, parsed when asked for."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    literal: str
    rest: str
    is_root: bool

    @functools.cached_property
    def attributes(self) -> Mapping[str, str]:
        """The `key=value` pairs after the operands, values as text."""
        pairs = (part.partition("=") for part in split(self.rest))
        found = {key.strip(): value.strip() for key, _, value in pairs}
        # `replica_groups=mesh[...], device_ids=(...) {...}` is one value with a comma in it.
        order = found.pop("device_ids", None)
        if order is not None and "replica_groups" in found:
            found["replica_groups"] += f", device_ids={order}"
        return found

    def called(self, *keys: str) -> tuple[str, ...]:
        """Names of the computations under the first of `keys` that is present."""
        for key in keys:
            value = self.attributes.get(key)
            if value is not None:
                names = split(value[1:-1]) if value.startswith("{") else [value]
                return tuple(name.lstrip("%") for name in names)
        return ()

    @property
    def op_name(self) -> str:
        """The source operation's name, or the empty string."""
        match = re.search(r'op_name="((?:\\.|[^"\\])*)"', self.attributes.get("metadata", ""))
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order of the text (operands before users)."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        return {instruction.name: i for i, instruction in enumerate(self.instructions)}

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in instruction.operands:
                found.setdefault(name, []).append(instruction)
        return found

    @functools.cached_property
    def root(self) -> Instruction:
        roots = [instruction for instruction in self.instructions if instruction.is_root]
        return roots[-1] if roots else self.instructions[-1]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    name: str
    entry: Computation
    computations: Mapping[str, Computation]
    num_replicas: int
    num_partitions: int
    # Instructions stand in the order in which they start.
    is_scheduled: bool = False
    # Device id -> position in the mesh, where the text was compiled for known devices.
    positions: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.num_partitions


def _instruction(line: str, match: re.Match[str]) -> Instruction:
    body = line[match.end() :]
    end = closing(body, 0) + 1 if body.startswith("(") else body.find(" ")
    head = re.match(r"\s*([\w\-]+)\(", body[end:])
    if end <= 0 or head is None:
        raise ValueError(f"audit: not an HLO instruction: {line.strip()[:120]!r}")
    open_at = end + head.end() - 1
    close_at = closing(body, open_at)
    inside = body[open_at + 1 : close_at]
    is_value = head[1] in ("constant", "parameter", "iota")
    operands = () if is_value else tuple(p.split()[-1].lstrip("%") for p in split(inside))
    return Instruction(
        name=match[2],
        shape=parse_shape(body[:end]),
        opcode=head[1],
        operands=operands,
        literal=inside if is_value else "",
        rest=body[close_at + 1 :].lstrip(", "),
        is_root=match[1] is not None,
    )


def parse(text: str) -> Module:
    """Parse the text of one HLO module.

    Args:
      text: what `jax.stages.Compiled.as_text()` returns, on any backend.

    Returns:
      The module; layouts, tilings and memory spaces are dropped.

    Raises:
      ValueError: the text is not an HLO module (StableHLO, for instance).
    """
    header = re.search(r"^HloModule\s+([^\s,]+)(.*)$", text, re.MULTILINE)
    if header is None:
        kind = "StableHLO (MLIR)" if "module @" in text or "func.func" in text else "unknown"
        raise ValueError(
            f"audit.collectives: got text of {len(text)} characters without an 'HloModule' line "
            f"({kind}). Required: the HLO of a compiled program. Pass lowered.compile().as_text(), "
            "or the lowered or compiled program itself."
        )
    computations: dict[str, Computation] = {}
    entry = name = None
    lines: list[Instruction] = []
    for raw in text[header.end() :].splitlines():
        line = _COMMENT.sub("", raw) if "/*" in raw else raw
        if name is None:
            match = _COMPUTATION.match(_COMPUTATION_TAIL.sub("{", line))
            if match:
                name, lines = match[2], []
                entry = name if match[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name = None
        elif found := _INSTRUCTION.match(line):
            lines.append(_instruction(line, found))
    if entry is None or entry not in computations:
        raise ValueError(
            f"audit.collectives: HLO module {header[1]} has {len(computations)} computations and "
            "no complete ENTRY. Pass the whole text of the compiled program."
        )
    numbers = dict(re.findall(r"\b(replica_count|num_partitions)=(\d+)", header[2]))
    return Module(
        name=header[1],
        entry=computations[entry],
        computations=computations,
        num_replicas=int(numbers.get("replica_count", 1)),
        num_partitions=int(numbers.get("num_partitions", 1)),
        is_scheduled="is_scheduled=true" in header[2],
    )
