"""Validation: a segment run twice, compiled and operation by operation, and the results compared."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.compile.executable import Executable
from coexec.launch.interpreter import replay
from coexec.launch.rounding import nudged, otherwise_rounded
from coexec.launch.segment import PendingSegment
from tracer.inputs import array_of
from tracer.intercept import handling
from tracer.private import context, core, gen_resource_variable_ops, record
from tracer.seeds import Pair, settled
from tracer.single_kernels import fast_execute_alone
from tracer.spec import RESOURCE, Spec

# By how much values may differ, relative to the tensor's scale: half the digits of their type, as compiled code sums in
# another order, and quotients and differences of sums lose digits.
TOLERANCE = {
    tf.float16: 4 * 2.0**-5, tf.bfloat16: 4 * 2.0**-3.5, tf.float32: 4 * 2.0**-11.5, tf.float64: 4 * 2.0**-26
}  # fmt: skip

# Below the least normal number nothing is compared: kernels may flush what is smaller to zero, and a decomposition that
# fails leaves memory as it was in the other triangle.
_LEAST = {tf.float32: np.finfo(np.float32).tiny, tf.float64: np.finfo(np.float64).tiny}

# The reason given for a launch that neither succeeded nor raised.
CHECKED = "its checks keep failing, though no operation fails"


class Declined(Exception):
    """Raised if the executable could not be launched, or one of its checks failed though no operation does."""


def validate(executable: Executable, pending: PendingSegment) -> str | None:
    """Runs a segment twice; returns how the executable differs from its operations, or None.

    Raises `Declined` if it does not launch. Afterwards tensors and variables hold the values of the operations, whose
    errors are raised as usual.
    """
    seeds = settled(pending.seeds)
    with handling(None), record.stop_recording():
        # On copies of the variables that it writes, so that an interrupt leaves the program's untouched.
        variables = [
            (n, feed, *spec.handle[0])
            for n, (feed, spec) in enumerate(zip(pending.feeds, executable.feeds, strict=True))
            if spec.enum == RESOURCE and spec.handle and n in executable.written
        ]
        before = {n: _read(handle, enum) for n, handle, enum, _ in variables}
        feeds = list(pending.feeds)
        for n, _, enum, shape in variables:
            feeds[n] = _variable(enum, shape, before[n])
        launched, reason = None, CHECKED
        try:
            launched = executable.launch(feeds, seeds)
        except Exception as error:  # a failing operation fails again in the replay
            reason = reason_of(error)
        compiled = [_contents(feeds[n], enum) for n, _, enum, _ in variables]
    replay(pending, seeds)
    if launched is None:
        raise Declined(reason)
    steps = {step.first + n: step for step in pending.last.chain() for n in range(len(step.outputs))}
    wanted = [number for number in executable.outputs if pending.values[number] is not None]
    given = dict(zip(executable.outputs, launched, strict=True))
    with handling(None), record.stop_recording():
        after = [_contents(handle, enum) for _, handle, enum, _ in variables]
        eager = [*(pending.values[number]._value for number in wanted), *after]
        places = [f"{steps[n].op} at {steps[n].node.location}" for n in wanted]  # type: ignore[union-attr]
        places += [f"a variable of shape {list(value.shape)} that it writes" for value in after]
        shaken: list[Any] | None = None
        for number, (one, other) in enumerate(zip(eager, [*(given[n] for n in wanted), *compiled], strict=True)):
            if _difference(one, other, []) is None:
                continue
            if shaken is None:
                for n, (feed, spec) in enumerate(zip(pending.feeds, executable.feeds, strict=True)):
                    if spec.enum == RESOURCE and spec.handle and n not in before:
                        before[n] = _read(feed, spec.handle[0][0])
                shakes = range(tuning.validation_shakes)
                runs = [
                    _shaken(pending, seeds, executable.feeds, variables, before, wanted, shake) for shake in shakes
                ]
                shaken = [run for run in runs if run is not None]
            problem = _difference(one, other, [run[number] for run in shaken])
            if problem:
                return f"{places[number]}: {problem}"
    return None


def reason_of(error: Exception) -> str:
    """Returns, in one line, why a launch failed."""
    return str(error).partition("\n")[0][:300] or type(error).__name__


def _shaken(
    pending: PendingSegment,
    seeds: list[Pair],
    specs: Sequence[Spec],
    variables: list[Any],
    before: dict[int, Any],
    wanted: list[int],
    shake: int,
) -> list[Any] | None:
    """Returns the results and writes of the operations with all last digits perturbed; None if they fail."""
    numbers = np.random.default_rng(shake)
    cells = [types.SimpleNamespace(_value=None) for _ in pending.values]
    feeds = []
    for n, (feed, spec) in enumerate(zip(pending.feeds, specs, strict=True)):
        value = before.get(n, feed)
        shaken = None if value is None else nudged(value, numbers)
        if n in before:
            enum, shape = spec.handle[0]
            shaken = _variable(enum, shape, shaken)
        feeds.append(shaken)
    try:
        again = dataclasses.replace(pending, feeds=feeds, values=cells, real=[], raw=[], done=0)
        replay(again, seeds, otherwise_rounded(numbers))
    except Exception:  # an assertion may depend on these digits
        return None
    return [*(cells[number]._value for number in wanted), *(_contents(feeds[n], enum) for n, _, enum, _ in variables)]


def _read(handle: Any, enum: int) -> Any:
    """Returns a variable's value, or None if it is uninitialized: a read of a newly created one gives shape [0]."""
    try:
        value = _run("ReadVariableOp", handle, "dtype", enum)
    except core._NotOkStatusException as error:
        if error.code == tf.errors.FAILED_PRECONDITION:
            return None
        raise core._status_to_exception(error) from None
    if value.shape == (0,) and not gen_resource_variable_ops.var_is_initialized_op(handle):
        return None
    return value


