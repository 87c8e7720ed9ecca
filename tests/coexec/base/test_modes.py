"""Modes: what programs ask of co-executed functions in a stretch of their code, each as context and as decorator."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base import modes
from coexec.compile.executable import Executable


def accumulator():
    """A step with a variable, a Python effect, and a branch of Python's."""
    total, log = tf.Variable(0.0), []

    @coexec.function
    def step(x, double=False):
        log.append(len(log))
        for _ in range(4):
            x = tf.tanh(x) * 1.5 + 0.25
        if double:
            x = tf.square(x) + x
        total.assign_add(tf.reduce_sum(x))
        return x

    step.total, step.log = total, log
    return step


def settle(step, *args):
    """Calls until nothing new is met."""
    for _ in range(4):
        result = step(*args)
    return result


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("enter", ["context", "decorator", "called"])
def test_imperative(enter):
    """Calls run plainly: nothing is followed, recorded or launched, and the next call outside is followed again."""
    step = accumulator()
    expected = settle(step, X).numpy()
    before = step.stats()
    if enter == "context":
        with coexec.imperative():
            result = step(X)
    elif enter == "decorator":
        result = coexec.imperative()(step)(X)
    else:
        result = coexec.imperative(step)(X)
    after = step.stats()
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert (after.imperative, after.launches, after.followed) == (1, before.launches, before.followed)
    step(X)
    assert step.stats().followed == before.followed + 1
    assert step.log == list(range(6))


def test_a_mode_is_its_threads():
    """Another thread does not run in this one's mode."""
    step = accumulator()
    settle(step, X)
    with coexec.imperative():
        thread = threading.Thread(target=step, args=(X,))
        thread.start()
        thread.join()
    assert step.stats().imperative == 0
    assert step.stats().followed == 4


def test_one_scope_for_several_threads():
    """Threads that enter the same object, one before the other leaves, each leave the mode again."""
    scope, inside, left, after = coexec.imperative(), threading.Event(), threading.Event(), []

    def first():
        with scope:
            inside.set()
            left.wait(10)
        after.append(modes.current())

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with scope:
        left.set()
        thread.join()
        assert modes.current().imperative
    after.append(modes.current())
    assert after == [modes.NONE, modes.NONE]


def test_generators_leave_in_any_order():
    """One that entered first and is closed first leaves nothing behind when the other is closed, too."""

    def entering(mode):
        with mode:
            yield

    one, other = entering(coexec.imperative()), entering(coexec.debug_nans())
    next(one), next(other)
    one.close(), other.close()
    assert modes.current() == modes.NONE


def test_a_mode_ends_with_an_exception():
    """An error leaves no mode behind."""
    step = accumulator()
    settle(step, X)
    with pytest.raises(KeyError), coexec.imperative(), coexec.fail_on_divergence():
        raise KeyError("user")
    step(X, double=True)
    assert step.stats().imperative == 0
    assert step.stats().diverged == 1


def test_fail_on_divergence():
    """A new path raises in the scope, a known one does not; state is that of the line where the paths parted."""
    step = accumulator()
    settle(step, X)
    total = step.total.numpy()
    with coexec.fail_on_divergence():
        step(X)
        with pytest.raises(coexec.Divergence, match="new operation"):
            step(X, double=True)
    assert step.total.numpy() == pytest.approx(total * 5 / 4)
    step(X, double=True)  # outside it is learnt


def test_fail_on_divergence_lets_first_calls_record():
    """Something must be known before it can be left."""
    step = accumulator()
    with coexec.fail_on_divergence():
        step(X)
    assert step.stats().recorded == 1


def test_fail_on_retrace():
    """First calls and new shapes raise; what is wholly known does not."""
    step = accumulator()
    with coexec.fail_on_retrace(), pytest.raises(coexec.Divergence, match="first call"):
        step(X)
    assert step.log == []  # the function was not entered
    settle(step, X)
    with coexec.fail_on_retrace():
        step(X)
        with pytest.raises(coexec.Divergence, match="not wholly known"):
            step(X[:2])


def test_an_asynchronous_generator_is_refused():
    """It runs after it has been called, as generators and coroutines do: the mode would not hold there."""

    async def later():
        yield 1

    with pytest.raises(TypeError, match="enter the mode inside"):
        coexec.debug_nans(later)


def test_bad_arguments():
    """What cannot be meant is refused with a reason."""
    for every in (-1, 1.5, True):
        with pytest.raises(ValueError, match="every is a number of calls"):
            coexec.validate(every=every)
    with pytest.raises(TypeError, match="callable"):
        coexec.imperative(3)
    with pytest.raises(TypeError, match="callable"):
        coexec.opaque(None)


# Validation.


@pytest.mark.parametrize("everything", [False, True], ids=["graph", "xla"])
def test_validation_finds_nothing_in_what_is_right(everything):
    """Validated calls return what others do, write once, and nothing is reported."""
    step, plain = accumulator(), accumulator()
    with testing.compile_everything() if everything else coexec.validate():
        settle(step, X)
        with coexec.validate():
            result = settle(step, X)
    with coexec.imperative():
        for _ in range(8):
            expected = plain(X)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_allclose(step.total, plain.total, rtol=1e-6)
    assert step.log == plain.log
    stats = step.stats()
    assert stats.validated >= 4
    assert stats.launches >= stats.validated
    assert "found by validation" not in step.explain()


def test_every_so_many_calls():
    """One call in three is validated, beginning with the first."""
    step = accumulator()
    settle(step, X)
    with coexec.validate(every=3):
        for _ in range(7):
            step(X)
    assert step.stats().validated == 3


