"""Executions: what Keras' training loop calls between the callbacks, with the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from coexec.api import Function
from coexec.training.audience import Audience, Logs

# Steps that are launched together: as many as these bounds allow, found by doubling.
MOST = 8
MAX_OPERATIONS = 2000  # all of a launch: what compiling takes
MAX_BYTES = 1 << 25  # of their batches, which are held meanwhile

PATIENCE = 16  # calls in a row that were nothing but steps followed as one, before more of them are launched together
MAX_DOUBT = 8  # calls in a row that were not, before steps are launched one by one again


# Each step of a launch has a frame of its own, which its operations are known by: all others there are Keras'.
_PLACES: list[Callable[..., Any]] = []
for _number in range(1, MOST + 1):
    _source = f"def step_{_number}(step, batch): return step(batch)"
    _names: dict[str, Any] = {}
    exec(compile(_source, "<steps of one launch>", "exec"), _names)
    _PLACES.append(_names[f"step_{_number}"])


def steps_of(model: keras.Model, phase: str) -> Callable[..., Any]:
    """Returns the function that makes the steps of a phase on some batches, and returns what the last one reports."""

    def steps(*batches: Any) -> Any:
        for place, batch in zip(_PLACES, batches, strict=False):
            result = place(getattr(model, f"{phase}_step"), batch)
        return result

    return steps


class Execution:
    """The steps of one phase, on as many batches a call as `steps_per_execution` says.

    While nobody looks in between, steps wait for others and are launched together. `flush` makes them.
    """

    def __init__(self, step: Function, steps: int, audience: Audience) -> None:
        self.step, self._control = step, step._controller
        self._steps, self._audience = steps, audience
        self.stats = step.stats
        self.explain = step.explain
        self._waiting: list[Any] = []
        self._running = False
        self._result: Any = None
        self._logs = Logs()
        self.together = 1
        self._steady = self._doubt = 0

    def __call__(self, batches: Iterator[Any]) -> Any:
        if self._audience.apart:
            try:
                self._waiting.append(_without_optionals(next(batches)))
                self._waiting += [_without_optionals(b) for _, b in zip(range(1, self._steps), batches, strict=False)]
            except BaseException:
                self.flush()
                raise
            if len(self._waiting) >= self.together:
                self._make_steps()
        else:
            self._run([_without_optionals(next(batches))])  # its StopIteration ends the epoch
            for _, batch in zip(range(1, self._steps), batches, strict=False):
                self._run([_without_optionals(batch)])
        return self._result if self._audience.listens or not isinstance(self._result, dict) else self._logs

    def flush(self) -> None:
        """Makes the steps that wait, and waits for the last; where one fails, those behind it are not made."""
        if not self._running:
            self._make_steps()
            self._control.land()

    def _make_steps(self) -> None:
        self._running = True
        try:
            while self._waiting:
                batches = self._waiting[: self.together]
                if len(batches) < self.together or not _are_alike(batches):
                    del batches[1:]
                del self._waiting[: len(batches)]
                self._run(batches)
        finally:
            self._running = False
            self._waiting.clear()

    def logs(self) -> dict[str, Any]:
        """Returns what the last step has reported, once it is made."""
        self.flush()
        return self._logs

    def _run(self, batches: list[Any]) -> None:
        self._control.ahead = self._audience.apart
        self._result = self.step(*batches)
        if not self._audience.listens and isinstance(self._result, dict):
            self._logs.clear()
            self._logs.update(self._result)
        if self._audience.apart and len(batches) == self.together:
            self._consider(batches)

    def _consider(self, batches: list[Any]) -> None:
        """Has more steps launched together where that is all that the last ones were; fewer if they are no more."""
        regions, operations = self._control.whole
        if regions != self.together:
            self._steady, self._doubt = 0, self._doubt + 1
            if self._doubt > MAX_DOUBT:
                self.together, self._doubt = 1, 0
            return
        self._steady, self._doubt = self._steady + 1, 0
        if self._steady < PATIENCE:
            return
        self._steady = 0
        more = 2 * self.together
        if more <= MOST and 2 * operations <= MAX_OPERATIONS and 2 * _size(batches) <= MAX_BYTES:
            self.together = more


class Prediction:
    """The same for `predict`, which hands over the batches and takes all results."""

    def __init__(self, step: Function) -> None:
        self.step = step
        self.stats = step.stats
        self.explain = step.explain

    def __call__(self, batches: Any) -> Any:
        results = [self.step(_without_optionals(batch)) for batch in batches]
        return results[0] if len(results) == 1 else keras.tree.map_structure(_joined, *results)


def _without_optionals(batch: Any) -> Any:
    """Returns a batch with None where the data of this batch have none."""
    return keras.tree.map_structure(lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch)


def _are_alike(batches: list[Any]) -> bool:
    """Whether these are tensors of the same shapes: steps on others are not made together."""
    known = None
    for batch in batches:
        parts = keras.tree.flatten(batch)
        if not all(part is None or isinstance(part, tf.Tensor) for part in parts):
            return False
        specs = [None if part is None else (part.dtype, part.shape.as_list()) for part in parts]
        if known is not None and specs != known:
            return False
        known = specs
    return True


def _size(batches: list[Any]) -> int:
    parts = [part for part in keras.tree.flatten(batches) if part is not None]
    return sum(part.shape.num_elements() * part.dtype.size for part in parts)


def _joined(*parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(parts, 0) if parts[0].shape.rank else tf.stack(parts)
