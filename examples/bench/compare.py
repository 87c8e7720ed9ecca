"""Compares two runs of a program, step by step: what each step returned and the state it left.

What differs only in kind is the same here: a number may be Python's, NumPy's or a tensor. What cannot be read, like a
symbolic tensor that a trace left behind, is a difference and not an error.
"""

import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from examples.bench.rows import without_root
from examples.programs import Training

# Of a larger array, so many elements are kept of every step but the last: a model's weights once for each step would be
# most of the memory that is measured.
SAMPLE = 1024
LONGEST_REASON = 160
# Lines of an error's message that say where and not what.
ELSEWHERE = re.compile(r"\[\[|\[Op:|\^|File |The op is created|Stack trace")


@dataclass(frozen=True)
class Numbers:
    """An array's shape and its elements, or a sample of them."""

    shape: tuple[int, ...]
    values: np.ndarray = field(repr=False)

    def __str__(self) -> str:
        return f"{self.values.item()!r}" if self.shape == () else f"an array {list(self.shape)}"


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that there is no reading of."""

    why: str

    def __str__(self) -> str:
        return self.why


Leaves = dict[str, Any]
MISSING = "nothing"  # and a text that is the value of something has quotes


def leaves(value: Any, name: str, most: int | None = None) -> Leaves:
    """All parts of `value` by their path from `name`: `Numbers`, and what has no numbers as text."""
    return dict(parts(value, name, most, ()))


def parts(value: Any, path: str, most: int | None, inside: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The paths and parts of `value`, each container's length before its items."""
    if id(value) in inside:
        return
    inside += (id(value),)
    if isinstance(value, (tf.Tensor, tf.Variable, keras.Variable, np.ndarray, np.generic, bool, int, float, complex)):
        yield path, numbers(value, most)
        return
    if isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    elif isinstance(value, random.Random):
        value = value.getstate()
    elif isinstance(value, tf.random.Generator):
        value = value.state
    elif isinstance(value, (keras.layers.Layer, keras.optimizers.Optimizer)):
        value = value.variables
    elif tf.is_tensor(value) and not isinstance(value, tf.Tensor):  # ragged, sparse, extension types
        value = tf.nest.flatten(value, expand_composites=True)

    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (set, frozenset)):
        items = [(f"[{n}]", item) for n, item in enumerate(sorted(value, key=repr))]
    elif isinstance(value, (list, tuple, deque)):
        items = [(f"[{n}]", item) for n, item in enumerate(value)]
    elif isinstance(value, (tf.Tensor, tf.Variable)):
        items = [("", value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        items = [(f".{key}", item) for key, item in vars(value).items()]
    else:
        yield path, re.sub(r" at 0x\w+", "", repr(value))
        return
    if isinstance(value, (Mapping, set, frozenset, list, tuple, deque)):
        yield f"len({path})", numbers(len(items), None)
    for step, item in items:
        yield from parts(item, path + step, most, inside)


def numbers(value: Any, most: int | None) -> Numbers | Unreadable:
    """The elements of a number, an array, a tensor or a variable; at most so many of them, evenly spread."""
    try:
        found = np.array(value.numpy() if hasattr(value, "numpy") else value)
    except Exception as error:  # symbolic tensors raise errors of several kinds
        symbolic = isinstance(value, tf.Tensor) and hasattr(value, "graph")
        return Unreadable("a symbolic tensor of a trace" if symbolic else f"unreadable, {reason(error)}")
    if most is not None and found.size > most:
        return Numbers(found.shape, found.reshape(-1)[:: -(-found.size // most)])
    return Numbers(found.shape, found)


def difference(eager: Leaves, other: Leaves, rtol: float, atol: float, redrawn: Leaves | None = None) -> str | None:
    """The first part of `other` that is not eager's, in words; None if there is none.

    `redrawn` is of an eager run with other random numbers: what is another there may be another here.
    """
    for path, right in eager.items():
        # Far below the tolerance: what depends a little on the numbers in one run may do so more in another.
        free = redrawn is not None and not same(right, redrawn.get(path, MISSING), rtol / 100, atol / 100)
        mine = other.get(path, MISSING)
        if isinstance(mine, Unreadable) or not (free or same(right, mine, rtol, atol)):
            return f"{path}: {in_words(right, mine)}"
    if redrawn is None:
        for path, mine in other.items():
            if path not in eager:
                return f"{path}: {in_words(MISSING, mine)}"
    return None


def same(eager: Any, other: Any, rtol: float, atol: float) -> bool:
    """Whether two parts are alike: floats within the tolerance, all else exactly."""
    if not isinstance(eager, Numbers) or not isinstance(other, Numbers):
        return eager == other and not isinstance(eager, Unreadable)
    if eager.shape != other.shape:
        return False
    right, mine = comparable(eager.values), comparable(other.values)
    if right.dtype.kind not in "fc" and mine.dtype.kind not in "fc":
        return np.array_equal(right, mine)
    if not all(array.dtype.kind in "biufc" for array in (right, mine)):
        return False
    return bool(np.allclose(mine, right, rtol=rtol, atol=atol, equal_nan=True))


def comparable(values: np.ndarray) -> np.ndarray:
    """`values`; bfloat16 and its like, which NumPy does not know, as float32."""
    return values.astype(np.float32) if values.dtype.kind == "V" or values.dtype == np.float16 else values


def in_words(eager: Any, other: Any) -> str:
    """How two parts differ: for arrays of one shape, by how much."""
    if isinstance(eager, Numbers) and isinstance(other, Numbers) and eager.shape == other.shape and eager.shape:
        right, mine = comparable(eager.values), comparable(other.values)
        if right.dtype.kind in "biufc" and mine.dtype.kind in "biufc":
            off = np.abs(np.subtract(mine, right, dtype=np.result_type(mine, right, np.float32)))
            return f"{other} that is off by up to {np.max(off):.2g}"
    return f"eager has {eager}, here is {other}"


@dataclass
class Course:
    """What the first steps of a training did."""

    training: Training
    losses: list[Leaves] = field(default_factory=list)
    states: list[Leaves] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: str | None = None  # why there are no more steps
    last: Leaves = field(default_factory=dict)  # the whole state at the end, where the others are samples

    def step(self) -> None:
        """Makes a step, up to where its losses can be read, and notes what came of it."""
        start = time.perf_counter()
        losses = leaves(self.training.step(), "losses")
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(losses)
        self.states.append(self.state(SAMPLE))

    def state(self, most: int | None = None) -> Leaves:
        """The state after the last step."""
        try:
            return leaves(self.training.state(), "state", most)
        except Exception as error:  # a state function may compute, on what happens to be symbolic
            return {"state": Unreadable(f"unreadable, {reason(error)}")}

    def run(self, steps: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """Makes the steps; the error of one that fails is kept."""
        for _ in range(steps):
            if not go_on():
                break
            try:
                self.step()
            except Exception as error:
                self.error = reason(error)
                break


def verdict(eager: Course, other: Course, rtol: float, atol: float, redrawn: Course | None = None) -> str | None:
    """What is wrong with a course, as `wrong from step 2: where` or `fails: why`; None if it is eager's so far.

    With `redrawn`, an eager course with other random numbers, it need not have eager's random numbers.
    """
    made = len(other.losses)
    for number in range(min(made, len(eager.losses))):
        for what in ("losses", "states"):
            right, mine = getattr(eager, what)[number], getattr(other, what)[number]
            # Where the redrawn run came no further, all may be another.
            drawn = None if redrawn is None else dict(enumerate(getattr(redrawn, what))).get(number, {})
            found = difference(right, mine, rtol, atol, drawn)
            if found:
                return f"wrong from step {number + 1}: {found}"
    if other.error is not None:
        return f"fails: {other.error}" if made == 0 else f"fails in step {made + 1}: {other.error}"
    if other.last and eager.last and made == len(eager.losses):
        found = difference(eager.last, other.last, rtol, atol, redrawn and redrawn.last)
        if found:
            return f"wrong from step {made}: {found}"
    return None


def unreadable(course: Course) -> str | None:
    """What there is in a course that nothing can be compared with; None if all can be."""
    for found in (*course.losses, *course.states):
        for path, part in found.items():
            if isinstance(part, Unreadable):
                return f"has {part} at {path}"
    return None


def reason(error: BaseException) -> str:
    """The line of an error's message that says what went wrong, shortened."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not ELSEWHERE.match(line)]
    # An operation's error says first what it is and then where it was; a traced function's error the other way round.
    line = (lines[0] if isinstance(error, tf.errors.OpError) else lines[-1]) if lines else ""
    line = re.sub(r"\{\{.*?\}\} ?|\[_Xla[^]]*\]|\[Op:\w*\]|__inference_|(?<=\w)_\d+(?=\W)|, ?name: $", "", line).strip()
    kind = type(error).__name__
    line = without_root(line if line.startswith(kind) else f"{kind}: {line}")
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 4].rstrip() + " ..."
