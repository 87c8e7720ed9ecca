"""Schedule: which groups of operations are launched together, and in what order.

A group has the instances of one kind at one depth. Where its instances correspond to those of another group one to one,
in order, it joins that group's *block*: the operations of a cell, say, for all cells of a level. Blocks are launched in
the order in which they were begun; a group joins one only if everything else it takes comes from earlier blocks.
"""

from __future__ import annotations

from typing import Any

from coexec.batching.buffers import SHIFT, Buffers, Rows, shared_key
from coexec.batching.kinds import OpKind
from coexec.batching.programs import Argument, Program, ProgramPart, Wire
from coexec.batching.rules import CONSTANT, MANY, SHARED


class Group:
    """The instances of one kind at one depth, on the same shared tensors, recorded by the same tapes."""

    __slots__ = ("block", "count", "depth", "first", "inputs", "kind", "place", "shared", "site", "tapes")

    def __init__(self, kind: OpKind, depth: int, first: int, site: Any) -> None:
        self.kind = kind
        self.depth = depth
        self.first = first  # the buffer of its first output; the others follow
        self.site = site  # where the program issues it
        self.shared: tuple[int, ...] = site.shared  # the keys of its shared inputs, in order
        self.tapes: tuple[int, ...] = site.tapes
        self.count = 0
        self.inputs: list[list[Any]] = []  # of each row input the keys; of a list of many a list of keys
        self.block: GroupBlock | None = None
        self.place = 0  # its number in the block


class GroupBlock:
    """Groups whose instances correspond, to be launched as one program."""

    __slots__ = ("arguments", "count", "first", "groups", "keys", "number", "program", "rows", "tapes", "wires")

    def __init__(self, number: int, count: int, tapes: tuple[int, ...]) -> None:
        self.number = number
        self.count = count
        self.tapes = tapes
        self.groups: list[Group] = []
        self.wires: list[tuple[Wire, ...]] = []
        self.arguments: list[Argument] = []
        self.keys: list[Any] = []  # of each argument
        self.rows: list[Any] = []  # of each argument: a shared buffer's number, or `Rows`
        self.program: Program | None = None


def blocks_of(groups: list[Group], buffers: Buffers, programs: dict[Any, Program]) -> list[GroupBlock]:
    """Returns the blocks in the order in which they can be launched, with their programs."""
    owners = {b: g for g in groups for b in range(g.first, g.first + len(g.kind.outputs))}
    blocks: list[GroupBlock] = []
    for group in sorted(groups, key=_depth):
        _place(group, owners, buffers, blocks)
    for block in blocks:
        signature = tuple(
            (group.kind.number, wires) for group, wires in zip(block.groups, block.wires, strict=True)
        ), tuple(block.arguments)
        program = programs.get(signature)
        if program is None:
            parts = [ProgramPart(group.kind, wires) for group, wires in zip(block.groups, block.wires, strict=True)]
            program = programs[signature] = Program(parts, block.arguments)
        block.program = program
    return blocks


def _depth(group: Group) -> int:
    return group.depth


def _place(group: Group, owners: dict[int, Group], buffers: Buffers, blocks: list[GroupBlock]) -> None:
    """Puts a group into a block, an old one if possible."""
    wholes: list[int | None] = []
    joined: GroupBlock | None = None
    latest = -1  # of the blocks of which it takes rows in another order
    for keys in group.inputs:
        whole = None
        if type(keys[0]) is not list:
            whole = buffers.whole(keys)
            owner = owners.get(keys[0] >> SHIFT)
            if whole is not None and owner is not None and owner.count == group.count:
                block = owner.block
                assert block is not None
                if (joined is None or block.number > joined.number) and _belongs(group, block):
                    joined = block
            elif owner is not None and whole is not None:
                whole = None
        wholes.append(whole)
    if joined is not None and not group.kind.alone:
        for keys, whole in zip(group.inputs, wholes, strict=True):
            for buffer in {k >> SHIFT for k in _flat(keys)} if whole is None else {whole}:
                owner = owners.get(buffer)
                if owner is not None:
                    assert owner.block is not None
                    latest = max(latest, owner.block.number - (whole is not None))
        for key in group.shared:
            owner = owners.get(shared_key(key))
            if owner is not None:
                assert owner.block is not None
                latest = max(latest, owner.block.number)
    if joined is None or group.kind.alone or latest >= joined.number:
        joined = GroupBlock(len(blocks), group.count, group.tapes)
        blocks.append(joined)
    group.block, group.place = joined, len(joined.groups)
    joined.groups.append(group)
    joined.wires.append(_wired(group, joined, wholes, owners, buffers))


def _belongs(group: Group, block: GroupBlock) -> bool:
    """Returns whether a group is of the same unit as a block: issued by the same code, once for each instance.

    Groups that correspond by chance, as those of a level with a single node do, would make ever other programs.
    """
    first = block.groups[0]
    return (
        block.tapes == group.tapes
        and not first.kind.alone
        and first.site.code == group.site.code
        and all(other.site is not group.site for other in block.groups)
    )


def _flat(keys: list[Any]) -> Any:
    return keys if type(keys[0]) is not list else (k for items in keys for k in items)


def _wired(
    group: Group, block: GroupBlock, wholes: list[int | None], owners: dict[int, Group], buffers: Buffers
) -> tuple[Wire, ...]:
    wires = []
    rows, shared = iter(zip(group.inputs, wholes, strict=True)), iter(group.shared)
    for operand in group.kind.call.operands:
        if operand.mode == CONSTANT:
            continue
        if operand.mode == SHARED or group.kind.alone:
            key = next(shared)
            number = _known(block, key)
            if number < 0:
                number = _argument(block, Argument(operand.spec, True, 0), key, shared_key(key))
            wires.append(Wire(-1, number))
            continue
        keys, whole = next(rows)
        owner = owners.get(whole) if whole is not None else None
        if owner is not None and owner.block is block and whole is not None:
            wires.append(Wire(owner.place, whole - owner.first))
            continue
        number = _known(block, keys)
        if number < 0:
            flat = list(_flat(keys))
            items = 0 if operand.mode != MANY else -1 if group.kind.call.op == "AddN" else operand.items
            argument = Argument(operand.spec, False, items)
            number = _argument(block, argument, keys, Rows(flat, whole))
        wires.append(Wire(-1, number))
    return tuple(wires)


def _known(block: GroupBlock, keys: Any) -> int:
    for number, known in enumerate(block.keys):
        if known == keys:
            return number
    return -1


def _argument(block: GroupBlock, argument: Argument, keys: Any, rows: Any) -> int:
    block.arguments.append(argument)
    block.keys.append(keys)
    block.rows.append(rows)
    return len(block.arguments) - 1
