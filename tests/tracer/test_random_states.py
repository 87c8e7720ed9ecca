"""Random states: each draw from the global generators, and each seed, shows in their memory."""

import random

import numpy as np
import pytest

from tracer import random_states

DRAWS = {
    "random": random.random,
    "getrandbits": lambda: random.getrandbits(8),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "gauss": lambda: random.gauss(0.0, 1.0),  # of two calls, one draws: the other takes what was kept
    "seed": lambda: random.seed(5),
    "setstate": lambda: random.setstate(random.Random(3).getstate()),
    "numpy": np.random.rand,
    "numpy.integers": lambda: np.random.randint(8),
    "numpy.shuffle": lambda: np.random.shuffle([1, 2, 3]),
    "numpy.seed": lambda: np.random.seed(5),
    "numpy.set_state": lambda: np.random.set_state(np.random.RandomState(3).get_state()),
}


@pytest.fixture(autouse=True)
def restored():
    """Leaves the generators as they were."""
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


@pytest.mark.parametrize("known", [True, False], ids=["from memory", "by public functions"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_show(name, known, monkeypatch):
    """The states differ after each draw, and are equal while nothing is drawn."""
    monkeypatch.setattr(random_states, "KNOWN", known and random_states.KNOWN)
    random.seed(1)
    np.random.seed(1)
    for _ in range(3):
        before = random_states.states()
        random.Random(4).random()
        np.random.default_rng(4).random()
        assert random_states.states() == before
        if name.endswith(("seed", "setstate", "set_state")):
            random.random()
            np.random.rand()
            before = random_states.states()
        DRAWS[name]()
        assert random_states.states() != before


def test_memory_is_laid_out_as_expected():
    """Here, states are read from memory."""
    assert random_states.KNOWN


def test_another_bit_generator():
    """NumPy's global generator may be replaced by one of another kind, whose draws show, too."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = random_states.states()
        assert random_states.states() == state
        np.random.rand()
        assert random_states.states() != state
    finally:
        np.random.set_bit_generator(before)
