"""The hooks: installed while somebody holds them, answered per thread, and gone without a trace."""

import gc
import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf

import coexec
from tracer import intercept
from tracer.intercept import handling, hold, installed, release
from tracer.lazy import LazyTensor
from tracer.private import constant_op, context, pywrap_tfe
from tracer.versions import present

X = tf.constant([1.0, 2.0])
HOOKED = [(module, name) for module, name, _, _ in intercept._HOOKS]


@pytest.fixture(autouse=True)
def unhooked():
    """Nobody else holds the hooks meanwhile; a test leaves them as it found them."""
    gc.collect()
    others = intercept.holders()  # tensors that earlier tests have left alive, as tracebacks keep them
    alive = [each for each in gc.get_objects() if isinstance(each, LazyTensor)]  # and none of them ends meanwhile
    for _ in range(others):
        release()
    functions = [getattr(module, name) for module, name in HOOKED]
    yield
    assert (intercept.holders(), intercept.current_handler()) == (0, None)
    assert [getattr(module, name) for module, name in HOOKED] == functions
    for _ in range(others):
        hold()
    del alive


class Answers:
    """A handler that notes what it is asked, and lets it run."""

    device = None
    open = False

    def __init__(self, error=None):
        self.seen = []
        self.tapes = self
        self.error = error

    def expected(self, op, args):
        """None: no operation is known beforehand, so each arrives where TensorFlow issues it."""

    def fast(self, op, name, args):
        self.seen.append(op)
        if self.error is not None:
            raise self.error
        return intercept.run_fast(op, name, args)

    def execute(self, device, op, inputs, attrs, outputs, cancel):
        self.seen.append(op)
        return intercept.run_execute(device, op, inputs, attrs, outputs, cancel)

    def constant(self, value, dtype):
        self.seen.append(("constant", value))
        return intercept.make_constant(value, dtype)

    def __getattr__(self, event):
        """What happens to tapes."""
        return lambda *_: self.seen.append(event)


def test_held_and_released():
    """The hooks are in place from the first hold to the last release, and TensorFlow's functions are back after it."""
    originals = [getattr(module, name) for module, name in HOOKED]
    assert not installed()
    hold()
    assert installed()
    assert all(getattr(m, n) is not o for (m, n), o in zip(HOOKED, originals, strict=True))
    hold()
    release()
    assert installed()
    release()
    assert not installed()
    assert [getattr(module, name) for module, name in HOOKED] == originals


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_released_in_any_order(order):
    """Holders that overlap may let go in any order: calls on several threads do."""
    steps = [threading.Event() for _ in order]
    done = [threading.Event() for _ in order]
    holding = threading.Barrier(len(order) + 1)

    def holder(number):
        hold()
        holding.wait(30)
        steps[number].wait(30)
        release()
        done[number].set()

    threads = [threading.Thread(target=holder, args=(n,), daemon=True) for n in range(len(order))]
    for thread in threads:
        thread.start()
    holding.wait(30)
    for left, number in zip(reversed(range(len(order))), order, strict=True):
        assert installed()
        steps[number].set()
        assert done[number].wait(30)
        assert installed() == (left > 0)


def test_many_threads_hold_and_release():
    """No hold is lost when many threads come and go."""

    def busy():
        for _ in range(200):
            hold()
            release()

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not installed()


def test_a_handler_answers_its_thread_only():
    """Operations of another thread pass untouched, whatever handler this one has."""
    answers, others = Answers(), []

    def other():
        others.append((intercept.current_handler(), (tf.sin(X) + 1.0).numpy()))

    hold()
    try:
        with handling(answers):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(30)
            y = tf.cos(X)
    finally:
        release()
    assert answers.seen == ["Cos"]
    assert others[0][0] is None
    np.testing.assert_allclose(others[0][1], np.sin(X.numpy()) + 1.0, rtol=1e-6)
    np.testing.assert_allclose(y.numpy(), np.cos(X.numpy()), rtol=1e-6)


def test_every_way_in_reaches_the_handler():
    """Generated wrappers, constants, tapes and functions are all seen."""
    answers = Answers()
    function = tf.function(lambda x: x * 2.0)
    function(X)
    hold()
    try:
        with handling(answers):
            tf.constant([5, 6])
            with tf.GradientTape():
                tf.sin(X)
            function(X)
            tf.autodiff.ForwardAccumulator(X, X)
    finally:
        release()
    assert answers.seen[0] == ("constant", [5, 6])
    assert answers.seen[1:3] == ["opened", "Sin"]
    assert any(isinstance(name, (str, bytes)) and b"inference" in (name if isinstance(name, bytes) else name.encode())
               for name in answers.seen[3:])  # fmt: skip
    assert "popped" in answers.seen
    assert "accumulates" in answers.seen[-2:]


