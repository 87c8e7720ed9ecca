"""JANUS's programs: in ten steps the eager run's losses and state, by calls that were followed and launched."""

import importlib

import pytest

import coexec
from examples.programs import PROGRAMS, Program
from tests.examples import STEPS, check, run
from tests.snapshots import assert_same

NAMES = (
    "lenet",
    "lstm_lm",
    "tree_rnn",
    "tree_lstm",
    "a3c",
    "ppo",
    "adversarial_nets",
    "pix2pix",
    "inception_v3",
)


def load(name: str) -> Program:
    importlib.import_module(f"examples.programs.{name}")
    return PROGRAMS[name]


@pytest.mark.sample("lenet", "lstm_lm", "a3c")
@pytest.mark.parametrize("name", NAMES)
def test_is_the_eager_program(name):
    check(load(name))


def test_sampling_of_words_is_the_eager_program():
    """Looking for words that were sampled by accident draws a seed: it may be that no call is followed to its end."""
    program, made = load("sampled_softmax_lm"), []

    def decorate(function):
        made.append(coexec.function(function))
        return made[-1]

    eager, found = run(program, lambda function: function, STEPS), run(program, decorate, STEPS)
    for what, expected, seen in zip(("losses", "state"), eager, found, strict=True):
        parts = zip(expected, seen, strict=True) if what == "losses" else [(expected, seen)]
        for part in parts:
            assert_same(*part, program.rtol, program.atol, what)
    (stats,) = (function.stats() for function in made)
    assert stats.launches
    assert stats.ops_followed
