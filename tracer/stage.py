"""Stage: runs Python on tensors without values, and collects the operations it issues as a block.

Operations arrive through the hooks, like those of a running program, so a block holds exactly what eager TensorFlow
would run. Nothing is executed, and anything that needs a value is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tracer.block import PACK, PACKED, STRUCTURES, UNPACK, Block
from tracer.constants import constant_output
from tracer.derive import folded_variant, inferred_variant
from tracer.errors import Refused
from tracer.graph import CONST, LIST, Node, Step, Variant
from tracer.inputs import Unsupported, part_of, python_spec, settle, small
from tracer.intercept import handling
from tracer.lazy import LazyTensor, Output, has_attributes, new_lazy
from tracer.location import Location, call_stack
from tracer.op import Const, Signature, copied_attrs, freeze, signature_of
from tracer.private import EagerTensor, record
from tracer.slow_path import name_in_errors
from tracer.spec import RESOURCE, STRING, VARIANT, Spec

_RANDOM = ("StatelessRandom", "StatelessTruncated", "StatelessMultinomial", "StatelessShuffle")

MAX_OPERATIONS = 2000  # in one block: Python loops are unrolled

Fetch = Callable[[Any], LazyTensor | None]


class Stage:
    """The handler of a thread while it stages a block; `outer` is the enclosing stage.

    Tensors of the outer stage become arguments on first use. The outermost stage calls `captured` to map a tensor from
    outside, or a variable's handle, to an argument.
    """

    open = records = False
    watches = None
    tapes = None
    device: str | None = None

    def __init__(self, outer: Stage | None = None, captured: Fetch | None = None) -> None:
        self.outer = outer
        self.captured = captured
        self.arguments: list[LazyTensor] = []
        self.given: list[Any] = []  # the outer stage's tensor for each argument, or None
        self._step = Step(None, None, Node(0, "Entry", "entry", (), Location((), 0)), None, (), {}, {}, ())
        self._count = 0
        self._shown: dict[int, LazyTensor] = {}  # arguments by the id of the outer tensor

    def __enter__(self) -> Stage:
        self._around = [handling(self), record.stop_recording()]
        for manager in self._around:
            manager.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for manager in reversed(self._around):
            manager.__exit__(*raised)

    # Arguments and results.

    def argument(self, spec: Spec, given: Any = None) -> LazyTensor:
        """Adds an argument and returns it as a tensor."""
        lazy = new_lazy(Output(spec), -1 - len(self.arguments), self)
        self.arguments.append(lazy)
        self.given.append(given)
        return lazy

    def stand_in(self, out: Any) -> LazyTensor:
        """Returns a placeholder for a tensor that a loop's iterations update: it has the spec, but no value."""
        return new_lazy(Output(out.spec), CONST, self)

    def own(self, value: Any) -> Any:
        """Returns a tensor as one of this stage, adding an argument if needed; constants are returned unchanged."""
        if type(value) is LazyTensor and (value._run is self or value._out.const is not None):
            return value
        if self.outer is None:
            tensor = self.captured(value) if self.captured is not None else None
            if tensor is None:
                raise Refused("a tensor comes from where it cannot be guarded")
            return tensor
        outer = value if type(value) is LazyTensor and value._run is self.outer else self.outer.own(value)
        known = self._shown.get(id(outer))
        if known is None:
            known = self._shown[id(outer)] = self.argument(outer._out.spec, outer)
        return known

    def block(self, results: list[Any]) -> Block:
        """Returns the staged operations; `results` are tensors of this stage or of those outside it."""
        slots: list[Any] = []
        for value in results:
            if has_attributes(value):  # the tensors that the program gets would not have them
                raise Refused("a result has attributes, such as a mask of Keras'")
            tensor = self.own(value)
            const = tensor._out.const
            slots.append((const, tensor._out.spec) if const is not None else tensor._key)
        return Block(tuple(a._out.spec for a in self.arguments), tuple(self._step.chain()), tuple(slots))

    # Handler protocol, called by the hooks.

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Returns None: the next operation is not known."""
        return None

    def library(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a library call; its operations are staged one by one."""
        return function(*args, **kwargs)

    def aside(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """Refuses an operation that is placed on a device."""
        raise Refused("an operation is placed on a device")

    def fault(self, error: BaseException) -> bool:
        """Returns False: any error ends the staging."""
        return False

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Refuses operations issued by name: functions, and operations with unusual arguments."""
        raise Refused(f"{op.decode() if isinstance(op, bytes) else op} is issued by name")

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a tensor of a small Python value; refuses large ones."""
        out, _ = constant_output(value, dtype) if small(value) else (None, None)
        if out is None:
            raise Refused("a large constant is made")
        return new_lazy(out, -1, self)

    def index(self, index: tuple[tuple[int, ...], ...]) -> list[Any]:
        """Returns tensors of the bounds and strides of an index."""
        return [self.constant(list(part), None) for part in index]

    def force(self, lazy: LazyTensor) -> None:
        """Refuses to compute a value."""
        raise Refused("a value is read")

    def decide(self, lazy: LazyTensor, frame: Any) -> bool:
        """Refuses to decide a tensor's truth value."""
        raise Refused("a library asks for the truth of a tensor")

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Stages an operation and returns its outputs, or raises `Refused`. Variable reads become captures."""
        signature = signature_of(op)
        if signature is None:
            raise Refused(f"{op} is no operation")
        name = name_in_errors(signature, name, args)
        count = len(signature.inputs)
        args = settle(signature, (*args[:count], *_as_taken(op, signature, args[count:])))
        if op == "ReadVariableOp":
            return self.own(args[0])
        if op == "ResourceGather":
            dims = dict(zip(args[count::2], args[count + 1 :: 2], strict=True)).get("batch_dims") or 0
            return self.fast("GatherV2", name, (self.own(args[0]), args[1], dims, "batch_dims", dims))
        if signature.stateful or op.startswith(_RANDOM):
            raise Refused(f"{op} has effects, or draws random numbers")
        try:
            return self._write(op, name, signature, args[:count], args[count:])
        except (Unsupported, TypeError, ValueError, OverflowError) as error:
            raise Refused(f"{op} cannot be written down: {error}") from None

    def _write(self, op: str, name: Any, signature: Signature, inputs: Any, attrs: Any) -> Any:
        """Stages an operation; raises `Refused` if its output shapes depend on values."""
        freeze(attrs)
        slots: list[int] = []
        consts: dict[int, Const] = {}
        lists: dict[int, Any] = {}
        parts: list[Any] = []
        for i, (value, is_list) in enumerate(zip(inputs, signature.lists, strict=True)):
            if is_list:
                items = [self._input(op, signature, i, v, (*inputs, *attrs)) for v in value]
                lists[i] = tuple(s for s, _, _ in items), {j: c for j, (_, _, c) in enumerate(items) if c is not None}
                slots.append(LIST)
                parts.append(tuple(part for _, part, _ in items))
                continue
            slot, part, const = self._input(op, signature, i, value, (*inputs, *attrs))
            if const is not None:
                consts[i] = const
            slots.append(slot)
            parts.append(part)
        node = Node(self._count, op, "fast", copied_attrs(attrs), Location(call_stack()[0], 0))
        node.name = name
        with handling(None):
            variant = folded_variant(node, tuple(parts)) or inferred_variant(node, tuple(parts))
        if variant is None:
            raise Refused(f"{op}: its result's shape depends on values, or cannot be foreseen")
        if any(o.spec.enum in (STRING, VARIANT, RESOURCE) for o in variant.outputs):
            raise Refused(f"{op} gives something that cannot be compiled")
        return self._add(Step(self._step, op, node, variant, tuple(slots), consts, lists, ()))

    def structure(self, op: str, part: Any, inputs: list[Any], specs: list[Spec]) -> list[LazyTensor]:
        """Stages a loop, a branch or a recursive call, and returns its results."""
        assert op in STRUCTURES
        node = Node(self._count, op, "execute", ("structure", part), Location(call_stack()[0], 0))
        given = [self.own(v) for v in inputs]
        consts = {i: v._out.const for i, v in enumerate(given) if v._out.const is not None}
        slots = tuple(CONST if i in consts else v._key for i, v in enumerate(given))
        variant = Variant(
            tuple(v._out.spec for v in given), tuple(Output(s, None, node) for s in specs), list(range(len(specs)))
        )
        return list(self._add(Step(self._step, op, node, variant, slots, consts, {}, ())))

    def packed(self, values: list[Any]) -> LazyTensor:
        """Stages packing `values` into one opaque variant, and returns it."""
        given = [self.own(v) for v in values]
        consts = {i: v._out.const for i, v in enumerate(given) if v._out.const is not None}
        slots = tuple(CONST if i in consts else v._key for i, v in enumerate(given))
        specs = tuple(v._out.spec for v in given)
        attrs = ("metadata", b"", "Tcomponents", [spec.dtype for spec in specs])
        node = Node(self._count, PACK, "fast", attrs, Location(call_stack()[0], 0))
        variant = Variant((specs,), (Output(PACKED, None, node),), -1)
        made: LazyTensor = self._add(Step(self._step, PACK, node, variant, (LIST,), {}, {0: (slots, consts)}, ()))
        return made

    def unpacked(self, tensor: LazyTensor, specs: list[Spec]) -> list[LazyTensor]:
        """Stages unpacking such a variant into tensors of `specs`, and returns those."""
        attrs = ("metadata", b"", "Tcomponents", [spec.dtype for spec in specs])
        node = Node(self._count, UNPACK, "fast", attrs, Location(call_stack()[0], 0))
        outputs = tuple(Output(spec, None, node) for spec in specs)
        variant = Variant((PACKED,), outputs, list(range(len(specs))))
        return list(self._add(Step(self._step, UNPACK, node, variant, (tensor._key,), {}, {}, ())))

    @property
    def last(self) -> Step:
        """The step staged last."""
        return self._step

    def forget(self, last: Step) -> None:
        """Drops the steps staged after `last`; no tensor of theirs may still be in use."""
        self._step = last

    def _add(self, step: Step) -> Any:
        self._count += 1
        if self._count > MAX_OPERATIONS:
            raise Refused(f"more than {MAX_OPERATIONS} operations")
        self._step = step
        lazies = [new_lazy(out, step.first + n, self) for n, out in enumerate(step.outputs)]
        return lazies[0] if step.single else step.arrange(lazies)

    def _input(self, op: str, signature: Signature, i: int, value: Any, args: Any) -> tuple[int, Any, Const | None]:
        """Returns the slot of an input, its part of the variant key, and its constant, if it is one."""
        if isinstance(value, EagerTensor):
            tensor = self.own(value)
            const, spec = tensor._out.const, tensor._out.spec
            if spec.enum in (STRING, VARIANT, RESOURCE):
                raise Refused(f"{op} works on something that cannot be compiled")
            return (tensor._key if const is None else CONST), part_of(const, spec, op), const
        if not small(value):
            raise Refused("a large constant is made")
        spec = python_spec(signature, i, args, value)
        const = Const(value)
        return CONST, part_of(const, spec, op), const


# What the eager runtime takes for an attribute; for anything else, generated wrappers convert, and issue it by name.
_TAKEN: dict[str, tuple[type, ...]] = {
    "type": (tf.DType, int), "int": (int,), "float": (float, int), "bool": (bool, int), "string": (str, bytes),
}  # fmt: skip


def _as_taken(op: str, signature: Signature, attrs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an operation's attributes with the names of dtypes as dtypes; raises `Refused` for what is not taken."""
    kinds = {attr.name: attr.type for attr in signature.definition.attr}
    found = list(attrs)
    for n in range(1, len(found), 2):
        kind, value = kinds.get(found[n - 1], ""), found[n]
        if kind == "type" and isinstance(value, str):
            value = found[n] = tf.as_dtype(value)
        items = value if kind.startswith("list(") and isinstance(value, (list, tuple)) else [value]
        taken = _TAKEN.get(kind.removeprefix("list(").rstrip(")"))
        if taken is not None and any(item is not None and not isinstance(item, taken) for item in items):
            raise Refused(f"{op} is given {value!r} as {found[n - 1]}")
    return tuple(found)
