"""Wiring: the sources of an operation's inputs within the current segment, computed if no known step matches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tracer.block import STRUCTURES
from tracer.graph import CONST, DECIDES, DECIDES_AT_LENGTH, LIST, Node, Step
from tracer.inputs import (
    DATA_SHAPED,
    SHAPED_BY_CONSTANTS,
    Unsupported,
    indexes_known,
    overflows,
    part_of,
    python_spec,
    said_enum,
    small,
)
from tracer.intercept import as_constant, make_constant
from tracer.lazy import LazyTensor
from tracer.op import Const, Signature, signature_of
from tracer.private import CompositeTensor, EagerTensor
from tracer.spec import INTEGERS, RESOURCE, Spec, spec_of


class Wiring:
    """The slots, constants and feeds of one operation. `build` fills it in; `commit` adds its feeds to the segment."""

    def __init__(self, cursor: Any, node: Node, op: str, signature: Signature | None, args: tuple[Any, ...]) -> None:
        """`signature`: None for a function, for which `args` is empty."""
        self.cursor = cursor
        self.node = node
        self.op = op
        self.signature = signature
        self.args = args
        self.slots: list[int] = []
        self.consts: dict[int, Const] = {}
        self.outside: dict[Any, Spec] = {}  # constants from outside the call, by input or (input, item)
        self.known: set[Any] = set()  # those of them that an operation before has been fed
        self.shaping: set[Any] = set()  # constants that are fed, of a kind that a shape may depend on
        self.lists: dict[int, tuple[tuple[int, ...], dict[int, Const]]] = {}
        self.specs: list[Spec] = []
        self.new: dict[int, tuple[int, Any]] = {}  # feeds it adds, by tensor id: number and tensor
        self.made: list[Any] = []  # those of them made from constants
        self._dtypes: dict[str, int] = {}  # by the attribute that is the dtype of some inputs

    def build(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Computes the wiring, single inputs before lists, as the cursor matches them; returns the variant key."""
        parts: list[Any] = []
        fed = self.node.fed
        for i, value in enumerate(inputs):
            if self._is_list(i):
                self.slots.append(LIST)
                parts.append(None)
                continue
            if i == 1 and indexes_known(self.op, parts, self.outside):
                fed = frozenset()
            slot, part, const = self._input(i, value, i in fed or self.op in STRUCTURES)
            if const is not None:
                self.consts[i] = const
            self.slots.append(slot)
            parts.append(part)
        for i, value in enumerate(inputs):
            if self._is_list(i):
                if isinstance(value, (tf.Tensor, CompositeTensor)):  # iterating over one issues operations
                    raise Unsupported(f"a {type(value).__name__} in place of a list")
                items = [self._input((i, j), v, (i, j) in self.node.fed) for j, v in enumerate(value)]
                consts = {j: const for j, (_, _, const) in enumerate(items) if const is not None}
                self.lists[i] = (tuple(slot for slot, _, _ in items), consts)
                parts[i] = tuple(part for _, part, _ in items)
        return tuple(parts)

    def call(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Computes the wiring of a function's call, whose inputs are tensors.

        Constants are those alone that another function returns, for its backward function; others may change.
        """
        parts = []
        for i, value in enumerate(inputs):
            slot, part, _ = self._input(i, value, True) if not _is_returned(value) else (CONST, value._out.spec, None)
            if slot == CONST:
                self.consts[i] = value._out.const
            self.slots.append(slot)
            parts.append(part)
        return tuple(parts)

    def tensors(self) -> set[int]:
        """Returns the numbers of the segment's tensors among the inputs."""
        slots = [*self.slots, *(slot for listed, _ in self.lists.values() for slot in listed)]
        return {slot for slot in slots if slot >= 0}

    def numbers(self, parts: tuple[Any, ...]) -> dict[Any, Const]:
        """Returns the constants whose values no output shape depends on, by input or (input, item)."""
        found: dict[Any, Const] = {i: c for i, c in self.consts.items() if not isinstance(parts[i], Const)}
        for i, (_, consts) in self.lists.items():
            found.update({(i, j): c for j, c in consts.items() if not isinstance(parts[i][j], Const)})
        return found

    def keep_shaping(self, here: Step) -> bool:
        """Turns fed Python numbers that a shape here depends on back into constants from the next call on.

        A number that changes is fed if the output shapes of its own operation do not depend on it, but that output may
        become the shape of a later operation. Returns whether any were found upstream of this wiring. Numbers in front
        of an operation like `Unique` are data: as constants, they would make each batch a path of its own.
        """
        if self.op in DATA_SHAPED:
            return False
        found = False
        # Where its value decides the shapes of others, all its inputs may.
        by_value = self.node.host in (DECIDES, DECIDES_AT_LENGTH)
        deciding = None if by_value else SHAPED_BY_CONSTANTS.get(self.op)
        ahead = self.tensors() if deciding is None else {self.slots[i] for i in deciding if self.slots[i] >= 0}
        step: Step | None = here
        while step is not None and step.parent is not None and ahead:  # latest steps first
            mine = {slot for slot in ahead if slot >= step.first}
            ahead -= mine
            node = step.node
            if mine and node is not None and all(out.spec.enum in INTEGERS for out in step.outputs):
                # Those that another operation of this call has found before are still fed here.
                numbers = {path for path in node.fed | node.shaping if self._is_number(step, path)}
                if numbers:
                    found = True
                    node.shaping |= numbers
                    node.sizing |= numbers & node.data
                    node.fed = node.fed - numbers
                    step.parent.next = [s for s in step.parent.next if s.node is not node]
                    step.parent.hot = None
                ahead.update(slot for slot in step.slots if slot >= 0)
                ahead.update(slot for listed, _ in step.lists.values() for slot in listed if slot >= 0)
            step = step.parent
        return found

    def unfeed(self) -> bool:
        """Makes constants again of what is fed here, but decides the result's shape; returns whether that is anything.

        A gradient's operations are all at the line that asks for it: after other choices, the same turn of one may be
        another of them, of which the shape did not depend on what is fed.
        """
        self.node.fed = self.node.fed - self.shaping
        self.node.specific |= {frozenset(self.shaping)}
        return bool(self.shaping)

    def _is_number(self, step: Step, path: Any) -> bool:
        """Whether what is fed there was made from a Python value, or is one number.

        A batch of integers is neither: as a constant, it would make each batch a path of its own.
        """
        slots, at = (step.lists[path[0]][0], path[1]) if isinstance(path, tuple) else (step.slots, path)
        slot = slots[at] if at < len(slots) else CONST  # at another size, a list may have more items
        if not CONST < slot < 0:
            return False
        feed = self.cursor.externals[-1 - slot]
        return id(feed) in self.cursor.numbers or feed._num_elements() <= 1

    def commit(self) -> None:
        """Adds the new feeds to the cursor's segment."""
        new = [tensor for _, tensor in self.new.values()]
        self.cursor.externals.extend(new)
        self.cursor.handles.update(id(t) for t in new if t._datatype_enum() == RESOURCE)
        self.cursor.numbers.update(map(id, self.made))

    def _is_list(self, i: int) -> bool:
        return bool(self.args) and self.signature is not None and self.signature.lists[i]

    def _input(self, path: Any, value: Any, fed: bool) -> tuple[int, Any, Const | None]:
        """Returns an input's slot, its part of the variant key, and its constant, if it is one and not `fed`."""
        kind = type(value)
        if kind is LazyTensor:
            const, spec = value._out.const, value._out.spec
            self._check_dtype(path, spec)
            if const is not None:
                if value._out.node is None:
                    self.outside[path] = spec
                    if value._value is not None and self.cursor.place(value._value) is not None:
                        self.known.add(path)
                part = part_of(const, spec, self.op)
                if not fed:
                    return CONST, part, const
                self._note_shaping(path, part)
            elif value._value is None and 0 <= value._key - self.cursor.base < self.cursor.step.end:
                return value._key - self.cursor.base, spec, None
            if spec.open:
                spec = value.measured()
            return self._external(value.resolve(), spec, const is not None), spec, None
        if kind is EagerTensor:
            spec = spec_of(value)
            self._check_dtype(path, spec)
            const = self.cursor.constant_of(value)
            if const is not None:
                self.outside[path] = spec
                if self.cursor.place(value) is not None:
                    self.known.add(path)
                if isinstance(part := part_of(const, spec, self.op), Const):
                    if not fed:
                        return CONST, const, const
                    self._note_shaping(path, part)
            return self._external(value, spec), spec, None
        if not self.args or self.signature is None:
            raise Unsupported("a Python value is passed to a function")
        if overflows(value):
            raise Unsupported("a number beyond float32")
        i = path[0] if isinstance(path, tuple) else path
        spec = python_spec(self.signature, i, self.args, value)
        self.outside[path] = spec
        if small(value):
            const = as_constant(value, spec)
            part = part_of(const, spec, self.op)
            if not fed:
                return CONST, part, const
            self._note_shaping(path, part)
        return self._external(_converted(value, spec, self.signature, i, self.args), spec, True), spec, None

    def _note_shaping(self, path: Any, part: Any) -> None:
        if isinstance(part, Const) and path in self.node.fed:
            self.shaping.add(path)

    def _check_dtype(self, path: Any, spec: Spec) -> None:
        """Raises `Unsupported` if another input has to be of the same dtype and is not: the operation fails, here.

        Not for one issued by name, whose inputs are given without their lists.
        """
        if self.signature is not None and self.args and self.op not in STRUCTURES:
            name = self.signature.types[path[0] if isinstance(path, tuple) else path]
            if name and self._dtypes.setdefault(name, spec.enum) != spec.enum:
                raise Unsupported("inputs of several dtypes")

    def _external(self, real: Any, spec: Spec, made: bool = False) -> int:
        """Returns the slot of a feed, adding a new one; `made`: converted from a constant."""
        place: int | None = self.cursor.place(real)
        if place is not None:
            return -1 - place
        if id(real) not in self.new:
            self.new[id(real)] = len(self.cursor.externals) + len(self.new), real
            if made:
                self.made.append(real)
            self.specs.append(spec)
        return -1 - self.new[id(real)][0]


def _is_returned(value: Any) -> bool:
    """Whether this is a constant that a graph function returns."""
    out = value._out if type(value) is LazyTensor else None
    return out is not None and out.const is not None and out.node is not None and out.node.callee is not None


def _converted(value: Any, spec: Spec, signature: Signature, i: int, args: tuple[Any, ...]) -> Any:
    """Returns the tensor that a Python value becomes as input `i`.

    TensorFlow's cache of tensors made from numbers takes -0.0 for 0.0, and is asked with a dtype only if one is said.
    """
    said = value.__class__ is not float or value != 0.0 or said_enum(signature, i, args) is not None
    return make_constant(value, spec.dtype if said else None)


def number_fed(value: Any, spec: Spec, k: int, step: Step, args: tuple[Any, ...]) -> Any:
    """Returns the tensor that a Python value becomes if it is passed for feed `k` of a step."""
    if value.__class__ is not float or value != 0.0:
        return make_constant(value, spec.dtype)
    signature, i = signature_of(step.op or ""), _input_fed(k, step)
    if signature is None or i is None:
        return make_constant(value, spec.dtype)
    return _converted(value, spec, signature, i, args)


def is_given(value: Any, spec: Spec, k: int, step: Step, args: tuple[Any, ...]) -> bool:
    """Returns whether a Python value becomes a tensor of this spec if it is passed for feed `k` of a step."""
    given = _spec_given(value, k, step, args)
    if spec.__class__ is Spec or given is None:
        return given is spec
    return given.enum == spec.enum and len(given.shape) == len(spec.shape)  # sizes are compared with those before it


def _spec_given(value: Any, k: int, step: Step, args: tuple[Any, ...]) -> Spec | None:
    """Returns the spec of the tensor that a Python value becomes if it is passed for feed `k` of a step."""
    signature, i = signature_of(step.op or ""), _input_fed(k, step)
    return None if signature is None or i is None else python_spec(signature, i, args, value)


def _input_fed(k: int, step: Step) -> int | None:
    """Returns the first input of a step that takes feed `k`, alone or in a list."""
    for i, slot in enumerate(step.slots):
        if slot == -1 - k or (slot == LIST and -1 - k in step.lists[i][0]):
            return i
    return None
