"""What computes while an asynchronous collective is under way, by the compiler's schedule."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence

from gradaccum.audit._facts import MOVING, Path
from gradaccum.audit._parse import Computation, Instruction, Module, leaves
from gradaccum.audit._sites import KINDS, is_between_slices, rendezvous

_ASYNC = re.compile(r"-(start|update|done)$")
_CHAIN = re.compile(r'chain_id="?(\w+)')
_BEGINS = '"flag_start":"-1"'
_MATRIX_PRODUCT = re.compile(r"gemm|matmul|\bdot\b|\$conv", re.IGNORECASE)
# Custom calls of the TPU compiler that hold a place in memory, or name one anew.
_PLACES = re.compile(r"AllocateBuffer|Bitcast|ZeroCrop|AsyncCollective|SliceId|Pin|Assume|Sharding")
_CALLS = ("calls", "to_apply", "called_computations")
_HOLDERS = {
    "fusion": (_CALLS,),
    "call": (_CALLS,),
    "async-start": (_CALLS,),
    "while": (("body",),),
    "conditional": (("branch_computations",), ("true_computation",), ("false_computation",)),
}
# fmt: off
_IDLE = KINDS | MOVING | {
    "add-dependency", "after-all", "broadcast", "concatenate", "constant", "dynamic-update-slice",
    "gather", "get-dimension-size", "get-tuple-element", "infeed", "iota", "outfeed", "parameter",
    "partition-id", "recv", "replica-id", "tuple",
}
# fmt: on


class Schedule:
    """The order in which a program's instructions start, and what of them computes."""

    def __init__(self, module: Module):
        self.module = module
        self._inside: dict[str, tuple[Sequence[int], tuple[str, ...]]] = {}
        self._chains: dict[str, frozenset[str]] = {}

    def overlaps(self, key: Path) -> tuple[str, ...] | None:
        """What computes between the start and the done of the collective at `key`.

        None for a synchronous one, where the text is in no schedule, and where the done stands
        in another computation than the start (a pipelined loop).
        """
        found = self._line(key) if self.module.is_scheduled else None
        if found is None:
            return None
        home, line = found
        begin = home.position[line.name]
        end = self._end(home, line, begin)
        if end is None:
            return None
        where, labels = self._labels(home)
        return labels[bisect.bisect(where, begin) : bisect.bisect_left(where, end)]

    def _called(self, instruction: Instruction, *keys: str) -> list[Computation]:
        known = self.module.computations
        return [known[name] for name in instruction.called(*keys) if name in known]

    def _line(self, key: Path) -> tuple[Computation, Instruction] | None:
        """The scheduled instruction that is, or holds, the collective; and its computation."""
        home = self.module.entry
        for name, following in zip(key, (*key[1:], None), strict=True):
            bare, mark, branch = name.partition("#")
            line = home.by_name[bare]
            if following is None or line.opcode == "fusion" or _ASYNC.search(line.opcode):
                return home, line
            if mark:
                options = self._called(line, "branch_computations") or [
                    *self._called(line, "true_computation"),
                    *self._called(line, "false_computation"),
                ]
                options = options[int(branch) : int(branch) + 1]
            else:
                options = [
                    *self._called(line, "body"),
                    *self._called(line, "condition"),
                    *self._called(line, *_CALLS),
                ]
            # A loop's body and its condition have the same place.
            inside = following.rpartition("#")[0] or following
            homes = [
                each for each in options if following in each.by_name or inside in each.by_name
            ]
            if not homes:
                return None
            home = homes[0]
        return None

    def _end(self, home: Computation, line: Instruction, begin: int) -> int | None:
        """Where the collective that starts at `line` is waited for."""
        if line.opcode == "fusion":
            return self._end_of_chain(home, line, begin)
        sends = line.opcode == "send"
        if not sends and not line.opcode.endswith("-start"):
            return None
        if '"is_sync":true' in line.attributes.get("backend_config", ""):
            return None  # the GPU runtime waits for it at once
        todo = [line.name]
        if sends and is_between_slices(line):  # the answer is what is waited for
            todo += [
                other.name
                for other in home.instructions
                if other.opcode == "recv" and rendezvous(other) == rendezvous(line)
            ]
        done: dict[str, int] = {}
        for name in todo:  # grows
            for later in home.users.get(name, ()):
                if later.opcode.endswith("-done"):
                    done.setdefault(later.opcode, home.position[later.name])
                elif later.opcode in ("get-tuple-element", "tuple") or "-update" in later.opcode:
                    todo.append(later.name)
        return done.get("recv-done", min(done.values(), default=None))

    def _end_of_chain(self, home: Computation, line: Instruction, begin: int) -> int | None:
        """The last part of a TPU async fusion that begins at `line`."""
        end = None
        chains = {c.rstrip("^") for c in self.chains(home, line)}
        for i, later in enumerate(home.instructions[begin + 1 :], begin + 1):
            if later.opcode != "fusion":
                continue
            found = self.chains(home, later)
            if any(f"{chain}^" in found for chain in chains) and end is not None:
                break
            end = i if chains & {c.rstrip("^") for c in found} else end
        return end

    def chains(self, home: Computation, fusion: Instruction) -> frozenset[str]:
        """Marks of the async collectives that this fusion is a part of; `^` where one begins."""
        key = f"{home.name}/{fusion.name}"
        if key not in self._chains:
            self._chains[key] = frozenset(
                mark for callee in self._called(fusion, "calls") for mark in self._marks(callee)
            )
        return self._chains[key]

    def _marks(self, computation: Computation) -> Iterator[str]:
        for inner in computation.instructions:
            if inner.opcode == "fusion":
                yield from self.chains(computation, inner)
            elif inner.opcode in KINDS and "chain_id" in inner.rest:
                match = _CHAIN.search(inner.attributes.get("frontend_attributes", ""))
                begins = _BEGINS in inner.attributes.get("backend_config", "")
                if match:
                    yield f"{inner.opcode} {match[1]}{'^' if begins else ''}"

    def label(self, home: Computation, instruction: Instruction) -> str:
        """What an instruction computes, in a word; empty where it computes nothing."""
        opcode = instruction.opcode
        if opcode in ("dot", "convolution"):
            return "matmul"
        if opcode in _HOLDERS:
            inside = {
                label
                for keys in _HOLDERS[opcode]
                for callee in self._called(instruction, *keys)
                for label in self._labels(callee)[1]
            }
            if opcode == "while" or opcode == "conditional":
                return opcode if inside else ""
            if "matmul" in inside:
                return "matmul"
            return "fusion" if inside else ""
        if opcode in _IDLE or _ASYNC.search(opcode):
            return ""
        if opcode == "custom-call":
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            if _MATRIX_PRODUCT.search(target):
                return "matmul"
            return "" if _PLACES.search(target) else target
        shapes = [instruction.shape, *(home.by_name[name].shape for name in instruction.operands)]
        arrays = [array.size for shape in shapes for array in leaves(shape)]
        return opcode if max(arrays, default=0) > 1 else ""

    def _labels(self, computation: Computation) -> tuple[Sequence[int], tuple[str, ...]]:
        """Where something computes, and what."""
        if computation.name not in self._inside:
            labels = [self.label(computation, inner) for inner in computation.instructions]
            where = [i for i, label in enumerate(labels) if label]
            self._inside[computation.name] = where, tuple(labels[i] for i in where)
        return self._inside[computation.name]
