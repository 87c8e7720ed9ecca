"""Trainer: runs a step, given as a function of state and batch, with everything else that Keras' `fit` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from coexec.api import function
from coexec.training.checkpoint.checkpoint import Checkpoint, has_state
from coexec.training.keras.callbacks import CallbackStates, check_callbacks
from coexec.training.loop.data import Source, source_of
from coexec.training.loop.loop import Loop
from coexec.training.loop.replicas import Replicas, unscaled
from coexec.training.loop.running_means import Means


class Trainer:
    """Trains, evaluates and predicts with a step of your own, co-executed, whose Python runs for every batch.

        def step(state, batch, training):
            images, labels = batch
            logits = state.model(images, training=training)
            return {"loss": objective(labels, logits), "error": error_rate(labels, logits.numpy())}

        trainer = coexec.Trainer(step, state={"model": model, "optimizer": optimizer}, clip_norm=1.0)
        history = trainer.fit((images, labels), batch_size=32, epochs=3, validation_data=(others, their_labels))

    If the state has an optimizer, the trainer differentiates the loss with respect to the model's trainable variables
    and applies the gradients; otherwise the step does all of that itself, with any number of optimizers.

    If the model was created in the scope of a `tf.distribute` strategy, the rows of each batch are split among its
    replicas, the step runs on each, and one update is made with the gradients of all: those of one device with the
    whole batch. Create optimizers and metrics in that scope, too.

    Args:
      step: takes the state, a batch and whether to train; returns the loss, or a dict with "loss" and anything else to
        report. Reports are averaged over the rows of an epoch.
      state: what the step works with, by name, passed to it as attributes: a Keras "model", optionally an "optimizer",
        and more. Metrics in it are reported, and reset for each epoch; everything in it that has a state is saved in
        checkpoints.
      callbacks: Keras callbacks, unchanged.
      checkpoint: where to save, how often, and what else (`coexec.Checkpoint`); `fit` then resumes from it.
      accumulate_steps: the number of batches whose gradients are averaged for one update.
      clip_norm: the maximum global norm of the gradients.
      jit_compile: as for `coexec.function`.
    """

    def __init__(
        self,
        step: Callable[[Any, Any, bool], Any],
        state: Mapping[str, Any],
        *,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        checkpoint: Checkpoint | None = None,
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        jit_compile: Literal["auto"] | bool = "auto",
    ) -> None:
        if not isinstance(state.get("model"), keras.Model):
            raise TypeError('the state needs a Keras model by the name of "model", which callbacks are about')
        check_callbacks(list(callbacks))
        self.state = SimpleNamespace(**state)
        self.model = self.state.model
        self._user_step = step
        self._callbacks, self._checkpoint = list(callbacks), checkpoint
        self._metrics = {n: v for n, v in state.items() if isinstance(v, keras.metrics.Metric)}
        self._means = {True: Means(), False: Means()}  # by whether the step trains
        optimizer = state.get("optimizer")
        strategy = self.model.distribute_strategy
        self._replicas = Replicas(strategy) if strategy.num_replicas_in_sync > 1 else None
        if optimizer is not None:
            with self._scope():
                self.state.optimizer = _prepared(optimizer, self.model, accumulate_steps, clip_norm)
            self.model.optimizer = self.state.optimizer  # for callbacks
        elif accumulate_steps != 1 or clip_norm is not None:
            raise ValueError("accumulate_steps and clip_norm are about the optimizer in the state, and there is none")
        decorate = function(jit_compile=jit_compile)
        # With several replicas: what each does with its share.
        distributed = self._replicas is not None
        self.train_step = decorate(self._gradients if distributed else self._train)
        self.test_step = decorate(self._reports_of if distributed else self._test)
        self.predict_step = decorate(lambda batch: self.model(_inputs_of(batch), training=False))

    # One batch; these methods are co-executed.

    def _train(self, batch: Any) -> dict[str, Any]:
        optimizer = getattr(self.state, "optimizer", None)
        if optimizer is None:
            return self._report(_logs_of(self._user_step(self.state, batch, True)), batch, True)
        logs, gradients = self._gradients(batch)
        optimizer.apply_gradients(list(zip(gradients, self.model.trainable_variables, strict=True)))
        return self._report(logs, batch, True)

    def _gradients(self, batch: Any, share: Any = None) -> tuple[dict[str, Any], list[Any]]:
        """Returns the step's report, and the gradients of `share` of its loss if there is an optimizer."""
        optimizer = getattr(self.state, "optimizer", None)
        if optimizer is None:
            return _logs_of(self._user_step(self.state, batch, True)), []
        with tf.GradientTape() as tape:
            with unscaled() if share is not None else contextlib.nullcontext():
                logs = _logs_of(self._user_step(self.state, batch, True))
            loss = logs["loss"] if share is None else logs["loss"] * tf.cast(share, logs["loss"].dtype)
            scaled = optimizer.scale_loss(loss)
        return logs, tape.gradient(scaled, self.model.trainable_variables)

    def _reports_of(self, batch: Any, share: Any) -> tuple[dict[str, Any], list[Any]]:
        with unscaled():
            return _logs_of(self._user_step(self.state, batch, False)), []

    def _test(self, batch: Any) -> dict[str, Any]:
        return self._report(_logs_of(self._user_step(self.state, batch, False)), batch, False)

    def _report(self, logs: dict[str, Any], batch: Any, training: bool) -> dict[str, Any]:
        rows = next((a.shape[0] for a in keras.tree.flatten(batch) if getattr(a, "shape", ())), 1)
        means = self._means[training].update(logs, rows)
        with self._scope():
            return {**means, **{name: metric.result() for name, metric in self._metrics.items()}}

    def _reports(self) -> dict[str, float]:
        """Returns the epoch's reports so far; it may have begun in another process."""
        means = self._means[True].result()
        with self._scope():
            return {n: float(v) for n, v in {**means, **{n: m.result() for n, m in self._metrics.items()}}.items()}

    # One batch, on one device or split.

    def _scope(self) -> Any:
        return contextlib.nullcontext() if self._replicas is None else self._replicas.strategy.scope()

    def _run(self, batch: Any, training: bool) -> dict[str, Any]:
        step, replicas = self.train_step if training else self.test_step, self._replicas
        if replicas is None:
            report: dict[str, Any] = step(batch)
            return report
        (logs, gradients), shares = replicas.run(step, batch)
        if gradients:
            total = [replicas.total(g) for g in gradients]
            replicas.apply(self.state.optimizer, total, self.model.trainable_variables)
        return self._report({name: replicas.mean(value, shares) for name, value in logs.items()}, batch, training)

    # All batches.

    def fit(
        self,
        data: Any,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        prefetch: int = 0,
        validation_data: Any = None,
        verbose: Literal["auto"] | int = "auto",
    ) -> keras.callbacks.History:
        """Trains on all batches for each epoch, and returns the History; data are given as for `coexec.loop`."""
        source = source_of(data, batch_size, shuffle, seed, prefetch)
        optimizer = getattr(self.state, "optimizer", None)
        if optimizer is not None and not optimizer.built and self.model.built:
            with self._scope():
                optimizer.build(self.model.trainable_variables)
        steps = source.steps if steps_per_epoch is None else steps_per_epoch
        callbacks = self._list(verbose, epochs=epochs, steps=steps)
        checkpoint = self._checkpoint
        if checkpoint is not None:
            states = CallbackStates(callbacks.callbacks)
            kept = {name: value for name, value in vars(self.state).items() if has_state(value)}
            checkpoint = checkpoint.keeping(**kept, callbacks=states, means=self._means[True])
        self.model.stop_training = False
        callbacks.on_train_begin()
        # Set by now if BackupAndRestore found progress of an earlier run.
        first = getattr(self.model, "_initial_epoch", None) or 0

        def validate() -> dict[str, Any]:
            if validation_data is None:
                return {}
            logs = self._evaluate(source_of(validation_data, batch_size), callbacks)
            return {f"val_{name}": value for name, value in logs.items()}

        loop = _Fit(self, source, first, epochs, steps_per_epoch, checkpoint, callbacks, validate)
        for batch in loop:
            callbacks.on_train_batch_begin(loop.in_epoch)
            loop.logs = self._run(batch, True)
            callbacks.on_train_batch_end(loop.in_epoch, loop.logs)
            if self.model.stop_training:
                loop.stop()
        callbacks.on_train_end(loop.logs)
        return self.model.history

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, verbose: Literal["auto"] | int = "auto"
    ) -> dict[str, float]:
        """Runs the step on all batches without training, and returns its reports, averaged over all rows."""
        source = source_of(data, batch_size)
        return self._evaluate(source, self._list(verbose, epochs=1, steps=source.steps))

    def predict(self, data: Any, *, batch_size: int | None = None, verbose: Literal["auto"] | int = "auto") -> Any:
        """Returns the model's output for all rows, as arrays; if a batch is a tuple, for its first part."""
        source = source_of(data, batch_size)
        callbacks = self._list(verbose, epochs=1, steps=source.steps)
        callbacks.on_predict_begin()
        found = []
        for number, batch in enumerate(Loop(source, 1, None, None, progress=False)):
            callbacks.on_predict_batch_begin(number)
            result = self.predict_step(batch)
            found.append(keras.tree.map_structure(np.asarray, result))
            callbacks.on_predict_batch_end(number, {"outputs": result})
        callbacks.on_predict_end()
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *found)

    def _evaluate(self, source: Source, callbacks: keras.callbacks.CallbackList) -> dict[str, float]:
        self._reset(training=False)
        callbacks.on_test_begin()
        logs: dict[str, Any] = {}
        for number, batch in enumerate(Loop(source, 1, None, None, progress=False)):
            callbacks.on_test_batch_begin(number)
            logs = self._run(batch, False)
            callbacks.on_test_batch_end(number, logs)
        scores = {name: float(value) for name, value in logs.items()}
        callbacks.on_test_end(scores)
        return scores

    def _reset(self, training: bool) -> None:
        self._means[training].reset()
        with self._scope():
            for metric in self._metrics.values():
                metric.reset_state()

    def _list(self, verbose: Any, **params: Any) -> keras.callbacks.CallbackList:
        params = {"model": self.model, "verbose": verbose, **params}
        return keras.callbacks.CallbackList(
            list(self._callbacks), add_history=True, add_progbar=verbose != 0, **params
        )


