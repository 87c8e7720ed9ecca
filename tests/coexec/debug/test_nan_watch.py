"""NaN mode: the operation, the line and the inputs from which the first NaN or infinity comes."""

import inspect
import os
import subprocess
import sys
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.coexec import assert_quiet, holders
from tracer import intercept


def line_of(text, function):
    """The number of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(inspect.unwrap(function))
    return first + next(n for n, line in enumerate(lines) if text in line)


def planted():
    """A step that divides by what may be zero, behind and before other operations, and writes around that."""
    total, log = tf.Variable(0.0), []

    @coexec.function
    def step(x, y):
        total.assign_add(1.0)
        log.append("before")
        scaled = tf.tanh(x) * 2.0
        ratio = scaled / y
        log.append("behind")
        total.assign_add(tf.reduce_sum(ratio))
        return tf.nn.softmax(ratio)

    return step, total, log


X, GOOD, BAD = tf.constant([0.0, 1.0, 2.0]), tf.constant([1.0, 2.0, 4.0]), tf.constant([0.0, 2.0, 4.0])


def settled(step, *given):
    for _ in range(4):
        result = step(*given)
    return result


def test_the_operation_the_line_and_the_inputs():
    """Zero by zero: the error names the division, not what NaN went on into; state and effects end there."""
    before = holders()
    step, total, log = planted()
    expected = settled(step, X, GOOD).numpy()
    at, logged = total.numpy(), len(log)
    stats = step.stats()
    with coexec.debug_nans():
        np.testing.assert_allclose(step(X, GOOD), expected, rtol=1e-6)
        at = total.numpy()
        with pytest.raises(coexec.NonFiniteError) as caught:
            step(X, BAD)
    error = caught.value
    assert error.op == "RealDiv"
    assert error.location.frames[0].line == line_of("ratio = scaled / y", step)
    np.testing.assert_allclose(error.inputs[0], 2 * np.tanh(X), rtol=1e-6)
    np.testing.assert_array_equal(error.inputs[1], BAD)
    assert np.isnan(error.output).tolist() == [True, False, False]
    assert str(error).startswith(f"NaN from RealDiv at {__file__}:{error.location.frames[0].line} in planted")
    assert "float32[3]" in str(error)
    assert "input 1: float32[3] [0.0, 2.0, 4.0]" in str(error)
    assert isinstance(error, FloatingPointError)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "step" in names
    assert total.numpy() == at + 1.0
    assert log[logged:] == ["before", "behind", "before"]
    after = step.stats()
    assert (after.imperative - stats.imperative, after.followed, after.launches) == (2, stats.followed, stats.launches)
    step(X, GOOD)
    assert step.stats().followed == stats.followed + 1
    del error, caught
    assert_quiet(before)


@pytest.mark.parametrize("enter", ["decorator", "called"])
def test_as_a_decorator(enter):
    """As other modes are."""
    step, *_ = planted()
    watched = coexec.debug_nans()(step) if enter == "decorator" else coexec.debug_nans(step)
    watched(X, GOOD)
    with pytest.raises(coexec.NonFiniteError, match="NaN from RealDiv"):
        watched(X, BAD)
    assert not np.isfinite(step(X, BAD)[0])


def test_infinity():
    """It is told where it comes up, and where it came in, as masks do, nothing is said."""

    @coexec.function
    def step(x, mask):
        scores = tf.where(mask, x, -np.inf)
        return tf.nn.softmax(scores * 2.0), tf.exp(x)

    with coexec.debug_nans():
        step(tf.constant([1.0, 2.0]), tf.constant([True, False]))
        with pytest.raises(coexec.NonFiniteError, match="infinity from Exp") as caught:
            step(tf.constant([1.0, 200.0]), tf.constant([True, False]))
    np.testing.assert_array_equal(caught.value.inputs[0], [1.0, 200.0])


def test_a_gradient():
    """The square root's, at zero: the line is that of the tape, and the message says whose gradient it is."""

    @coexec.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sqrt(x))
        return tape.gradient(y, x)

    with coexec.debug_nans():
        step(X + 1.0)
        with pytest.raises(coexec.NonFiniteError, match=r"from \w+ in the gradient of Sqrt at ") as caught:
            step(X)
    assert caught.value.location.frames[0].line == line_of("tape.gradient", step)


