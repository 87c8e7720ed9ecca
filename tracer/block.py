"""Block: operations written down without being run, with arguments and results; loops and branches made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracer.graph import Step
from tracer.op import Const, Structure
from tracer.private import types_pb2
from tracer.spec import Spec, intern_spec

# What puts tensors of any kind into one, and takes them out again. The latter fails where something else was packed: so
# of two ways that take things out, never both may be run.
PACK, UNPACK = "CompositeTensorVariantFromComponents", "CompositeTensorVariantToComponents"

# The operations that stand for them in traces and graphs.
LOOP, BRANCH, CALL = "StatelessWhile", "StatelessIf", "PartitionedCall"

STRUCTURES = (LOOP, BRANCH, CALL)

COUNT, FLAG = intern_spec(types_pb2.DT_INT32, ()), intern_spec(types_pb2.DT_BOOL, ())
PACKED = intern_spec(types_pb2.DT_VARIANT, ())


@dataclass(frozen=True, eq=False)
class Block(Structure):
    """Steps whose feeds are the arguments. A result is a slot as in a step, or a constant with its spec."""

    arguments: tuple[Spec, ...]
    steps: tuple[Step, ...]
    results: tuple[int | tuple[Const, Spec], ...]


@dataclass(frozen=True, eq=False)
class Branch(Structure):
    """Either of two blocks, which give results of the same specs, as the first input says."""

    then: Block
    other: Block
    then_inputs: tuple[int, ...]  # which inputs are the arguments of `then`, the first one not counted
    other_inputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Loop(Structure):
    """What turns while `test` holds: the inputs are all that `test` and `body` take, some of which the body changes.

    Before an iteration of which the body's last result, a bool, says that Python must run it, and after `limit`
    iterations, the loop stops. Its results are the states, how often it has turned, whether the test still holds, and
    of each state that is `saved` what it was before each iteration, in room for `limit` of them.
    """

    test: Block
    body: Block
    test_inputs: tuple[int, ...]  # which inputs are its arguments
    body_inputs: tuple[int, ...]
    states: tuple[int, ...]  # which inputs the body gives anew
    limit: int
    whole: bool = False  # whether all goes wrong where it stops before its end
    saved: tuple[int, ...] = ()  # which of the states are, by their numbers


@dataclass(eq=False)
class Recursion(Structure):
    """A function that calls itself; `block` is there once it is written down, with `Again` for the calls in it.

    `guard` is the branch in it that asks whether there is room for one more call: its second way is the function.
    """

    block: Block | None = None
    guard: Branch | None = None


@dataclass(frozen=True, eq=False)
class Again(Structure):
    """A call of a function that calls itself, from within such a function."""

    recursion: Recursion


def blocks_of(step: Step) -> list[Block]:
    """Returns the blocks that a step is made of, if it is a loop or a branch."""
    part: Any = step.attrs[1] if step.attrs and step.op in STRUCTURES else None
    if isinstance(part, Block):
        return [part]
    if isinstance(part, Recursion) and part.block is not None:
        return [part.block]
    if isinstance(part, Branch):
        return [part.then, part.other]
    return [part.test, part.body] if isinstance(part, Loop) else []


def steps_of(step: Step) -> list[Step]:
    """Returns the steps of all blocks inside of a step."""
    return [inner for block in blocks_of(step) for s in block.steps for inner in (s, *steps_of(s))]
