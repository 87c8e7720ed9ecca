"""Loop: the batches of a training loop that somebody writes themselves, with progress, checkpoints and signals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from coexec.training.checkpoint import Checkpoint, Saved
from coexec.training.data import Source, source_of
from coexec.training.progress import Bar
from coexec.training.signals import Interrupts


class Position(NamedTuple):
    """Where a loop is: the steps done, in all and in which epoch, whether that is over or all of it, and the data's."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    over: bool = False
    stopped: bool = False
    data: Any = None


class Loop:
    """What `coexec.loop` returns: iterate over it once; `step`, `epoch` and `show` are for the loop's body.

    `step` counts the steps that are done, of all epochs and of the processes before, `in_epoch` those of this epoch;
    `epoch` counts from 0.
    """

    first_epoch = 0  # where nothing was kept

    def __init__(
        self,
        source: Source,
        epochs: int,
        steps_per_epoch: int | None,
        checkpoint: Checkpoint | None,
        progress: bool | None,
    ) -> None:
        self._source, self._epochs, self._limit = source, epochs, steps_per_epoch
        self._checkpoint, self._progress = checkpoint, progress
        self.step = self.epoch = self.in_epoch = 0
        self._stopped = False
        self._values: dict[str, Any] = {}
        if checkpoint is not None and checkpoint.every is not None:
            reason = source.why_not_resumable()
            if reason is not None:
                raise TypeError(
                    f"{reason}, so a loop cannot go on there in the middle of an epoch.\n"
                    "  1. Give it methods state_dict and load_state_dict,\n"
                    "  2. or give arrays, a PyDataset or a tf.data.Dataset,\n"
                    "  3. or have checkpoints at the end of epochs only: every=None."
                )

    def show(self, **values: Any) -> None:
        """Has the progress bar show these; tensors are waited for only when the line is drawn anew."""
        self._values.update(values)

    @property
    def total(self) -> int | None:
        """How many steps there are in all, where that is known."""
        known = [n for n in (self._limit, self._source.steps) if n is not None]
        return min(known) * self._epochs if known else None

    def stop(self) -> None:
        """Ends the loop behind the running step, for good: it does not go on in another process either."""
        self._stopped = True

    def begin_epoch(self) -> None:
        """Is called before the first batch of an epoch, or the next one after a resume."""

    def end_epoch(self) -> None:
        """Is called behind the last batch of an epoch, before what is kept then."""

    def __iter__(self) -> Iterator[Any]:
        source, checkpoint = self._source, self._checkpoint
        # Behind the last step, and on every other way out, what is being written is waited for.
        with contextlib.closing(source), contextlib.nullcontext() if checkpoint is None else checkpoint.writer:
            saved = checkpoint.find() if checkpoint is not None else None
            at = Position(0, self.first_epoch) if saved is None else Position(*saved.python["position"])
            self.step, self.epoch, self.in_epoch, self._stopped = at.step, at.epoch, at.in_epoch, at.stopped
            with Interrupts() as interrupts, Bar(self.total, self.step, self._progress) as bar:
                bar.values = self._values
                while self.epoch < self._epochs and not self._stopped:
                    self._begin(saved, at)
                    if not at.over:
                        for batch in self._batches():
                            yield batch
                            self.step += 1
                            self.in_epoch += 1
                            bar.advance(f"epoch {self.epoch + 1}/{self._epochs}")
                            self._after_step(interrupts)
                        self._after_epoch()
                    self.epoch, self.in_epoch = self.epoch + 1, 0
                    saved, at = None, Position()
                if saved is not None and checkpoint is not None:  # all was done before
                    checkpoint.load(saved)

    def _begin(self, saved: Saved | None, at: Position) -> None:
        """Starts an epoch, or goes on with the one that was saved."""
        source, checkpoint = self._source, self._checkpoint
        if not at.over:
            self.begin_epoch()
        if saved is None or checkpoint is None:
            source.begin(self.epoch)
        elif at.in_epoch:  # the random numbers are those of the moment behind the batch
            source.begin(at.epoch, at.data)
            checkpoint.load(saved, source.iterator)
        else:  # and these those before the epoch
            checkpoint.load(saved)
            source.begin(at.epoch)

    def _batches(self) -> Iterator[Any]:
        while not self._stopped and (self._limit is None or self.in_epoch < self._limit):
            try:
                batch = next(self._source)
            except StopIteration:
                return
            yield batch

    def _after_step(self, interrupts: Interrupts) -> None:
        checkpoint = self._checkpoint
        stops = interrupts.requested
        if stops is not None:
            interrupts.quiet()
        due = checkpoint is not None and checkpoint.every is not None and self.step % checkpoint.every == 0
        if due or (stops is not None and checkpoint is not None and self._source.why_not_resumable() is None):
            self._save()
        if stops is not None:
            raise KeyboardInterrupt(f"{stops.name} after step {self.step}")

    def _after_epoch(self) -> None:
        """At the end of the last epoch all is kept, however many steps there were since the last time."""
        self.end_epoch()
        checkpoint = self._checkpoint
        ends = self._stopped or self.epoch + 1 == self._epochs
        if checkpoint is not None and (checkpoint.every is None or ends):
            self._save(over=True)

    def _save(self, over: bool = False) -> None:
        source = self._source
        assert self._checkpoint is not None
        if source.why_not_resumable() is None:  # the end of an epoch is a place in it, so that shuffling goes on, too
            at = Position(self.step, self.epoch, self.in_epoch, over, self._stopped, source.position())
        else:
            at = Position(self.step, self.epoch + 1, stopped=self._stopped)
        self._checkpoint.save(self.step, tuple(at), source.iterator if at.in_epoch else None)


def loop(
    data: Any,
    *,
    epochs: int = 1,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    prefetch: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: bool | None = None,
) -> Loop:
    """Hands the batches of all epochs to a loop of your own, and goes on where a process before had come to.

        for images, labels in coexec.loop(dataset, epochs=3, checkpoint=coexec.Checkpoint("run", model=model)):
            loss = step(images, labels)

    With a checkpoint, a loop that was killed and is started again continues behind the step that was kept last, in
    the middle of an epoch, with the random numbers of that moment. The first Ctrl-C or SIGTERM ends the loop behind
    the running step, with a checkpoint there if the data can say where they are, and raises KeyboardInterrupt; a step
    that takes a second longer, or another signal, is stopped inside.

    Args:
      data: a `tf.data.Dataset`, a Keras `PyDataset`, an iterable, which is iterated over once in each epoch, or an
        iterator, whose batches go on; or arrays, alone or in tuples and dicts, with a `batch_size`. What an iterable
        says with `state_dict` is given back to `load_state_dict`, after which it goes on behind that batch.
      epochs: how often to go through the data.
      batch_size: rows of a batch, where data are arrays or a dataset of single rows.
      steps_per_epoch: the most steps of an epoch.
      shuffle: of arrays and a PyDataset: another order in each epoch, which `seed` and the epoch's number decide.
      seed: see `shuffle`.
      prefetch: how many batches are made ahead: by TensorFlow for datasets, else by a thread. With 0, what your data do
        in Python comes in the order of the program.
      checkpoint: what to keep, where and how often.
      progress: whether to show a progress bar; None: where standard error is a terminal.
    """
    source = source_of(data, batch_size, shuffle, seed, prefetch)
    return Loop(source, epochs, steps_per_epoch, checkpoint, progress)
