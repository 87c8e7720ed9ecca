"""Data: the sources of batches, epoch by epoch, and how another process resumes at the same batch."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning


class Source:
    """The batches of a loop; `position` returns a position, and `begin` resumes from it."""

    steps: int | None = None  # per epoch, if known
    iterator: Any = None  # of tf.data, which saves its position in a checkpoint itself

    def begin(self, epoch: int, position: Any = None) -> None:
        """Starts an epoch, or resumes after a position; the caller restores a tf.data iterator afterwards."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def position(self) -> Any:
        """Returns the position of the latest batch, as plain Python values."""
        return None

    def why_not_resumable(self) -> str | None:
        """Returns why the middle of an epoch cannot be resumed; None if it can."""
        return None

    def close(self) -> None:
        """Stops any prefetching thread."""


def source_of(
    data: Any, batch_size: int | None = None, shuffle: bool = False, seed: int = 0, prefetch: int = 0
) -> Source:
    """Returns the source for datasets, arrays, a PyDataset, or any iterable; raises TypeError for anything else."""
    if isinstance(data, tf.data.Dataset):
        return Dataset(data if batch_size is None else data.batch(batch_size), prefetch)
    if isinstance(data, keras.utils.PyDataset):
        source: Source = Indexed(data.__getitem__, lambda: data.num_batches or 0, shuffle, seed, data)
    elif batch_size is not None:
        source = Indexed(*_rows_of(data, batch_size, shuffle, seed))
    elif hasattr(data, "__iter__"):
        source = Iterated(data)
    else:
        kind = type(data).__name__
        raise TypeError(f"data are a tf.data.Dataset, a PyDataset, an iterable, or arrays and batch_size, not a {kind}")
    return Prefetched(source, prefetch) if prefetch else source


def _rows_of(data: Any, size: int, shuffle: bool, seed: int) -> tuple[Any, ...]:
    """Returns the arguments of `Indexed` for arrays; raises TypeError or ValueError if they have no common rows."""
    arrays = keras.tree.flatten(data)
    if not arrays or not all(hasattr(a, "shape") and len(a.shape) for a in arrays):
        raise TypeError(f"with a batch_size, data are arrays, alone or in tuples and dicts, not {type(data).__name__}")
    lengths = {len(a) for a in arrays}
    if len(lengths) > 1:
        raise ValueError(f"the arrays have {sorted(lengths)} rows; each row of one belongs to a row of the others")
    (rows,) = lengths
    arrays = [np.asarray(a) for a in arrays]

    def batch(chosen: Any) -> Any:
        return keras.tree.pack_sequence_as(data, [tf.constant(a[chosen]) for a in arrays])

    return batch, lambda: rows, shuffle, seed, None, size


class Dataset(Source):
    """A tf.data.Dataset, whose iterators TensorFlow saves and restores, with what they shuffled and prefetched."""

    def __init__(self, dataset: tf.data.Dataset, prefetch: int) -> None:
        self._dataset = dataset.prefetch(prefetch) if prefetch else dataset
        cardinality = int(dataset.cardinality())
        self.steps = cardinality if cardinality >= 0 else None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Creates the epoch's iterator."""
        self.iterator = iter(self._dataset)

    def __next__(self) -> Any:
        return next(self.iterator)


class Indexed(Source):
    """Data with random access to batches or rows: the position is a number, and the order need not be saved."""

    def __init__(
        self, get: Callable[[Any], Any], length: Callable[[], int], shuffle: bool, seed: int, owner: Any, size: int = 0
    ) -> None:
        self._get, self._length, self._shuffle, self._seed, self._owner = get, length, shuffle, seed, owner
        self._size = size  # rows per batch; 0: numbers are those of batches
        self._order = np.arange(0)
        self._next = 0
        self.steps = -(-length() // (size or 1)) or None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Orders the epoch, by seed and number alone, so that another process gets the same order."""
        if self._owner is not None:
            self._owner.on_epoch_begin()
        length = self._length()
        numbers = np.random.default_rng((self._seed, epoch))
        self._order = numbers.permutation(length) if self._shuffle else np.arange(length)
        self._next = position or 0

    def __next__(self) -> Any:
        size = self._size or 1
        first = self._next * size
        if first >= len(self._order):
            if self._owner is not None:
                self._owner.on_epoch_end()
            raise StopIteration
        chosen = self._order[first : first + size]
        batch = self._get(chosen if self._size else int(chosen[0]))
        self._next += 1
        return batch

    def position(self) -> int:
        """Returns the number of batches so far."""
        return self._next


class Iterated(Source):
    """Any iterable, iterated over once per epoch; an iterator is continued instead."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._running: Iterator[Any] = iter(())
        self._keeps = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self.steps = len(data) if hasattr(data, "__len__") else None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Starts the epoch's iterator, after restoring the data's position."""
        if position is not None:
            self._data.load_state_dict(position)
        self._running = iter(self._data)

    def __next__(self) -> Any:
        return next(self._running)

    def position(self) -> Any:
        """Returns the data's own state."""
        return self._data.state_dict() if self._keeps else None

    def why_not_resumable(self) -> str | None:
        """Returns a reason unless the data have `state_dict` and `load_state_dict`."""
        return None if self._keeps else f"a {type(self._data).__name__} cannot say where it is"


class Prefetched(Source):
    """Another source, whose batches are prepared on a thread, `count` ahead, each with the position after it."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count
        self.steps = source.steps
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._position: Any = None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Starts the epoch on a new thread."""
        self.close()
        self._source.begin(epoch, position)
        self._position = position
        self._stop = stop = threading.Event()
        self._queue = batches = queue.Queue[Any](self._count)
        self._thread = threading.Thread(
            target=_work_ahead, args=(self._source, batches, stop), name="coexec-prefetch", daemon=True
        )
        self._thread.start()

    def __next__(self) -> Any:
        kind, value, position = self._queue.get()
        if kind == "batch":
            self._position = position
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def position(self) -> Any:
        """Returns the position after the batch handed out last, not the thread's."""
        return self._position

    def why_not_resumable(self) -> str | None:
        """Returns the source's reason."""
        return self._source.why_not_resumable()

    def close(self) -> None:
        """Ends the thread, which may be blocked on a full queue; abandons it, with a warning, if the data block it."""
        self._stop.set()
        thread, self._thread = self._thread, None
        patience = time.monotonic() + tuning.data_patience
        while thread is not None and thread.is_alive():
            if time.monotonic() > patience:
                warnings.warn(f"the data keep the thread {thread.name} busy; it is left to itself", stacklevel=2)
                return
            try:
                self._queue.get_nowait()
            except queue.Empty:
                thread.join(0.01)


def _work_ahead(source: Source, batches: queue.Queue[Any], stop: threading.Event) -> None:
    try:
        for batch in source:
            batches.put(("batch", batch, source.position()))
            if stop.is_set():
                return
        batches.put(("end", None, None))
    except BaseException as error:  # raised where the batch is requested
        batches.put(("error", error, None))
