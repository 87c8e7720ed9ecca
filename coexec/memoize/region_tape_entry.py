"""Region tape entry: the deferred tape records of a skipped call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from coexec.follow.backward import FunctionRecord
from coexec.follow.follower import Follower
from coexec.follow.tape_entry import identities, record_on_tapes
from coexec.follow.tensor_names import TensorNames
from coexec.memoize.entry import Region
from tracer.graph import CONST, LIST
from tracer.lazy import LazyTensor, Output, new_lazy
from tracer.op import Const
from tracer.sizes import const_at, settled


class RegionEntry:
    """The records that a skipped call would have put on tapes."""

    __slots__ = (
        "_aliases", "_constants", "_earlier", "_early", "_inputs", "_interior", "_outputs", "_own", "_recorded",
        "_run", "_tensors", "_values", "arguments", "base", "externals", "region", "tapes", "version",
    )  # fmt: skip

    def __init__(
        self,
        region: Region,
        arguments: Any,
        tensors: dict[int, Any],
        run: Follower,
        tapes: tuple[int, ...],
        constants: list[Any] | None = None,
        earlier: list[Any] | None = None,
    ) -> None:
        """`earlier`: for a gradient, the entries of its tape."""
        self.region = region
        self.version = region.version
        self.arguments: list[Any] = arguments.given
        self._inputs: list[Any] | None = arguments.tensors
        self._tensors = tensors  # by number: results, and those held by tapes
        self.base = run.cursor.base
        self.externals = run.cursor.externals
        self._run = run
        self._values: list[Any] | None = run.values
        # Copied, as the region may be learnt anew.
        self._interior, self._outputs, self._recorded = region.interior, region.outputs, region.recorded
        self._own, self._early, self._earlier = region.own, region.early, earlier or []
        self.tapes = tapes
        self._aliases: dict[int, Any] | None = None
        self._constants = constants or []

    def results(self) -> list[Any]:
        """Returns the results of the call, and what tapes hold."""
        first = self.region.start.end
        return [tensor for number, tensor in self.tensors.items() if number >= first]

    def is_differentiable(self) -> bool:
        """Returns True: one of its operations is."""
        return True

    @property
    def tensors(self) -> dict[int, Any]:
        """The tensors of its segment by number: arguments, results, and those that a tape holds.

        Arguments are added on demand, as a memoized gradient needs none.
        """
        for value in self._inputs or ():
            if type(value) is LazyTensor and value._out.const is None:
                self._tensors.setdefault(value._key - self.base, value)
        self._inputs = None
        return self._tensors

    def brief(self, names: TensorNames) -> Any:
        """Returns a key that implies the tensors, if all arguments come from its own segment; else None."""
        return (self.region, self.version, names.of(self.base), self.tapes) if self.region.closed else None

    def identity(self, names: TensorNames) -> Any:
        """Returns a key of the call, apart from what `given` returns."""
        return self.region, self.version, names.of(self.base) if self._early else None

    def keep(self) -> None:
        """Creates the tensors that a tape would hold, in time to get values when their segment runs.

        Not earlier, as a memoized gradient needs none of them, and they are most of a region's tensors under a tape.
        """
        values = self._values
        if values is None:
            return
        for slot, (kind, place) in self._early.items():
            if slot >= 0 and kind == "earlier":
                self._earlier[place[0]].keep()
        tensors = self.tensors
        for number in self._interior:
            if number not in tensors:
                lazy = new_lazy(settled(self._outputs[number], self.externals), self.base + number, self._run)
                values[number] = tensors[number] = lazy
        self._values = None

    def constants(self) -> list[Any]:
        """Returns the tensors recorded in place of the region's constants, except arguments."""
        return self._constants

    def goes_into(self, region: Region) -> None:
        """Makes a gradient's region depend on this one: it is dropped with it."""
        self.region.gradients.add(region)

    def given(self) -> list[Any]:
        """Returns the arguments, the region's own tensors, which the program may hold, too, and a gradient's feeds."""
        if not self._own and not self._early:
            return self.arguments
        return [*self.arguments, *self._own, *(self._tensor(slot) for slot in self._early if slot < 0)]

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Yields each of its tensors with its key for `get`, which is the same for calls that do the same elsewhere."""
        first = self.region.start.end
        for number, tensor in enumerate(self.arguments):
            yield from ((v, ("argument", number)) for v in identities(tensor))
        for number, tensor in self.tensors.items():
            yield from ((v, ("tensor", number - first)) for v in identities(tensor))

    def get(self, place: Any) -> Any:
        """Returns an argument, a result, or a tensor kept for the tapes."""
        kind, number = place
        return self.arguments[number] if kind == "argument" else self.tensors[number + self.region.start.end]

    def record(self, constant: Callable[[Any, Any], Any]) -> None:
        """Puts the region's operations on the active tapes."""
        self.keep()
        shapes: dict[int, int] = {}  # results of the region's operations that are constants, by the constant's id
        for step in self._recorded:
            if isinstance(step, FunctionRecord):
                step.record(self._tensor)
                continue
            args: list[Any] = []
            for i, slot in enumerate(step.slots):
                if slot == LIST:
                    slots, consts = step.lists[i]
                    args.append([
                        self._const(consts[j], shapes) if j in consts else self._tensor(s) for j, s in enumerate(slots)
                    ])  # fmt: skip
                else:
                    args.append(self._const(step.consts[i], shapes) if slot == CONST else self._tensor(slot))
            for number, out in enumerate(step.outputs, step.first):
                if out.const is not None:
                    shapes[id(out.const)] = number
            result = [self._tensor(step.first + n) for n in range(len(step.outputs))]
            self._constants += record_on_tapes(step, step.op or "", tuple(args), result, constant)

    def _const(self, const: Const, shapes: dict[int, int]) -> Any:
        """Returns the value of a constant, or the tensor that it is in `shapes`.

        Tapes take operations in an order that depends on which tensors of shapes they share: with one of its own in
        each place, a gradient's operations would come in another order than when the call was not skipped.
        """
        if id(const) in shapes:
            return self._tensor(shapes[id(const)])
        return const_at(const, self.externals).value

    def _tensor(self, slot: Any) -> Any:
        if isinstance(slot, tuple):
            spec, const = slot
            return new_lazy(Output(spec, const, None), -1, self._run)
        if slot in self._early:
            kind, place = self._early[slot]
            return self.arguments[place] if kind == "argument" else self._earlier[place[0]].get(place[1])
        if slot < 0:
            real = self.externals[-1 - slot]
            if self._aliases is None:  # eager tensors passed as lazy ones, which is how tapes know them
                lazies = [a for a in self.arguments if type(a) is LazyTensor and a._value is not None]
                self._aliases = {id(a._value): a for a in lazies}
            return self._aliases.get(id(real), real)
        tensor = self.tensors.get(slot)
        if tensor is None:  # its value is never needed: tapes hold those that they need
            tensor = self.tensors[slot] = new_lazy(settled(self._outputs[slot], self.externals), -1, None)
        return tensor