def test_variables():
    """One that overflows as it is added to is found there; one that holds NaN already where it is read."""
    v = tf.Variable([1e38, 1.0])

    @coexec.function
    def step(x):
        v.assign_add(x)
        return v * 0.5

    with coexec.debug_nans():
        step(tf.constant([1e37, 0.0]))
        with pytest.raises(coexec.NonFiniteError, match="infinity from AssignAddVariableOp") as caught:
            step(tf.constant([3e38, 0.0]))
        np.testing.assert_array_equal(caught.value.inputs[1], np.float32([3e38, 0.0]))
        assert "the variable, float32[2]" in str(caught.value)
        v.assign([np.nan, 1.0])
        with pytest.raises(coexec.NonFiniteError, match="NaN from AssignAddVariableOp"):
            step(tf.constant([1.0, 0.0]))


def test_what_came_in():
    """NaN in the data is told at the first operation that gives it, with a word on where it came from."""

    @coexec.function
    def step(x):
        cleaned = tf.where(tf.math.is_nan(x), 0.0, x)
        return tf.reduce_sum(cleaned), x * 2.0

    with coexec.debug_nans(), pytest.raises(coexec.NonFiniteError, match="NaN from Mul") as caught:
        step(tf.constant([1.0, np.nan]))
    assert "an input has it already" in str(caught.value)


def test_a_model_in_training():
    """In a Keras model a layer's operation is named; training that is fine is not disturbed, and learns as eagerly."""
    outcomes = []
    for watched in (False, True):
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3),
             keras.layers.LSTM(4), keras.layers.Dense(1)]
        )  # fmt: skip
        optimizer = keras.optimizers.Adam(0.01)

        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        step = coexec.debug_nans(coexec.function(step)) if watched else step
        x, y = tf.random.normal([4, 5, 3]), tf.ones([4, 1])
        outcomes.append([step(x, y).numpy() for _ in range(4)])
    np.testing.assert_array_equal(*outcomes)
    with pytest.raises(coexec.NonFiniteError, match="NaN from"):
        step(x * np.nan, y)


def test_what_is_not_looked_at():
    """Opaque functions are left alone; a graph function is one operation; half precision and complex numbers count."""

    @coexec.opaque
    def hidden(x):
        return tf.math.log(x)

    graph = tf.function(lambda x: tf.math.log(x) + 1.0)

    @coexec.function
    def step(x, how):
        if how == "opaque":
            return tf.math.is_finite(hidden(x))
        if how == "graph":
            return graph(x)
        if how == "python":
            return tf.py_function(lambda z: tf.math.is_finite(tf.math.log(z)), [x], tf.bool)
        return tf.cast(x, how) / tf.cast(x * 0.0, how)

    x = tf.constant([1.0, 0.0])
    with coexec.debug_nans():
        for how in ("opaque", "python"):
            assert step(x, how).numpy().tolist() == [True, False]
        with pytest.raises(coexec.NonFiniteError, match="infinity from __inference"):
            step(x, "graph")
        tf.config.run_functions_eagerly(True)
        try:
            with pytest.raises(coexec.NonFiniteError, match="infinity from Log"):
                step(x, "graph")
        finally:
            tf.config.run_functions_eagerly(False)
        for dtype in (tf.float16, tf.bfloat16, tf.float64, tf.complex64):
            with pytest.raises(coexec.NonFiniteError, match="NaN from RealDiv"):
                step(x, dtype)
    assert intercept.current_handler() is None


