"""Array names: the arrays that a functional model was given, in an error for which it was given tensors made of them.

A functional model converts arrays itself, so Keras names them as they were given where code between its layers fails,
such as the check of a layer's input. Memoized calls get tensors in their place.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from tracer.private import KerasFunctional, inject_argument_info

_CALL = "call"
_START = f"Arguments received by {_CALL}:\n"


def name_arrays(error: Exception, given: tuple[Any, dict[str, Any]], taken: tuple[Any, dict[str, Any]]) -> None:
    """Has an error to which Keras has added a functional model's arguments name the `given` ones, not those `taken`."""
    (model, *_), named = taken
    if not isinstance(model, KerasFunctional) or not getattr(error, "_keras_call_info_injected", False):
        return
    if _is_of_another(error, model):
        return
    before, start, after = _message(error).rpartition(f"Arguments received by {type(model).__name__}.call():\n")
    old = _line("inputs", _inputs(taken))
    if not start or not after.startswith(old):
        return
    after = _line("inputs", _inputs(given)) + after[len(old) :]
    if len(taken[0]) < 4 and "mask" not in named:  # Keras looks for the masks of tensors only
        masks = tf.nest.map_structure(lambda _: None, _inputs(taken))
        after = after.replace(f"\n{_line('mask', masks)}", f"\n{_line('mask', None)}", 1)
    if isinstance(error, tf.errors.OpError):
        error._message = before + start + after
    else:
        error.args = (before + start + after, *error.args[1:])


def _is_of_another(error: Exception, model: Any) -> bool:
    """Returns whether an error came through another functional model in this one, whose arguments it may name."""
    at = error.__traceback__
    while at is not None:
        given = at.tb_frame.f_locals.get("args")
        if type(given) is tuple and given and given[0] is not model and isinstance(given[0], KerasFunctional):
            return True
        at = at.tb_next
    return False


def _inputs(arguments: tuple[Any, dict[str, Any]]) -> Any:
    args, kwargs = arguments
    return args[1] if len(args) > 1 else kwargs["inputs"]


def _message(error: Exception) -> str:
    return str(error.message if isinstance(error, tf.errors.OpError) else next(iter(error.args), ""))


def _line(name: str, value: Any) -> str:
    """Returns what Keras writes of one argument."""

    def failing(**_: Any) -> None:
        raise ValueError

    one = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    failing.__signature__ = inspect.Signature([one])  # type: ignore[attr-defined]
    try:
        inject_argument_info(failing, _CALL)(**{name: value})
    except ValueError as error:
        return _message(error).partition(_START)[2]
    return ""
