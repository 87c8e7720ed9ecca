"""What drop-in code asks of `tf.function`: concrete functions and XLA's program, or an error that says why not."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing

X = tf.reshape(tf.linspace(-1.0, 1.0, 12), [4, 3])


class Scaled(tf.Module):
    """A module whose decorated method is saved."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(2.0)

    @coexec.function
    def __call__(self, x, times=1):
        for _ in range(times):
            x = tf.tanh(x * self.scale)
        return {"out": x, "sum": tf.reduce_sum(x)}


@coexec.function(input_signature=[tf.TensorSpec([None, 3])])
def halved(x):
    if tf.reduce_sum(x) > 0.0:  # written down as one graph, as AutoGraph has it
        x = -x
    return x / 2.0


@coexec.function
def reading(x):
    y = x * 2.0
    return y * y.numpy().max()


def test_a_concrete_function_computes_what_calls_do():
    """For tensors and specs, by position and by name; structures come back as they are."""
    scaled = Scaled()
    expected = scaled(X, times=3)
    for given in (X, tf.TensorSpec([None, 3])):
        found = Scaled.__call__.get_concrete_function(scaled, given, times=3)(X)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_the_signature_is_that_of_the_decorator():
    """With an `input_signature` none need be given; both branches are in the graph."""
    concrete = halved.get_concrete_function()
    assert concrete.structured_input_signature[0][0].shape.as_list() == [None, 3]
    for x in (X - 1.0, X + 1.0):
        np.testing.assert_allclose(concrete(x), halved(x), rtol=1e-6)


def test_a_model_can_be_saved(tmp_path):
    """What is saved under a signature computes the same after it was loaded, with the state of that moment."""
    scaled = Scaled()
    signature = Scaled.__call__.get_concrete_function(scaled, tf.TensorSpec([None, 3], name="x"), times=2)
    scaled.scale.assign(0.5)
    tf.saved_model.save(scaled, str(tmp_path), signatures=signature)
    loaded = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    np.testing.assert_allclose(loaded(x=X)["out"], scaled(X, times=2)["out"], rtol=1e-6)


def test_calls_do_not_notice():
    """Asking for a graph neither changes what is known of calls, nor is it counted; calls are followed as before."""
    fn = coexec.function(lambda x: tf.tanh(x) * 3.0 + tf.reduce_sum(x))
    with testing.compile_everything():
        for _ in range(3):
            fn(X)
        before, known = fn.stats(), str(fn.trace_graph)
        fn.get_concrete_function(tf.TensorSpec([None, 3]))
        assert (fn.stats(), str(fn.trace_graph)) == (before, known)
        fn(X)
    assert fn.stats().followed == before.followed + 1
    assert fn.stats().launches == before.launches + 1


@pytest.mark.parametrize("ask", ["get_concrete_function", "experimental_get_compiler_ir"])
def test_what_is_no_graph_says_why(ask):
    """A function that reads values is none: the error names it and has the reason as its cause; calls go on."""
    for _ in range(3):
        expected = reading(X).numpy()
    with pytest.raises(NotImplementedError, match=r"^reading cannot be written down as one graph") as caught:
        getattr(reading, ask)(X)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "numpy" in str(caught.value)
    np.testing.assert_allclose(reading(X), expected, rtol=1e-6)


def test_a_bound_method_is_told_how():
    """A method has no instance to trace with: the error says how to give it."""
    with pytest.raises(NotImplementedError, match=r"Class\.method\.get_concrete_function\(instance"):
        Scaled().__call__.get_concrete_function(X)


def test_the_program_of_xla():
    """XLA's program of the whole function, by stage, as from `tf.function(jit_compile=True)`."""
    text = coexec.function(lambda x: tf.tanh(x) + 1.0).experimental_get_compiler_ir(X)(stage="hlo")
    assert "HloModule" in text
    assert "tanh" in text
