"""Callees: graph functions that segments may call, as they are: what they do, and for how long TensorFlow keeps them.

A call of a `tf.function` is issued by name, with its captured variables and tensors as further inputs, and so are the
forward and backward functions that a tape has TensorFlow derive from it. One that only computes, reads variables and
asserts is an operation like any other. Others run on their own: what they write, draw or print has a place in the
order of effects that a segment does not keep.

Relies on `AtomicFunction.call_flat`, in whose frame TensorFlow issues such a call, on its `function_type`, and on
`Context.add_function_def` and `remove_function`, which count references.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from typing import Any

import tensorflow as tf

from tracer.op import signature_of
from tracer.private import AtomicFunction, InterpolateRuntimeError, context
from tracer.spec import FOLDED, RESOURCE, STRING

CALLED = "a function is called"  # why its node is a host op

# Functions that one trace graph knows as callees: each is kept in TensorFlow's registry as long as the graph lives.
MAX_CALLEES = 128
# At one place of the program: a function that is made anew every few calls is not worth its segments.
MAX_AT_PLACE = 16
# Functions that were called once. One that is made anew for each call never comes back.
MAX_SEEN = 64
# Sizes of inputs for which the shapes of a function's results are inferred: 0.1 ms for each of its operations.
MAX_SIZES = 8
MAX_SHAPE = 16  # elements of a constant result that may be a shape
MAX_NODES = 20000  # operations in a function and those that it calls

# Stateful operations without effects: they read variables, or fail. A call of a function is what that function does.
_READS = frozenset({
    "Assert", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape",
})  # fmt: skip
_CALLS = frozenset({
    "Case", "If", "PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "StatelessIf", "StatelessWhile",
    "While",
})  # fmt: skip
# Declared stateless, though they run Python, or read files that Python may write.
_OUTSIDE = frozenset({"MatchingFiles", "PyFuncStateless", "ReadFile"})


class Refusal(Exception):
    """Why a function cannot be part of a segment; never leaves this module."""


class Callee:
    """A graph function as segments call it, kept in TensorFlow's registry as long as this object lives."""

    def __init__(self, function: Any) -> None:
        """Looks at what an `AtomicFunction` does; `refusal` says why it has to run on its own."""
        self.name = function.name.decode()
        self.refusal: str | None = None
        self.stateful = self.compiled = False
        self.results: tuple[Any, ...] = tuple(function.function_type.flat_outputs)
        # Results that are known without a call, by number: of the input with a variable's handle, ("handle", number);
        # of its variable's shape as a dtype, ("shape", number, enum); of a constant, ("constant", array).
        self.known: dict[int, tuple[Any, ...]] = {}
        self.computed: list[int] = []  # the numbers of the others
        self.sizes: dict[Any, Any] = {}  # the specs of its results, by those of its inputs (`rebuild`)
        self._function = weakref.ref(function)
        try:
            names = self._look_at(function)
        except Refusal as refusal:
            self.refusal = str(refusal)
            return
        ctx = context.context()
        for name in names:
            ctx.add_function_def(ctx.get_function_def(name))
        weakref.finalize(self, _let_go, ctx, names).atexit = False

    def _look_at(self, function: Any) -> list[str]:
        """Returns the names of the function and of all that it calls; raises `Refusal` if it does more than compute."""
        ctx = context.context()
        definition = function.definition
        self.stateful = bool(definition.signature.is_stateful)
        self.compiled = bool(definition.attr["_XlaMustCompile"].b)
        signature = definition.signature
        if len(signature.output_arg) != len(self.results):
            raise Refusal("it is not known what the function returns")
        self.known = _known_results(definition)
        self.computed = [number for number in range(len(self.results)) if number not in self.known]
        if not self.computed:
            raise Refusal("a function without results is called for its effects")
        if RESOURCE in {signature.output_arg[number].type for number in self.computed}:
            raise Refusal("a function makes a resource")
        if STRING in {arg.type for arg in (*signature.input_arg, *signature.output_arg)}:
            raise Refusal("strings cannot be compiled")
        names, ahead, count = {self.name: None}, [definition], 0
        while ahead:
            definition = ahead.pop()
            count += len(definition.node_def)
            if count > MAX_NODES:
                raise Refusal(f"a function has more than {MAX_NODES} operations")
            for node in definition.node_def:
                for name in _called(node):
                    if name not in names:
                        if not ctx.has_function(name):
                            raise Refusal(f"{name} is no function any more")
                        names[name] = None
                        ahead.append(ctx.get_function_def(name))
        return list(names)

    def explain(self, error: Exception) -> None:
        """Completes the error of a call as TensorFlow does, with the places at which its operations were traced."""
        function = self._function()
        if function is not None:
            InterpolateRuntimeError(function).__exit__(type(error), error, None)


