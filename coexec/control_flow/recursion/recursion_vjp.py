"""Recursion VJP: the backward pass through functions that call themselves.

In the forward pass, each call also returns what its backward pass needs, packed into one tensor: which paths it took,
what its inner calls returned, and what those packed. In the backward pass, a second recursive function unpacks these
residuals, recomputes the rest of the call, and backpropagates through its inner calls, the last one first. So the
backward pass makes as many calls as the forward pass.

The same gradients exist as in eager mode. If one path has a gradient for an argument and another has none, calls return
flags that say which was taken: a zero that stands for a missing cotangent is not propagated, since zero times infinity
would be NaN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.grad.block_vjp import (
    Taped,
    input_of,
    issue_step,
    pruned,
    slots_of,
    spec_in,
    tensors_of,
    unwatched,
)
from coexec.control_flow.recursion.dependence import Dependence, Dependences, both, either, flag_of
from tracer.block import (
    BRANCH,
    CALL,
    FLAG,
    PACKED,
    STRUCTURES,
    UNPACK,
    Block,
    Branch,
    RecursiveCall,
    RecursiveFunction,
    recursion_of,
)
from tracer.errors import Refused
from tracer.graph import Step
from tracer.lazy import LazyTensor
from tracer.spec import Spec
from tracer.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coexec.control_flow.grad.block_vjp import Result
    from coexec.control_flow.program_types import Tensor, Truth
    from coexec.control_flow.recursion.dependence import Flags
    from tracer.op import Const, Structure

    # What a call packs: the value of a slot, the condition of a branch, whether an output of a structure depends on an
    # input, and what a structure has packed.
    Item = int | tuple[str, Step] | tuple[str, Step, int, int]


@dataclass
class _Function:
    """The forward and backward functions of a recursive function."""

    forward: RecursiveFunction | None = None
    # By the results that have a cotangent.
    backs: dict[tuple[int, ...], RecursiveFunction] = field(default_factory=dict)


class RecursionVjp:
    """The VJP of a block with recursive calls, of which these arguments are watched; raises `Refused` if there is none.

    `forward` returns the block's results, for each of the pairs in `asked` whether the result depends on the argument,
    and the packed residuals for the blocks in `backs`.
    """

    forward: Block

    def __init__(self, block: Block, watched: tuple[int, ...]) -> None:
        self.block = block
        self.steps: list[Step] = []  # of all blocks traced here, to be checked
        self.backs: dict[int, Block] = {}  # by result: takes the arguments, what was packed, and the cotangent
        self._functions: dict[RecursiveFunction, _Function] = {}
        self._inside = 0
        unwatched(lambda: self._prepare(watched))

    def _prepare(self, watched: tuple[int, ...]) -> None:
        self._reaches = Dependences(self.block, watched)
        root = self._reaches.root
        self.pairs = root.pairs()
        self.asked = sorted(pair for pair, always in self.pairs.items() if not always)
        self.forward = self._forward(root, self.asked)
        for n in sorted({n for n, _ in self.pairs}):
            self.backs[n] = self._back(root, (n,), [(k, self.block.arguments[k]) for k in self.arguments(n)])

    def arguments(self, n: int) -> list[int]:
        """Returns the arguments that may get a cotangent from a result, in order."""
        return sorted(k for m, k in self.pairs if m == n)

    def _noted(self, block: Block) -> Block:
        self.steps += block.steps
        return block

    def _written(self, recursion: RecursiveFunction, block: Callable[[], Block]) -> None:
        """Traces a function, `recursion`, as `block()`; calls of functions in it refer to them by name."""
        self._inside += 1
        try:
            recursion.block = block()
        finally:
            self._inside -= 1

    def _call(self, recursion: RecursiveFunction) -> RecursiveFunction | RecursiveCall:
        return RecursiveCall(recursion) if self._inside else recursion

    def _layout(self, reach: Dependence) -> list[tuple[Item, Spec]]:
        """Returns what is packed, with its specs, in order."""
        used = {slot for step in reach.block.steps for slot in slots_of(step)}
        found: list[tuple[Item, Spec]] = []
        for step in (s for s in reach.block.steps if s.op in STRUCTURES):
            found += [(step.first + n, out.spec) for n, out in enumerate(step.outputs) if step.first + n in used]
            if reach.through[step]:
                if step.op == BRANCH and not reach.is_guard(step):
                    found.append((("condition", step), FLAG))
                if not reach.is_guard(step):
                    found += [(("flag", step, *pair), FLAG) for pair in reach.asked(step)]
                found.append((("packed", step), PACKED))
        return found

    # Forward.

    def _forward(self, reach: Dependence, asked: Sequence[tuple[int, int | None]]) -> Block:
        """Returns the block with further results: whether the asked pairs are connected, and what is packed."""
        block = reach.block
        stage = Stage()
        values: dict[int, Tensor] = {-1 - k: stage.argument(spec) for k, spec in enumerate(block.arguments)}
        flags: Flags = {-1 - k: {k: True} for k in reach.active}
        items: dict[Item, Tensor] = {}
        with stage:
            for step in block.steps:
                inputs = [input_of(step, i, slot, values) for i, slot in enumerate(step.slots)]
                if step.op in STRUCTURES:
                    outputs = self._forward_structure(stage, reach, step, tensors_of(step, inputs), flags, items)
                else:
                    outputs = issue_step(stage, step, inputs)
                values.update((step.first + n, tensor) for n, tensor in enumerate(outputs))
            results = [values[r] if isinstance(r, int) else _constant(stage, r) for r in block.results]
            for n, k in asked:
                flag = flag_of(reach, flags, block.results[n], k)
                results.append(tf.constant(flag) if isinstance(flag, bool) else flag)
            results.append(
                _packed(stage, [{**values, **items}[key] for key, _ in self._layout(reach)])  # type: ignore[misc]
            )
            return self._noted(stage.block(results))

    def _forward_structure(
        self,
        stage: Stage,
        reach: Dependence,
        step: Step,
        inputs: list[Tensor],
        flags: Flags,
        items: dict[Item, Tensor],
    ) -> list[LazyTensor]:
        """Issues a structure so that it also returns flags and what it packs, which are added to `flags` and `items`.

        Returns the outputs that the structure itself has.
        """
        count = len(step.outputs)
        specs = [out.spec for out in step.outputs]
        if step.op == BRANCH:
            branch: Branch = step.attrs[1]
            asked = reach.asked(step)
            given = [{1 + place: a for a, place in enumerate(g)} for g in (branch.then_inputs, branch.other_inputs)]
            then, other = (
                self._forward(way, [(n, at.get(j)) for n, j in asked])
                for way, at in zip(reach.ways[step], given, strict=True)
            )
            part: Structure = Branch(then, other, branch.then_inputs, branch.other_inputs)
            found = stage.structure(BRANCH, part, inputs, [*specs, *(FLAG for _ in asked), PACKED])
            items["condition", step] = inputs[0]
        else:
            recursion = recursion_of(step.attrs[1])
            asked = self._reaches.asked(recursion)
            part = self._call(self._forward_of(recursion))
            *found, deep = stage.structure(CALL, part, inputs, [*specs[:-1], *(FLAG for _ in asked), PACKED, FLAG])
            found.insert(count - 1, deep)
        items["packed", step] = found[-1]
        told = dict(zip(asked, found[count:-1], strict=True))
        items.update({("flag", step, *pair): flag for pair, flag in told.items()})
        for n, j in reach.through[step]:
            behind = flags.setdefault(step.first + n, {})
            for k in reach.of(step.slots[j]):
                flag = both(told.get((n, j), True), flag_of(reach, flags, step.slots[j], k))
                behind[k] = either(behind.get(k, False), flag)
        return list(found[:count])

    def _forward_of(self, recursion: RecursiveFunction) -> RecursiveFunction:
        """Returns the forward function of a function; its last result still says whether all is left to Python."""
        known = self._functions.setdefault(recursion, _Function())
        if known.forward is None:
            known.forward = RecursiveFunction()
            reach = self._reaches.function(recursion)

            def block() -> Block:
                found = self._forward(reach, self._reaches.asked(recursion))
                count = len(reach.block.results)
                results = (*found.results[: count - 1], *found.results[count:], found.results[count - 1])
                return dataclasses.replace(found, results=results)

            self._written(known.forward, block)
        return known.forward

    # Backward.

    def _back(self, reach: Dependence, live: tuple[int, ...], wanted: Sequence[tuple[int | None, Spec]]) -> Block:
        """Returns the block that computes the wanted arguments' cotangents; zeros for arguments without a gradient.

        It takes the arguments, what was packed, and the cotangents of the `live` results.
        """
        block = reach.block
        stage = Taped()
        given = [stage.argument(spec) for spec in block.arguments]
        packed = stage.argument(PACKED)
        backs = [stage.argument(spec_in(block, block.results[n])) for n in live]
        with stage:
            layout = self._layout(reach)
            items = dict(zip([key for key, _ in layout], _unpacked(stage, packed, layout), strict=True))
            way = _BackwardBlock(stage, reach, given, items)
            way.pull([(block.results[n], back) for n, back in zip(live, backs, strict=True)], True)
            for step in reversed(block.steps):
                if step.op in STRUCTURES:
                    self._back_structure(way, step)
            sums = [way.sums.get(None if k is None else -1 - k) for k, _ in wanted]
            results = [_zeros(s) if found is None else found[0] for found, (_, s) in zip(sums, wanted, strict=True)]
            return self._noted(pruned(stage.block(results)))

    def _back_structure(self, way: _BackwardBlock, step: Step) -> None:
        """Backpropagates through a branch or call, from those of its outputs that have a cotangent to its inputs."""
        outs = {n: way.sums[step.first + n] for n in range(len(step.outputs)) if step.first + n in way.sums}
        through = {pair: always for pair, always in way.reach.through[step].items() if pair[0] in outs}
        wanted = sorted({j for _, j in through})
        if not wanted:
            return
        live, flags = tuple(outs), [flag for _, flag in outs.values()]
        if len({id(flag) for flag in flags if flag is not True}) > tuning.max_unwinding_flags:
            raise Refused("what a call or an `if` gives has a gradient on too many different ways")
        inputs = tensors_of(step, [input_of(step, i, slot, way.values) for i, slot in enumerate(step.slots)])
        if step.op == BRANCH and not way.reach.is_guard(step):
            inputs[0] = way.items["condition", step]
        backs = [back for back, _ in outs.values()]
        given = [*inputs, way.items["packed", step]]
        found = self._as_told(way.stage, way.reach, step, live, flags, wanted, given, backs)
        always = []
        for j, back in zip(wanted, found, strict=True):
            told: Truth = False
            for n, flag in zip(live, flags, strict=True):
                if (n, j) in through:
                    sure = through[n, j] or way.reach.is_guard(step)  # the caller of the function knows
                    told = either(told, both(flag, True if sure else way.items["flag", step, n, j]))
            if told is True:
                always.append((step.slots[j], back))
            else:
                way.pull([(step.slots[j], back)], told)
        way.pull(always, True)

    def _as_told(
        self, stage: Stage, reach: Dependence, step: Step, live: tuple[int, ...], flags: list[Truth], wanted: list[int],
        given: list[Tensor], backs: list[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Issues the backward pass of a branch or call, for those of its outputs whose flags are true."""
        assert step.variant is not None
        specs: list[Spec] = [step.variant.key[j] for j in wanted]
        doubts = list({id(flag): flag for flag in flags if flag is not True}.values())
        if not doubts:
            places = [j for j in wanted if any((n, j) in reach.through[step] for n in live)]
            found = self._issued(stage, reach, step, live, places, [*given, *backs]) if places else []
            issued = dict(zip(places, found, strict=True))
            return [issued[j] if j in issued else _zeros(spec) for j, spec in zip(wanted, specs, strict=True)]
        arguments, blocks = [*given, *backs, *doubts], []
        for holds in (True, False):
            inner = Taped()  # does not keep tapes from recording
            own = [inner.argument(v._out.spec) for v in arguments]
            known: dict[int, Truth] = dict(zip(map(id, doubts), own[len(given) + len(backs) :], strict=True))
            known[id(doubts[0])] = True
            kept = [k for k, flag in enumerate(flags) if holds or flag is not doubts[0]]
            with inner:
                found = self._as_told(
                    inner, reach, step, tuple([live[k] for k in kept]), [known.get(id(flags[k]), True) for k in kept],
                    wanted, own[: len(given)], [own[len(given) + k] for k in kept],
                )  # fmt: skip
                blocks.append(self._noted(inner.block(found)))
        all_of_them = tuple(range(len(arguments)))
        part = Branch(blocks[0], blocks[1], all_of_them, all_of_them)
        return stage.structure(BRANCH, part, [doubts[0], *arguments], specs)

    def _issued(
        self, stage: Stage, reach: Dependence, step: Step, live: tuple[int, ...], wanted: list[int], given: list[Tensor]
    ) -> list[Tensor]:
        """Issues the backward pass of a branch or call, given its inputs, what it packed, and the cotangents."""
        assert step.variant is not None
        specs: list[Spec] = [step.variant.key[j] for j in wanted]
        if step.op == CALL:
            recursion = recursion_of(step.attrs[1])
            order = self._places(recursion, live)
            part = self._call(self._back_of(recursion, live))
            types: list[Spec] = [*(step.variant.key[k] for k in order), FLAG]
            found = stage.structure(CALL, part, given, types)
            return [found[order.index(j)] for j in wanted]
        branch: Branch = step.attrs[1]
        last = len(given) - 1
        more = tuple(range(last - len(live) - 1, last))  # what was packed, and the cotangents
        ways = []
        for inner, places in zip(reach.ways[step], (branch.then_inputs, branch.other_inputs), strict=True):
            at = {1 + place: a for a, place in enumerate(places)}
            pairs = [(at.get(j), spec) for j, spec in zip(wanted, specs, strict=True)]
            ways.append((inner, pairs, (*places, *more)))
        if reach.is_guard(step):
            inner, pairs, places = ways[1]
            return _inlined(stage, self._back(inner, live, pairs), [given[1 + place] for place in places])
        then, other = (self._back(inner, live, pairs) for inner, pairs, _ in ways)
        return stage.structure(BRANCH, Branch(then, other, ways[0][2], ways[1][2]), given, specs)

    def _places(self, recursion: RecursiveFunction, live: tuple[int, ...]) -> list[int]:
        """Returns the arguments of a function that may get a cotangent from these results, in order."""
        return sorted({k for n, k in self._reaches.pairs_of(recursion) if n in live})

    def _back_of(self, recursion: RecursiveFunction, live: tuple[int, ...]) -> RecursiveFunction:
        """Returns the backward function of a function; its last result, "left to Python", is always false."""
        known = self._functions[recursion]
        if live not in known.backs:
            known.backs[live] = RecursiveFunction()
            reach = self._reaches.function(recursion)
            wanted = [(k, reach.block.arguments[k]) for k in self._places(recursion, live)]

            def block() -> Block:
                found = self._back(reach, live, wanted)
                never = Stage().constant(False, tf.bool)._out
                return dataclasses.replace(found, results=(*found.results, (never.const, never.spec)))

            self._written(known.backs[live], block)
        return known.backs[live]


