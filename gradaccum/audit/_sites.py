"""One collective at one place in a program: what it is given and what it hands on."""

from __future__ import annotations

import dataclasses
import re

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
# Their results are the operands' bytes from elsewhere, whole or in pieces.
SPREADING = frozenset({"all-gather", "all-to-all", "ragged-all-to-all"})
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]*)\}x')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_SUMS = re.compile(r'_xla_megascale_transfer_type="(ALL_REDUCE|REDUCE_SCATTER)"')


@dataclasses.dataclass(frozen=True)
class Site:
    """One collective at one place; a computation called from two places holds two of each.

    Attributes:
      key: the calls down to it, and its name.
      groups: flattened device indices; for `send` of a TPU program, the slices it goes between.
      operands: what is known of each operand, and `arrays` its shape.
      loops: trip counts of the enclosing loops, outermost first; None is unknown.
      conditional: whether it stands in a branch of a conditional.
    """

    key: Path
    kind: str
    instruction: Instruction
    groups: Groups
    operands: tuple[Fact, ...]
    arrays: tuple[Array, ...]
    loops: tuple[int | None, ...]
    conditional: bool

    @property
    def group_size(self) -> int:
        return max((len(set(group)) for group in self.groups), default=1)

    @property
    def reduces(self) -> bool:
        """Whether it sums between devices: by kind, or a transfer that the TPU runtime sums."""
        text = self.instruction.attributes.get("frontend_attributes", "")
        return self.kind in REDUCTIONS or (self.kind == "send" and bool(_SUMS.search(text)))


def rendezvous(instruction: Instruction) -> str:
    """What a `send` and the `recv` of the same transfer between slices have in common."""
    match = _RENDEZVOUS.search(instruction.attributes.get("frontend_attributes", ""))
    return match[1] if match else instruction.attributes.get("channel_id", "")


def slices(instruction: Instruction) -> Groups:
    """The TPU slices, from 0, between which a `send` goes; empty where the text does not tell."""
    text = instruction.attributes.get("frontend_attributes", "")
    match = _SLICES.search(text)
    return (tuple(int(i) - 1 for i in match[1].split(",") if i),) if match else ()


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
    attributes = instruction.attributes
    pairs = attributes.get("source_target_pairs") or (
        attributes.get("frontend_attributes", "").partition("source_target_pairs=")[2]
        if kind == "send"
        else ""
    )
    listed = parse_groups(pairs or attributes.get("replica_groups", "{}"))
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
    if site.kind == "all-gather":
        return [size * site.group_size for size in sizes]
    if site.kind == "reduce-scatter":
        return [size // site.group_size for size in sizes]
    if len(sizes) == 1:
        return [next(leaves(site.instruction.shape)).size]
    return sizes


def handed_on(site: Site) -> list[Fact]:
    """What is known of each result of a collective."""
    results = []
    for i, (fact, size) in enumerate(zip(site.operands, result_sizes(site), strict=True)):
        if size <= 1:
            results.append(Fact(size))
            continue
        reduced = fact.reduced | {(site.key, i)} if site.reduces else fact.reduced
        gathered = fact.gathered
        if site.kind in SPREADING and fact.size > 1:
            gathered = gathered | {(site.key, site.kind != "all-gather")}
        elif site.reduces:
            gathered = frozenset()
        results.append(
            Fact(size, reduced=reduced, gathered=gathered, origin=frozenset({(site.key, i)}))
        )
    return results


def exclusive(one: Path, other: Path) -> bool:
    """Whether two places stand in different branches of the same conditional."""
    for here, there in zip(one, other, strict=False):
        if here != there:
            name, mark, _ = here.rpartition("#")
            return bool(mark) and there.startswith(f"{name}#")
    return False
