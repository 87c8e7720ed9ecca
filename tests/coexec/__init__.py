"""Hostile tests of the decorated function: plain eager TensorFlow is the oracle, and counts show how a result came.

What they share: calls eager and decorated side by side, work on other threads, and what a test must leave behind.
"""

import functools
import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import coexec
from tests.snapshots import assert_same, snapshot
from tracer import intercept

TIMEOUT = 60  # seconds until a thread counts as hung; no test waits that long unless something is wrong


def outcomes(function: Callable, calls: Iterable[tuple]) -> list[Any]:
    """What each call returned or raised, as snapshots."""
    found = []
    for arguments in calls:
        try:
            found.append(snapshot(("returned", function(*arguments))))
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit) as error:
            found.append(snapshot(("raised", error.with_traceback(None))))
    return found


def unchanged(function: Callable) -> Callable:
    """The decorator of the eager side."""
    return function


def run_both(make: Callable, calls: Iterable[tuple], **options: Any) -> Any:
    """Compares all calls of `make(decorator)` with eager's, and returns what was decorated."""
    calls = list(calls)
    expected = outcomes(make(unchanged), calls)
    decorated = make(functools.partial(coexec.function, **options))
    for number, (one, other) in enumerate(zip(expected, outcomes(decorated, calls), strict=True)):
        assert_same(one, other, path=f"call {number}: ")
    return decorated


def in_threads(*functions: Callable) -> list[Any]:
    """Runs the functions at the same time, each on a thread of its own; returns their results, or raises an error."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(number: int) -> None:
        try:
            start.wait(TIMEOUT)
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def in_thread(function: Callable) -> Any:
    """Runs the function on another thread, waits for it, and returns or raises what it does."""
    return in_threads(function)[0]


def holders() -> int:
    """How many calls and live lazy tensors keep the hooks in place, garbage excluded."""
    gc.collect()
    return intercept.holders()


def assert_quiet(before: int) -> None:
    """Fails if this thread still has a handler, or more keeps the hooks in place than `before`."""
    assert intercept.current_handler() is None
    after = holders()  # fewer than before where pytest has let go of an earlier test's traceback
    assert after <= before
    assert intercept.installed() == (after > 0)


def launches_a_call(fn, calls):
    """How many launches a followed call takes once all is known."""
    before = fn.stats()
    for arguments in calls:
        fn(*arguments)
    after = fn.stats()
    assert after.followed - before.followed == len(calls), fn.explain()
    assert after.diverged == before.diverged, fn.explain()
    return (after.launches - before.launches) / len(calls)
