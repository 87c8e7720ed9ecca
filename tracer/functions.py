"""Functions: TensorFlow's graph functions, inlined into blocks.

A call of a `tf.function` that only computes and reads variables is then followed like its operations; TensorFlow's `If`
and `While` become branches and loops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tracer.block import BRANCH, COUNT, FLAG, LOOP, Block, Branch, WhileLoop
from tracer.errors import Refused
from tracer.intercept import flat_outputs
from tracer.lazy import LazyTensor
from tracer.nodedef import run_through
from tracer.op import signature_of
from tracer.private import context
from tracer.spec import RESOURCE, Spec, intern_spec
from tracer.stage import Stage

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_IFS = ("If", "StatelessIf")
_WHILES = ("While", "StatelessWhile")

LIMIT = 1 << 30  # iterations: TensorFlow does not interrupt such a loop either


class Held(NamedTuple):
    """A variable passed to a function: the number of its handle's argument, and the spec of its value."""

    argument: int
    spec: Spec


class Call(NamedTuple):
    """An inlined function; `sources` has, per argument of the block, the function's, and whether to read it."""

    block: Block
    sources: tuple[tuple[int, bool], ...]
    outputs: tuple[Spec, ...]


def take_apart(name: str, specs: tuple[Spec, ...]) -> Call:
    """Returns the block of a function for arguments of these specs; raises `Refused` if it does more than compute."""
    stage = Stage()
    sources: list[tuple[int, bool]] = []
    held: dict[int, LazyTensor] = {}

    def value_of(handle: Held) -> LazyTensor:
        if handle.argument not in held:
            sources.append((handle.argument, True))
            held[handle.argument] = stage.argument(handle.spec)
        return held[handle.argument]

    given: list[Any] = []
    for k, spec in enumerate(specs):
        if spec.enum == RESOURCE:
            given.append(Held(k, _behind(spec)))
        else:
            sources.append((k, False))
            given.append(stage.argument(spec))
    with stage:
        results = _Writer(stage, value_of).write(name, given)
    if any(isinstance(r, Held) for r in results):
        raise Refused("a function returns a variable's handle")
    block = stage.block(results)
    return Call(block, tuple(sources), tuple(r._out.spec for r in results))


def _behind(spec: Spec) -> Spec:
    enum, shape = spec.handle[0] if spec.handle else (0, None)
    if shape is None or -1 in shape:
        raise Refused("a function is given a resource that is no variable of a fixed shape")
    return intern_spec(enum, shape)


