"""Eager tensors and the garbage collector: a collection while a tensor's attributes become a dict."""

import gc
import weakref

import pytest
import tensorflow as tf

import tracer.lazy  # noqa: F401 (which has tensors visited otherwise)


class Mark:
    """An attribute that the collector has to follow."""


@pytest.fixture
def at_the_next_object():
    """A collection begins with the next object that is made after `gc.enable()`."""
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.disable()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


@pytest.mark.usefixtures("at_the_next_object")
def test_a_tensor_has_one_dict():
    """With two of the same values, the one that is nobody's points to freed memory once the tensor has ended."""
    mark, tensor = Mark(), tf.constant(1.0)
    tensor._is_zeros_tensor = mark
    dicts = [{} for _ in range(1000)]  # none that was freed is left to be used again
    gc.enable()
    found = tensor.__dict__
    gc.disable()
    assert len(dicts) == 1000
    assert [
        id(held) for held in gc.get_referrers(mark) if type(held) is dict and held.keys() == {"_is_zeros_tensor"}
    ] == [id(found)]


@pytest.mark.parametrize("asked", [False, True])
def test_attributes_are_followed(asked):
    """A circle through a tensor's attributes is found, before and after these become a dict."""
    mark, tensor = Mark(), tf.constant(1.0)
    tensor._is_zeros_tensor, mark.tensor = mark, tensor
    if asked:
        assert tensor.__dict__ == {"_is_zeros_tensor": mark}
    ended = weakref.ref(mark)
    del mark, tensor
    assert ended() is not None
    gc.collect()
    assert ended() is None
