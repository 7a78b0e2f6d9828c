"""Trip counts of while loops: annotated, or worked out from the condition and the body."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from gradaccum.audit._parse import Array, Computation, Instruction, Module, Shape

_TRIP_COUNT = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)"?')
_MIRROR = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}
_PASS_THROUGH = {"copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "broadcast"}


@dataclasses.dataclass(frozen=True)
class Symbol:
    """Leaf `leaf` of the loop's carry, plus `offset`."""

    leaf: tuple[int, ...]
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class _Compare:
    left: Symbol | int
    right: Symbol | int
    direction: str


# What one instruction is known to be: None is unknown; a tuple follows the shape.
Value: TypeAlias = "int | Symbol | _Compare | tuple[Value, ...] | None"


def _is_counter(shape: Shape) -> bool:
    """Whether a value of this shape can count: one integer or boolean."""
    return isinstance(shape, Array) and shape.size == 1 and shape.dtype[0] in "sup"


def symbols(shape: Shape, path: tuple[int, ...] = ()) -> Value:
    """The carry itself: each integer leaf stands for its value at the start of an iteration."""
    if isinstance(shape, Array):
        return Symbol(path) if _is_counter(shape) else None
    return tuple(symbols(part, (*path, i)) for i, part in enumerate(shape))


def _element(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, tuple) and index < len(value) else None


def _add(left: Value, right: Value, sign: int = 1) -> Value:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, Symbol) and isinstance(right, int):
        return dataclasses.replace(left, offset=left.offset + sign * right)
    if isinstance(left, int) and isinstance(right, Symbol) and sign == 1:
        return dataclasses.replace(right, offset=right.offset + left)
    return None


def integer(instruction: Instruction) -> int | None:
    """The value of an integer or boolean constant of one element."""
    if re.fullmatch(r"-?\d+", instruction.literal.strip()):
        return int(instruction.literal)
    return {"true": 1, "false": 0}.get(instruction.literal.strip())


def evaluate(module: Module, computation: Computation, arguments: tuple[Value, ...]) -> Value:
    """Evaluate the root of `computation` on symbols, as far as integer arithmetic goes."""
    known: dict[str, Value] = {}

    def arithmetic(instruction: Instruction, of: Callable[[int], Value]) -> Value:
        if instruction.opcode == "add":
            return _add(of(0), of(1))
        if instruction.opcode == "subtract":
            return _add(of(0), of(1), -1)
        if instruction.opcode == "multiply":
            left, right = of(0), of(1)
            both = isinstance(left, int) and isinstance(right, int)
            return left * right if both else None  # type: ignore[operator]
        if instruction.opcode == "compare":
            left, right = of(0), of(1)
            if isinstance(left, int | Symbol) and isinstance(right, int | Symbol):
                return _Compare(left, right, instruction.attributes.get("direction", ""))
        return None

    def of_instruction(name: str) -> Value:
        if name not in known:
            known[name] = None  # so that malformed, cyclic text ends as unknown
            instruction = computation.by_name.get(name)
            # Arrays never count; not following them keeps the recursion shallow.
            if instruction and (
                _is_counter(instruction.shape) or isinstance(instruction.shape, tuple)
            ):
                known[name] = compute(instruction)
        return known[name]

    def compute(instruction: Instruction) -> Value:
        def of(i: int) -> Value:
            return of_instruction(instruction.operands[i])

        opcode = instruction.opcode
        if opcode == "parameter":
            index = int(instruction.literal)
            return arguments[index] if index < len(arguments) else None
        if opcode == "constant":
            return integer(instruction)
        if opcode == "tuple":
            return tuple(of(i) for i in range(len(instruction.operands)))
        if opcode == "get-tuple-element":
            return _element(of(0), int(instruction.attributes["index"]))
        if opcode in ("fusion", "call"):
            callee = module.computations.get((*instruction.called("calls", "to_apply"), "")[0])
            inputs = tuple(of(i) for i in range(len(instruction.operands)))
            return evaluate(module, callee, inputs) if callee else None
        if opcode in _PASS_THROUGH:
            return of(0)
        return arithmetic(instruction, of)

    return of_instruction(computation.root.name)


def invariants(next_carry: Value, path: tuple[int, ...] = ()) -> set[tuple[int, ...]]:
    """Leaves of the carry that the body hands on unchanged."""
    if isinstance(next_carry, tuple):
        return {leaf for i, part in enumerate(next_carry) for leaf in invariants(part, (*path, i))}
    return {path} if next_carry == Symbol(path) else set()


def _count(start: int, step: int, bound: int, direction: str) -> int | None:
    """Iterations of `for (i = start; i <direction> bound; i += step)`; None if it never ends."""
    distance = bound - start
    if direction in ("LE", "GE"):
        direction, distance = direction[0] + "T", distance + (1 if direction == "LE" else -1)
    if direction == "GT":
        direction, distance, step = "LT", -distance, -step
    if direction == "LT":
        if distance <= 0:
            return 0
        return -(-distance // step) if step > 0 else None
    if direction == "NE":
        if distance == 0:
            return 0
        runs_into = step != 0 and distance % step == 0 and distance // step > 0
        return distance // step if runs_into else None
    if direction == "EQ" and distance != 0:
        return 0
    return 1 if direction == "EQ" and step != 0 else None


def trip_count(
    module: Module, loop: Instruction, initial: Mapping[tuple[int, ...], int | None]
) -> int | None:
    """Iterations of the while `loop`, or None where the text does not tell.

    Args:
      module: the program.
      loop: the `while` instruction.
      initial: leaf of the carry -> its value before the loop, where it is a known integer.

    Returns:
      The annotated `known_trip_count` (CPU, GPU); otherwise, from a condition that compares an
      induction variable with a constant (TPU), its count; None for anything else.
    """
    if match := _TRIP_COUNT.search(loop.attributes.get("backend_config", "")):
        return int(match[1])
    body = module.computations.get((*loop.called("body"), "")[0])
    condition = module.computations.get((*loop.called("condition"), "")[0])
    if body is None or condition is None:
        return None
    carry = symbols(loop.shape)
    next_carry = evaluate(module, body, (carry,))
    test = evaluate(module, condition, (carry,))
    if not isinstance(test, _Compare):
        return None
    constant = invariants(next_carry)

    def settled(side: Symbol | int) -> Symbol | int:
        """An invariant leaf is the constant it started as."""
        if isinstance(side, Symbol) and side.leaf in constant:
            start = initial.get(side.leaf)
            return side if start is None else start + side.offset
        return side

    left, right, direction = settled(test.left), settled(test.right), test.direction
    if isinstance(left, int) and isinstance(right, Symbol):
        left, right, direction = right, left, _MIRROR.get(direction, "")
    if isinstance(left, int) and isinstance(right, int):
        return _count(left, 0, right, direction)
    if not isinstance(left, Symbol) or not isinstance(right, int):
        return None
    following: Value = next_carry
    for index in left.leaf:
        following = _element(following, index)
    start = initial.get(left.leaf)
    if start is None or not isinstance(following, Symbol) or following.leaf != left.leaf:
        return None
    return _count(start + left.offset, following.offset, right, direction)
