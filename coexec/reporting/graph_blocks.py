"""Graph blocks: a trace graph folded for drawing: chains of operations of one line, one memoized call, one segment.

A *block* is a chain of nodes without forks and joins that come from one line of the decorated function, or from one
memoized call, and are launched in one segment. Blocks that come again and again, as those of a Python loop do, are
folded once more, and so are long chains of blocks, by parts.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coexec.base.tuning import tuning
from coexec.memoize.entry import Region
from tracer.graph import Node, Step, TraceGraph


@dataclass
class GraphBlock:
    """A chain of operations drawn as one box."""

    nodes: list[Node]
    place: str  # the line of the decorated function that they come from
    memoized: str  # the call whose Python is skipped; or empty
    segments: tuple[int, ...]  # the numbers of those of the last call that it is in
    host: bool  # whether it runs on its own
    after: set[int] = field(default_factory=set)  # the blocks that may come next, by number
    before: int = 0  # how many blocks may come before it

    @property
    def content(self) -> Any:
        """What makes two blocks alike."""
        return self.place, self.memoized, self.host, tuple(node.op for node in self.nodes)


def memoized_calls(graph: TraceGraph) -> Iterator[Region]:
    """Yields all library calls that were tried to be memoized, of all paths."""
    ahead = list(graph.roots())
    while ahead:
        step = ahead.pop()
        ahead += step.next
        yield from list((step.regions or {}).values())


def name_of(region: Region) -> str:
    """Returns the name of a memoized call, with that of its layer."""
    name = str(getattr(region.function, "__qualname__", region.function))
    held = region.held[0] if region.held else None
    owner = held() if callable(held) else held
    kinds, given = [kind.__name__ for kind in type(owner).__mro__], getattr(owner, "name", None)
    if isinstance(given, str) and name.partition(".")[0] in kinds:
        return f"{kinds[0]} {given!r}.{name.rpartition('.')[2]}"
    return name


def steps_of(region: Region) -> list[Step]:
    """Returns the steps of a memoized call."""
    steps = []
    step: Step | None = region.end
    while step is not None and step is not region.start:
        steps.append(step)
        step = step.parent
    return steps[::-1] if step is region.start else []


def blocks_of(graph: TraceGraph, lasts: Sequence[Step]) -> list[GraphBlock]:
    """Returns the blocks of a graph, ordered so that only edges of loops lead back.

    `lasts`: where the segments of the last call end.
    """
    inside: dict[int, Region] = {}  # node number -> the outermost memoized call that it is in
    for region in memoized_calls(graph):
        if region.confirmed > 1:
            steps = steps_of(region)
            for step in steps:
                node = step.node
                if node is not None:
                    known = inside.get(node.number)
                    if known is None or len(steps) > len(steps_of(known)):
                        inside[node.number] = region
    launched: dict[int, int] = {}
    for number, last in enumerate(lasts, 1):
        for step in last.chain():
            if step.node is not None:
                launched[step.node.number] = number
    blocks: list[GraphBlock] = []
    of: dict[int, int] = {}
    keys: dict[int, Any] = {}
    for node in graph.nodes[1:]:
        memoized = inside.get(node.number)
        place = _place(node)
        key = memoized if memoized is not None else (place, node.host), launched.get(node.number)
        before = next(iter(node.predecessors.values())) if len(node.predecessors) == 1 else None
        joined = of.get(before.number) if before is not None and len(before.successors) == 1 else None
        if joined is not None and keys[joined] == key:
            blocks[joined].nodes.append(node)
            of[node.number] = joined
            continue
        segments = (launched[node.number],) if node.number in launched else ()
        of[node.number] = len(blocks)
        keys[len(blocks)] = key
        name = "" if memoized is None else name_of(memoized)
        blocks.append(GraphBlock([node], place, name, segments, node.host is not None))
    for number, block in enumerate(blocks):
        block.after = {of[after] for after in block.nodes[-1].successors if of.get(after, number) != number}
    return _ordered(blocks, [of[n] for n in graph.entry.successors if n in of])


def _place(node: Node) -> str:
    """Returns the line of the decorated function from which a node comes."""
    return str(node.location.frames[-1]) if node.location.frames else "outside of user code"


def _ordered(blocks: list[GraphBlock], starts: list[int]) -> list[GraphBlock]:
    """Returns the blocks in reverse postorder, with their numbers in `after` changed accordingly."""
    seen: set[int] = set()
    finished: list[int] = []
    for start in [*starts, *range(len(blocks))]:
        ahead = [(start, False)]
        while ahead:
            number, left = ahead.pop()
            if left:
                finished.append(number)
            elif number not in seen:
                seen.add(number)
                ahead.append((number, True))
                # The first successor last: it is visited first, finished first, and so comes last, below the others.
                ahead += [(after, False) for after in sorted(blocks[number].after)]
    finished.reverse()
    new = {old: n for n, old in enumerate(finished)}
    ordered = [blocks[old] for old in finished]
    for block in ordered:
        block.after = {new[after] for after in block.after}
        for after in block.after:
            ordered[after].before += 1
    return ordered


def folds(blocks: list[GraphBlock]) -> list[tuple[int, ...]]:
    """Returns which blocks are drawn as one box: of each the period, and the numbers of its blocks; none is in two.

    Where the period is that of all of them, they do not repeat, but are a part of a long chain.
    """
    follows: dict[int, int] = {}  # in a chain: what comes after a block
    for number, block in enumerate(blocks):
        if len(block.after) == 1:
            (after,) = block.after
            if after > number and blocks[after].before == 1:
                follows[number] = after
    inner = set(follows.values())
    found = []
    for number in range(len(blocks)):
        if number not in inner:
            chain = [number]
            while chain[-1] in follows:
                chain.append(follows[chain[-1]])
            found += list(_folds(chain, [blocks[n].content for n in chain]))
    return found


def _folds(chain: list[int], contents: list[Any]) -> Iterator[tuple[int, ...]]:
    at = 0
    between: list[int] = []
    while at < len(chain):
        best, period = 0, 0
        for p in range(1, min(tuning.graph_period, (len(chain) - at) // tuning.graph_turns) + 1):
            end = at + p
            while end < len(chain) and contents[end] == contents[end - p]:
                end += 1
            turns = (end - at) // p
            if turns >= tuning.graph_turns and turns * p > best:
                best, period = turns * p, p
        if best:
            yield from _stretches(between)
            yield (period, *chain[at : at + best])
            between = []
        else:
            between.append(chain[at])
        at += best or 1
    yield from _stretches(between)


def _stretches(blocks: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields the folds of blocks that do not repeat: none, unless they are many."""
    if len(blocks) > tuning.graph_long:
        for at in range(0, len(blocks), tuning.graph_part):
            part = blocks[at : at + tuning.graph_part]
            yield (len(part), *part)