def test_handlers_nest():
    """An inner handler takes over and gives back; None lets operations run untouched."""
    outer, inner = Answers(), Answers()
    hold()
    try:
        with handling(outer):
            tf.sin(X)
            with handling(inner):
                tf.cos(X)
                with handling(None):
                    tf.tan(X)
                tf.exp(X)
            tf.tanh(X)
    finally:
        release()
    assert (outer.seen, inner.seen) == (["Sin", "Tanh"], ["Cos", "Exp"])


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_after_an_exception(error):
    """What a handler raises reaches the program as the same object, and the handler before is back."""
    outer, failing = Answers(), Answers(error)
    hold()
    try:
        with handling(outer):
            with pytest.raises(type(error)) as caught:
                with handling(failing):
                    tf.sin(X)
            assert caught.value is error
            assert intercept.current_handler() is outer
            tf.cos(X)
    finally:
        release()
    assert outer.seen == ["Cos"]
    assert intercept.current_handler() is None
    np.testing.assert_allclose(tf.sin(X).numpy(), np.sin(X.numpy()), rtol=1e-6)


def test_hooks_without_a_handler_change_nothing():
    """Values, errors and gradients are TensorFlow's own while the hooks are in place and nobody answers."""

    def program():
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = tf.reduce_sum(tf.gather(X * 3.0, [1, 0]) ** 2)
        try:
            tf.matmul(X, X)
        except tf.errors.InvalidArgumentError as error:
            message = str(error)
        return y.numpy(), tape.gradient(y, X).numpy().tolist(), message, tf.constant([1, 2]).numpy().tolist()

    expected = program()
    hold()
    try:
        assert program() == expected
    finally:
        release()


def test_gradient_functions_keep_no_lazy_tensors():
    """What TensorFlow keeps for later gradients is its own: a lazy tensor there would hold the hooks for good."""
    step = coexec.function(lambda x: gradient(x, lambda: tf.reduce_sum(x * 2.0)))
    step(X)
    caches = context.context().ones_rank_cache(), context.context().zeros_cache()
    for cache in caches:
        cache.flush()
    for _ in range(3):
        np.testing.assert_array_equal(step(X), [2.0, 2.0])
    assert step.stats().followed == 3
    assert not any(isinstance(kept, LazyTensor) for cache in caches for kept in cache._data.values())
    gc.collect()
    assert not installed()


def gradient(x, compute):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = compute()
    return tape.gradient(y, x)


def test_the_result_of_a_flat_and_a_nested_operation():
    """`flat_outputs` and `template_of` describe what the fast path returns, for each form of result."""
    forms = {
        "one": X,
        "several": [X, X],
        "a list": [[X, X], X],
        "none": None,
    }
    counts = {name: len(intercept.flat_outputs(form)) for name, form in forms.items()}
    assert counts == {"one": 1, "several": 2, "a list": 3, "none": 0}
    templates = {name: intercept.template_of(form) for name, form in forms.items()}
    assert templates == {"one": -1, "several": [0, 1], "a list": [[0, 1], 2], "none": None}


def test_the_hooked_functions_are_the_named_ones():
    """The hooks stand in these modules under these names: nothing else is touched."""
    assert {name for module, name in HOOKED if module is pywrap_tfe} == {
        "TFE_Py_FastPathExecute", "TFE_Py_Execute", "TFE_Py_ExecuteCancelable", "TFE_Py_TensorShapeSlice",
        "TFE_ToDlpackCapsule", "TFE_Py_PackEagerTensors", "TFE_Py_ForwardAccumulatorNew",
        "TFE_Py_RecordGradient", "TFE_Py_TapeGradient", "TFE_Py_TapeSetAdd", "TFE_Py_TapeSetNew",
        "TFE_Py_TapeSetPossibleGradientTypes", "TFE_Py_TapeSetRecordOperation", "TFE_Py_TapeSetRecordOperationBackprop",
        "TFE_Py_TapeSetRecordOperationForwardprop", "TFE_Py_TapeSetRemove", "TFE_Py_TapeSetShouldRecordBackprop",
        "TFE_Py_TapeVariableAccessed", "TFE_Py_TapeWatch", "TFE_Py_TapeWatchVariable",
        *present(pywrap_tfe, "TFE_DlpackDevice"),
    }  # fmt: skip
    assert [name for module, name in HOOKED if module is constant_op] == ["convert_to_eager_tensor"]
    assert [name for module, name in HOOKED if module is context] == ["internal_operation_seed"]
