"""What is known of one array in a program: whose bytes it still carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

from gradaccum.audit._parse import Array, Shape

Path: TypeAlias = tuple[str, ...]
Label: TypeAlias = tuple[Path, int]  # a collective, and which of its operands
Nothing: frozenset[Hashable] = frozenset()

# fmt: off
ELEMENTWISE = frozenset({
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "complex", "convert", "cosine",
    "divide", "erf", "exponential", "exponential-minus-one", "floor", "imag", "log",
    "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "power",
    "real", "reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt",
    "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine",
    "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "xor",
})
# fmt: on
# Scaling and casting: the result is still a copy of the same bytes.
_SCALING = frozenset({"convert", "divide", "multiply", "negate", "reduce-precision"})
# Operand 0, rearranged (or a part of it).
# fmt: off
MOVING = frozenset({
    "bitcast", "bitcast-convert", "copy", "domain", "dynamic-slice", "optimization-barrier",
    "pad", "reshape", "reverse", "slice", "transpose",
})
# fmt: on
_TAKING_A_PART = frozenset({"slice", "dynamic-slice"})


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """One array, followed through casts, elementwise arithmetic and data movement.

    Contractions, reductions, lookups and broadcasts end the trail: what comes out of a matrix
    product is new data. Arrays of one element carry no trail at all.
    """

    size: int = 0
    # Its value, where it is a known integer.
    number: int | None = None
    # The cross-device reductions whose results it carries.
    reduced: frozenset[Label] = frozenset()
    # The gathers whose results it carries, and whether only a part of one.
    gathered: frozenset[tuple[Path, bool]] = frozenset()
    # Identity of its bytes up to scaling, casts and layout; empty where uniform (a constant).
    origin: frozenset[Hashable] = frozenset()
    # Whether it is an input of the program, or made of inputs alone.
    given: bool = False
    # A number that differs between devices by their index.
    by_device: bool = False
    # Zeros but for this device's part: an all-reduce of such is a gather.
    placed: bool = False
    # The arrays that it consists of, laid end to end (as the GPU compiler does to combine them).
    pieces: tuple[Fact, ...] = ()


Value: TypeAlias = "Fact | tuple[Value, ...]"


def facts(value: Value) -> Iterator[Fact]:
    """Yield the facts of a value, depth first."""
    if isinstance(value, Fact):
        yield value
    else:
        for part in value:
            yield from facts(part)


def build(shape: Shape, make: Callable[[Array, int], Fact]) -> Value:
    """A value of `shape`, each leaf made from its array and its position."""
    count = 0

    def visit(part: Shape) -> Value:
        nonlocal count
        if isinstance(part, Array):
            count += 1
            return make(part, count - 1)
        return tuple(visit(inner) for inner in part)

    return visit(shape)


def fresh(shape: Shape, identity: Hashable, *, given: bool = False) -> Value:
    """New data: no trail, an identity of its own."""

    def make(array: Array, i: int) -> Fact:
        origin: frozenset[Hashable] = frozenset({(identity, i)}) if array.size > 1 else Nothing
        return Fact(array.size, origin=origin, given=given)

    return build(shape, make)


def element(value: Value, index: int) -> Value:
    """Part `index` of a tuple value; an unknown fact where the value has no such part."""
    if isinstance(value, tuple):
        return value[index] if index < len(value) else Fact()
    return value


def join(one: Value, other: Value, identity: Hashable) -> Value:
    """What holds whichever of the two the value is; bytes that differ get a new identity."""
    count = 0

    def visit(a: Value, b: Value) -> Value:
        nonlocal count
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(visit(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, tuple) or isinstance(b, tuple):
            return a  # malformed text; keep the shape
        count += 1
        if a == b:
            return a
        same = a.origin == b.origin
        return Fact(
            size=a.size,
            number=a.number if a.number == b.number else None,
            reduced=a.reduced | b.reduced,
            gathered=a.gathered | b.gathered,
            origin=a.origin if same else frozenset({(identity, count - 1)}),
            given=a.given and b.given,
            by_device=a.by_device or b.by_device,
        )

    return visit(one, other)


def numbers(value: Value, path: tuple[int, ...] = ()) -> Mapping[tuple[int, ...], int | None]:
    """The known integers of a value, by leaf."""
    if isinstance(value, Fact):
        return {path: value.number}
    return {
        leaf: number
        for i, part in enumerate(value)
        for leaf, number in numbers(part, (*path, i)).items()
    }


def lay_end_to_end(parts: Sequence[Fact], identity: Hashable) -> Fact:
    """The fact of a concatenation of arrays of rank 1."""
    pieces = tuple(piece for part in parts for piece in part.pieces or (part,))
    whole = combine("concatenate", list(parts), sum(part.size for part in parts), identity)
    return dataclasses.replace(whole, pieces=pieces)


def cut(whole: Fact, start: int, stop: int, identity: Hashable) -> Fact | None:
    """The pieces from `start` to `stop`; None where that is not a number of whole pieces."""
    inside, at = [], 0
    for piece in whole.pieces:
        if start <= at and at + piece.size <= stop:
            inside.append(piece)
        at += piece.size
    if not inside or sum(piece.size for piece in inside) != stop - start:
        return None
    return inside[0] if len(inside) == 1 else lay_end_to_end(inside, identity)


def combine(opcode: str, operands: list[Fact], size: int, identity: Hashable) -> Fact:
    """The fact of an elementwise operation, of a move, or of a concatenation."""
    given = all(fact.given for fact in operands)
    if size <= 1:
        moves = opcode in MOVING or opcode == "convert"
        by_device = any(fact.by_device for fact in operands)
        number = operands[0].number if moves else None
        return Fact(size, number=number, given=given, by_device=by_device)
    carried = [fact for fact in operands if fact.size > 1]
    sources = [fact for fact in carried if fact.origin]
    origin: frozenset[Hashable]
    if not sources:
        origin = Nothing
    elif opcode == "concatenate":
        origin = frozenset().union(*(fact.origin for fact in sources))
    elif opcode in _TAKING_A_PART:
        # `identity` then says which part, so that equal parts of equal bytes are equal.
        origin = frozenset({(tuple(sorted(map(repr, sources[0].origin))), identity)})
    elif len(sources) == 1 and (opcode in _SCALING or opcode in MOVING):
        origin = sources[0].origin
    else:
        origin = frozenset({identity})
    is_part = opcode in _TAKING_A_PART
    keeps_order = opcode in _SCALING or opcode in ("bitcast", "copy", "reshape")
    return Fact(
        size,
        reduced=frozenset().union(*(fact.reduced for fact in carried)),
        gathered=frozenset(
            (path, part or is_part) for fact in carried for path, part in fact.gathered
        ),
        origin=origin,
        given=given,
        placed=len(sources) == 1
        and sources[0].placed
        and (keeps_order or opcode in ("transpose", "pad")),
        pieces=sources[0].pieces if keeps_order and len(sources) == 1 else (),
    )
