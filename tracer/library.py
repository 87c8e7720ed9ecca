"""Library: the doors through which a program enters Keras and TensorFlow's gradients, as one call each.

A door is a method of a public class that asks the running thread's handler before it runs: `handler.library(function,
args, kwargs)` may follow the call as a whole. Without a handler, and inside of another door, it runs as it is.

Relies on: `keras.layers.Layer.__call__` and the like being looked up on the classes; Keras' thread-local global state
(`global_state.GLOBAL_STATE_TRACKER`, another one after `clear_session`), which holds what a call depends on beside its
arguments and objects.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tracer.effects import written
from tracer.intercept import current_handler
from tracer.private import context, global_state

_DOORS: list[tuple[type, str]] = [
    (keras.layers.Layer, "__call__"),
    (keras.losses.Loss, "__call__"),
    (keras.metrics.Metric, "__call__"),
    *((kind, name) for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
      for name in ("apply", "apply_gradients")),
    (tf.GradientTape, "gradient"),
]  # fmt: skip
# Metrics are updated and asked by methods of their own classes.
_DOORS += [
    (kind, name)
    for kind in vars(keras.metrics).values()
    if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)
    for name in ("update_state", "result")
]

# As they are without doors.
gradient = tf.GradientTape.gradient
layer_call = keras.layers.Layer.__call__
loss_call = keras.losses.Loss.__call__

# What Keras notes there that no value depends on: names.
_NAMES = frozenset({"name_scope_stack", "object_name_uids", "keras_name_uids", "_learning_phase"})

_originals: dict[tuple[type, str], Any] = {}


def install() -> None:
    """Puts the doors in place; they stay, and cost a call without a handler 0.2 us."""
    if _originals:
        return
    for kind, name in _DOORS:
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if (owner, name) not in _originals:
            original = vars(owner)[name]
            _originals[owner, name] = original
            setattr(owner, name, _door(original))
    # Writes that no `__setattr__` hears of: lists that grow.
    _originals[keras.layers.Layer, "add_loss"] = original = keras.layers.Layer.add_loss
    keras.layers.Layer.add_loss = _telling(original)


def uninstall() -> None:
    """Restores the methods."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _door(original: Any) -> Any:
    @functools.wraps(original)
    def door(*args: Any, **kwargs: Any) -> Any:
        handler = current_handler()
        if handler is None or not handler.open:
            return original(*args, **kwargs)
        return handler.library(original, args, kwargs)

    return door


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        written(self, original.__name__)
        return original(self, *args, **kwargs)

    return write


def environment(kept: list[Any]) -> tuple[Any, ...]:
    """Returns what a library call depends on beside its arguments and objects: scopes, policies, the device.

    Objects count by identity; they are added to `kept`, which must live as long as the answer is compared with others.
    """
    config = keras.config
    parts: list[Any] = [context.context().device_name, config.epsilon(), config.floatx(), config.image_data_format()]
    for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items():
        if value is None or name in _NAMES:
            continue
        if name == "autocast_scope":
            parts.append((name, value.dtype))
        elif name == "current_call_ctx":
            for key, given in vars(value).items():
                if key == "entry_layer" or isinstance(given, (bool, type(None))):
                    parts.append((key, given is not None, given is True))
                else:
                    parts.append((key, id(given)))
                    kept.append(given)
        else:
            parts.append((name, id(value)))
            kept.append(value)
    return tuple(parts)