class _BackwardBlock:
    """A block's operations, recomputed, and the cotangents so far of its arguments and its structures' outputs."""

    def __init__(self, stage: Taped, reach: Dependence, given: list[Tensor], items: dict[Item, Tensor]) -> None:
        self.stage, self.reach, self.items = stage, reach, items
        self.sums: dict[int | None, tuple[Tensor, Truth]] = {}  # by slot: the sum, and whether there is one
        self.values: dict[int, Tensor] = {-1 - k: v for k, v in enumerate(given)}
        steps = reach.block.steps
        for step in (s for s in steps if s.op in STRUCTURES):
            self.values.update(
                (slot, items[slot] if slot in items else stage.stand_in(out))
                for slot, out in enumerate(step.outputs, step.first)
            )
        slots = [-1 - k for k in reach.active] + [s.first + n for s, pairs in reach.through.items() for n, _ in pairs]
        self._sources = {slot: self.values[slot] for slot in dict.fromkeys(slots)}
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as self._tape:
            self._tape.watch(list(self._sources.values()))
            for step in (s for s in steps if s.op not in STRUCTURES):
                inputs = [input_of(step, i, slot, self.values) for i, slot in enumerate(step.slots)]
                self.values.update((step.first + n, v) for n, v in enumerate(issue_step(stage, step, inputs)))

    def pull(self, backs: Sequence[tuple[Result, Tensor]], flag: Truth) -> None:
        """Backpropagates cotangents of slots to the sources that those are computed from, if `flag` is true.

        Adds the results to `sums`.
        """
        targets, given = [], []
        for slot, back in backs:
            if slot in self._sources:
                self._add(slot, back, flag)
            elif slot in self.values:
                targets.append(self.values[slot])
                given.append(back)
        if not targets:
            return
        grads = self._tape.gradient(targets, list(self._sources.values()), output_gradients=given)
        for slot, grad in zip(self._sources, grads, strict=True):
            if grad is None:
                continue
            if type(grad) is not LazyTensor:
                raise Refused("a gradient is sparse")
            self._add(slot, grad if flag is True else tf.where(flag, grad, _zeros(grad._out.spec)), flag)

    def _add(self, slot: int, grad: LazyTensor, flag: Truth) -> None:
        known = self.sums.get(slot)
        self.sums[slot] = (grad, flag) if known is None else (tf.add(known[0], grad), either(known[1], flag))


