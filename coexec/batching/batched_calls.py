"""Batched calls: those calls of a function that are batched, as far as the clock finds that this pays."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from coexec.base.stats import EventLog
from coexec.base.tuning import tuning
from coexec.batching.batch import Batch
from coexec.batching.batch_sites import Knowledge
from tracer import intercept
from tracer.intercept import tape_is_empty
from tracer.library import has_strategy


class BatchedCalls:
    """Decides which of the calls that are not followed are batched, and runs those.

    A few are tried. While they take clearly less time than imperative ones, all are batched but for a few, whose times
    are compared; else none for a while, four times as long after each trial.
    """

    def __init__(self, ledger: EventLog) -> None:
        self.knowledge = Knowledge()
        self._ledger = ledger
        self._plain: deque[float] = deque(maxlen=tuning.plain_calls_kept)
        self._taken: deque[float] = deque(maxlen=tuning.batching_trial)
        self._tried = 0  # calls of the current trial
        self._lost = 0.0  # seconds that the current trial has cost over imperative calls
        self._rest = 0  # imperative calls before the next trial
        self._length = tuning.batching_rest  # of the next rest
        self._since = 0  # batched calls since the last imperative one
        self._apart = tuning.batching_apart
        self.pays = False

    def admit(self, backs_off: bool) -> bool:
        """Returns whether to batch the next call; `backs_off`: whether following has been found not to pay."""
        if not tape_is_empty() or has_strategy():
            return False
        if tuning.batches_all:
            return True
        if not backs_off or not self._plain:
            return False
        if self._rest:
            self._rest -= 1
            return False
        if self.pays and self._since >= self._apart:
            self._since, self._apart = 0, min(2 * self._apart, tuning.max_backoff)
            return False
        return True

    def ran_plainly(self, seconds: float) -> None:
        """Notes the time of an imperative call."""
        self._plain.append(seconds)

    def took(self, seconds: float) -> None:
        """Notes the time of a batched call; ends a trial, or batching, by what the last ones took."""
        if tuning.batches_all:
            return
        plain = statistics.median(self._plain)
        self._taken.append(seconds)
        self._since += 1
        self._tried += 1
        self._lost = max(self._lost + seconds - plain, 0.0)
        if self._lost > tuning.batching_patience * plain:
            self._give_up()
        elif self._tried >= tuning.batching_trial:
            self.pays = statistics.median(self._taken) < tuning.batching_share * plain
            if not self.pays:
                self._give_up()

    def _give_up(self) -> None:
        self.pays = False
        self._rest, self._length = self._length, min(4 * self._length, tuning.batching_longest_rest)
        self._tried, self._lost = 0, 0.0
        self._taken.clear()

    def run(
        self, batch: Batch, function: Callable[[], Any], hand_out: Callable[[list[Any], bool], None], into: list[Any]
    ) -> None:
        """Runs a call, and appends its result to `into`."""
        finished = False
        try:
            with intercept.handling(batch), batch:
                into.append(function())
            hand_out(into, batch.tapes.alive())
            finished = True
        finally:
            for lazy in batch.close():
                intercept.keep_while_alive(lazy)
            if finished:
                self._ledger.count("batched", ops_batched=batch.batched)
                self.knowledge.tidy_up()

    def begin(self, strict: bool) -> Batch:
        """Returns the handler of a batched call."""
        return Batch(self.knowledge, self._ledger, strict)
