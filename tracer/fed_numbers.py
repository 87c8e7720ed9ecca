"""Fed numbers: numbers and arrays of Python's that operations are given anew in each call.

Those that are not written in the code that issues the operation are fed from the start: an attribute, an argument, a
schedule, data. Any call may bring another, and what follows the operation would then be learnt anew.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.graph import Step
from tracer.inputs import small
from tracer.lazy import Output
from tracer.library import is_call
from tracer.location import is_entry, is_tensorflow, is_user
from tracer.op import Const

MAX_KNOWN = 20_000  # code objects

# Inputs that XLA compiles to other code if it knows them: a square takes no logarithm.
_BETTER_KNOWN = frozenset({("Pow", 1)})

_GRADIENTS = inspect.getfile(tf.GradientTape)

# By the id of the code, which is kept alive: all numbers written in it, and those written as floats.
_known: dict[int, tuple[CodeType, frozenset[Any], frozenset[Any]]] = {}


# What stays the same while it is the same object.
_LASTING = frozenset({Output, int, float, bool, complex, str, bytes, *np.sctypeDict.values()} - {np.void, np.object_})


def note_fed(step: Step, feed: int, number: Any, tensor: Any) -> None:
    """Keeps a number that a step was fed, an output or Python value, and notes on the node whether it has changed."""
    node = step.node
    assert node is not None
    if number.__class__ is not Output and not small(number):  # always fed: keeping and comparing it would cost more
        return
    if number.__class__ not in _LASTING:
        if node.varies:
            return
        try:
            number = Const(number)
        except TypeError:  # one of a class of the program's
            node.varies = True
            return
    if not step.numbers:
        step.numbers = {}
    elif not node.varies and feed in step.numbers:
        node.varies = _const_of(step.numbers[feed][0]) != _const_of(number)
    step.numbers[feed] = number, tensor


def _const_of(number: Any) -> Any:
    return number.const if number.__class__ is Output else number if number.__class__ is Const else Const(number)


def is_same_number(known: Any, value: Any) -> bool:
    """Returns whether a number is the one that was fed last, or a float of the same value, which was computed anew."""
    if known is value:
        return True
    kind = value.__class__
    return (kind is float or kind is np.float64) and known.__class__ is kind and known == value and value != 0.0


def is_from_elsewhere(op: str, path: Any, const: Const) -> bool:
    """Returns whether this input, on which no shape depends, is a number or array that no code on the stack contains.

    Integers count in the line's own function alone, as nearly all code has a 0 and a 1. What calls of Keras' objects
    pass to operations is theirs to repeat, but not what goes through its functions and variables; gradients work
    numbers out from sizes.
    """
    value = np.asarray(const.value)
    if value.dtype.kind not in "fc" or (op, path) in _BETTER_KNOWN:
        return False
    items = tuple(value.ravel().tolist())
    key = items[0] if value.shape == () else items
    issued = through_keras = False  # whether the program's own code has been met, and Keras' before it
    frame: Any = sys._getframe(1)
    while frame is not None and not is_entry(code := frame.f_code):
        numbers, floats = _numbers(code)
        if is_user(code, frame.f_globals):
            if key in (floats if issued else numbers) or (len(items) == 2 and not issued and numbers.issuperset(items)):
                return False
            issued = True
        elif not issued:
            through_keras = through_keras or not is_tensorflow(code)
            if key in floats or code.co_filename == _GRADIENTS or (through_keras and is_call(code)):
                return False
        frame = frame.f_back
    return issued


def _numbers(code: CodeType) -> tuple[frozenset[Any], frozenset[Any]]:
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        floats = frozenset(_written(code.co_consts, (float, complex)))
        found = _known[id(code)] = code, floats.union(_written(code.co_consts, (int, float, complex))), floats
    return found[1:]


def _written(constants: tuple[Any, ...], kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yields the numbers among constants of code, and tuples of numbers, as which lists are written, too.

    Each also as it reads back from single precision.
    """
    for value in constants:
        if isinstance(value, tuple):
            yield from _written(value, kinds)
            if value and all(isinstance(item, (int, float)) for item in value):
                yield value
                yield tuple(map(_single, value))
        elif isinstance(value, kinds):
            yield value
            yield _single(value)


def _single(value: Any) -> Any:
    if isinstance(value, complex):
        return complex(np.complex64(value))
    with np.errstate(over="ignore"):
        return float(np.float32(value)) if abs(value) < 1 << 64 else value