class _Writer:
    """Stages a function's operations; `value_of` maps a `Held` to the tensor of its value."""

    def __init__(self, stage: Stage, value_of: Any) -> None:
        self.stage = stage
        self.value_of = value_of

    def write(self, name: str, given: list[Any]) -> list[Any]:
        """Stages the named function and returns its results for these arguments; raises `Refused`."""
        ctx = context.context()
        if not ctx.has_function(name):
            raise Refused(f"{name} is no function any more")
        definition = ctx.get_function_def(name)
        if definition.attr["_XlaMustCompile"].b:
            raise Refused(f"{name} is compiled by XLA")
        results = run_through(definition, given, self._operation)
        if results is None:
            raise Refused(f"the operations of {name} have no order")
        return results

    def _operation(self, node: Any, inputs: list[Any]) -> list[Any]:
        op = node.op
        if node.device and len(context.context().devices()) > 1:
            raise Refused("an operation is placed on a device")
        if op == "NoOp":
            return []
        if op == "Const":
            return [self.stage.constant(tf.make_ndarray(node.attr["value"].tensor), None)]
        if op in _CALLS:
            return self.write(node.attr["f"].func.name, inputs)
        if op in _IFS:
            return self._branch(node, inputs)
        if op in _WHILES:
            return self._loop(node, inputs)
        if op in ("Identity", "ReadVariableOp") and isinstance(inputs[0], Held):
            return [inputs[0] if op == "Identity" else self.value_of(inputs[0])]
        if op == "ResourceGather" and isinstance(inputs[0], Held):
            dims = node.attr["batch_dims"].i
            return [self.stage.fast("GatherV2", None, (self.value_of(inputs[0]), inputs[1], dims, "batch_dims", dims))]
        signature = signature_of(op)
        if signature is None or any(isinstance(v, Held) for v in inputs):
            raise Refused(f"{op} of a variable, or of TensorFlow's own")
        args: list[Any] = []
        attrs: list[Any] = []
        rest = list(inputs)
        for arg in signature.definition.input_arg:
            if arg.number_attr or arg.type_list_attr:
                held = node.attr[arg.number_attr or arg.type_list_attr]
                count = held.i if arg.number_attr else len(held.list.type)
                args.append(rest[:count])
                del rest[:count]
            else:
                args.append(rest.pop(0))
        derived = {name for arg in signature.definition.input_arg
                   for name in (arg.type_attr, arg.number_attr, arg.type_list_attr)}  # fmt: skip
        for definition in signature.definition.attr:
            if definition.name in node.attr and definition.name not in derived:
                attrs += [definition.name, _plain(node.attr[definition.name])]
        return flat_outputs(self.stage.fast(op, None, (*args, *attrs)))

    def _apart(self, name: str, given: list[Any]) -> tuple[Stage, list[Any]]:
        inside = Stage(self.stage)
        with inside:
            return inside, _Writer(inside, self.value_of).write(name, given)

    def _branch(self, node: Any, inputs: list[Any]) -> list[Any]:
        condition, *given = inputs
        if condition._out.spec is not FLAG:
            raise Refused("a condition is no bool")
        ways = [self._apart(node.attr[key].func.name, given) for key in ("then_branch", "else_branch")]
        blocks = [stage.block(results) for stage, results in ways]
        specs = [[r._out.spec for r in results] for _, results in ways]
        if specs[0] != specs[1]:
            raise Refused("the ways of a condition give results of different shapes")
        outer, places = joined([stage for stage, _ in ways])
        branch = Branch(blocks[0], blocks[1], places[0], places[1])
        return self.stage.structure(BRANCH, branch, [condition, *outer], specs[0])

    def _loop(self, node: Any, inputs: list[Any]) -> list[Any]:
        given: list[Any] = [v if isinstance(v, Held) else self.stage.stand_in(v._out) for v in inputs]
        testing, (going,) = self._apart(node.attr["cond"].func.name, given)
        turning, after = self._apart(node.attr["body"].func.name, given)
        states = [n for n, v in enumerate(given) if not isinstance(v, Held)]
        for n, (before, result) in enumerate(zip(given, after, strict=True)):
            if (result != before) if n not in states else (result._out.spec is not before._out.spec):
                raise Refused("a loop's state changes its shape")
        if going._out.spec is not FLAG:
            raise Refused("a condition is no bool")
        with turning:
            stuck = self.stage.constant(False, None)
        body = turning.block([*(after[n] for n in states), stuck])
        test = testing.block([going])
        outer, places = joined([testing, turning], [given[n] for n in states])
        loop = WhileLoop(test, body, places[0], places[1], tuple(range(len(states))), LIMIT, True)
        specs = [given[n]._out.spec for n in states]
        outer[: len(states)] = [inputs[n] for n in states]
        results = iter(self.stage.structure(LOOP, loop, outer, [*specs, COUNT, FLAG]))
        return [next(results) if n in states else v for n, v in enumerate(given)]


def joined(stages: list[Stage], first: list[Any] | None = None) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Returns the tensors that stages capture, after those of `first`, and per stage their positions."""
    outer = list(first or [])
    places = []
    for stage in stages:
        for given in stage.given:
            if not any(given is known for known in outer):
                outer.append(given)
        places.append(tuple(next(k for k, o in enumerate(outer) if o is given) for given in stage.given))
    return outer, places


def _plain(attr: Any) -> Any:
    """Returns an attribute's value as TensorFlow's fast path takes it; raises `Refused` for other kinds."""
    kind = attr.WhichOneof("value")
    if kind == "type":
        return attr.type
    if kind in ("i", "f", "b", "s"):
        return getattr(attr, kind)
    if kind == "shape":
        return tf.TensorShape(attr.shape)
    if kind == "list":
        for name in ("i", "f", "b", "s", "type"):
            if getattr(attr.list, name):
                return list(getattr(attr.list, name))
        if not attr.list.shape and not attr.list.func and not attr.list.tensor:
            return []
    raise Refused("an attribute is not supported")
