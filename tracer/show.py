"""Show: prints a trace graph as text, which `parse` reads back completely.

    trace graph 'step'
    files:
      f0 = 'train.py'
    node 0: Entry() entry
      at outside
      next 1
    node 1: MatMul(transpose_a=False, transpose_b=False) fast
      at f0:12 in step +34 < f0:40 in main +5, iteration 2
      inputs {feed}, {ReadVariableOp:0}
      variant float32[2,3], float32[3,4] -> float32[2,4]
    exits 1
    end

A variant maps inputs to outputs: `float32[2,3]` is a spec, `=3` a constant, and `as [0, [1, 2]]` the structure of the
result if it is not a single tensor. A frame is file, line, function and instruction offset, innermost first. `next`
lists the edges. Optional lines of a node are `name`, `host` (why it is a host op), `guarded`, `passed` or `named` (the
program may catch its failure, context managers let it pass, or Keras adds its layer to it), and `fed` (inputs whose
constants have changed; `2.0` is the first item of input 2, a list).

Steps, which the cursor adds while following, are not printed: a graph read back grows them anew. Attributes without a
text form, such as functions, print as `opaque(...)` and read back as `Opaque`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tracer.graph import Node, TraceGraph, Variant, name_by_default, node_key
from tracer.lazy import Output
from tracer.literals import NAME, Line, literal, word
from tracer.location import CAUGHT, FREE, NAMED, PASSED, Frame, Location
from tracer.op import Const

_FATES = {CAUGHT: "guarded", PASSED: "passed", NAMED: "named"}


def _set_fate(node: Node, fate: int) -> None:
    node.guarded = fate


def show(graph: TraceGraph) -> str:
    """Returns the graph as text: nodes, variants, edges, exits and slow operations, but no steps.

    `show(parse(show(graph))) == show(graph)` for every well-formed graph.
    """
    slow = sorted(graph.slow)
    locations = [n.location for n in graph.nodes] + [location for _, location in slow]
    files: dict[str, str] = {}
    for location in locations:
        for frame in location.frames:
            files.setdefault(frame.file, f"f{len(files)}")
    lines = [f"trace graph {graph.name!r}", "files:"]
    lines += [f"  {alias} = {file!r}" for file, alias in files.items()]
    for node in graph.nodes:
        lines += _node_lines(node, files)
    lines.append(" ".join(["exits", ", ".join(map(str, sorted(graph.exits)))]).rstrip())
    lines += [f"slow {word(op)} at {_location(location, files)}" for op, location in slow]
    return "\n".join([*lines, "end"])


def _node_lines(node: Node, files: dict[str, str]) -> Iterator[str]:
    yield f"node {node.number}: {word(node.op)}({_attributes(node.attrs)}) {word(node.entry)}"
    yield f"  at {_location(node.location, files)}"
    if node.name != name_by_default(node.entry):
        yield f"  name {literal(node.name)}"
    if node.host is not None:
        yield f"  host {node.host!r}"
    if node.guarded != FREE:
        yield f"  {_FATES[node.guarded]}"
    if node.fed:
        yield f"  fed {', '.join(sorted(map(_fed, node.fed), key=_by_numbers))}"
    if node.inputs:
        yield "  inputs " + ", ".join("{" + ", ".join(map(word, sorted(s))) + "}" for s in node.inputs)
    for variant in node.variants.values():
        yield f"  variant {_variant(variant)}"
    if node.successors:
        yield f"  next {_numbers(node.successors)}"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _fed(path: Any) -> str:
    """Returns the text of an input path: its number, or input and item numbers."""
    return f"{path[0]}.{path[1]}" if isinstance(path, tuple) else str(path)


def _by_numbers(path: str) -> list[int]:
    return [int(number) for number in path.split(".")]


def _location(location: Location, files: dict[str, str]) -> str:
    frames = " < ".join(f"{files[f.file]}:{f.line} in {word(f.function)} +{f.offset}" for f in location.frames)
    iteration = f", iteration {location.iteration}" if location.iteration else ""
    return (frames or "outside") + iteration


def _attributes(attrs: tuple[Any, ...]) -> str:
    names = attrs[::2]
    if len(attrs) % 2 or not all(n.__class__ is str and NAME.fullmatch(n) for n in names):
        return f"*{literal(tuple(attrs))}"
    return ", ".join(f"{n}={literal(v)}" for n, v in zip(names, attrs[1::2], strict=True))


def _variant(variant: Variant) -> str:
    key = ", ".join(map(_part, variant.key))
    outputs = ", ".join(_output(o) for o in variant.outputs) or "nothing"
    form = "" if variant.template == -1 else f" as {literal(variant.template)}"
    return f"{key} -> {outputs}{form}".lstrip()


def _part(part: Any) -> str:
    if isinstance(part, tuple):
        return "(" + ", ".join(map(_part, part)) + ")"
    return f"={literal(part.value)}" if isinstance(part, Const) else repr(part)


def _output(output: Output) -> str:
    return repr(output.spec) if output.const is None else f"{output.spec!r}={literal(output.const.value)}"


# Parsing.


def parse(text: str) -> TraceGraph:
    """Returns the graph that `show` printed; raises `ParseError` with the line and what was expected."""
    return _Parser(text).graph()


class _Parser:
    """Reads the lines of a printed graph in order."""

    def __init__(self, text: str) -> None:
        self.lines = text.rstrip("\n").split("\n")
        self.number = 0
        self.files: dict[str, str] = {}
        self.line = Line(1, self.lines[0])

    def next(self) -> None:
        self.line.end()
        self.number += 1
        text = self.lines[self.number] if self.number < len(self.lines) else None
        self.line = Line(self.number + 1, text)

    def graph(self) -> TraceGraph:
        try:
            return self._graph()
        except RecursionError:
            raise self.line.fail("fewer nested brackets") from None

    def _graph(self) -> TraceGraph:
        self.line.take("trace graph ")
        graph = TraceGraph(self.line.string())
        self.next()
        self.line.take("files:")
        self.next()
        while self.line.accept("  "):
            alias = self.line.match(NAME, "a file's short name")
            self.line.take(" = ")
            self.files[alias] = self.line.string()
            self.next()
        graph.nodes.clear()
        edges: list[tuple[Node, list[int], Line]] = []
        while self.line.text.startswith("node "):
            edges.append(self._node(graph))
        if not graph.nodes:
            raise self.line.fail("'node 0'")
        graph.entry = graph.nodes[0]
        if not self.line.accept("exits"):
            raise self.line.fail(f"'node {len(graph.nodes)}' or 'exits'")
        for node, numbers, line in edges:
            for number in numbers:
                if not 0 <= number < len(graph.nodes):
                    raise line.fail(f"numbers of nodes, which {number} is not,")
                graph.link(node, graph.nodes[number])
        graph.exits.update(self.line.sequence(self.line.integer) if self.line.accept(" ") else ())
        if not all(0 <= number < len(graph.nodes) for number in graph.exits):
            raise self.line.fail("numbers of nodes")
        self.next()
        while self.line.accept("slow "):
            op = self.line.word("an operation")
            self.line.take(" at ")
            graph.slow.add((op, self._location()))
            self.next()
        self.line.take("end")
        self.line.end()
        if self.number + 1 < len(self.lines):
            raise Line(self.number + 2, self.lines[self.number + 1]).fail("nothing behind 'end'")
        return graph

    def _node(self, graph: TraceGraph) -> tuple[Node, list[int], Line]:
        line = self.line
        line.take(f"node {len(graph.nodes)}: ")
        op = line.word("an operation")
        line.take("(")
        attrs = self._attributes()
        line.take(" ")
        entry = line.word("the way it was issued")
        self.next()
        self.line.take("  at ")
        node = Node(len(graph.nodes), op, entry, attrs, self._location())
        if graph.nodes:
            known = graph.index.setdefault(node_key(op, entry, attrs, node.location), node)
            if known is not node:
                raise self.line.fail(f"another place than node {known.number}, which is the same operation,")
        graph.nodes.append(node)
        self.next()
        successors: list[int] = []
        readers: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("name ", lambda: setattr(node, "name", self.line.value())),
            ("host ", lambda: setattr(node, "host", self.line.string())),
            *((text, functools.partial(_set_fate, node, fate)) for fate, text in _FATES.items()),
            ("fed ", lambda: setattr(node, "fed", frozenset(self.line.sequence(self._fed)))),
            ("inputs ", lambda: node.inputs.extend(self.line.sequence(self._sources))),
        )
        for keyword, read in readers:
            if self.line.accept(f"  {keyword}"):
                read()
                self.next()
        while self.line.accept("  variant "):
            variant = self._variant(node)
            if variant.key in node.variants:
                raise self.line.fail("inputs that no variant before has")
            node.variants[variant.key] = variant
            self.next()
        line = self.line
        if line.accept("  next "):
            successors = line.sequence(line.integer)
            self.next()
        return node, successors, line

    def _attributes(self) -> tuple[Any, ...]:
        if self.line.accept("*("):
            attrs = self.line.tuple_rest()
            self.line.take(")")
            return attrs
        pairs: list[Any] = []
        while not self.line.accept(")"):
            if pairs:
                self.line.take(", ")
            pairs.append(self.line.match(NAME, "an attribute's name"))
            self.line.take("=")
            pairs.append(self.line.value())
        return tuple(pairs)

    def _location(self) -> Location:
        frames: list[Frame] = []
        if not self.line.accept("outside"):
            frames.append(self._frame())
            while self.line.accept(" < "):
                frames.append(self._frame())
        return Location(tuple(frames), self.line.integer() if self.line.accept(", iteration ") else 0)

    def _frame(self) -> Frame:
        line = self.line
        alias = line.match(NAME, "a file's short name")
        if alias not in self.files:
            line.at -= len(alias)
            raise line.fail("a short name from 'files:'")
        line.take(":")
        number = line.integer()
        line.take(" in ")
        function = line.word("a function")
        line.take(" +")
        return Frame(self.files[alias], function, number, line.integer())

    def _fed(self) -> Any:
        number = self.line.integer()
        return (number, self.line.integer()) if self.line.accept(".") else number

    def _sources(self) -> frozenset[str]:
        self.line.take("{")
        return frozenset(self.line.sequence(lambda: self.line.word("where the input came from"), "}"))

    def _part(self) -> Any:
        if self.line.accept("("):
            return tuple(self.line.sequence(self._part, ")"))
        return self._const() if self.line.accept("=") else self.line.spec()

    def _const(self) -> Const:
        value = self.line.value()
        try:
            return Const(value)
        except TypeError:  # of a user's type: equal if it prints the same
            const = Const(literal(value))
            const.value = value
            return const

    def _output(self, node: Node) -> Output:
        return Output(self.line.spec(), self._const() if self.line.accept("=") else None, node)

    def _variant(self, node: Node) -> Variant:
        line = self.line
        key: tuple[Any, ...] = ()
        if not line.accept("-> "):
            key = tuple(line.sequence(self._part))
            line.take(" -> ")
        outputs: list[Output] = []
        if not line.accept("nothing"):
            outputs = line.sequence(lambda: self._output(node))
        return Variant(key, tuple(outputs), line.value() if line.accept(" as ") else -1)
