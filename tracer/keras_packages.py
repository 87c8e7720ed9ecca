"""Keras packages: the classes of Keras, and of Keras 2 (`tf_keras`) from when the program has imported it.

Keras 2 is the Keras of `tf.keras` under `TF_USE_LEGACY_KERAS=1`, and that of TensorFlow Probability, Transformers and
other libraries. It is never imported here.

Relies on tf_keras 2.18 to 2.21: `base_layer_utils.call_context()`, whose `in_call` and `_state` are replaced as layers
are entered and left; `autocast_variable._autocast_dtype.dtype`; `backend._DUMMY_EAGER_GRAPH.learning_phase_is_set`;
`backend_config._FLOATX`, `_EPSILON` and `_IMAGE_DATA_FORMAT`; `_eager_losses`, a list of each layer and thread, which
an empty one replaces as the outermost layer is entered; `object_registration._THREAD_LOCAL_CUSTOM_OBJECTS` and
`_GLOBAL_CUSTOM_OBJECTS`, by which names are looked up; the arguments of nodes, `call_args` and `call_kwargs`;
`traceback_utils.inject_argument_info_in_traceback`, as in Keras; `tf.compat.v2.__internal__.autograph.tf_convert`,
which metrics look up as their methods are called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from tracer.private import EagerTensor, KerasNode, code_inside, inject_argument_info, keras_tracking

NAMES = ("keras", "tf_keras")
MODULES = ("keras.", "tf_keras.")  # with what the modules of their classes begin
LOSSES = "_eager_losses"


class KerasClasses:
    """The classes of all packages known so far, as tuples for `isinstance`."""

    def __init__(self) -> None:
        self.layers: tuple[type, ...] = ()
        self.losses: tuple[type, ...] = ()
        self.models: tuple[type, ...] = ()
        self.stateful: tuple[type, ...] = ()  # layers, losses, metrics, optimizers: writes to their attributes are seen
        self.parts: tuple[type, ...] = ()  # what these are made of, whose attributes are watched in the same way
        self.symbolic: tuple[type, ...] = ()  # the graph of a functional model
        self.nodes: tuple[type, ...] = ()  # the calls in it, which hold arguments
        self.injecting: dict[int, Callable[..., Any]] = {}  # by the id of the code in which a layer runs its `call`

    def add(
        self, package: Any, optimizers: list[type], node: type, symbolic: list[type], inject: Callable[..., Any]
    ) -> None:
        """Adds the classes of a package; `inject` adds a layer's arguments to the errors of its `call`."""
        self.layers += (package.layers.Layer,)
        self.losses += (package.losses.Loss,)
        self.models += (package.Model,)
        self.stateful += (package.layers.Layer, package.losses.Loss, package.metrics.Metric, *optimizers)
        self.parts += (
            package.initializers.Initializer, package.regularizers.Regularizer, package.constraints.Constraint,
            package.optimizers.schedules.LearningRateSchedule,
        )  # fmt: skip
        self.symbolic += (node, *symbolic)
        self.nodes += (node,)
        self.injecting[id(code_inside(inject))] = inject


classes = KerasClasses()
classes.add(
    keras, [keras.optimizers.Optimizer], KerasNode, [keras.KerasTensor, keras_tracking.Tracker], inject_argument_info
)
classes.parts += (keras.random.SeedGenerator,)


_PLAIN = frozenset({type(None), bool, int, float, str})


class LegacyKeras:
    """Keras 2: what calls of its layers depend on besides their arguments and objects."""

    def __init__(self, package: Any) -> None:
        def part(path: str) -> Any:
            return importlib.import_module(f"{package.__name__}.src.{path}")

        backend, config = part("backend"), part("backend_config")
        self.package = package
        self._call_context = part("engine.base_layer_utils").call_context
        self._autocast = vars(part("mixed_precision.autocast_variable"))["_autocast_dtype"]
        self._config = vars(config)
        self._phase, self._learning_phase = vars(backend)["_DUMMY_EAGER_GRAPH"], backend.learning_phase
        registration = vars(part("saving.object_registration"))
        self._scope = registration["_THREAD_LOCAL_CUSTOM_OBJECTS"]
        self.custom_objects: dict[str, Any] = registration["_GLOBAL_CUSTOM_OBJECTS"]
        old: list[type] = [package.optimizers.legacy.Optimizer]
        classes.add(
            package,
            [package.optimizers.Optimizer, *old],
            part("engine.node").Node,
            [part("engine.keras_tensor").KerasTensor],
            part("utils.traceback_utils").inject_argument_info_in_traceback,
        )

    def surroundings(self, kept: list[Any]) -> tuple[Any, ...]:
        """Returns the part of `library.environment` that is of this package; objects by id, appended to `kept`."""
        call, config = self._call_context(), self._config
        parts = [
            call.in_call, getattr(self._autocast, "dtype", None),
            config["_EPSILON"], config["_FLOATX"], config["_IMAGE_DATA_FORMAT"],
        ]  # fmt: skip
        named = self._scope.__dict__
        if named:
            parts += [(name, id(value)) for name, value in named.items()]
            kept += named.values()
        given: list[tuple[str, Any]] = []
        if self._phase.learning_phase_is_set:
            given.append(("phase", self._learning_phase()))
        if call.in_call:
            for name, value in call._state.items():
                if name == "inputs":  # which only graphs of symbolic tensors ask for; may be a dict of them
                    continue
                if type(value) is dict:  # arguments that layers hand on; before tf_keras 2.20, each has its own entry
                    given += value.items()
                else:
                    given.append((name, value))
        for name, value in given:
            if type(value) in _PLAIN:
                parts.append((name, type(value), value))
            elif name == "layer" or type(value) is EagerTensor:
                parts.append((name, id(value)))
                kept.append(value)
            else:
                parts.append(object())  # equal to no other: what a layer hands on may have changed
        return tuple(parts)


legacy: LegacyKeras | None = None
_is_unknown = False  # whether Keras 2 is of a version that lacks what is relied on: then its calls are not memoized


def adopt_legacy() -> LegacyKeras | None:
    """Adds Keras 2 if the program has imported it, once; returns it if it was added now."""
    global legacy, _is_unknown
    package = sys.modules.get("tf_keras")
    if legacy is not None or package is None or _is_unknown or _is_being_imported(package):
        return None
    try:
        legacy = LegacyKeras(package)
    except (ImportError, AttributeError, LookupError, StopIteration):
        _is_unknown = True
    return legacy


def legacy_autograph() -> Any:
    """Returns the module in which Keras 2 looks `tf_convert` up."""
    return tf.compat.v2.__internal__.autograph


def _is_being_imported(package: ModuleType) -> bool:
    return bool(getattr(package.__spec__, "_initializing", False))