def _known_results(definition: Any) -> dict[int, tuple[Any, ...]]:
    """Returns the results of a function that are known without a call; see `Callee.known`.

    A forward function hands on the variables from which it gathers rows, and a backward one their shapes.
    """
    signature = definition.signature
    arguments = {arg.name: number for number, arg in enumerate(signature.input_arg)}
    nodes = {node.name: node for node in definition.node_def}

    def known(tensor: str) -> tuple[Any, ...] | None:
        if tensor in arguments:
            number = arguments[tensor]
            return ("handle", number) if signature.input_arg[number].type == RESOURCE else None
        node = nodes[tensor.partition(":")[0]]
        if node.op == "Identity":
            return known(node.input[0])
        if node.op in ("While", "StatelessWhile"):
            number = int(tensor.rpartition(":")[2])
            body = context.context().get_function_def(node.attr["body"].func.name)
            if body.signature.output_arg[number].type != RESOURCE:
                return None
            return known(node.input[number]) if _known_results(body).get(number) == ("handle", number) else None
        if node.op == "VariableShape":
            held = known(node.input[0])
            return None if held is None else ("shape", held[1], node.attr["out_type"].type)
        if node.op == "Const" and node.attr["dtype"].type in FOLDED:
            value = tf.make_ndarray(node.attr["value"].tensor)
            return ("constant", value) if value.size <= MAX_SHAPE else None
        return None

    found = [known(definition.ret[arg.name]) for arg in signature.output_arg]
    return {number: result for number, result in enumerate(found) if result is not None}


def _called(node: Any) -> list[str]:
    """Returns the functions that an operation of a function calls; raises `Refusal` if it has effects."""
    signature = signature_of(node.op)
    if signature is None:  # a call, as an operation of the function's name
        return [node.op]
    names = [attr.func.name for attr in node.attr.values() if attr.HasField("func")]
    names += [func.name for attr in node.attr.values() for func in attr.list.func]
    if node.op in _CALLS:
        return names
    if names or node.op in _OUTSIDE or (signature.stateful and node.op not in _READS):
        raise Refusal(f"a function is called in which {node.op} has effects, or state, of its own")
    return []


def _let_go(ctx: Any, names: list[str]) -> None:
    for name in names:
        if ctx.has_function(name):
            ctx.remove_function(name)


class Callees:
    """The graph functions that the calls of one decorated function make."""

    def __init__(self) -> None:
        self._known: dict[str, Callee | str] = {}  # or why it runs on its own
        self._seen: OrderedDict[str, None] = OrderedDict()

    def note(self, name: str) -> None:
        """Notes that a function is called, which is worth being known from its second call on."""
        if name not in self._known:
            self._seen[name] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)

    def runs_alone(self, name: str) -> bool:
        """Returns whether a call runs on its own, as it is the function's first, or as the function is refused."""
        known = self._known.get(name)
        if known is not None:
            return isinstance(known, str)
        if name in self._seen and len(self._known) < MAX_CALLEES:  # `of` looks at it
            return False
        self.note(name)
        return True

    def of(self, name: str) -> Callee | None:
        """Returns the callee of this name, whose function is being called; None if it runs on its own."""
        if self.runs_alone(name):
            return None
        if name not in self._known:
            self._seen.pop(name, None)
            function = _calling(name)
            found = None if function is None else Callee(function)
            if found is None:
                self.refuse(name, "it is not called as a `tf.function` is")
            elif found.refusal is not None:
                self.refuse(name, found.refusal)
            else:
                self._known[name] = found
        known = self._known.get(name)
        return known if isinstance(known, Callee) else None

    def refuse(self, name: str, why: str) -> None:
        """Has a function run on its own from now on."""
        if len(self._known) < 2 * MAX_CALLEES:  # else it counts as one that is called for the first time
            self._known[name] = why

    def why(self, name: str) -> str:
        """Returns why a function runs on its own."""
        known = self._known.get(name)
        if known is None and len(self._known) >= MAX_CALLEES:
            return "functions keep changing"
        return known if isinstance(known, str) else CALLED


def _calling(name: str) -> Any:
    """Returns the `AtomicFunction` of this name that is being called on this thread, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is AtomicFunction.call_flat.__code__:
            function = frame.f_locals.get("self")
            return function if function is not None and function.name.decode() == name else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def named(attrs: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Returns the attributes of a function's call with its name: those of the operation that calls it in a graph."""
    return *attrs, "f", name


def name_in(attrs: tuple[Any, ...]) -> str | None:
    """Returns the function's name that `named` has added; None if it has not."""
    return attrs[-1] if attrs[-2:-1] == ("f",) else None
