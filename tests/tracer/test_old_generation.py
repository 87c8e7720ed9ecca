"""What is learnt goes to the oldest generation, uncounted, and garbage does not."""

import gc
import itertools
import weakref

import pytest

from tracer import old_generation
from tracer.old_generation import hand_over


class Thing:
    """Has a reference to itself, so that only the collector can free it."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def first_time(monkeypatch):
    """As if nothing had been handed over in this process, nor frozen, as it is around all tests."""
    monkeypatch.setattr(old_generation, "_times", itertools.count())
    monkeypatch.setattr(old_generation, "_managed", False)
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.enable()
    gc.unfreeze()
    yield
    (gc.enable if enabled else gc.disable)()
    if frozen:
        gc.freeze()


def is_old(thing):
    return any(each is thing for each in gc.get_objects(2))


def test_what_is_alive_becomes_old_at_once():
    thing = Thing()
    assert not is_old(thing)
    hand_over()
    assert is_old(thing)
    assert gc.get_freeze_count() == 0


def test_young_garbage_is_collected_first():
    gone = weakref.ref(Thing())
    hand_over()
    assert gone() is None


def test_old_garbage_is_still_found():
    thing = Thing()
    hand_over()
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


def test_it_keeps_out_of_what_the_program_manages():
    """It has frozen objects, or disabled the collector."""
    thing = Thing()
    gc.disable()
    hand_over()
    assert not is_old(thing)
    gc.enable()
    gc.freeze()
    try:
        frozen, other = gc.get_freeze_count(), Thing()
        hand_over()
        assert 0 < frozen / 2 < gc.get_freeze_count() <= frozen  # other threads may free some
        assert not is_old(other)
    finally:
        gc.unfreeze()


def test_what_a_program_has_frozen_is_counted_once(monkeypatch):
    """That takes 40 ms for what TensorFlow has; every call that learns something asks."""
    counts = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(1) or 5)
    for _ in range(3):
        hand_over()
    assert len(counts) == 1


def test_it_ends_after_some_times(monkeypatch):
    monkeypatch.setattr(old_generation, "MAX_TIMES", 2)
    for expected in (True, True, False):
        thing = Thing()
        hand_over()
        assert is_old(thing) is expected
