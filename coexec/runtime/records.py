"""Records: what waits to be put on tapes, of one operation or of a library call that was jumped over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coexec.runtime.regions import Region
from tracer.graph import CONST, LIST, Step
from tracer.inputs import python_spec
from tracer.intercept import flat_outputs, record_gradient
from tracer.lazy import LazyTensor, new_lazy
from tracer.op import complete_attrs, signature_of
from tracer.private import EagerTensor, ops

Constant = Callable[[Any, Any], Any]  # makes a tensor of a Python value, of a dtype


class Entry:
    """One followed operation that tapes were to record: its step, its arguments and its result."""

    __slots__ = ("args", "op", "result", "step", "tapes")

    def __init__(self, step: Step, op: str, args: tuple[Any, ...], result: Any, tapes: tuple[int, ...]) -> None:
        self.step = step
        self.op = op
        # The program may change lists that it has given or got.
        self.args = tuple([list(value) if isinstance(value, list) else value for value in args]) if step.lists else args
        self.result = list(flat_outputs(result))
        self.tapes = tapes
        if step.closed is None:
            step.closed = bool(self.result) and not step.lists and all(map(_is_inside, step.slots, args))

    def identity(self) -> Any:
        """Returns what this did, as far as it does not follow from the tensors given."""
        return self.step

    def goes_into(self, region: Any) -> None:
        """Operations never end."""

    def given(self) -> list[Any]:
        """Returns the tensors given, but for constants: what those are is the step's."""
        step = self.step
        if step.lists:
            return [v for v, slot in self._inputs() if slot != CONST]
        pairs = zip(self.args, step.slots, strict=False)  # attributes follow
        return [v for v, slot in pairs if slot != CONST and isinstance(v, EagerTensor)]

    def constants(self) -> list[Any]:
        """Returns the tensors given that are constants."""
        return [v for v, slot in self._inputs() if slot == CONST]

    def _inputs(self) -> list[tuple[Any, int]]:
        """Returns the tensors given, each with where its step takes it from."""
        inputs: list[tuple[Any, int]] = []
        for i, (value, slot) in enumerate(zip(self.args, self.step.slots, strict=False)):  # attributes follow
            if slot == LIST:
                inputs += zip(value, self.step.lists[i][0], strict=True)
            else:
                inputs.append((value, slot))
        return [pair for pair in inputs if isinstance(pair[0], EagerTensor)]

    def find(self, value: Any) -> Any:
        """Returns what `get` finds this eager tensor by; None if it is not known here."""
        for number, tensor in enumerate(self._tensors()):
            if tensor is value or getattr(tensor, "_value", None) is value:
                return number
        return None

    def get(self, number: Any) -> Any:
        """Returns a tensor that was given or came out."""
        return self._tensors()[number]

    def _tensors(self) -> list[Any]:
        return [*(v for v, _ in self._inputs()), *self.result]

    def record(self, constant: Constant) -> None:
        """Puts the operation on the active tapes."""
        record_on_tapes(self.step, self.op, self.args, self.result, constant)


def _is_inside(slot: int, value: Any) -> bool:
    """Whether an input is a constant of its step, or a tensor that its segment has made: the step says which."""
    return slot == CONST or (slot >= 0 and type(value) is LazyTensor and value._out.const is None)


