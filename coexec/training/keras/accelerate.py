"""Accelerate: makes a Keras model's `fit`, `evaluate` and `predict` run co-executed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import keras
import tensorflow as tf

from coexec.api import Function
from coexec.base.options import Options
from coexec.training.keras.audience import Audience, QuietBar
from coexec.training.keras.callbacks import check_callbacks
from coexec.training.keras.executions import Execution, Prediction, steps_of
from tracer import hooks

Model = TypeVar("Model", bound=keras.Model)

hooks.Hooks(
    __name__,
    "`fit`, `evaluate`, `make_train_function` and the like of the model itself, as attributes of the instance",
    "Keras asks the model for the function that runs a step",
    "the model that was given to `accelerate` lives",
)


def accelerate(model: Model, *, jit_compile: Literal["auto"] | bool = "auto", regions: bool = True) -> Model:
    """Makes `fit`, `evaluate`, `predict` and the single-batch methods of a Keras model run its steps co-executed.

    The model behaves as if compiled with `run_eagerly=True`: `train_step`, `test_step`, `predict_step`, `call`, layers,
    losses and metrics may contain any Python, which runs for every batch. Only the speed differs. The model may be
    compiled before or afterwards, and again. `model.train_function.stats()` and `.explain()` report what was done.

    Steps that run no Python of yours are launched several at a time if nothing can observe them in between: no
    callback hooks single batches, and the data (arrays, or a dataset without Python and variables) do not depend on
    them.

    Args:
      model: a Keras model of any kind.
      jit_compile: as for `coexec.function`. If it is "auto" and `model.compile` has Keras compile with XLA, XLA starts
        as soon as a step has run a few times; it still compiles in the background, and must still prove faster.
      regions: as for `coexec.function`.

    Returns:
      `model` itself. Left unchanged are models on several replicas, and overrides of `make_train_function`,
      `make_test_function` and `make_predict_function` in classes of yours.
    """

    def make(name: str, audience: Audience | None) -> Callable[..., None]:
        def make_function(force: bool = False) -> None:
            if getattr(model, f"{name}_function") is not None and not force:
                return
            if model.distribute_strategy.num_replicas_in_sync > 1:
                getattr(type(model), f"make_{name}_function")(model, force)
                return
            title = f"{type(model).__name__}.{name}_step"
            # Steps are launched together where each is one memoized call. On paths for any size that is learnt again:
            # with a last batch of another size in each of a few short epochs, steps were never put together.
            options = Options(
                jit_compile, reduce_retracing=False, name=title, regions=regions, xla_soon=bool(model.jit_compile)
            )
            step = Function(steps_of(model, name), options)
            made = Prediction(step) if audience is None else Execution(step, model.steps_per_execution, audience)
            setattr(model, f"{name}_function", made)

        return make_function

    if not isinstance(model, keras.Model):
        raise TypeError(f"coexec.accelerate takes a Keras model, not {model!r}")
    for name, loop in (("train", "fit"), ("test", "evaluate"), ("predict", None)):
        audience = None if loop is None else Audience(name)
        method = f"make_{name}_function"  # Keras calls it before training; documented as overridable
        if _is_keras_own(model, method):
            setattr(model, method, make(name, audience))
            setattr(model, f"{name}_function", None)
            if audience is None or loop is None:
                continue
            setattr(model, f"{name}_on_batch", _at_once(model, audience))
            if _is_keras_own(model, loop) and _is_keras_own(model, "get_metrics_result"):
                setattr(model, loop, _watched(model, loop, audience))
    if _is_keras_own(model, "get_metrics_result"):
        model.get_metrics_result = _behind_the_steps(model)
    return model


def _is_keras_own(model: keras.Model, method: str) -> bool:
    return getattr(type(model), method) is getattr(keras.Model, method)


def _execution(model: keras.Model, phase: str) -> Execution | None:
    made = getattr(model, f"{phase}_function", None)
    return made if isinstance(made, Execution) else None


def _behind_the_steps(model: keras.Model) -> Callable[[], Any]:
    """Returns a `get_metrics_result` that first runs the deferred steps: Keras calls it after the last batch."""

    def get_metrics_result() -> Any:
        for phase in ("train", "test"):
            execution = _execution(model, phase)
            if execution is not None:
                execution.flush()
        return keras.Model.get_metrics_result(model)

    return get_metrics_result


def _at_once(model: keras.Model, audience: Audience) -> Callable[..., Any]:
    """Returns an undeferred `train_on_batch` or `test_on_batch`: its caller, maybe a callback, reads the result."""
    original = getattr(type(model), f"{audience.phase}_on_batch").__get__(model)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = audience.listens, audience.apart
        audience.listens, audience.apart = True, False
        try:
            return original(*args, **kwargs)
        finally:
            audience.listens, audience.apart = before

    return run


def _watched(model: keras.Model, loop: str, audience: Audience) -> Callable[..., Any]:
    """Returns a `fit` or `evaluate` that sets `audience` for the steps, and leaves none of them deferred."""
    original = getattr(keras.Model, loop)
    signature = inspect.signature(original)
    phase = audience.phase

    def read() -> dict[str, Any]:
        execution = _execution(model, phase)
        return {} if execution is None else execution.logs()

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(model, *args, **kwargs)
        except TypeError:
            return original(model, *args, **kwargs)  # raises the proper error
        arguments = given.arguments
        callbacks = arguments.get("callbacks")
        data = arguments.get("x")
        if not isinstance(data, tf.data.Dataset):
            data = data, arguments.get("y"), arguments.get("sample_weight")
        before = audience.listens, audience.apart
        if isinstance(callbacks, keras.callbacks.CallbackList):
            audience.listens, audience.apart = audience.of(callbacks.callbacks, data)
        else:
            callbacks = keras.tree.flatten(callbacks) if callbacks else []
            check_callbacks(callbacks)
            audience.listens, audience.apart = audience.of(callbacks, data)
            if not audience.listens:
                arguments["callbacks"] = [*callbacks, QuietBar(phase, read)]
        try:
            return original(*given.args, **given.kwargs)
        finally:
            try:
                execution = _execution(model, phase)
                if execution is not None:
                    execution.flush()
            finally:
                audience.listens, audience.apart = before

    return run
