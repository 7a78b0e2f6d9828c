"""One collective at one place in a program: what it is given and what it hands on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from gradaccum.audit._facts import Fact, Path
from gradaccum.audit._groups import Groups, parse_groups
from gradaccum.audit._parse import Array, Instruction, Module, leaves

REDUCTIONS = frozenset({"all-reduce", "reduce-scatter"})
KINDS = REDUCTIONS | {
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
}
# Between TPU slices the runtime carries out whole collectives, named by their transfer type.
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="?(\w+)')
_REDUCE_OPERATION = re.compile(r'_xla_megascale_reduce_operation="?(\w+)')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]*)\}x')
_DEVICES = re.compile(r"_xla_megascale_target=\"?\{(\{.*?\})\}(?=[,}\"]|$)")
_PAIRS = re.compile(r"source_target_pairs=\"?(\{\{.*?\}\})")
_SLICE_STRIDE = 100_000  # device d of slice s, from 0, is written (s + 1) * 100000 + d


@dataclasses.dataclass(frozen=True)
class Site:
    """One collective at one place; a computation called from two places holds two of each.

    Attributes:
      key: the calls down to it, and its name.
      groups: flattened device indices, of one TPU slice except for a `send` between slices.
      operands: what is known of each operand, and `arrays` its shape; arrays that were laid end
        to end for an all-reduce stand for themselves.
      loops: trip counts of the enclosing loops, outermost first; None is unknown.
      conditional: whether it stands in a branch of a conditional.
      adds: whether what it reduces, it adds; a maximum or a logical reduction does not.
    """

    key: Path
    kind: str
    instruction: Instruction
    groups: Groups
    operands: tuple[Fact, ...]
    arrays: tuple[Array, ...]
    loops: tuple[int | None, ...]
    conditional: bool
    adds: bool

    @property
    def group_size(self) -> int:
        return max((len(set(group)) for group in self.groups), default=1)

    @property
    def transfer(self) -> str:
        """What a `send` between TPU slices is part of (`ALL_REDUCE`); empty for anything else."""
        match = _TRANSFER.search(self.instruction.attributes.get("frontend_attributes", ""))
        return match[1] if match and self.kind == "send" else ""

    @property
    def reduces(self) -> bool:
        """Whether it sums between devices."""
        return self.kind in REDUCTIONS or self.transfer in ("ALL_REDUCE", "REDUCE_SCATTER")

    @property
    def scatters(self) -> bool:
        """Whether every device gets a part of what is reduced."""
        return self.kind == "reduce-scatter" or self.transfer == "REDUCE_SCATTER"

    def sums(self, operand: int) -> bool:
        """Whether it sums this operand; zeros but for one device's part are gathered instead."""
        return self.reduces and self.adds and not self.operands[operand].placed

    def is_scalar(self, operand: int) -> bool:
        """Whether this operand is one number, also where it is padded."""
        return self.arrays[operand].size <= 1 or self.operands[operand].size == 1

    @property
    def gathers(self) -> bool:
        """Whether every device gets the operands of all of its group."""
        return self.kind == "all-gather" or self.transfer == "ALL_GATHER"

    @property
    def exchanges(self) -> bool:
        """Whether every device gets a piece of the operand of each of its group."""
        return "all-to-all" in self.kind or self.transfer == "ALL_TO_ALL"

    def has_piece(self, size: int) -> bool:
        """Whether an array of this size is what one device gave to this gather or exchange.

        Less than half of an exchange may be something else: the scales of quantised numbers.
        """
        whole = sum(array.size for array in self.arrays)
        whole *= self.group_size if self.gathers else 1
        least = whole // 2 + 1 if self.exchanges else whole
        return least <= size * self.group_size <= whole


def widths(kind: str, given: Sequence[Fact]) -> list[int]:
    """How many arrays each operand of the text consists of."""
    return [len(fact.pieces) or 1 if kind == "all-reduce" else 1 for fact in given]


def at(
    key: Path,
    kind: str,
    instruction: Instruction,
    groups: Groups,
    given: Sequence[Fact],
    arrays: Sequence[Array],
    loops: tuple[int | None, ...],
    conditional: bool,
    adds: bool,
) -> Site:
    """Make a site of the text's operands, taking apart those laid end to end."""
    operands: list[Fact] = []
    parts: list[Array] = []
    for fact, array, width in zip(given, arrays, widths(kind, given), strict=True):
        pieces = fact.pieces if width > 1 else (fact,)
        operands += pieces
        parts += [Array(array.dtype, (p.size,)) for p in pieces] if width > 1 else [array]
    return Site(
        key, kind, instruction, groups, tuple(operands), tuple(parts), loops, conditional, adds
    )


def adds(instruction: Instruction, module: Module) -> bool:
    """Whether a reduction adds, and is not a maximum or a logical one."""
    if instruction.opcode == "send":
        text = instruction.attributes.get("frontend_attributes", "")
        operation = _REDUCE_OPERATION.search(text)
        return operation is None or operation[1] == "SUM"
    return any(
        inner.opcode == "add"
        for name in instruction.called("to_apply")
        if name in module.computations
        for inner in module.computations[name].instructions
    )


