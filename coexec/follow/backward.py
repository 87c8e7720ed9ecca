"""Backward functions on tapes (`tf.custom_gradient`), the program's own and libraries', and their tape entries."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

from coexec.follow.tape_entry import TapeEntry
from coexec.follow.tensor_names import TensorNames
from tracer.faults import passes
from tracer.intercept import current_handler
from tracer.location import is_user
from tracer.private import EagerTensor
from tracer.spec import spec_of

_PLAIN = (bool, int, float, str, bytes, type(None))


class Backward:
    """A backward function: its Python runs in every gradient, even where the rest of the gradient is memoized."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @passes
    def __call__(self, *cotangents: Any) -> Any:
        """Calls the function, through the tapes' `around` if one is set for the running gradient."""
        handler = current_handler()
        around = None if handler is None or handler.tapes is None else handler.tapes.around
        return self.function(*cotangents) if around is None else around(self, cotangents)


class Closed(NamedTuple):
    """What a library's backward function is, apart from tensors: its code, and what it closes over.

    Library code only computes. So of two functions that are equal in this, and have the same tensors, either will do:
    `tf.nn.silu` makes a new one in each call. Source: `coexec/README.md`, Regions.
    """

    code: Any
    globals: Any  # by identity
    cells: tuple[Any, ...]  # of each: the number of a tensor, `Closed`, a plain value and its type, or items of these

    def make(self, tensors: list[Any]) -> Callable[..., Any]:
        """Returns such a function that closes over other tensors."""
        cells = tuple([CellType(_filled(cell, tensors)) for cell in self.cells])
        return FunctionType(self.code, self.globals.namespace, self.code.co_name, None, cells)


class _Namespace:
    """A module's globals, compared by identity."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Namespace) and self.namespace is other.namespace

    def __hash__(self) -> int:
        return id(self.namespace)


def closed(function: Any, tensors: list[Any]) -> Closed | None:
    """Returns what a backward function is if it is a library's; adds the tensors that it closes over.

    Returns None if it, or what it closes over, may be the program's.
    """
    if type(function) is not FunctionType or is_user(function.__code__, function.__globals__):
        return None
    if function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    cells = []
    for cell in function.__closure__ or ():
        try:
            found = _form(cell.cell_contents, tensors)
        except ValueError:  # it is empty
            return None
        if found is None:
            return None
        cells.append(found)
    return Closed(function.__code__, _Namespace(function.__globals__), tuple(cells))


def _form(value: Any, tensors: list[Any]) -> Any:
    """Returns the form of what a cell holds, or None if it is of no known kind; adds its tensors."""
    if isinstance(value, EagerTensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (list, tuple):
        items = tuple([_form(item, tensors) for item in value])
        return None if None in items else ("items", type(value), items)
    return closed(value, tensors)


def _filled(form: Any, tensors: Any) -> Any:
    """Returns what a cell holds, with these tensors."""
    if isinstance(form, Closed):
        return form.make(tensors)
    if form[0] == "tensor":
        return tensors[form[1]]
    if form[0] == "items":
        return form[1](_filled(item, tensors) for item in form[2])
    return form[1]


class FunctionEntry(TapeEntry):
    """The entry of an operation with its own backward function: inputs, outputs and that function."""

    __slots__ = ("_forward", "_inputs", "_original", "backward", "op", "outputs", "tapes")

    def __init__(
        self,
        original: Callable[..., Any],
        op: str,
        outputs: Any,
        inputs: Any,
        backward: Backward,
        forward: tuple[Any, ...],
        tapes: tuple[int, ...],
    ) -> None:
        self._original = original
        self.op = op
        self.outputs = list(outputs)
        self._inputs = list(inputs)
        self.backward = backward
        self._forward = forward
        self.tapes = tapes

    def results(self) -> list[Any]:
        """Returns the outputs of the operation."""
        return self.outputs

    def identity(self, names: TensorNames) -> Any:
        """Returns a key of the operation, apart from its tensors.

        The backward function is not part of it, as it runs each time.
        """
        return self.op, len(self.outputs), tuple([spec_of(v) for v in self.given()])

    def given(self) -> list[Any]:
        """Returns its input and output tensors."""
        return [v for v in self._tensors() if isinstance(v, EagerTensor)]

    def _tensors(self) -> list[Any]:
        return [*self._inputs, *self.outputs]

    def record(self, constant: Callable[[Any, Any], Any]) -> None:
        """Puts the operation on the active tapes."""
        self._original(self.op, self.outputs, self._inputs, self.backward, *self._forward)


class LibraryEntry(FunctionEntry):
    """The entry of an operation whose backward function is a library's: its calls are part of the gradient's Python."""

    __slots__ = ("_held", "closed")

    def __init__(
        self, original: Any, op: str, outputs: Any, inputs: Any, function: Any, forward: tuple[Any, ...],
        tapes: tuple[int, ...], known: Closed, held: list[Any],
    ) -> None:  # fmt: skip
        """`known`: what the function is; `held`: the tensors that it closes over."""
        super().__init__(original, op, outputs, inputs, function, forward, tapes)
        self.closed, self._held = known, held

    @property
    def step(self) -> LibraryEntry:
        """What observed calls list of it, where other entries have a step."""
        return self

    def identity(self, names: TensorNames) -> Any:
        """Returns a key of the operation and its function, apart from their tensors."""
        return *super().identity(names), self.closed

    def _tensors(self) -> list[Any]:
        return [*self._inputs, *self.outputs, *self._held]

    def noted(self, slot: Callable[[Any], Any]) -> FunctionRecord:
        """Returns what a memoized call repeats of it; `slot` says where in its segment a tensor is."""
        inputs, outputs, held = ([slot(v) for v in some] for some in (self._inputs, self.outputs, self._held))
        return FunctionRecord(self._original, self.op, self.closed, self._forward, inputs, outputs, held)


class FunctionRecord(NamedTuple):
    """What a memoized call records of an operation whose backward function is a library's."""

    original: Callable[..., Any]
    op: str
    closed: Closed
    forward: tuple[None, ...]  # further arguments of `original`
    inputs: list[Any]  # slots, or specs and constants
    outputs: list[Any]
    held: list[Any]

    def slots(self) -> list[Any]:
        """Returns the slots of all its tensors."""
        return [*self.inputs, *self.outputs, *self.held]

    def record(self, tensor: Callable[[Any], Any]) -> None:
        """Puts the operation on the active tapes, with the tensors at its slots."""
        inputs, outputs, held = ([tensor(slot) for slot in some] for some in (self.inputs, self.outputs, self.held))
        self.original(self.op, outputs, inputs, self.closed.make(held), *self.forward)