def broken(monkeypatch, change):
    """Makes executables give out something else."""
    launch = Executable.launch

    def wrong(self, *values):
        results = launch(self, *values)
        return change(results)

    monkeypatch.setattr(Executable, "launch", wrong)


@pytest.mark.parametrize("everything", [False, True], ids=["graph", "xla"])
def test_a_wrong_result_is_found(monkeypatch, everything):
    """A planted error is found, told with operation and line, and the program goes on with the right values."""
    step, plain = accumulator(), accumulator()
    with testing.compile_everything() if everything else coexec.validate():
        settle(step, X)
        broken(monkeypatch, lambda results: [results[0] + 1.0, *results[1:]])
        with coexec.validate():
            result = step(X)
    with coexec.imperative():
        expected = settle(plain, X)
        plain(X)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_allclose(step.total, plain.total, rtol=1e-6)
    text = step.explain()
    assert "found by validation" in text
    assert ("xla" if everything else "graph") in text
    assert "AddV2 at" in text
    assert "test_modes.py" in text
    assert "12 of 12 values differ" in text
    if not everything:
        launches = step.stats().launches
        np.testing.assert_allclose(step(X), expected, rtol=1e-6)  # and is not launched again
        assert step.stats().launches == launches


def test_a_wrong_write_is_found(monkeypatch):
    """So is a variable that the executable leaves with another value, and it holds eager's afterwards."""
    step, plain = accumulator(), accumulator()
    settle(step, X)
    launch = Executable.launch

    def wrong(self, feeds, *rest):
        results = launch(self, feeds, *rest)
        for feed in feeds:
            if feed.dtype == tf.resource:
                tf.raw_ops.AssignVariableOp(resource=feed, value=100.0)
        return results

    monkeypatch.setattr(Executable, "launch", wrong)
    with coexec.validate():
        step(X)
    with coexec.imperative():
        settle(plain, X)
        plain(X)
    np.testing.assert_allclose(step.total, plain.total, rtol=1e-6)
    assert "a variable of shape [] that it writes" in step.explain()


def test_strict_functions_raise(monkeypatch):
    """Under `fail_on_divergence`, a difference is an error."""
    step = accumulator()
    settle(step, X)
    broken(monkeypatch, lambda results: [results[0] * 2.0, *results[1:]])
    with coexec.validate(), coexec.fail_on_divergence(), pytest.raises(coexec.Divergence, match="values differ"):
        step(X)


def test_rounding_is_no_difference():
    """A sum in another order is not reported; half precision neither."""
    numbers = np.random.default_rng(0).normal(size=(64, 300))

    @coexec.function
    def step(x, y):
        product = tf.matmul(x, x, transpose_b=True)
        return tf.reduce_sum(tf.exp(product / 100.0)), tf.reduce_mean(y * y + y) - tf.reduce_max(y)

    x, y = tf.constant(numbers, tf.float32), tf.constant(numbers, tf.float16)
    with testing.compile_everything():
        for _ in range(4):
            step(x, y)
        with coexec.validate():
            step(x, y)
    assert step.stats().validated == 1
    assert "found by validation" not in step.explain()


# Opaque functions.


def test_opaque_functions_are_not_followed():
    """Their operations run at once, gradients flow through them, and what is around them is followed."""

    def make(decorate, hide):
        weight, seen = tf.Variable(2.0), []

        @hide
        def hidden(x, n):
            seen.append(n)
            for _ in range(n):
                x = tf.sin(x) * weight
            return x

        @decorate
        def step(x, n):
            with tf.GradientTape() as tape:
                y = hidden(x * 3.0, n)
                loss = tf.reduce_sum(tf.square(y) + y)
            gradient = tape.gradient(loss, weight)
            weight.assign_sub(0.01 * gradient)
            return loss, gradient

        return step, weight, seen

    step, weight, seen = make(coexec.function, coexec.opaque)
    plain, its_weight, its_seen = make(lambda f: f, lambda f: f)
    for n in (1, 2, 3, 1, 4, 2, 5, 6):
        for one, other in zip(step(X, n), plain(X, n), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(weight, its_weight, rtol=1e-5)
    assert seen == its_seen
    assert step.stats().followed >= 5


def test_opaque_results_in_containers():
    """What an opaque function returns may be anything."""

    @coexec.opaque
    def hidden(x):
        return {"sum": tf.reduce_sum(x), "rows": [x[0], x[1]]}, "text"

    @coexec.function
    def step(x):
        found, text = hidden(x + 1.0)
        return found["sum"] * 2.0 + found["rows"][1][0], text

    for _ in range(4):
        result, text = step(X)
        np.testing.assert_allclose(result, (X + 1.0).sum() * 2.0 + X[1, 0] + 1.0, rtol=1e-6)
        assert text == "text"
    assert step.stats().followed == 3


def test_opaque_functions_see_what_was_done_before():
    """Variables hold what the operations before the call have written, and those behind it see what it writes."""
    variable = tf.Variable(1.0)

    @coexec.opaque
    def hidden():
        variable.assign(variable * 10.0)
        return float(variable)

    @coexec.function
    def step():
        variable.assign_add(1.0)
        read = hidden()
        variable.assign_add(read)
        return variable.read_value()

    expected = 1.0
    for _ in range(5):
        expected = (expected + 1.0) * 20.0
        assert step().numpy() == expected
    assert step.stats().followed == 4