def rendezvous(instruction: Instruction) -> str:
    """What a `send` and the `recv` of the same transfer between slices have in common."""
    match = _RENDEZVOUS.search(instruction.attributes.get("frontend_attributes", ""))
    return match[1] if match else instruction.attributes.get("channel_id", "")


def is_between_slices(instruction: Instruction) -> bool:
    """Whether a `send` leaves the TPU slice; its groups then count the devices of all slices."""
    return "_xla_megascale" in instruction.attributes.get("frontend_attributes", "")


def slice_groups(instruction: Instruction, module: Module) -> Groups:
    """Groups of a `send` between TPU slices: slice * devices per slice + device.

    Written `"{1,2}x{0:7}"` (each device with its like in slices 0 and 1), or device by device:
    `{{100000,200000},...}`, `{{100000->200000},...}`. These are devices' ids, so that a mesh that
    lays them out in another order must say where they are.
    """
    text = instruction.attributes.get("frontend_attributes", "")
    local = module.num_devices
    if match := _SLICES.search(text):
        between = [int(i) - 1 for i in match[1].split(",") if i]
        return tuple(tuple(s * local + i for s in between) for i in range(local))
    match = _DEVICES.search(text)
    if match is None:
        raise ValueError(
            f"audit: cannot read between which TPU slices {instruction.name} sends: {text[:200]!r}"
        )

    def position(i: int) -> int:
        return module.positions.get(i, (i // _SLICE_STRIDE - 1) * local + i % _SLICE_STRIDE)

    groups = parse_groups("{" + match[1].replace("->", ",") + "}")
    return tuple(tuple(map(position, group)) for group in groups)


def _replica_ids(instruction: Instruction, module: Module, listed: Groups) -> Groups:
    """Groups of replica ids to device indices; a channel takes in all their partitions."""
    replicas, partitions = module.num_replicas, module.num_partitions
    listed = listed or (tuple(range(replicas)),)
    if "channel_id" in instruction.attributes:
        return tuple(
            tuple(i * partitions + partition for i in group for partition in range(partitions))
            for group in listed
        )
    return tuple(
        tuple(i * partitions + partition for i in group)
        for partition in range(partitions)
        for group in listed
    )


def device_groups(kind: str, instruction: Instruction, module: Module) -> Groups:
    """Groups of flattened device indices between which `instruction` moves data.

    The text lists replica ids, partition ids or both flattened, by XLA's rules for `channel_id`
    and `use_global_device_ids`; a device's index is replica * num_partitions + partition.
    """
    if is_between_slices(instruction):
        return slice_groups(instruction, module)
    attributes = instruction.attributes
    pairs = _PAIRS.search(instruction.rest)
    if kind == "send" and pairs is None:
        return ()  # to the host (a callback), not to a device
    listed = parse_groups(pairs[1] if pairs else attributes.get("replica_groups", "{}"))
    if attributes.get("use_global_device_ids") == "true":
        return listed or (tuple(range(module.num_devices)),)
    if "channel_id" in attributes and kind not in {*REDUCTIONS, "all-gather"}:
        # Partition ids, the same in every replica.
        listed = listed or (tuple(range(module.num_partitions)),)
        return tuple(
            tuple(replica * module.num_partitions + i for i in group)
            for replica in range(module.num_replicas)
            for group in listed
        )
    return _replica_ids(instruction, module, listed)


def result_sizes(site: Site) -> list[int]:
    """Elements of each result, in the order of the operands."""
    sizes = [array.size for array in site.arrays]
    if site.gathers:
        return [size * site.group_size for size in sizes]
    if site.scatters:
        return [size // site.group_size for size in sizes]
    if len(sizes) == 1 and site.kind != "send":
        return [next(leaves(site.instruction.shape)).size]
    return sizes


def handed_on(site: Site) -> list[Fact]:
    """What is known of each result of a collective."""
    results = []
    for i, (fact, size) in enumerate(zip(site.operands, result_sizes(site), strict=True)):
        padded = site.reduces and site.is_scalar(i)
        if size <= 1 or padded:
            results.append(Fact(1 if padded else size))
            continue
        sums = site.sums(i)
        reduced = fact.reduced | {(site.key, i)} if sums else fact.reduced
        gathered = fact.gathered
        if (site.gathers or site.exchanges) and fact.size > 1:
            gathered = gathered | {(site.key, site.exchanges)}
        elif sums:
            gathered = frozenset()
        results.append(
            Fact(size, reduced=reduced, gathered=gathered, origin=frozenset({(site.key, i)}))
        )
    return results


def meet(one: Groups, other: Groups) -> bool:
    """Whether two devices are together in a group of both."""
    group_of = {device: i for i, group in enumerate(one) for device in set(group)}
    for group in other:
        homes = [group_of[device] for device in set(group) if device in group_of]
        if len(set(homes)) < len(homes):
            return True
    return False


def exclusive(one: Path, other: Path) -> bool:
    """Whether two places stand in different branches of the same conditional."""
    for here, there in zip(one, other, strict=False):
        if here != there:
            name, mark, _ = here.rpartition("#")
            return bool(mark) and there.startswith(f"{name}#")
    return False