def _contents(handle: Any, enum: int) -> Any:
    """Returns a variable's value to compare, an empty one if it is uninitialized."""
    value = _read(handle, enum)
    return tf.zeros([0]) if value is None else value


def _variable(enum: int, shape: tuple[int, ...] | None, value: Any) -> Any:
    """Returns the handle of a new, private variable, uninitialized for a value of None."""
    name = context.anonymous_name()
    handle = _run("VarHandleOp", "container", "", "shared_name", name, "dtype", enum, "shape", shape)
    if value is not None:
        _run("AssignVariableOp", handle, value, "dtype", enum)
    return handle


def _run(op: str, *args: Any) -> Any:
    """Runs an operation as a kernel alone: those of variables are new for each shape."""
    return fast_execute_alone(context.context(), op, None, *args)


def _difference(eager: Any, compiled: Any, shaken: list[Any]) -> str | None:
    """Returns in words how two tensors differ beyond rounding and ties; None if they do not.

    `shaken`: results of the operations for inputs perturbed in their last digits.
    """
    if eager.dtype != compiled.dtype or eager.shape != compiled.shape:
        return f"{eager.dtype.name}{list(eager.shape)} one by one, {compiled.dtype.name}{list(compiled.shape)} compiled"
    if eager.dtype in (tf.string, tf.variant, tf.resource):
        return None
    floats = eager.dtype.is_floating or eager.dtype.is_complex
    one, other = (_sampled(array_of(t)) if floats else array_of(t) for t in (eager, compiled))
    shaken = [_sampled(array_of(s)) if floats else array_of(s) for s in shaken]
    if np.array_equal(one, other):  # as most are
        return None
    with np.errstate(all="ignore"):
        same = one == other
        if floats:
            tolerance = TOLERANCE.get(eager.dtype.real_dtype, 0.5)
            wide = np.complex128 if eager.dtype.is_complex else np.float64
            one, other = one.astype(wide), other.astype(wide)
            finite = np.abs(one[np.isfinite(one)])
            scale = finite.max() if finite.size else 0.0
            noise = max([np.abs(s.astype(wide) - one).max(initial=0.0) for s in shaken], default=0.0)
            same |= np.abs(one - other) <= tolerance * (np.abs(one) + scale) / 2 + tuning.validation_margin * noise
            same |= np.isnan(one) & np.isnan(other)
            same |= np.abs(one - other) < _LEAST.get(eager.dtype.real_dtype, 0.0)
        elif any(not np.array_equal(one, s) for s in shaken):
            return None  # decided by rounding
    wrong = int(same.size - np.count_nonzero(same))
    if 100 * wrong <= tuning.validation_ties * same.size:
        return None
    first = tuple(int(i) for i in np.argwhere(~same)[0])
    there = [*first] if one.ndim == len(eager.shape) else "one"
    return f"{wrong} of {same.size} values differ, at {there} {one[first]} one by one, {other[first]} compiled"


def _sampled(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array, or evenly spaced values of a large one: to compare 13 million takes a second."""
    if array.size <= tuning.validated_numbers:
        return array
    return array.reshape(-1)[:: -(-array.size // tuning.validated_numbers) | 1]  # odd: not of one column
