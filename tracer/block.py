"""Block: operations staged without running them, with arguments and results; loops and branches built from blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracer.graph import Step
from tracer.op import Const, Structure
from tracer.private import types_pb2
from tracer.spec import Spec, intern_spec

# Pack tensors of any specs into one variant, and unpack it. Unpacking fails on a variant of other components, so of two
# branches that unpack, only the one that was chosen may run.
PACK, UNPACK = "CompositeTensorVariantFromComponents", "CompositeTensorVariantToComponents"

# The operations that represent structures in traces and graphs.
LOOP, BRANCH, CALL = "StatelessWhile", "StatelessIf", "PartitionedCall"

STRUCTURES = (LOOP, BRANCH, CALL)

COUNT, FLAG = intern_spec(types_pb2.DT_INT32, ()), intern_spec(types_pb2.DT_BOOL, ())
PACKED = intern_spec(types_pb2.DT_VARIANT, ())


@dataclass(frozen=True, eq=False)
class Block(Structure):
    """Steps whose feeds are the arguments. A result is a slot, numbered as in a step, or a constant with its spec."""

    arguments: tuple[Spec, ...]
    steps: tuple[Step, ...]
    results: tuple[int | tuple[Const, Spec], ...]


@dataclass(frozen=True, eq=False)
class Branch(Structure):
    """Two blocks with results of the same specs; the first input, a bool, selects which one runs."""

    then: Block
    other: Block
    then_inputs: tuple[int, ...]  # inputs passed to `then`, numbered without the predicate
    other_inputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class WhileLoop(Structure):
    """Runs `body` while `test` holds. The inputs are all arguments of `test` and `body`; the body updates the states.

    The loop stops early before an iteration whose last body result, a bool, says that Python must run it, and after
    `limit` iterations. Results: the states, the number of iterations, whether the test still holds, and for each state
    in `saved` its value before each iteration, in a buffer of `limit` entries.
    """

    test: Block
    body: Block
    test_inputs: tuple[int, ...]  # inputs passed to the test
    body_inputs: tuple[int, ...]
    states: tuple[int, ...]  # inputs that the body updates
    limit: int
    whole: bool = False  # whether stopping early makes the whole result invalid
    saved: tuple[int, ...] = ()  # states to save, by number


@dataclass(eq=False)
class RecursiveFunction(Structure):
    """A function that calls itself. `block` is set once its body is staged; calls in it are `RecursiveCall`s.

    `guard` is the branch that tests for room for one more call; its `other` block is the function.
    """

    block: Block | None = None
    guard: Branch | None = None


@dataclass(frozen=True, eq=False)
class RecursiveCall(Structure):
    """A recursive call, from within the body of the function it calls."""

    recursion: RecursiveFunction


def recursion_of(part: RecursiveFunction | RecursiveCall) -> RecursiveFunction:
    """Returns the function that is called."""
    return part.recursion if isinstance(part, RecursiveCall) else part


def blocks_of(step: Step) -> list[Block]:
    """Returns the blocks of a loop, branch or call; none for other steps."""
    part: Any = step.attrs[1] if step.attrs and step.op in STRUCTURES else None
    if isinstance(part, Block):
        return [part]
    if isinstance(part, RecursiveFunction) and part.block is not None:
        return [part.block]
    if isinstance(part, Branch):
        return [part.then, part.other]
    return [part.test, part.body] if isinstance(part, WhileLoop) else []


def steps_of(step: Step) -> list[Step]:
    """Returns the steps of all blocks inside a step, recursively."""
    return [inner for block in blocks_of(step) for s in block.steps for inner in (s, *steps_of(s))]
