"""Loop writer: emits a repeat as a loop for XLA, with functions for its condition and body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coexec.lowering.function_body import Body
from coexec.lowering.reroll.find_repeats import Repeat
from coexec.lowering.reroll.op_signature import SLIDING, Operations, source_of
from tracer.block import COUNT, LOOP
from tracer.nodedef import Symbol
from tracer.spec import Spec, intern_spec

# A tensor of the loop body: the place of its operation in the iteration, and the output index.
Tensor = tuple[int, int]


@dataclass(eq=False)
class Turns:
    """A repeat that is being turned into a loop."""

    repeat: Repeat
    read: dict[Tensor, set[int]] = field(default_factory=dict)  # by tensor, the iterations whose value is used outside
    summed: dict[Tensor, None] = field(default_factory=dict)  # tensors whose sum over all iterations is used outside
    results: dict[Any, Symbol] = field(default_factory=dict)  # the loop's results: ("rows" | "last" | "sum", tensor)

    @property
    def node(self) -> str:
        """The name of the loop's node."""
        return source_of(next(iter(self.results.values())).name)


class LoopWriter:
    """Emits loops into a function's body; appends their conditions and bodies to `functions`."""

    def __init__(self, body: Body, functions: list[Body], operations: Operations) -> None:
        self.body = body
        self.functions = functions
        self.of = operations

    def loop(self, turns: Turns, states: dict[Any, Symbol], inputs: dict[tuple[int, int], Any]) -> None:
        """Emits a loop, and sets `turns.results`.

        `states` are the initial values of the loop variables, by key; accumulators for results are added to it.
        `inputs` maps (place, input number) of the body's operations to such a key: a value of the previous iteration
        ("carried"), a row of a stack ("stack", or "back" if the last row belongs to the first iteration), or a loop
        invariant ("same", or "constant", which is no loop variable).
        """
        body, count = self.body, turns.repeat.turns
        for tensor in turns.summed:
            spec = self._spec(turns, tensor)
            zero = np.zeros((), spec.dtype.as_numpy_dtype)
            states["sum", tensor] = self._filled(spec, -zero if spec.dtype.is_floating else zero)
        carried = {key[1]: key for key in states if key[0] == "carried"}
        for tensor, asked in turns.read.items():
            spec = self._spec(turns, tensor)
            if asked != {count - 1}:
                rows = intern_spec(spec.enum, (count, *spec.shape))
                states["rows", tensor] = self._filled(rows, np.zeros((), spec.dtype.as_numpy_dtype))
            elif tensor not in carried:
                states["last", tensor] = self._filled(spec, np.zeros((), spec.dtype.as_numpy_dtype))
        variables = [body.constant(0, COUNT.enum), *states.values()]
        specs = [v.spec for v in variables]
        attrs = (
            "T", [s.enum for s in specs], "cond", self._condition(specs, count),
            "body", self._turn(turns, list(states), inputs, specs),
            "output_shapes", [s.tensor_shape for s in specs], "parallel_iterations", 1,
        )  # fmt: skip
        given = dict(zip(states, body.add(LOOP, [variables], attrs, specs)[1:], strict=True))
        turns.results.update({key: symbol for key, symbol in given.items() if key[0] in ("rows", "sum", "last")})
        turns.results.update({("last", tensor): given[key] for tensor, key in carried.items()})

    def _spec(self, turns: Turns, tensor: Tensor) -> Spec:
        place, port = tensor
        return self.body.specs[self.of.outputs[turns.repeat.start + place][port]]

    def _filled(self, spec: Spec, value: Any) -> Symbol:
        """Returns a tensor of this spec, filled with `value`."""
        scalar = self.body.constant(value, spec.enum)
        return self.body.make("Fill", [list(spec.shape), scalar], spec.enum, spec.shape) if spec.shape else scalar

    def _function(self, kind: str, specs: list[Spec]) -> tuple[Body, list[Symbol]]:
        body = Body(f"{self.body.definition.signature.name}_{kind}_{len(self.functions)}")
        self.functions.append(body)
        return body, [body.argument(spec) for spec in specs]

    def _condition(self, specs: list[Spec], count: int) -> str:
        body, (turned, *_) = self._function("condition", specs)
        body.give(body.compare("Less", turned, count))
        return str(body.definition.signature.name)

    def _turn(self, turns: Turns, keys: list[Any], inputs: dict[tuple[int, int], Any], specs: list[Spec]) -> str:
        """Emits the function of one iteration; returns its name."""
        body, (turned, *arguments) = self._function("turn", specs)
        of, repeat = self.of, turns.repeat
        given = dict(zip(keys, arguments, strict=True))
        behind = body.make("Sub", [repeat.turns - 1, turned], COUNT.enum, ())
        here: dict[Tensor, Symbol] = {}
        for place in range(repeat.period):
            node = of.nodes[repeat.start + place]
            taken = []
            for k, source in enumerate(repeat.sources[place]):
                key = inputs.get((place, k))
                if key is None:
                    taken.append(here[source.place, source.port])
                elif key[0] == "constant":
                    taken.append(self._constant(body, key[1]))
                elif key[0] in ("stack", "back"):
                    taken.append(_row_of(body, given["stack", key[1]], turned if key[0] == "stack" else behind))
                else:
                    taken.append(given[key])
            if ("begins", place) in given:
                begin = _row_of(body, given["begins", place], turned)
                here[place, 0] = self._slid(body, node, taken[0], begin)
                continue
            if node.name in of.slides:
                left = iter(taken)
                taken = [
                    self._constant(body, name) if k in SLIDING[node.op] else next(left)
                    for k, name in enumerate(node.input)
                ]
            out = [self.body.specs[name] for name in of.outputs[repeat.start + place]]
            for port, symbol in enumerate(body.copy(node, [value.name for value in taken], out, "turn_")):
                here[place, port] = symbol
        body.give(body.make("AddV2", [turned, 1], COUNT.enum, ()))
        for key, now in given.items():
            value = now
            if key[0] in ("carried", "last"):
                value = here[key[1]]
            elif key[0] == "sum":
                value = body.make("AddV2", [now, here[key[1]]], now.spec.enum, now.spec.shape)
            elif key[0] == "rows":
                row = body.make("ExpandDims", [here[key[1]], 0], now.spec.enum, (1, *now.spec.shape[1:]))
                changed = [now, row, _begin(body, turned, now)]
                value = body.make("XlaDynamicUpdateSlice", changed, now.spec.enum, now.spec.shape)
            body.give(body.make("Identity", [value], value.spec.enum, value.spec.shape))
        return str(body.definition.signature.name)

    def _constant(self, body: Body, name: str) -> Symbol:
        return body.constant(self.of.value(name), self.body.specs[name].enum)

    def _slid(self, body: Body, node: Any, value: Symbol, begin: Symbol) -> Symbol:
        """Emits a read or write of a slice whose start differs between iterations; returns the result."""
        sizes = self.of.slides[node.name][1]
        spec = self.body.specs[self.of.outputs[self.of.places[node.name]][0]]
        if node.op == "StridedSliceGrad":
            zero = body.constant(np.zeros((), spec.dtype.as_numpy_dtype), spec.enum)
            room = body.make("Fill", [list(spec.shape), zero], spec.enum, spec.shape)
            part = body.make("Reshape", [value, sizes], spec.enum, tuple(sizes))
            return body.make("XlaDynamicUpdateSlice", [room, part, begin], spec.enum, spec.shape)
        part = body.make("XlaDynamicSlice", [value, begin, sizes], spec.enum, tuple(sizes))
        return body.make("Reshape", [part, list(spec.shape)], spec.enum, spec.shape)


def _begin(body: Body, number: Symbol, rows: Symbol) -> Symbol:
    """Returns the start of row `number`, as a vector of indices."""
    rank = len(rows.spec.shape)
    return body.make("Pack", [[number, *[0] * (rank - 1)]], COUNT.enum, (rank,))


def _row_of(body: Body, rows: Symbol, number: Symbol) -> Symbol:
    """Returns row `number` of a stack."""
    enum, shape = rows.spec.enum, rows.spec.shape[1:]
    row = body.make("XlaDynamicSlice", [rows, _begin(body, number, rows), [1, *shape]], enum, (1, *shape))
    return body.make("Reshape", [row, list(shape)], enum, shape)
