"""Audience: what observes the steps of a Keras training loop while it runs, and so which steps may be deferred."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tracer.private import functions_of_dataset
from tracer.spec import RESOURCE, VARIANT

# Operations of a data pipeline that run Python, which may observe anything.
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})

# They hook every batch, in order to save at some; with `save_freq="epoch"` they do nothing there.
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class Audience:
    """What observes the steps of one phase ("train" or "test") of a model; assumes an observer until set.

    `listens`: some callback hooks every batch, with its logs. `apart`: the data do not depend on the steps, so several
    batches may be fetched before the first of them is trained on.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.listens, self.apart = True, False

    def of(self, callbacks: list[Any], data: Any) -> tuple[bool, bool]:
        """Returns `listens` and `apart` for a training loop with these callbacks and data."""
        listens = any(hears_of_batches(callback, self.phase) for callback in callbacks)
        return listens, not listens and comes_apart(data)


def hears_of_batches(callback: Any, phase: str) -> bool:
    """Returns whether a callback acts when a batch of this phase begins or ends."""
    if type(callback) is QuietBar or (type(callback) in _SAVERS and callback.save_freq == "epoch"):
        return False
    hooks = [f"on_{phase}_batch_begin", f"on_{phase}_batch_end"]
    if phase == "train":
        hooks += ["on_batch_begin", "on_batch_end"]
    return any(_function(getattr(callback, h)) is not getattr(keras.callbacks.Callback, h) for h in hooks)


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def comes_apart(data: Any) -> bool:
    """Returns whether batches cannot depend on what a model does: no Python or variables take part in making them."""
    if isinstance(data, tf.data.Dataset):
        return not any(map(_looks_around, functions_of_dataset(data)))
    parts = [part for part in keras.tree.flatten(data) if part is not None]
    return bool(parts) and all(isinstance(part, (np.ndarray, tf.Tensor)) for part in parts)


def _looks_around(function: Any) -> bool:
    if any(tensor._datatype_enum() in (RESOURCE, VARIANT) for tensor in function.captured_inputs):
        return True
    graph = function.graph.as_graph_def()
    inner = (node for inner in graph.library.function for node in inner.node_def)
    return any(node.op in _PYTHON for nodes in (graph.node, inner) for node in nodes)


class Logs(dict[str, Any]):
    """The report of the last step; false, so that Keras does not read it for callbacks that ignore it.

    It is always the same object, which is updated when deferred steps run.
    """

    def __bool__(self) -> bool:
        return False


class QuietBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, except that it reads the logs only when it draws.

    Its presence also keeps Keras from calling batch hooks on a thread of its own.
    """

    def __init__(self, phase: str, read: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._phase, self._read = phase, read
        self._due = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Draws, if it is time."""
        self._advance(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Draws, if it is time; not for validation within `fit`, which is silent."""
        if self._phase == "test":
            self._advance(batch)

    def _advance(self, batch: int) -> None:
        self.seen = batch + 1
        if self.verbose == 1 and time.time() >= self._due:
            self._update_progbar(batch, dict(_numbers(self._read())))
            self._due = time.time() + self.progbar.interval


def _numbers(logs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what Keras would show: values as numbers where possible, nested dicts flattened."""
    for name, value in sorted(logs.items()):
        if isinstance(value, dict):
            yield from _numbers(value)
            continue
        try:
            yield name, float(value)
        except (TypeError, ValueError):
            yield name, value
