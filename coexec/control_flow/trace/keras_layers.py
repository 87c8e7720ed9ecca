"""Keras layers: calls of layers while a statement is traced, and which layers qualify.

Relies on `Layer._flatten_layers`, which returns a Keras layer and its sublayers, and on `Layer._called` and
`ResourceVariable._variable_read`, which record whether that was ever done.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from tracer.location import is_user

if TYPE_CHECKING:
    import keras


def note_call(layer: keras.layers.Layer) -> None:
    """Marks a layer and its sublayers as called, and their variables as read.

    The first call of a built layer has no other effects; with these marks set beforehand, it has none at all.
    """
    for inner in layer._flatten_layers():
        if not inner._called:
            inner._called = True
    for variable in layer.variables:
        if getattr(variable.value, "_variable_read", None) is False:
            variable.value._variable_read = True


def is_plain_keras(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer and its sublayers run only Keras' own code.

    Then an extra call, made to find out whether it has effects, is harmless.
    """
    for inner in layer._flatten_layers():
        held = [v for v in vars(inner).values() if isinstance(v, types.FunctionType)]
        if not type(inner).__module__.startswith("keras.") or any(is_user(v.__code__) for v in held):
            return False
    return True