def _inlined(stage: Stage, block: Block, given: list[Tensor]) -> list[Tensor]:
    """Traces a block's operations into a stage, with these arguments; returns its results."""
    values: dict[int, Tensor] = {-1 - k: v for k, v in enumerate(given)}
    for step in block.steps:
        inputs = [input_of(step, i, slot, values) for i, slot in enumerate(step.slots)]
        specs = [out.spec for out in step.outputs]
        if step.op in STRUCTURES:
            outputs = stage.structure(step.op, step.attrs[1], tensors_of(step, inputs), specs)
        elif step.op == UNPACK:
            outputs = stage.unpacked(inputs[0], specs)
        else:
            outputs = issue_step(stage, step, inputs)
        values.update((step.first + n, tensor) for n, tensor in enumerate(outputs))
    return [values[r] if isinstance(r, int) else _constant(stage, r) for r in block.results]


def _packed(stage: Stage, values: list[Tensor]) -> Tensor:
    if len(values) == 1 and values[0]._out.spec is PACKED:
        return values[0]
    return stage.packed(values)


def _unpacked(stage: Stage, packed: LazyTensor, layout: list[tuple[Item, Spec]]) -> list[LazyTensor]:
    specs = [spec for _, spec in layout]
    return [packed] if specs == [PACKED] else stage.unpacked(packed, specs) if specs else []


def _constant(stage: Stage, result: tuple[Const, Spec]) -> Tensor:
    return stage.constant(result[0].value, result[1].dtype)


def _zeros(spec: Spec) -> Tensor:
    return tf.zeros(spec.shape, spec.dtype)
