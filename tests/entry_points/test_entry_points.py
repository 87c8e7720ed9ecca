"""A tensor that a followed call has made goes through every entry_point as an eager one does, on any thread.

Each entry_point is tried in two places; COEXEC_DOORS=all tries all five.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import in_thread, outcomes
from tests.entry_points import ENTRY_POINTS, tensors_of
from tests.snapshots import assert_same
from tracer.lazy import LazyTensor

pytestmark = pytest.mark.slow

CALLS = 5


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def here(ask):
    return ask()


def in_a_pool(ask):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result(60)


def in_a_generator(ask):
    """On a thread of tf.data's."""
    found = []

    def items():
        assert threading.current_thread() is not threading.main_thread()
        try:
            found.append(ask())
        except BaseException as error:
            found.append(error)
        yield 0

    assert len(list(tf.data.Dataset.from_generator(items, output_signature=tf.TensorSpec([], tf.int32)))) == 1
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def in_a_py_function(ask):
    """On the calling thread, inside of one of TensorFlow's operations."""
    found = []
    tf.py_function(lambda: found.append(ask()), [], [])
    return found[0]


PLACES = {place.__name__: place for place in (here, in_thread, in_a_generator, in_a_pool, in_a_py_function)}
# Every entry_point where the call is, and in one other place, unless all are asked for.
ALL = os.environ.get("COEXEC_DOORS") == "all"
PAIRS = [
    (name, place)
    for number, name in enumerate(ENTRY_POINTS)
    for turn, place in enumerate(PLACES)
    if ALL or turn in (0, 1 + number % (len(PLACES) - 1))
]


# How many tensors decide shapes of what the call itself computes: from the third call on, they are computed at once.
SHAPING = {"attributes": 1, "specs": 1, "variables": 1, "keras_fit_from_a_generator_of_sparse_batches": 2}


@pytest.mark.filterwarnings("default")  # Keras converts in ways that NumPy discourages
@pytest.mark.parametrize(("name", "place"), PAIRS)
def test_through(name, place, tmp_path):
    """Results and errors are eager's in each call, and the tensors that went in were lazy."""
    lazy = []

    def make(decorate):
        def compute(x):
            tensors = tensors_of(x, str(tmp_path))
            lazy.append(sum(type(each) is LazyTensor for each in vars(tensors).values()))
            return PLACES[place](lambda: ENTRY_POINTS[name](tensors))

        return decorate(compute)

    calls = [(tf.constant([1.0, 2.0, 3.0, 4.0]),)] * CALLS
    expected = outcomes(make(lambda f: f), calls)
    lazy.clear()
    decorated = make(coexec.function)
    for number, (one, other) in enumerate(zip(expected, outcomes(decorated, calls), strict=True)):
        assert_same(one, other, path=f"call {number}: ")
    assert expected[0].parts["[0]"] == "returned", expected[0]
    assert decorated.stats().followed + decorated.stats().diverged == CALLS - 1
    eager = SHAPING.get(name, 0) if place == "here" else 0
    assert lazy == [0, 6] + [6 - eager] * (CALLS - 2)
