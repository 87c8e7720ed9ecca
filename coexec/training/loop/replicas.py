"""Replicas: splits a batch among the replicas of a `tf.distribute` strategy, and combines the results."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tracer import hooks
from tracer.faults import passes
from tracer.private import keras_losses

_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


class _Thread(threading.local):
    whole = False


_thread = _Thread()


class unscaled:
    """While entered, Keras' losses are means over their rows, even on several replicas.

    By default Keras divides them by the number of replicas, as it sums their gradients; the program's own losses are
    not divided, and replicas may have shares of different sizes.
    """

    def __enter__(self) -> None:
        self._before, _thread.whole = _thread.whole, True

    def __exit__(self, *_: object) -> None:
        _thread.whole = self._before


def _unless_whole(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @passes
    @functools.wraps(function)
    def scale(value: Any) -> Any:
        return value if _thread.whole else function(value)

    return scale


_hooks = hooks.HookSet(
    __name__,
    "`scale_loss_for_distribution`, `unscale_loss_for_distribution` of Keras' losses",
    "on replicas of a `Trainer`, losses are means over all rows of the batch",
    hooks.PROCESS,
)
for _name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
    _hooks.add(keras_losses, _name, _unless_whole(getattr(keras_losses, _name)))


class Replicas:
    """Runs a step on all replicas, each with its share of a batch's rows, so that sums equal the whole batch's."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self.count: int = strategy.num_replicas_in_sync
        if not _hooks.users:
            _hooks.hold()

    def run(self, step: Callable[[Any, Any], Any], batch: Any) -> tuple[Any, list[float]]:
        """Returns the per-replica results of `step(part, share)`, in TensorFlow's form, and the shares of rows."""
        parts, rows = self._split(batch)
        shares = [count / sum(rows) for count in rows]
        leaves = [self._values(list(of_all)) for of_all in zip(*parts, strict=True)]
        share = self._values([tf.constant(s) for s in shares])
        return self.strategy.run(step, (keras.tree.pack_sequence_as(batch, leaves), share)), shares

    def total(self, values: Any) -> Any:
        """Returns the sum of a tensor over all replicas; None stays None."""
        return None if values is None else self.strategy.reduce("SUM", values, axis=None)

    def mean(self, values: Any, shares: list[float]) -> Any:
        """Returns the mean of a report, weighted by each replica's rows."""
        local = self.strategy.experimental_local_results(values)
        if len(local) == 1:  # one Python value for all replicas
            return local[0]
        return tf.add_n([tf.cast(v, tf.float32) * s for v, s in zip(local, shares, strict=True)])

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Makes one update of all replicas, with the gradients of the whole batch."""
        # The optimizer is called on each replica, clips there, and sums all replicas' gradients. The first replica
        # passes all gradients, the others zeros or no rows: so it gets what it would on one device.
        # Accumulators must be equal on all replicas: with accumulation, each passes its part.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        clips = {}
        if inner.gradient_accumulation_steps:
            clips = {name: limit for name in _CLIPS if (limit := getattr(inner, name, None)) is not None}
            each = [[_part(g, self.count) for g in gradients]] * self.count
        else:
            each = [gradients] + [[_nothing(g) for g in gradients]] * (self.count - 1)

        def apply() -> None:
            mine = each[int(tf.distribute.get_replica_context().replica_id_in_sync_group)]
            optimizer.apply_gradients(list(zip(mine, variables, strict=True)))

        for name, limit in clips.items():
            setattr(inner, name, limit / self.count)
        try:
            self.strategy.run(apply)
        finally:
            for name, limit in clips.items():
                setattr(inner, name, limit)

    def _values(self, tensors: list[Any]) -> Any:
        def of(context: Any) -> Any:
            return tensors[context.replica_id_in_sync_group]

        return self.strategy.experimental_distribute_values_from_function(of)

    def _split(self, batch: Any) -> tuple[list[list[Any]], list[int]]:
        """Splits rows evenly; returns each replica's leaves and number of rows, or raises ValueError if that fails."""
        sizes = {part.shape[0] for part in keras.tree.flatten(batch) if getattr(part, "shape", ())}
        if len(sizes) != 1:
            raise ValueError(f"a batch to be shared out has parts with as many rows, not with {sorted(sizes)}")
        (rows,) = sizes
        if rows < self.count:
            raise ValueError(
                f"a batch of {rows} rows cannot be shared out among {self.count} replicas: choose another batch_size, "
                "or drop the remainder (dataset.batch(..., drop_remainder=True))"
            )
        bounds = [round(i * rows / self.count) for i in range(self.count + 1)]
        leaves = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(batch)]
        parts = [
            [leaf[begin:end] if leaf.shape.rank else leaf for leaf in leaves]
            for begin, end in itertools.pairwise(bounds)
        ]
        return parts, [end - begin for begin, end in itertools.pairwise(bounds)]


def _part(gradient: Any, count: int) -> Any:
    return gradient if gradient is None else tf.convert_to_tensor(gradient) / count


def _nothing(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values[:0], gradient.indices[:0], gradient.dense_shape)
    return gradient if gradient is None else tf.zeros_like(gradient)
