"""Executions: the functions that Keras' training loop calls with the data, between callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from coexec.api import Function
from coexec.base.tuning import tuning
from coexec.training.keras.audience import Audience, Logs


@functools.cache
def _place(number: int) -> Callable[..., Any]:
    """Returns a function that runs step `number` of a launch; each has its own frame, as frames identify operations.

    All other frames there are Keras'.
    """
    names: dict[str, Any] = {}
    exec(compile(f"def step_{number}(step, batch): return step(batch)", "<steps of one launch>", "exec"), names)
    made: Callable[..., Any] = names[f"step_{number}"]
    return made


def steps_of(model: keras.Model, phase: str) -> Callable[..., Any]:
    """Returns a function that runs a phase's step on each of some batches and returns the last one's report."""

    def steps(*batches: Any) -> Any:
        for number, batch in enumerate(batches, 1):
            result = _place(number)(getattr(model, f"{phase}_step"), batch)
        return result

    return steps


class Execution:
    """The steps of one phase, on `steps_per_execution` batches per call.

    While nothing observes them in between, steps are deferred and launched together. `flush` runs those.
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
        """Runs the deferred steps, and waits for the last; if one fails, the steps after it are dropped."""
        if not self._running:
            self._make_steps()
            self._control.land()

    def _make_steps(self) -> None:
        """Runs the deferred steps, `together` per launch while batches are alike, else one by one."""
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
        """Returns the report of the last step, after running the deferred steps."""
        self.flush()
        return self._logs

    def _run(self, batches: list[Any]) -> None:
        self._control.ahead = self._audience.apart
        self._control.account.steps = len(batches)
        self._result = self.step(*batches)
        if not self._audience.listens and isinstance(self._result, dict):
            self._logs.clear()
            self._logs.update(self._result)
        if self._audience.apart and len(batches) == self.together:
            self._consider(batches)

    def _consider(self, batches: list[Any]) -> None:
        """Doubles the steps per launch while each step is one memoized call; resets to one if they cease to be."""
        regions, operations = self._control.whole
        if regions != self.together:
            self._steady, self._doubt = 0, self._doubt + 1
            if self._doubt > tuning.together_doubt:
                self.together, self._doubt = 1, 0
            return
        self._steady, self._doubt = self._steady + 1, 0
        if self._steady < tuning.together_patience:
            return
        self._steady = 0
        more = 2 * self.together
        fits = 2 * operations <= tuning.max_operations_together and 2 * _size(batches) <= tuning.max_bytes_together
        if more <= tuning.max_steps_together and fits:
            self.together = more


class Prediction:
    """The same for `predict`, which passes lists of batches, and needs all results."""

    def __init__(self, step: Function) -> None:
        self.step = step
        self.stats = step.stats
        self.explain = step.explain

    def __call__(self, batches: Any) -> Any:
        results = [self.step(_without_optionals(batch)) for batch in batches]
        return results[0] if len(results) == 1 else keras.tree.map_structure(_joined, *results)


def _without_optionals(batch: Any) -> Any:
    """Returns a batch with None for its `Optional` components, which the data lack."""
    return keras.tree.map_structure(lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch)


def _are_alike(batches: list[Any]) -> bool:
    """Whether batches consist of tensors of the same dtypes and shapes: only then are steps run together."""
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
