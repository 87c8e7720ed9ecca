"""Calls a public function eagerly and followed, its kinds of inputs in turn, and compares each call's outcome."""

import itertools
from collections.abc import Callable
from typing import Any

import keras

import coexec
from tests.public import by_hand, inputs
from tests.public.inputs import CallArguments
from tests.snapshots import assert_same, snapshot

TURNS = (0, 1, 0, 1, 0, 1, 1, 0)  # which kind of inputs each call gets

_BY_HAND = by_hand.table()


def why_not(name: str) -> str | None:
    """Returns why a function is not called; None if it is to be."""
    return None if name in _BY_HAND else by_hand.why_left_out(name)


def kinds(name: str, function: Callable[..., Any]) -> list[CallArguments]:
    """Returns two kinds of arguments that eager takes, or fewer where no more are found; those by hand may fail."""
    line = _BY_HAND.get(name)
    if line is not None:
        return [by_hand.made(line, 0), by_hand.made(line, 1)]
    tried = itertools.chain(inputs.found(function, name), inputs.found(function, name, again=True))
    good = (given for given in tried if outcome(function, given)[0] == "returned")
    found = list(itertools.islice(good, 2))
    if not found:  # the same function may be public by several names (`tf.einsum`, `tf.linalg.einsum`)
        last = name.rpartition(".")[2]
        line = next((line for other, line in _BY_HAND.items() if other.rpartition(".")[2] == last), None)
        found = [] if line is None else [by_hand.made(line, 0), by_hand.made(line, 1)]
    return found


def outcome(function: Callable[..., Any], given: CallArguments) -> Any:
    """Calls a function with fixed seeds; what it returned, or the exception's class."""
    keras.utils.set_random_seed(5)
    args, kwargs = given
    try:
        return "returned", function(*args, **kwargs)
    except Exception as error:
        return "raised", type(error).__name__


def differs(name: str, function: Callable[..., Any], given: list[CallArguments]) -> str | None:
    """Returns where the followed calls differ from eager ones; None if they do not."""

    def plain(args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    step = coexec.function(plain, jit_compile=False)
    for number, turn in enumerate(TURNS):
        arguments = given[turn % len(given)]
        one = snapshot(outcome(plain, (arguments, {})))
        other = snapshot(outcome(step, (arguments, {})))
        try:
            assert_same(one, other, path=f"call {number}")
        except AssertionError as error:
            return f"{name}: {error}"
    stats = step.stats()
    return None if stats.followed + stats.diverged >= len(TURNS) - 2 else f"{name}: {stats}"
