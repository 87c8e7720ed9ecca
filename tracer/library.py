"""Library: the doors through which a program enters Keras, TensorFlow's gradients and registered libraries.

A door is a method of a public class, or a function, that asks the running thread's handler before it runs:
`handler.library(function, args, kwargs)` may follow the call as a whole. Without a handler, and inside of another door,
it runs as it is. Functions that are one operation are asked about by `answers` instead.

Relies on: `keras.layers.Layer.__call__` and the like being looked up on the classes; Keras' thread-local global state
(`global_state.GLOBAL_STATE_TRACKER`, another one after `clear_session`), which holds what a call depends on beside its
arguments and objects.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import keras
import tensorflow as tf

from tracer.answers import answered
from tracer.effects import registered, written
from tracer.intercept import current_handler
from tracer.private import context, global_state, keras_config, ops

_DOORS: list[tuple[type, str]] = [
    (keras.layers.Layer, "__call__"),
    (keras.losses.Loss, "__call__"),
    (keras.metrics.Metric, "__call__"),
    *((kind, name) for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
      for name in ("apply", "apply_gradients")),
    (tf.GradientTape, "gradient"),
    *((keras.Model, f"{name}_step") for name in ("train", "test", "predict")),
]  # fmt: skip
# Metrics are updated and asked by methods of their own classes.
_DOORS += [
    (kind, name)
    for kind in vars(keras.metrics).values()
    if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)
    for name in ("update_state", "result")
]

# Functions of TensorFlow's that are many operations, or few behind much Python: that takes 10 to 20 us, a region 4.
# None that may fail for the values of tensors alone (`gather`): Keras notes in errors which layer was called, and how.
_FUNCTIONS = (
    "clip_by_global_norm", "clip_by_norm", "clip_by_value", "einsum", "norm", "one_hot", "ones", "pad", "range",
    "tensordot", "zeros", "linalg.global_norm", "linalg.norm", "math.reduce_logsumexp", "math.reduce_std",
    "math.reduce_variance", "nn.batch_normalization", "nn.l2_normalize", "nn.moments",
    "nn.sigmoid_cross_entropy_with_logits", "nn.softmax_cross_entropy_with_logits",
    *(f"debugging.assert_{what}" for what in ("all_finite", "equal", "greater", "greater_equal", "less", "less_equal",
      "near", "negative", "non_negative", "non_positive", "none_equal", "positive")),
)  # fmt: skip

# They depend on their arguments and the device alone, unless these hold objects: on none of Keras' scopes.
plain: frozenset[Any] = frozenset(functools.reduce(getattr, path.split("."), tf) for path in _FUNCTIONS)

# Of Keras' settings, what `keras.config` tells. Each of its functions would be a call, and each region asks for all.
_CONFIG: dict[str, Any] = vars(keras_config)

# As they are without doors.
gradient = tf.GradientTape.gradient
layer_call = keras.layers.Layer.__call__
loss_call = keras.losses.Loss.__call__

# What Keras notes there that no value depends on: names.
_NAMES = frozenset({"name_scope_stack", "object_name_uids", "keras_name_uids", "_learning_phase"})

_originals: dict[tuple[Any, str], Any] = {}
_doors: dict[Any, Any] = {}  # of functions, by what they lead to


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
    for path in _FUNCTIONS:
        door = _open(*_place_of(path))
        _name(door, path)
    for paths, function, door in answered():
        _name(door, paths[0])
        for path in paths:
            _put(*_place_of(path), function, door)
    # Writes that no `__setattr__` hears of: lists that grow.
    _originals[keras.layers.Layer, "add_loss"] = original = keras.layers.Layer.add_loss
    keras.layers.Layer.add_loss = _telling(original)


def _place_of(path: str) -> tuple[Any, str]:
    *parents, name = path.split(".")
    return functools.reduce(getattr, parents, tf), name


def _name(door: Any, path: str) -> None:
    # Where `pickle` finds it; the function itself stays where it was defined, for who has imported it from there.
    door.__module__, door.__qualname__ = "tensorflow", path


def _open(module: Any, name: str) -> Any:
    """Puts a door before a function, and returns it; names of one function have one door."""
    original = getattr(module, name)
    door = _doors.get(original)
    if door is None:
        door = _doors[original] = _door(original)
    _put(module, name, original, door)
    return door


def _put(module: Any, name: str, original: Any, door: Any) -> None:
    _originals[module, name] = original
    setattr(module, name, door)


def register(module: types.ModuleType) -> None:
    """Takes a module for a library: its code is nobody's whose every run matters, its functions are doors."""
    if module.__name__ in registered:
        return
    registered.add(module.__name__)
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_"):
            _open(module, name)