REPRODUCED = {
    "division": lambda x, v: 2.0 * x / (x - x),
    "a list": lambda x, v: tf.concat([x, tf.math.log(x - 1.0)], 0),
    "attributes": lambda x, v: tf.nn.conv1d(tf.math.log(x[None, :, None] - 1.0), tf.ones([2, 1, 1]), 1, "SAME"),
    "half precision": lambda x, v: tf.math.log(tf.cast(x - 5.0, tf.bfloat16)),
    "a half precision scalar": lambda x, v: tf.math.log(tf.cast(x[0] - 5.0, tf.bfloat16)),
    "complex": lambda x, v: tf.cast(x, tf.complex64) / tf.cast(x - x, tf.complex64),
    "a Python number": lambda x, v: x / 0.0,
    "an addition to a variable": lambda x, v: v.assign_add(x * 3e38),
    "a scatter": lambda x, v: v.scatter_sub(tf.IndexedSlices(tf.constant([np.nan]), [1])),
    "numbers": lambda x, v: tf.reshape(tf.cumsum(x * 1e38, axis=-1), [3, 1]) * 2.0,
}


RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
"""


def caught(name, directory):
    """The error of one of these programs, which has left something to reproduce."""
    v = tf.Variable([3e38, 1.0, 2.0])
    step = coexec.function(lambda x: REPRODUCED[name](x, v))
    with coexec.debug_nans(directory=directory), pytest.raises(coexec.NonFiniteError) as caught:
        step(tf.constant([1.0, 2.0, 3.0]))
    return caught.value


def run_python(*arguments, cwd=None):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


def said_at_the_end(error):
    return f"{int(np.count_nonzero(~np.isfinite(error.output)))} values are NaN or infinite"


def test_it_is_left_to_be_reproduced(tmp_path):
    """Another process, with TensorFlow alone, makes the same NaN or infinity of what was written."""
    errors = {name: caught(name, tmp_path / name) for name in REPRODUCED}
    scripts = {name: f"{error.reproduction}/reproduce.py" for name, error in errors.items()}
    printed = run_python("-c", RUN_ALL, *scripts.values())
    ends = iter([line for line in printed if line.endswith(("infinite", "status 0"))])
    for name, error in errors.items():
        assert error.reproduction == str(tmp_path / name / f"001-{error.op}")
        assert str(error).splitlines()[-1].endswith(f"python {scripts[name]}")
        assert (next(ends), next(ends)) == (said_at_the_end(error), "status 0"), name
        with open(scripts[name]) as script:
            text = script.read()
        assert "coexec" not in text.partition("import")[2]
        assert str(error).splitlines()[0].partition(" at ")[0] in text
    assert next(ends, None) is None


def test_the_command_that_reproduces_it(tmp_path):
    """As the error has it, in the directory that it names."""
    error = caught("numbers", tmp_path)
    assert run_python("reproduce.py", cwd=error.reproduction)[-1] == said_at_the_end(error)


def test_reproductions_are_kept_apart(tmp_path):
    """Each has a directory of its own; what cannot be written down, or where, is told, and raises no other error."""
    step = coexec.function(lambda x: 1.0 / x)
    graph = coexec.function(lambda x: tf.function(lambda y: tf.math.log(y))(x))
    (tmp_path / "file").touch()
    with coexec.debug_nans(directory=tmp_path):
        for _ in range(2):
            with pytest.raises(coexec.NonFiniteError):
                step(X)
        with pytest.raises(coexec.NonFiniteError, match=r"could not be written: .* is a function") as caught:
            graph(X)
        assert caught.value.reproduction is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["001-RealDiv", "002-RealDiv", "file"]
    with coexec.debug_nans(directory=tmp_path / "file"):
        with pytest.raises(coexec.NonFiniteError, match="could not be written"):
            step(X)
    with coexec.debug_nans(), pytest.raises(coexec.NonFiniteError) as caught:
        step(X)
    assert caught.value.reproduction is None
    assert "again" not in str(caught.value)


def test_a_program_may_catch_it():
    """In the program, at the line; the rest of the call is looked at, too."""

    @coexec.function
    def step(x):
        try:
            return 1.0 / x
        except FloatingPointError as error:
            return error.inputs[1]

    with coexec.debug_nans():
        np.testing.assert_array_equal(step(X), X)
