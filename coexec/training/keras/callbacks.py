"""Callbacks: what Keras' callbacks need, and their state, which is saved with everything else."""

from __future__ import annotations

import copy
import importlib.util
import types
from typing import Any

import keras
import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray)
_GIVEN = ("model", "_model", "params", "validation_data")  # set by the loop on every callback


def check_callbacks(callbacks: list[Any]) -> None:
    """Raises ImportError if a callback needs a missing package: before training, not in its first epoch."""
    if any(isinstance(c, keras.callbacks.TensorBoard) for c in callbacks):
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError("keras.callbacks.TensorBoard needs the package tensorboard: pip install tensorboard")


class CallbackStates:
    """The attributes of callbacks that are plain values: best losses and weights, patience counts, histories."""

    def __init__(self, callbacks: list[keras.callbacks.Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns each callback's class name and state, from its own `state_dict` if it has one."""
        return [(type(c).__name__, _state_of(c)) for c in self._callbacks]

    def load_state_dict(self, states: list[tuple[str, dict[str, Any]]]) -> None:
        """Restores the states, to callbacks in the same order; raises ValueError if their classes differ."""
        names, mine = [name for name, _ in states], [type(c).__name__ for c in self._callbacks]
        if names != mine:
            raise ValueError(f"the callbacks were {names}, and are {mine}; give the ones that were there then")
        for callback, (_, state) in zip(self._callbacks, states, strict=True):
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state)
            else:
                vars(callback).update(state)


def _state_of(callback: Any) -> dict[str, Any]:
    if hasattr(callback, "state_dict"):
        state: dict[str, Any] = callback.state_dict()
        return state
    return {n: copy.deepcopy(v) for n, v in vars(callback).items() if n not in _GIVEN and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, types.FunctionType):  # Keras' own, such as the comparison of a monitored value, chosen once
        return value.__module__.startswith("keras.") and "<" not in value.__qualname__
    return isinstance(value, _PLAIN)