class RegionEntry:
    """What a region that was jumped over would have put on tapes."""

    __slots__ = (
        "_aliases", "_inputs", "_interior", "_outputs", "_own", "_recorded", "_run", "_tensors", "_values", "arguments",
        "base", "externals", "region", "tapes", "version",
    )  # fmt: skip

    def __init__(
        self, region: Region, arguments: Any, tensors: dict[int, Any], run: Any, tapes: tuple[int, ...]
    ) -> None:
        self.region = region
        self.version = region.version
        self.arguments: list[Any] = arguments.given
        self._inputs: list[Any] | None = arguments.tensors
        self._tensors = tensors  # by number: those that came out, and those that a tape holds
        self.base = run.cursor.base
        self.externals = run.cursor.externals
        self._run = run
        self._values: list[Any] | None = run.values
        # As they are now: regions learn.
        self._interior, self._outputs, self._recorded = region.interior, region.outputs, region.recorded
        self._own = region.own
        self.tapes = tapes
        self._aliases: dict[int, Any] | None = None

    @property
    def tensors(self) -> dict[int, Any]:
        """The tensors of its segment by their numbers: those that came in or out, and those that a tape holds.

        Those that came in are added when they are asked for: a known gradient asks for none.
        """
        for value in self._inputs or ():
            if type(value) is LazyTensor and value._out.const is None:
                self._tensors.setdefault(value._key - self.base, value)
        self._inputs = None
        return self._tensors

    def identity(self) -> Any:
        """Returns what this did, as far as it does not follow from the tensors given."""
        return self.region, self.version

    def keep(self) -> None:
        """Makes the tensors that a tape would hold: before their segment is carried out, so that they get values.

        Not before that: a known gradient needs none of them, and they are most of what a region on a tape would make.
        """
        values, self._values = self._values, None
        if values is None:
            return
        tensors = self.tensors
        for number in self._interior:
            if number not in tensors:
                lazy = new_lazy(self._outputs[number], self.base + number, self._run)
                values[number] = tensors[number] = lazy

    def constants(self) -> list[Any]:
        """Those given count as arguments, the others are the region's."""
        return []

    def goes_into(self, region: Region) -> None:
        """Lets a gradient's region end with this one."""
        self.region.gradients.add(region)

    def given(self) -> list[Any]:
        """Returns the tensors given, and those that the region holds: they may be some that the program has, too."""
        return [*self.arguments, *self._own] if self._own else self.arguments

    def find(self, value: Any) -> Any:
        """Returns what `get` finds this eager tensor by; None if it is not known here."""
        for number, tensor in enumerate(self.arguments):
            if tensor is value or getattr(tensor, "_value", None) is value:
                return "argument", number
        for number, tensor in self.tensors.items():
            if tensor._value is value:
                return "tensor", number
        return None

    def get(self, place: Any) -> Any:
        """Returns a tensor that was given, came out, or was kept for the tapes."""
        kind, number = place
        return self.arguments[number] if kind == "argument" else self.tensors[number]

    def record(self, constant: Callable[[Any, Any], Any]) -> None:
        """Puts the region's operations on the active tapes."""
        self.keep()
        for step in self._recorded:
            args: list[Any] = []
            for i, slot in enumerate(step.slots):
                if slot == LIST:
                    slots, consts = step.lists[i]
                    args.append([consts[j].value if j in consts else self._tensor(s) for j, s in enumerate(slots)])
                else:
                    args.append(step.consts[i].value if slot == CONST else self._tensor(slot))
            result = [self._tensor(step.first + n) for n in range(len(step.outputs))]
            record_on_tapes(step, step.op or "", tuple(args), result, constant)

    def _tensor(self, slot: int) -> Any:
        if slot < 0:
            real = self.externals[-1 - slot]
            if self._aliases is None:  # eager tensors that came in as lazy ones, as which the tapes know them
                lazies = [a for a in self.arguments if type(a) is LazyTensor and a._value is not None]
                self._aliases = {id(a._value): a for a in lazies}
            return self._aliases.get(id(real), real)
        tensor = self.tensors.get(slot)
        if tensor is None:  # nobody will ever ask for its value: tapes hold those that they need
            tensor = self.tensors[slot] = new_lazy(self._outputs[slot], -1, None)
        return tensor


def record_on_tapes(step: Step, op: str, args: tuple[Any, ...], result: Any, constant: Constant) -> None:
    """Puts a followed operation on the active tapes; `constant` makes tensors of Python values."""
    flat: list[Any] = []
    kinds: list[Any] = []
    for i in range(step.arity):
        value = args[i]
        if i in step.lists:
            value = [v if isinstance(v, EagerTensor) else tf.convert_to_tensor(v) for v in value]
            flat.extend(value)
            kinds.append(tuple(v._datatype_enum() for v in value))
            continue
        if not isinstance(value, EagerTensor):
            signature = signature_of(op)
            assert signature is not None
            value = constant(value, python_spec(signature, i, args, value).dtype)
        flat.append(value)
        kinds.append(value._datatype_enum())
    if step.tape is None:
        step.tape = complete_attrs(op, step.attrs, tuple(kinds))
    record_gradient(op, flat, step.tape, flat_outputs(result), ops.get_name_scope())
