"""Loop: the batches for a hand-written training loop, with progress, checkpoints and signals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from coexec.training.checkpoint.checkpoint import Checkpoint, Saved
from coexec.training.loop.data import Source, source_of
from coexec.training.loop.progress import ProgressBar
from coexec.training.loop.signals import Interrupts


class Position(NamedTuple):
    """Where a loop is: steps done, in all and in this epoch; whether the epoch or loop is over; the data's position."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    over: bool = False
    stopped: bool = False
    data: Any = None


class Loop:
    """What `coexec.loop` returns: iterate over it once; `step`, `epoch` and `show` are for the loop's body.

    `step` counts completed steps over all epochs, earlier processes included, `in_epoch` those of this epoch; `epoch`
    counts from 0.
    """

    first_epoch = 0  # where no checkpoint exists

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
        """Shows these in the progress bar; tensors are waited for only when the line is redrawn."""
        self._values.update(values)

    @property
    def total(self) -> int | None:
        """The total number of steps, if known."""
        known = [n for n in (self._limit, self._source.steps) if n is not None]
        return min(known) * self._epochs if known else None

    def stop(self) -> None:
        """Ends the loop after the running step, for good: no other process resumes it."""
        self._stopped = True

    def begin_epoch(self) -> None:
        """Called before the first batch of an epoch, or the next one after a resume."""

    def end_epoch(self) -> None:
        """Called after the last batch of an epoch, before a checkpoint is saved."""

    def __iter__(self) -> Iterator[Any]:
        source, checkpoint = self._source, self._checkpoint
        # After the last step, and on any other exit, this waits for the checkpoint being written.
        with contextlib.closing(source), contextlib.nullcontext() if checkpoint is None else checkpoint.writer:
            saved = checkpoint.find() if checkpoint is not None else None
            at = Position(0, self.first_epoch) if saved is None else Position(*saved.python["position"])
            self.step, self.epoch, self.in_epoch, self._stopped = at.step, at.epoch, at.in_epoch, at.stopped
            with Interrupts() as interrupts, ProgressBar(self.total, self.step, self._progress) as bar:
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
                if saved is not None and checkpoint is not None:  # all epochs were done before
                    checkpoint.load(saved)

    def _begin(self, saved: Saved | None, at: Position) -> None:
        """Starts an epoch, or resumes the one that was saved."""
        source, checkpoint = self._source, self._checkpoint
        if not at.over:
            self.begin_epoch()
        if saved is None or checkpoint is None:
            source.begin(self.epoch)
        elif at.in_epoch:  # the random state was captured after the batch
            source.begin(at.epoch, at.data)
            checkpoint.load(saved, source.iterator)
        else:  # here it was captured before the epoch
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
        """Saves if checkpoints are per epoch, and always at the end of the last epoch."""
        self.end_epoch()
        checkpoint = self._checkpoint
        ends = self._stopped or self.epoch + 1 == self._epochs
        if checkpoint is not None and (checkpoint.every is None or ends):
            self._save(over=True)

    def _save(self, over: bool = False) -> None:
        """Saves a checkpoint; `over`: whether the epoch is over."""
        source = self._source
        assert self._checkpoint is not None
        if source.why_not_resumable() is None:  # the end of an epoch is a position in it: shuffling resumes, too
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
    """Yields the batches of all epochs to a loop of your own, and resumes where an earlier process stopped.

        for images, labels in coexec.loop(dataset, epochs=3, checkpoint=coexec.Checkpoint("run", model=model)):
            loss = step(images, labels)

    With a checkpoint, a loop that was killed and is started again resumes after the step saved last, in the middle of
    an epoch, with the random state of that moment. The first Ctrl-C or SIGTERM ends the loop after the running step,
    saves a checkpoint there if the data's position can be saved, and raises KeyboardInterrupt; a step that takes a
    second longer, or during which another signal comes, is aborted.

    Args:
      data: a `tf.data.Dataset`, a Keras `PyDataset`, an iterable, which is iterated over once per epoch, or an
        iterator, which is continued; or arrays, alone or in tuples and dicts, with a `batch_size`. An iterable's
        `state_dict` is saved, and restored with `load_state_dict`, after which it continues after that batch.
      epochs: the number of passes over the data.
      batch_size: rows per batch, if data are arrays or a dataset of single rows.
      steps_per_epoch: the maximum number of steps per epoch.
      shuffle: for arrays and a PyDataset: another order in each epoch, determined by `seed` and the epoch's number.
      seed: see `shuffle`.
      prefetch: how many batches to prepare ahead: by TensorFlow for datasets, else on a thread. With 0, Python in your
        data runs in program order.
      checkpoint: what to save, where and how often.
      progress: whether to show a progress bar; None: on a terminal, and in a notebook.
    """
    source = source_of(data, batch_size, shuffle, seed, prefetch)
    return Loop(source, epochs, steps_per_epoch, checkpoint, progress)