class _Fit(Loop):
    """The loop of `fit`, which calls the callbacks' epoch hooks."""

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        first: int,
        epochs: int,
        steps: int | None,
        checkpoint: Checkpoint | None,
        callbacks: keras.callbacks.CallbackList,
        validate: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(source, epochs, steps, checkpoint, progress=False)  # Keras adds a bar
        self._trainer, self._callbacks, self._validate = trainer, callbacks, validate
        self.first_epoch = first
        self.logs: dict[str, Any] = {}

    def begin_epoch(self) -> None:
        """Resets metrics, as Keras does."""
        self._trainer._reset(training=True)
        self._callbacks.on_epoch_begin(self.epoch)

    def end_epoch(self) -> None:
        """Runs validation as part of the epoch, with its results in the logs, as Keras does."""
        logs = self._trainer._reports()
        logs.update(self._validate())
        self._callbacks.on_epoch_end(self.epoch, logs)
        self.logs = logs
        if self._trainer.model.stop_training:
            self.stop()


def _prepared(optimizer: Any, model: keras.Model, steps: int, norm: float | None) -> Any:
    """Configures Keras' optimizer to accumulate, clip and scale, all of which it can do itself."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if steps > 1:
        if inner.built:
            raise ValueError("accumulate_steps needs an optimizer that was not built yet: its sums are variables, too")
        inner.gradient_accumulation_steps = steps
    if norm is not None:
        inner.global_clipnorm = norm
    if model.dtype_policy.name == "mixed_float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _logs_of(result: Any) -> dict[str, Any]:
    if not isinstance(result, dict):
        return {"loss": result}
    if "loss" not in result:
        raise KeyError(f'a step returns its loss, or a dict with "loss" in it, not one with {sorted(result)}')
    return result


def _inputs_of(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch
