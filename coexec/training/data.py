"""Data: where batches come from, epoch by epoch, and how to be at the same batch again in another process."""

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

PATIENCE = 1.0  # seconds that a thread has to end


class Source:
    """The batches of a loop; a position is what `position` returned, and `begin` goes there."""

    steps: int | None = None  # of an epoch, where that is known
    iterator: Any = None  # of tf.data, which keeps its position itself, in a checkpoint

    def begin(self, epoch: int, position: Any = None) -> None:
        """Starts an epoch, or goes on behind a position; of tf.data, the iterator is to be restored then."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def position(self) -> Any:
        """Returns where the batch that came last was; of plain Python values."""
        return None

    def why_not_resumable(self) -> str | None:
        """Returns why nobody can go to the middle of an epoch; None if they can."""
        return None

    def close(self) -> None:
        """Stops what works ahead."""


def source_of(
    data: Any, batch_size: int | None = None, shuffle: bool = False, seed: int = 0, prefetch: int = 0
) -> Source:
    """Returns the source for what users have: datasets, arrays, a PyDataset, anything that can be iterated over."""
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
    return Ahead(source, prefetch) if prefetch else source


def _rows_of(data: Any, size: int, shuffle: bool, seed: int) -> tuple[Any, ...]:
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
    """A tf.data.Dataset, whose iterators TensorFlow saves and restores, what is shuffled and prefetched included."""

    def __init__(self, dataset: tf.data.Dataset, prefetch: int) -> None:
        self._dataset = dataset.prefetch(prefetch) if prefetch else dataset
        cardinality = int(dataset.cardinality())
        self.steps = cardinality if cardinality >= 0 else None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Makes the epoch's iterator."""
        self.iterator = iter(self._dataset)

    def __next__(self) -> Any:
        return next(self.iterator)


class Indexed(Source):
    """What can be asked for its batch, or rows, number i: a position is a number, and no order is kept."""

    def __init__(
        self, get: Callable[[Any], Any], length: Callable[[], int], shuffle: bool, seed: int, owner: Any, size: int = 0
    ) -> None:
        self._get, self._length, self._shuffle, self._seed, self._owner = get, length, shuffle, seed, owner
        self._size = size  # rows of a batch; 0: the numbers are those of batches
        self._order = np.arange(0)
        self._next = 0
        self.steps = -(-length() // (size or 1)) or None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Orders the epoch: by its number alone, so that it is the same order in another process."""
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
        """Returns how many batches have come."""
        return self._next


class Iterated(Source):
    """Any iterable; it is iterated over once for each epoch, unless it is an iterator: then on and on."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._running: Iterator[Any] = iter(())
        self._keeps = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self.steps = len(data) if hasattr(data, "__len__") else None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Starts the epoch's iterator, behind the position that the data are given."""
        if position is not None:
            self._data.load_state_dict(position)
        self._running = iter(self._data)

    def __next__(self) -> Any:
        return next(self._running)

    def position(self) -> Any:
        """Returns what the data say."""
        return self._data.state_dict() if self._keeps else None

    def why_not_resumable(self) -> str | None:
        """Only what has `state_dict` and `load_state_dict` can be asked where it is."""
        return None if self._keeps else f"a {type(self._data).__name__} cannot say where it is"


class Ahead(Source):
    """Another source, whose batches are made on a thread: so many ahead, and with the positions behind them."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count
        self.steps = source.steps
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._position: Any = None

    def begin(self, epoch: int, position: Any = None) -> None:
        """Starts the epoch on a thread of its own."""
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
        """Returns the position behind the batch that was handed out last, not the one of the thread."""
        return self._position

    def why_not_resumable(self) -> str | None:
        """As of the source."""
        return self._source.why_not_resumable()

    def close(self) -> None:
        """Ends the thread, which may be waiting for room; one that its data keep busy is left, with a word."""
        self._stop.set()
        thread, self._thread = self._thread, None
        patience = time.monotonic() + PATIENCE
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
    except BaseException as error:  # is raised where the batch is asked for
        batches.put(("error", error, None))
