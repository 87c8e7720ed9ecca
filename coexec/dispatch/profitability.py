"""Profitability: whether following a function's calls pays, by measured times."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from coexec.base.explanation import Pace
from coexec.base.tuning import tuning


class Timed(NamedTuple):
    """The time of one call, and how many operations it had."""

    seconds: float
    size: float | None  # None: unknown, it stands for any


def are_alike(one: float, other: float) -> bool:
    """Returns whether calls of so many operations take about the same time."""
    less, more = sorted((one, other))
    return more - less <= tuning.alike_operations or more <= tuning.alike_calls * less


def expected(timed: Collection[Timed], size: float) -> float:
    """Returns the seconds that a call of so many operations takes: the lower median of calls like it, if there are any.

    Else in proportion to those that were timed.
    """
    alike = [each.seconds for each in timed if each.size is None or are_alike(each.size, size)]
    if alike:
        return statistics.median_low(alike)
    operations = sum((each.size or 0.0) + 1 for each in timed)
    return sum(each.seconds for each in timed) / operations * (size + 1)


class Profitability:
    """The balance, in seconds, of what following saves over imperative calls; backs off where it does not pay.

    No imperative call is timed until there is doubt. Then one is, and a few more at growing intervals, and before
    following is given up if calls differ in what they do, as one that returns at once says nothing of the others. The
    cost of learning before that is sunk and not counted. Later calls may lose up to `following_patience` imperative
    calls' time before following has to pay, and more once steady-state calls were fast: slow calls are then learning
    something new, once. So are they, before the first steady-state call, where the last ones took known paths. If
    following does not pay, calls run imperatively for a while. Then a few are followed again, with half the patience;
    if these do not pay either, the next backoff is long enough to amortize the loss.

    A call clearly cheaper than the one before it is progress and is not charged. Savings offset later slow calls, up to
    a limit. A single slow steady-state call was most likely disturbed by other load, and never causes a backoff by
    itself; nor does one that compiles, which happens once.

    A followed call is compared with imperative ones of as many operations, if such were timed: a program may fill its
    buffer of experience before it trains, train in every fourth call, or let its model grow. Of an imperative call the
    tensors are counted, by TensorFlow; how many there are for an operation is known from the first call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain: deque[Timed] = deque(maxlen=tuning.plain_calls_kept)
        self._taken: deque[Timed] = deque(maxlen=tuning.pace_calls)  # the last calls, however they ran
        self._steady: deque[float] = deque(maxlen=tuning.pace_calls)  # times of followed calls that met nothing new
        self._asked: deque[Timed] = deque(maxlen=tuning.plain_calls_kept)  # calls forced imperative
        self._waited: deque[Timed] = deque(maxlen=tuning.plain_calls_kept)  # `_plain`, as elapsed, for reports only
        self._sizes: deque[int] = deque(maxlen=tuning.plain_calls_kept)  # operations of the last followed calls
        self._varies = False  # whether some of them had many more than others
        self._recurring = 0  # followed calls in a row, up to the last, that met no new path or wiring
        self._steady_since = 0  # of `_steady`, those since the last backoff
        self._tensors = 1.0  # for each operation, in imperative calls
        self._imperative: dict[int, float] = {}  # seconds that calls of so many operations take imperatively
        self._asked_again = False  # whether calls were timed again since the last backoff, as no known one is like them
        self._doubt = 0.0
        self._calm = 0  # followed calls that met nothing new, while no imperative one was timed
        self._balance = 0.0
        self._last = 0.0  # seconds, of the last followed call
        self._since = 0  # calls followed since the last imperative one
        self._again = tuning.plain_calls_apart  # after how many of those to time an imperative one
        self.pause = 0  # length of the last backoff, in calls
        self.paused = 0  # calls left of the current one
        self.backs_off = False  # whether imperative calls are due to a backoff, not to be timed only
        self.steps = 1  # how many turns of a training loop the program makes in each call
        self._made, self._spent = 0, 0.0  # such turns, and the time that they took, for reports only

    def admit(self) -> bool:
        """Returns whether to follow the next call; if not, it counts towards the end of the backoff."""
        if self.paused == 0:
            self.backs_off = False
            return True
        with self._lock:
            if self.paused > 0:
                self.paused -= 1
                return False
            return True

    def recorded(self, operations: int, tensors: int) -> None:
        """Notes how many operations the recorded first call had, and how many tensors it made."""
        if operations and tensors:
            self._tensors = min(max(tensors / operations, 0.5), 4.0)

    def ran_plainly(self, seconds: float, elapsed: float | None = None, tensors: int | None = None) -> None:
        """Notes the time of a call that ran imperatively, and how many tensors it made.

        `elapsed`: with the time of other programs, for reports.
        """
        elapsed = seconds if elapsed is None else elapsed
        with self._lock:
            size = self._size_of(tensors)
            self._plain.append(Timed(seconds, size))
            self._waited.append(Timed(elapsed / self.steps, size))
            self._taken.append(self._waited[-1])
            self._add(elapsed)
            self._imperative.clear()
            self._since = 0
            if self.backs_off and size is not None and self._is_of_a_new_kind(size):
                self.paused = self.pause = 0

    def _size_of(self, tensors: int | None) -> float | None:
        """Returns how many operations an imperative call had that made so many tensors."""
        if tensors is not None:
            return tensors / self._tensors
        return statistics.fmean(self._sizes) if self._sizes else None

    def _is_of_a_new_kind(self, size: float) -> bool:
        """Returns whether a call has far more operations than those that following was given up for."""
        return bool(self._sizes) and size > tuning.varied_calls * (max(self._sizes) + tuning.alike_operations)

    def _takes(self, operations: int) -> float:
        """Returns the seconds that a call of so many operations takes imperatively."""
        known = self._imperative.get(operations)
        if known is None:
            if len(self._imperative) >= tuning.pace_calls:
                self._imperative.clear()
            known = self._imperative[operations] = expected(self._plain, operations)
        return known

    @property
    def _per_call(self) -> float:
        """The seconds that a call like the last followed one takes imperatively."""
        return self._takes(self._sizes[-1] if self._sizes else 0)

    def _add(self, seconds: float) -> None:
        self._made += self.steps
        self._spent += seconds

    def _note_size(self, operations: int) -> None:
        """Notes how many operations a followed call had; costs nothing where all have the same."""
        same = bool(self._sizes) and self._sizes[-1] == operations
        self._sizes.append(operations)
        if self._varies or not same:
            self._varies = max(self._sizes) > tuning.varied_calls * (min(self._sizes) + 1)

    def _wanted(self) -> int:
        """Returns how many more imperative calls to time before following is given up: two agree, or many are timed."""
        timed, kept = len(self._plain), tuning.plain_calls_kept
        if timed < 2:
            return 2 - timed
        seconds = [each.seconds for each in self._plain]
        differ = self._varies or max(seconds) > tuning.varied_calls * min(seconds)
        return kept - timed if differ else 0

    def _is_new_size(self) -> bool:
        """Returns whether no imperative call is known that is like the largest ones that were followed."""
        largest = max(self._sizes)
        return not any(each.size is None or are_alike(each.size, largest) for each in self._plain)

    def invested(self, seconds: float) -> None:
        """Charges a call that was followed to learn another size; this never takes the balance below zero."""
        with self._lock:
            if self._plain:
                self._balance = min(self._balance, max(self._balance + self._per_call - seconds, 0.0))

    def followed(
        self, seconds: float, clean: bool, most: float = math.inf, compiled: bool = False, operations: int = 0,
        recurs: bool = False,
    ) -> bool:  # fmt: skip
        """Notes a followed call; returns whether this starts a backoff.

        `clean`: whether it was a steady-state call; `most`: the largest loss to charge, in imperative calls' times;
        `compiled`: whether all that was new in it is what it has compiled, or validated; `operations`: how many it had;
        `recurs`: whether it met no new path or wiring.
        """
        with self._lock:
            self._note_size(operations)
            self._recurring = self._recurring + 1 if recurs else 0
            last, self._last = self._last, seconds
            # Neither is a reason to doubt: what is compiled is known by then, and calls that get ever faster will soon
            # have nothing left to learn. Else most functions would be timed in their fourth call, for nothing: by then
            # they have just been compiled, and the next call is fast.
            if not clean and not compiled and not 0.0 < seconds <= tuning.following_progress * last:
                self._doubt = min(self._doubt + 2, 2 * tuning.doubt_before_timing)
            elif clean:
                self._doubt = max(self._doubt - 1, 0)
            if not self._plain:
                self._calm += clean
                asked = 0 < tuning.calm_before_timing <= self._calm
                if asked or self._doubt >= tuning.doubt_before_timing:
                    self.paused = tuning.asked_calls_timed if asked else 1
                return False
            plain = self._takes(operations)
            largest = max(plain, self._takes(max(self._sizes)))
            saved = max(plain - seconds, -(min(tuning.following_patience, most) if clean else most) * plain)
            if not 0.0 < seconds - plain <= tuning.following_progress * (last - plain):
                self._balance = min(self._balance + saved, tuning.following_allowance * largest)
            self._since += 1
            if self._since >= self._again and len(self._plain) < tuning.plain_calls_kept:
                # Where following is clearly faster, imperative calls are a waste: time them more rarely.
                fast = tuning.plain_calls_apart_fast if self._is_fast(seconds, plain) else 1
                if self._since >= fast * self._again:
                    self._again *= 2
                    self.paused = 1
            if seconds < plain:
                self.pause //= 2
            patience = (tuning.promising_patience if self._promises() else tuning.following_patience) / (
                2 if self.pause else 1
            )
            if self._balance >= -patience * largest:
                return False
            if not self._asked_again and self._is_new_size():  # what was charged so far is a guess
                self._asked_again, self.paused, self._balance = True, tuning.plain_calls_kept, self._balance / 2
                return False
            if wanted := self._wanted():
                self.paused, self._balance = wanted, (1 - patience) * largest  # then one more such call decides
                return False
            share = round(-self._balance / (tuning.tries_share * largest))
            self._balance, self.backs_off, self._steady_since, self._asked_again = 0.0, True, 0, False
            longer = max(2 * self.pause, share) if self.pause else 0
            self.pause = self.paused = min(max(tuning.min_backoff, longer), tuning.max_backoff)
            return True

    def _is_fast(self, seconds: float, plain: float) -> bool:
        """Returns whether a followed call, or those that meet nothing new, take clearly less than an imperative one."""
        return seconds <= tuning.promising_share * plain or self._is_steady_fast()

    def _is_steady_fast(self) -> bool:
        """Returns whether calls that meet nothing new take clearly less time than imperative ones."""
        if not self._steady:
            return False
        return self.steps * statistics.median(self._steady) < tuning.promising_share * self._per_call

    def _promises(self) -> bool:
        """Returns whether calls that meet nothing new take clearly less time than imperative ones, or may do so soon.

        Where there was none since the last backoff, what recurs is compiled, and those to come will meet nothing new.
        """
        if not self._steady_since and self._recurring >= tuning.promising_recurrence:
            return True
        return self._is_steady_fast()

    def affords(self) -> bool:
        """Returns whether following has saved enough to learn another size; False while nothing is timed."""
        with self._lock:
            return bool(self._plain) and self._balance >= tuning.following_allowance * self._per_call / 2

    def ran_as_asked(self, seconds: float, tensors: int | None = None) -> None:
        """Notes the time of a call that ran imperatively on the program's demand, for reports only."""
        self._asked.append(Timed(seconds / self.steps, self._size_of(tensors)))
        self._add(seconds)

    def timed(self, seconds: float, steady: bool, watched: float = 0.0, operations: int | None = None) -> None:
        """Notes the time of a followed call, for the pace; `steady`: whether it met nothing new.

        `watched`: what it took besides, to watch calls of helpers; `operations`: how many it had.
        """
        self._add(seconds + watched)
        self._taken.append(Timed(seconds / self.steps, operations))
        if steady:
            self._steady.append(seconds / self.steps)
            self._steady_since += 1

    def pace(self) -> Pace:
        """Returns the recent times of calls, and of imperative ones as far as they were timed."""
        with self._lock:
            taken, steady, plain = list(self._taken), list(self._steady), [*self._waited, *self._asked]
            usual = statistics.fmean(self._sizes) if self._sizes else 0.0
        if len(taken) < tuning.pace_calls:
            taken = taken[len(taken) // 2 :]  # the first ones include learning
        return Pace(
            len(taken),
            statistics.fmean(each.seconds for each in taken) if taken else None,
            statistics.median(steady) if steady else None,
            statistics.fmean(expected(plain, usual if each.size is None else each.size) for each in taken or plain)
            if plain
            else None,
            self._made,
            self._spent,
            tuning.eager_operation * self._sizes[-1] / self.steps if self._sizes and self._sizes[-1] else None,
        )
