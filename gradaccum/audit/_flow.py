"""Walk a program as it runs: each collective's place in it, and the bytes it is given."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Hashable, Sequence

from gradaccum.audit import _facts, _sites
from gradaccum.audit._facts import Fact, Label, Path, Value
from gradaccum.audit._loops import integer, trip_count
from gradaccum.audit._parse import Array, Computation, Instruction, Module, leaves
from gradaccum.audit._sites import Site

_ASYNC = re.compile(r"^(.+)-(start|update|done)$")
_CHAIN = re.compile(r'chain_id="?(\w+)')
_WHOLE = ("optimization-barrier", "copy-start", "add-dependency", "domain", "send", "recv")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the walk is: the calls down to here, without and with fusions; loops; branches."""

    frame: Path = ()
    path: Path = ()
    loops: tuple[int | None, ...] = ()
    conditional: bool = False

    def inside(self, name: str, *, fusion: bool = False) -> _Place:
        frame = self.frame if fusion else (*self.frame, name)
        return dataclasses.replace(self, frame=frame, path=(*self.path, name))


class Flow:
    """The walk and what it found.

    Attributes:
      sites: every collective that moves something, by place, in program order.
      chains: pairs (earlier, later): a reduction was given the result of an earlier one.
      sums: pairs of reductions whose results are added to each other.
      local_sums: gathers and all-to-alls whose pieces are then summed on each device.
      made_of: identity of computed bytes -> those that they were computed of, element by element.
    """

    def __init__(self, module: Module):
        self.module = module
        self.sites: dict[Path, Site] = {}
        self.chains: set[tuple[Label, Label]] = set()
        self.sums: set[tuple[Label, Label]] = set()
        self.local_sums: set[Path] = set()
        self.made_of: dict[Hashable, frozenset[Hashable]] = {}
        self._fusions: dict[tuple[Path, str, str], Path] = {}
        self._sent: dict[str, list[Fact]] = {}
        parameters = [i for i in module.entry.instructions if i.opcode == "parameter"]
        inputs = {
            int(i.literal): _facts.fresh(i.shape, ("input", int(i.literal)), given=True)
            for i in parameters
        }
        self._run(module.entry, [inputs.get(i, Fact()) for i in range(len(inputs))], _Place())

    def _called(self, instruction: Instruction, *keys: str) -> list[Computation]:
        known = self.module.computations
        return [known[name] for name in instruction.called(*keys) if name in known]

    def _run(self, computation: Computation, inputs: Sequence[Value], at: _Place) -> Value:
        values: dict[str, Value] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                index = int(instruction.literal)
                missing = index >= len(inputs)
                identity = (at.path, instruction.name)
                values[instruction.name] = (
                    _facts.fresh(instruction.shape, identity) if missing else inputs[index]
                )
                continue
            operands = [values.get(name, Fact()) for name in instruction.operands]
            values[instruction.name] = self._step(instruction, operands, at, computation)
        return values[computation.root.name]

    def _step(
        self, instruction: Instruction, operands: list[Value], at: _Place, home: Computation
    ) -> Value:
        opcode = instruction.opcode
        pieces = _ASYNC.match(opcode)
        if pieces and pieces[2] != "start":
            return operands[0] if operands else Fact()
        kind = pieces[1] if pieces else opcode
        if kind in _sites.KINDS:
            return self._collective(kind, instruction, operands, at, home)
        if kind in ("fusion", "call", "async"):
            inner = at.inside(instruction.name, fusion=opcode == "fusion")
            if callees := self._called(instruction, "calls", "to_apply", "called_computations"):
                return self._run(callees[0], operands, inner)
        if opcode == "while":
            return self._loop(instruction, operands[0], at)
        if opcode == "conditional":
            return self._branches(instruction, operands, at)
        if opcode == "custom-call":
            for callee in self._called(instruction, "called_computations", "calls", "to_apply"):
                self._run(callee, (), at.inside(instruction.name))
        return self._data(instruction, operands, at)

    def _loop(self, instruction: Instruction, carry: Value, at: _Place) -> Value:
        """Run the body on what holds before every iteration, found as a fixed point."""
        trips = trip_count(self.module, instruction, _facts.numbers(carry))
        inner = at.inside(instruction.name)
        within = dataclasses.replace(inner, loops=(*at.loops, trips))
        for body in self._called(instruction, "body"):
            while True:
                after = self._run(body, (carry,), within)
                merged = _facts.join(carry, after, (at.path, instruction.name))
                if merged == carry:
                    break
                carry = merged
        tests = None if trips is None else trips + 1
        for condition in self._called(instruction, "condition"):
            self._run(condition, (carry,), dataclasses.replace(inner, loops=(*at.loops, tests)))
        return carry

    def _branches(self, instruction: Instruction, operands: list[Value], at: _Place) -> Value:
        branches = self._called(instruction, "branch_computations") or [
            *self._called(instruction, "true_computation"),
            *self._called(instruction, "false_computation"),
        ]
        inner = dataclasses.replace(at, conditional=True)
        results = [
            self._run(branch, operands[i + 1 : i + 2], inner.inside(f"{instruction.name}#{i}"))
            for i, branch in enumerate(branches)
        ]
        result = results[0] if results else Fact()
        for other in results[1:]:
            result = _facts.join(result, other, (at.path, instruction.name))
        return result

    def _data(self, instruction: Instruction, operands: list[Value], at: _Place) -> Value:
        """Everything that is neither a call nor a collective."""
        opcode, shape = instruction.opcode, instruction.shape
        identity = (at.path, instruction.name)
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return _facts.element(operands[0], int(instruction.attributes["index"]))
        if opcode == "constant":
            return Fact(next(leaves(shape)).size, number=integer(instruction), given=True)
        if opcode == "recv":
            return tuple(self._sent.get(_sites.rendezvous(instruction), [Fact()]))
        if opcode in _WHOLE and operands:
            return operands[0]
        arrays = [operand for operand in operands if isinstance(operand, Fact)]
        if not isinstance(shape, Array) or len(arrays) != len(operands):
            return _facts.fresh(shape, identity)
        return self._array(instruction, arrays, shape, at)

    def _array(
        self, instruction: Instruction, operands: list[Fact], shape: Array, at: _Place
    ) -> Value:
        """One array made of arrays."""
        opcode = instruction.opcode
        identity = (at.path, instruction.name)
        if opcode in ("partition-id", "replica-id"):
            return Fact(shape.size, by_device=True)
        if opcode == "iota" or (opcode == "broadcast" and operands[0].size <= 1):
            return Fact(shape.size, given=all(fact.given for fact in operands))
        if opcode in ("broadcast", "reduce") and operands[0].size == shape.size:
            opcode = "reshape"  # of dimensions of size 1
        if "ZeroCrop" in instruction.attributes.get("custom_call_target", ""):
            opcode = "pad"  # the TPU compiler fills up the lanes of a small array, between slices
        if opcode == "concatenate" and len(shape.dims) == 1:
            return _facts.lay_end_to_end(operands, identity)
        if opcode == "slice" and operands[0].pieces and len(shape.dims) == 1:
            bounds = re.findall(r"\d+", instruction.attributes.get("slice", ""))
            if len(bounds) == 2:
                whole = _facts.cut(operands[0], int(bounds[0]), int(bounds[1]), identity)
                if whole is not None:
                    return whole
        if opcode in _facts.MOVING:
            part = (shape, instruction.attributes.get("slice", identity))
            moved = operands[:1] if shape.size > 1 else operands
            # A scalar that fills a TPU's lanes, to be sent between slices, is still one.
            return self._combine(opcode, moved, shape.size if operands[0].size != 1 else 1, part)
        if opcode == "dynamic-update-slice":
            result = _facts.combine(opcode, operands[:2], shape.size, identity)
            base, where = operands[0], operands[2:]
            placed = not base.origin and any(index.by_device for index in where)
            return dataclasses.replace(result, placed=placed)
        if opcode == "concatenate" or opcode in _facts.ELEMENTWISE:
            used = operands[1:] if opcode == "select" else operands
            result = self._combine(opcode, used, shape.size, identity)
            if opcode in ("add", "subtract") and shape.size > 1:
                return self._add(operands, result)
            return result
        if opcode == "reduce" and _sites.adds(instruction, self.module):
            return self._sum(operands, shape.size, identity)
        if opcode in ("dot", "convolution"):  # the TPU compiler writes dots as convolutions
            self._contract(instruction, operands)
        return _facts.fresh(shape, identity)

    def _combine(self, opcode: str, operands: list[Fact], size: int, identity: Hashable) -> Fact:
        result = _facts.combine(opcode, operands, size, identity)
        sources = frozenset().union(*(fact.origin for fact in operands))
        self.made_of.update(dict.fromkeys(result.origin - sources, sources))
        return result

    def _add(self, operands: list[Fact], result: Fact) -> Fact:
        """Note results of two reductions that meet, and pieces of one gather that do."""
        left, right = operands[0], operands[1]
        for one in left.reduced - right.reduced:
            for other in right.reduced - left.reduced:
                self.sums.add((min(one, other), max(one, other)))
        for path in {path for path, part in left.gathered & right.gathered if part}:
            if self.sites[path].has_piece(result.size):
                result = self._summed(result, path)
        return result

    def _sum(self, operands: list[Fact], size: int, identity: object) -> Fact:
        """A local sum over as many pieces as a gather has."""
        result = Fact(size, origin=frozenset({identity}) if size > 1 else frozenset())
        for path, _ in operands[0].gathered:
            if size > 1 and operands[0].size == size * self.sites[path].group_size:
                result = self._summed(result, path)
        return result

    def _contract(self, instruction: Instruction, operands: list[Fact]) -> None:
        """A product of two operands gathered over the same devices sums over them.

        The text seldom says which dimension that is: every contraction counts, unless both
        operands are inputs of the program (parameters).
        """
        is_outer = instruction.attributes.get("lhs_contracting_dims") == "{}"
        left, right = ({p for p, part in fact.gathered if not part} for fact in operands[:2])
        met = {
            path
            for pair in itertools.product(left, right)
            if _sites.meet(*(self.sites[p].groups for p in pair))
            for path in pair
        }
        if not is_outer and not all(self.sites[p].operands[0].given for p in met):
            self.local_sums |= met

    def _summed(self, result: Fact, path: Path) -> Fact:
        self.local_sums.add(path)
        if self.sites[path].exchanges:  # then it is a reduction, made by hand
            given = self.sites[path].operands
            self.chains |= {(label, (path, 0)) for fact in given for label in fact.reduced}
        return dataclasses.replace(
            result,
            reduced=result.reduced | {(path, 0)},
            gathered=frozenset(g for g in result.gathered if g[0] != path),
        )

    def _collective(
        self,
        kind: str,
        instruction: Instruction,
        operands: list[Value],
        at: _Place,
        home: Computation,
    ) -> Value:
        """Record one collective; return what it hands on, one fact for each operand."""
        given = [next(_facts.facts(operand), Fact()) for operand in operands]
        arrays = [next(leaves(home.by_name[name].shape)) for name in instruction.operands]
        groups = _sites.device_groups(kind, instruction, self.module)
        if kind in ("send", "ragged-all-to-all"):  # beside the data: a token; offsets and sizes
            given, arrays = given[:1], arrays[:1]
        if all(len(set(group)) <= 1 for group in groups):
            return given[0] if len(given) == 1 else tuple(given)
        key = self._key(kind, instruction, at)
        adds = _sites.adds(instruction, self.module)
        site = _sites.at(
            key, kind, instruction, groups, given, arrays, at.loops, at.conditional, adds
        )
        if key == (*at.path, instruction.name):
            self.sites[key] = site
            for i, fact in enumerate(site.operands):
                if site.sums(i):
                    self.chains |= {(label, (key, i)) for label in fact.reduced}
        results = _sites.handed_on(site)
        if kind == "send":
            self._sent[_sites.rendezvous(instruction)] = results
        whole = iter(results)
        regrouped = [
            _facts.lay_end_to_end([next(whole) for _ in range(width)], (key, i))
            if width > 1
            else next(whole)
            for i, width in enumerate(_sites.widths(kind, given))
        ]
        return regrouped[0] if len(regrouped) == 1 else tuple(regrouped)

    def _key(self, kind: str, instruction: Instruction, at: _Place) -> Path:
        """A collective's place; the parts of one TPU async fusion share that of the first."""
        here = (*at.path, instruction.name)
        chain = _CHAIN.search(instruction.attributes.get("frontend_attributes", ""))
        if chain is None:
            return here
        slot = (at.frame, chain[1], kind)
        begins = '"flag_start":"-1"' in instruction.attributes.get("backend_config", "")
        if begins or slot not in self._fusions:
            self._fusions[slot] = here
        return self._fusions[slot]