def drawn(graph: TraceGraph, lasts: Sequence[Step]) -> dict[str, Any]:
    """Returns all that a drawing of the graph needs, as data that `json` can write."""
    blocks = blocks_of(graph, lasts)
    lines: dict[str, int] = {}

    def line(place: str) -> int:
        return lines.setdefault(place, len(lines))

    return {
        "nodes": len(graph.nodes) - 1,
        "forks": sum(1 for _ in graph.forks()),
        "joins": sum(1 for _ in graph.joins()),
        "blocks": [
            {
                "place": line(block.place), "memoized": block.memoized, "segments": block.segments, "host": block.host,
                "after": sorted(block.after),
                "nodes": [
                    [node.number, node.op, line(str(node.location)), _made(node), node.host or ""]
                    for node in block.nodes
                ],
            }
            for block in blocks
        ],
        "folds": folds(blocks),
        "places": list(lines),
        "sources": [source_of(place) for place in lines],
    }  # fmt: skip


def _made(node: Node) -> str:
    """Returns what an operation gives, as it was seen first."""
    for variant in node.variants.values():
        return ", ".join(repr(out.spec) for out in variant.outputs)
    return ""


def source_of(place: str) -> str:
    """Returns the source line at `file:line in function`; empty if it is unknown."""
    file, _, rest = place.rpartition(" in ")[0].rpartition(":")
    return linecache.getline(file, int(rest)).strip() if file and rest.isdigit() else ""