def pure_door(function: types.FunctionType) -> Any:
    """Returns a function of the program's with a door before it."""
    door = _door(function)
    _pure.add(function)
    return door


def behind(function: types.FunctionType) -> Any:
    """Returns what a door leads to; other functions as they are."""
    return function.__wrapped__ if function.__code__ is _DOOR else function  # type: ignore[attr-defined]


def is_pure(function: Any) -> bool:
    """Returns whether this is a function of the program's that has a door as it is to do nothing but compute."""
    return type(function) is types.FunctionType and function in _pure


def uninstall() -> None:
    """Restores methods and functions, and forgets registered libraries."""
    registered.clear()
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    _doors.clear()


def _door(original: Any) -> Any:
    @functools.wraps(original)
    def door(*args: Any, **kwargs: Any) -> Any:
        handler = current_handler()
        if handler is None or not handler.open:
            return original(*args, **kwargs)
        return handler.library(original, args, kwargs)

    return door


_DOOR = _door(layer_call).__code__  # all doors run the same
_pure: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


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
    context = vars(global_state.GLOBAL_STATE_TRACKER).get(_CALL)
    return (*_scopes(kept), *(() if context is None else _told(context, kept)))


def _scopes(kept: list[Any]) -> tuple[Any, ...]:
    """Returns the same without the call context, which layers write to as they run."""
    parts: list[Any] = [*_settings()]
    for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items():
        if value is None or name in _NAMES or name == _CALL:
            continue
        if name == "autocast_scope":
            parts.append((name, value.dtype))
        else:
            parts.append((name, id(value)))
            kept.append(value)
    return tuple(parts)


_CALL = "current_call_ctx"  # the one of these objects that is written to


def call_context() -> dict[str, Any] | None:
    """Returns what the outermost layer that runs, and those inside of it, have noted for the layers behind them.

    Each layer writes down there whether it took itself to train, for example; it counts for whoever is not told.
    """
    context = vars(global_state.GLOBAL_STATE_TRACKER).get(_CALL)
    return None if context is None else vars(context)


def _settings() -> tuple[Any, ...]:
    ctx = context.context()
    local, config = ctx._thread_local_data, _CONFIG
    no_seeds = ctx._seed is None  # then none are drawn for operations
    formats = config["_EPSILON"], config["_FLOATX"], config["_IMAGE_DATA_FORMAT"]
    return local.is_eager, local.device_name, *formats, no_seeds


def has_strategy() -> bool:
    """Returns whether a strategy of `tf.distribute` is in scope: what TensorFlow says, which takes long to say no."""
    return bool(ops.get_default_graph()._distribution_strategy_stack) and tf.distribute.has_strategy()


def _told(context: Any, kept: list[Any]) -> list[Any]:
    """Returns what is in a call context, as part of the environment."""
    parts: list[Any] = []
    for name, given in vars(context).items():
        if name == "entry_layer" or given is None or given is True or given is False:
            parts.append((name, given is not None, given is True))
        else:
            parts.append((name, id(given)))
            kept.append(given)
    return parts


class Surroundings:
    """The `environment` of one call after the other, found anew only where it is another; and the call context."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._environment: tuple[Any, ...] = ()
        self._kept: list[Any] = []
        self._held: tuple[Any, ...] = ()  # so that no other object gets an id among what was seen

    def environment(self, kept: list[Any]) -> tuple[Any, ...]:
        """Returns what the function of this name does."""
        state = vars(global_state.GLOBAL_STATE_TRACKER)
        seen = (*_settings(), *state, *map(id, state.values()))
        if seen != self._seen:
            self._kept, self._held = [], tuple(state.values())
            self._environment, self._seen = _scopes(self._kept), seen
        kept += self._kept
        context = state.get(_CALL)
        return self._environment if context is None else (*self._environment, *_told(context, kept))
