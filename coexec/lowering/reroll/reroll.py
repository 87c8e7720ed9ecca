"""Reroll: turns repeated operations (`find_repeats`) back into loops, whose bodies XLA compiles once.

XLA compiles for 2 to 20 ms per operation, so a Python loop unrolled into a segment is expensive: a NASRNN's step of 100
iterations took 36 s on two busy cores, and 8 s rerolled; launches took 8.3 ms unrolled, 8.8 as loops, and 14.9 as a
graph. An input of an iteration is loop-invariant, carried from the previous iteration, or different in each; the last
kind is stacked, and a gradient's loop reads the stacks of its forward loop backwards. Results used outside are stacked,
too. A sum over all iterations (`AddN`) is accumulated in the loop, as XLA would do; it may add in another order than
the kernel, and round differently.

For XLA only. Operations that are stateful, access variables, or are not compiled by XLA are never part of an iteration.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from coexec.base.tuning import tuning
from coexec.lowering.emit import Emitter
from coexec.lowering.function_body import BOOL, Body
from coexec.lowering.plan import Plan
from coexec.lowering.reroll.find_repeats import Repeat
from coexec.lowering.reroll.loop_writer import LoopWriter, Tensor, Turns
from coexec.lowering.reroll.op_signature import Operations, calls_functions, source_of
from tracer.block import COUNT
from tracer.nodedef import Symbol
from tracer.spec import Spec

# Operations that consume the results of all iterations at once.
_JOINS = frozenset({"AddN", "ConcatV2", "Pack"})


def fold(body: Body, functions: list[Body], fixed: set[str]) -> tuple[int, int]:
    """Rerolls repeats in `body`, in place; returns the numbers of operations before and after.

    The loops' bodies and conditions are appended to `functions`. The nodes named in `fixed` stay outside loops.
    """
    if calls_functions(body):
        return (count := len(body.definition.node_def)), count
    operations = Operations(body, fixed)
    repeats = _repeats(operations)
    if repeats:
        _Folding(body, functions, operations, repeats).carry_out()
    return len(operations.nodes), _left(operations, repeats)


def left_by_loops(plan: Plan) -> int:
    """Returns how many operations of a segment XLA would compile after rerolling."""
    emitter = Emitter(plan, checks=True, name="counted")
    body = emitter.build()
    if calls_functions(body):
        return len(body.definition.node_def)
    operations = Operations(body, emitter.outside)
    return _left(operations, _repeats(operations))


def _left(operations: Operations, repeats: list[Repeat]) -> int:
    """Returns the number of operations after rerolling these repeats."""
    return len(operations.nodes) - sum((repeat.turns - 1) * repeat.period for repeat in repeats)


def _repeats(operations: Operations) -> list[Repeat]:
    """Returns the repeats that are worth a loop."""
    found = operations.sequence.repeats(tuning.min_folded, lambda repeat: not _copies(operations, repeat))
    while True:
        made = {place for repeat in found for place in range(repeat.start, repeat.end)}
        kept = [repeat for repeat in found if _is_worth_it(operations, repeat, made)]
        if len(kept) == len(found):
            return found
        found = kept


def _stacked(operations: Operations, repeat: Repeat) -> Iterator[list[str]]:
    """Yields, for each input that a loop would read from a stack, its tensors, one per iteration."""
    for place, sources in enumerate(repeat.sources):
        for k, source in enumerate(sources):
            if source.lag == -1:
                names = [operations.inputs[n][k] for n in range(repeat.start + place, repeat.end, repeat.period)]
                if len(set(names)) > 1:
                    yield names


def _copies(operations: Operations, repeat: Repeat) -> bool:
    """Whether a loop would have to stack, and so copy, variables."""

    def is_read(name: str) -> bool:
        place, _ = operations.makers.get(name, (-1, 0))
        return place >= 0 and operations.nodes[place].op == "ReadVariableOp"

    return any(is_read(name) for names in _stacked(operations, repeat) for name in names)


def _is_worth_it(operations: Operations, repeat: Repeat, made: set[int]) -> bool:
    """Whether a loop saves enough operations, given that loops produce the tensors at the places in `made`.

    Each tensor that must be stacked or unstacked on its own costs an operation.
    """
    single, waits = set(), any(source.lag == 1 for sources in repeat.sources for source in sources)
    for names in _stacked(operations, repeat):
        for name in names:
            place, _ = operations.makers.get(name, (-1, 0))
            unpacked = place >= 0 and operations.nodes[place].op == "Unpack"
            if place not in made and not unpacked and source_of(name) not in operations.constants:
                single.add(name)
                if not waits and operations.specs[name].size > tuning.max_fold_copied:
                    return False
    for place in range(repeat.start, repeat.end):
        for name in operations.outputs[place]:
            users = (user for user in operations.users[name] if user not in made)
            if any(user < 0 or operations.nodes[user].op not in _JOINS for user in users):
                single.add(name)
    return (repeat.turns - 1) * repeat.period - len(single) >= tuning.min_folded


class _Folding:
    """Rerolls one function: reemits it with loops in place of the repeats."""

    def __init__(self, body: Body, functions: list[Body], operations: Operations, repeats: list[Repeat]) -> None:
        self.body = body
        self.writer = LoopWriter(body, functions, operations)
        self.of = operations
        self.loops = {repeat.start: Turns(repeat) for repeat in repeats}
        self.home = {
            k: (turns, *divmod(k - start, turns.repeat.period))
            for start, turns in self.loops.items() for k in range(start, turns.repeat.end)
        }  # fmt: skip
        self.renamed: dict[str, str] = {}
        self.stacks: dict[tuple[str, ...], Symbol] = {}

    def carry_out(self) -> None:
        """Rewrites the function, in place."""
        of, body = self.of, self.body
        for turns in self.loops.values():
            self._ask(turns)
        body.restart(list(of.constants.values()))
        at = 0
        while at < len(of.nodes):
            if at in self.loops:
                self._loop(self.loops[at])
                at = self.loops[at].repeat.end
            else:
                self._node(at)
                at += 1
        for result, name in of.definition.ret.items():
            body.definition.ret[result] = self._name(name)
        body.drop_unused_constants()

    # Uses of a loop's tensors outside it.

    def _element(self, name: str) -> tuple[Turns, Tensor, int] | None:
        """Returns the loop, tensor and iteration that this name belongs to; None if it is not produced in a loop."""
        maker = self.of.makers.get(name)
        found = self.home.get(maker[0]) if maker is not None else None
        return None if found is None or maker is None else (found[0], (found[2], maker[1]), found[1])

    def _sums(self, node: Any) -> dict[tuple[Turns, Tensor], set[int]]:
        """Returns the loop tensors that an `AddN` outside sums over all iterations, with their input positions."""
        found: defaultdict[tuple[Turns, Tensor], list[tuple[int, int]]] = defaultdict(list)
        if node.op == "AddN":
            for place, name in enumerate(node.input):
                element = self._element(name)
                if element is not None:
                    found[element[:2]].append((element[2], place))
        every = {turns: list(range(turns.repeat.turns)) for turns, _ in found}
        return {
            key: {place for _, place in of}
            for key, of in found.items() if sorted(number for number, _ in of) == every[key[0]]
        }  # fmt: skip

    def _ask(self, turns: Turns) -> None:
        """Sets `turns.read` and `turns.summed`: the tensors that are used outside the loop."""
        repeat = turns.repeat
        for k in range(repeat.start, repeat.end):
            number, place = divmod(k - repeat.start, repeat.period)
            for port, name in enumerate(self.of.outputs[k]):
                tensor = place, port
                for user in self.of.users[name]:
                    if repeat.start <= user < repeat.end:
                        continue
                    outside = user >= 0 and user not in self.home
                    if outside and (turns, tensor) in self._sums(self.of.nodes[user]):
                        turns.summed[tensor] = None
                    else:
                        turns.read.setdefault(tensor, set()).add(number)

    # Outside loops.

    def _node(self, place: int) -> None:
        """Emits an operation outside loops, with renamed inputs; takes sums and stacks of iterations from the loops."""
        node, body = self.of.nodes[place], self.body
        sums = self._sums(node)
        if sums:
            left = [n for k, n in enumerate(node.input) if not any(k in places for places in sums.values())]
            terms = [*(t.results["sum", tensor] for t, tensor in sums), *(self._symbol(name) for name in left)]
            total = terms[0] if len(terms) == 1 else body.add("AddN", [terms], (), [terms[0].spec])[0]
            self.renamed[self.of.outputs[place][0]] = total.name
            return
        if node.op == "Pack" and any(self._element(name) for name in node.input):
            names = list(node.input)
            if self.body.specs[names[0]].enum == BOOL and self._is_for_all(place):
                names.sort(key=self._order)
            axis, stacked = int(node.attr["axis"].i), self.stack(names)
            rank = len(stacked.spec.shape)
            self.renamed[self.of.outputs[place][0]] = self._moved(stacked, axis % rank).name
            return
        if node.op == "ConcatV2" and (joined := self._concatenated(node)) is not None:
            self.renamed[self.of.outputs[place][0]] = joined.name
            return
        inputs = [self._name(name) for name in node.input if not name.startswith("^")]
        behind = dict.fromkeys(self._behind(name[1:]) for name in node.input if name.startswith("^"))
        body.copy(node, [*inputs, *behind])

    def _is_for_all(self, place: int) -> bool:
        """Whether an operation's result is used only by `All` outside loops, so that the order of elements is free."""
        return all(
            user >= 0 and user not in self.home and self.of.nodes[user].op == "All"
            for user in self.of.users[self.of.outputs[place][0]]
        )

    def _order(self, name: str) -> tuple[int, Tensor, int]:
        """Returns a sort key that groups tensors by loop, and orders them by iteration."""
        element = self._element(name)
        return (-1, (0, 0), 0) if element is None else (element[0].repeat.start, element[1], element[2])

    def _behind(self, name: str) -> str:
        """Returns the control input that replaces one on the node of this name."""
        place = self.of.places.get(name)
        if place is not None and place in self.home:
            return f"^{self.home[place][0].node}"
        given = self.of.outputs[place][:1] if place is not None else []
        return f"^{source_of(self.renamed.get(given[0], name)) if given else name}"

    def _name(self, name: str) -> str:
        """Returns a tensor's name in the rewritten function; may emit a slice of a loop's rows."""
        element = self._element(name)
        if element is not None and name not in self.renamed:
            turns, tensor, number = element
            if number == turns.repeat.turns - 1 and ("last", tensor) in turns.results:
                self.renamed[name] = turns.results["last", tensor].name
            else:
                spec, rows = self.body.specs[name], turns.results["rows", tensor]
                at = [rows, [number], [number + 1], [1]]
                one = self.body.make("StridedSlice", at, spec.enum, spec.shape, shrink_axis_mask=1)
                self.renamed[name] = one.name
        return self.renamed.get(name, name)

    def _symbol(self, name: str) -> Symbol:
        now = self._name(name)
        return Symbol(now, self.body.specs[now], "Identity", [])

    # Stacks.

    def stack(self, names: list[str]) -> Symbol:
        """Returns one tensor with these tensors, of one shape and dtype, as its rows."""
        key = tuple(names)
        if key not in self.stacks:
            body, pieces = self.body, self._pieces(names)
            stacked, spec = pieces[0], self.body.specs[names[0]]
            if len(pieces) > 1:
                stacked = body.make("ConcatV2", [pieces, 0], spec.enum, (len(names), *spec.shape))
            self.stacks[key] = stacked
        return self.stacks[key]

    def _row(self, name: str) -> tuple[Any, int]:
        """Returns what a tensor is a row of (a loop's rows, or an unpacked tensor; None: neither), and its index."""
        element = self._element(name)
        if element is not None:
            turns, tensor, number = element
            return (turns, tensor) if ("rows", tensor) in turns.results else None, number
        maker = self.of.makers.get(name)
        if maker is not None and self.of.nodes[maker[0]].op == "Unpack":
            return (None, maker[0]), maker[1]
        return None, 0

    def _pieces(self, names: list[str]) -> list[Symbol]:
        """Returns stacks that concatenate to the stack of these tensors: strided rows, constants, and packed others."""
        rows, spec = [self._row(name) for name in names], self.body.specs[names[0]]
        known = [source_of(name) in self.of.constants for name in names]
        pieces, at = [], 0
        while at < len(names):
            (whole, first), until = rows[at], at + 1
            if whole is None:
                while until < len(names) and rows[until][0] is None and known[until] == known[at]:
                    until += 1
                if known[at]:
                    values = np.stack([self.of.value(name) for name in names[at:until]])
                    pieces.append(self.body.constant(values, spec.enum))
                else:
                    these = [self._symbol(name) for name in names[at:until]]
                    pieces.append(self.body.make("Pack", [these], spec.enum, (len(these), *spec.shape)))
            else:
                step = rows[until][1] - first if until < len(names) and rows[until][0] == whole else 1
                while step and until < len(names) and rows[until] == (whole, first + step * (until - at)):
                    until += 1
                pieces.append(self._rows(whole, first, step or 1, until - at, spec))
            at = until
        return pieces

    def _rows(self, whole: Any, first: int, step: int, count: int, spec: Spec) -> Symbol:
        """Returns `count` rows of a loop's result, or of an unpacked tensor, from `first` on with stride `step`."""
        body, (turns, tensor) = self.body, whole
        rows: Symbol
        if turns is not None:
            rows = turns.results["rows", tensor]
        else:
            unpacked = self.of.nodes[tensor]
            rows = self._symbol(unpacked.input[0])
            axis = int(unpacked.attr["axis"].i) % len(rows.spec.shape)
            rows = self._permuted(rows, [axis, *(n for n in range(len(rows.spec.shape)) if n != axis)])
        if (first, step, count) == (0, 1, rows.spec.shape[0]):
            return rows
        end = first + step * count
        at = [rows, [first], [max(end, 0)], [step]]
        return body.make("StridedSlice", at, spec.enum, (count, *spec.shape), end_mask=int(end < 0))

    def _permuted(self, value: Symbol, order: list[int]) -> Symbol:
        if order == sorted(order):
            return value
        shape = tuple(value.spec.shape[n] for n in order)
        return self.body.make("Transpose", [value, order], value.spec.enum, shape)

    def _moved(self, rows: Symbol, axis: int) -> Symbol:
        """Moves the first axis of a stack to position `axis`."""
        others = list(range(1, len(rows.spec.shape)))
        return self._permuted(rows, [*others[:axis], 0, *others[axis:]])

    def _concatenated(self, node: Any) -> Symbol | None:
        """Lowers a `ConcatV2` of tensors from iterations to reshaped stacks; None if none of its inputs is one."""
        *names, last = node.input
        axis = self.of.value(last)
        rows = [self._row(name) for name in names]
        if axis is None or all(whole is None for whole, _ in rows):
            return None
        parts, at = [], 0
        while at < len(names):
            until, spec = at + 1, self.body.specs[names[at]]
            while rows[at][0] is not None and until < len(names) and rows[until][0] == rows[at][0]:
                until += 1
            if until == at + 1:
                parts.append(self._symbol(names[at]))
            else:
                along = int(axis) % len(spec.shape)
                shape = list(spec.shape)
                shape[along] *= until - at
                part = self._moved(self.stack(names[at:until]), along)
                parts.append(self.body.make("Reshape", [part, shape], spec.enum, tuple(shape)))
            at = until
        if len(parts) == 1:
            return parts[0]
        spec = self.body.specs[self.of.outputs[self.of.places[node.name]][0]]
        return self.body.make("ConcatV2", [parts, int(axis)], spec.enum, spec.shape)

    # Loops.

    def _loop(self, turns: Turns) -> None:
        """Emits a loop: chooses its variables, and maps each input of an iteration to one of them."""
        body, of, repeat = self.body, self.of, turns.repeat
        states: dict[Any, Symbol] = {}  # initial values of the loop variables
        inputs: dict[tuple[int, int], Any] = {}  # by operation of an iteration and input: the variable's key
        for place, sources in enumerate(repeat.sources):
            for k, source in enumerate(sources):
                names = [of.inputs[n][k] for n in range(repeat.start + place, repeat.end, repeat.period)]
                if source.lag == 1:
                    key: Any = "carried", (source.place, source.port), names[0]
                    states[key] = self._symbol(names[0])
                elif source.lag == 0:
                    continue
                elif len(set(names)) > 1:
                    back = tuple(reversed(names)) in self.stacks or self._is_backward(names)
                    key = ("back", tuple(reversed(names))) if back else ("stack", tuple(names))
                    states["stack", key[1]] = self.stack(list(key[1]))
                elif source_of(names[0]) in of.constants:
                    key = "constant", names[0]
                else:
                    key = "same", names[0]
                    states[key] = self._symbol(names[0])
                inputs[place, k] = key
            slides = [of.slides.get(of.nodes[n].name) for n in range(repeat.start + place, repeat.end, repeat.period)]
            begins = [slide[0] for slide in slides if slide is not None]
            if any(begin != begins[0] for begin in begins):
                states["begins", place] = body.constant(np.asarray(begins, np.int32), COUNT.enum)
        self.writer.loop(turns, states, inputs)

    def _is_backward(self, names: list[str]) -> bool:
        """Whether these tensors are mostly rows of something in reverse order."""
        rows = [self._row(name) for name in names]
        steps = [b[1] - a[1] for a, b in itertools.pairwise(rows) if a[0] is not None and a[0] == b[0]]
        return sum(step < 0 for step in steps) > len(steps) / 2
