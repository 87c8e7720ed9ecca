"""Operations that run as kernels alone: the same results, errors, handles and random numbers as in eager."""

import contextlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuned
from tests.snapshots import assert_same, snapshot
from tests.tracer import unhooked
from tracer import intercept, single_kernels
from tracer.private import context, core, gen_resource_variable_ops, pywrap_tfe
from tracer.recorder import Recorder
from tracer.trace import Trace

X = tf.constant(np.random.default_rng(5).normal(size=[4, 6, 6, 3]).astype(np.float32))
M = tf.reshape(X, [4, -1])[:, :16]


def gradients(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
        z = tf.reduce_sum(y * tf.sin(y))
    return y, tape.gradient(z, x)


COMPUTE = [
    lambda: tf.matmul(M, M, transpose_b=True),
    lambda: tf.nn.conv2d(X, tf.ones([3, 3, 3, 2]), 1, "SAME"),
    lambda: tf.nn.depthwise_conv2d(X, tf.ones([3, 3, 3, 2]), [1, 1, 1, 1], "VALID"),
    lambda: tf.raw_ops.FusedBatchNormV3(
        x=X, scale=tf.ones([3]), offset=tf.zeros([3]), mean=tf.zeros([0]), variance=tf.zeros([0]), is_training=True
    ),
    lambda: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(M), M),
    lambda: gradients(lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 3, 2]), 2, "SAME"), X),
    lambda: gradients(lambda x: tf.nn.conv3d(x[..., None], tf.ones([2, 2, 2, 1, 2]), [1] * 5, "SAME"), X),
    lambda: gradients(lambda x: tf.nn.depthwise_conv2d(x, tf.ones([3, 3, 3, 2]), [1] * 4, "SAME"), X),
    lambda: gradients(lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"), X),
    lambda: gradients(lambda x: tf.nn.avg_pool3d(x[..., None], 2, 2, "SAME"), X),
    lambda: gradients(lambda x: tf.nn.max_pool2d(x, 2, 1, "SAME"), X),
    lambda: gradients(lambda x: tf.matmul(x, x, transpose_b=True), tf.reshape(X, [2, 3, -1])),
    lambda: gradients(tf.nn.softmax, M),
    lambda: gradients(lambda x: tf.raw_ops.FusedBatchNormV3(
        x=x, scale=tf.ones([3]), offset=tf.zeros([3]), mean=tf.zeros([0]), variance=tf.zeros([0]), is_training=True
    ).y, X),
    lambda: gradients(lambda x: tf.transpose(x, [0, 3, 2, 1]), X),
    lambda: tf.reduce_sum(M, 0),
    lambda: tf.einsum("bi,bj->ij", M, M),
    lambda: tf.linalg.svd(M)[0],
    lambda: tf.signal.fft(tf.cast(M, tf.complex64)),
    lambda: tf.nn.top_k(M, 3),
    lambda: tf.unique(tf.constant([3, 1, 3, 2])),
    lambda: tf.strings.split(["a b c", "d"], " ").values,
    lambda: tf.concat([M, M], 1),
    lambda: tf.split(M, 4, axis=1),
    lambda: tf.cast(M, tf.bfloat16) @ tf.cast(tf.transpose(M), tf.bfloat16),
    lambda: tf.shape(X),
    lambda: tf.image.resize(X, [3, 5]),
    lambda: tf.random.stateless_normal([3], [1, 2]),
    lambda: tf.where(M > 0),
    lambda: tf.math.bincount([1, 1, 2]),
    lambda: tf.nn.leaky_relu(M, 0.3),
]  # fmt: skip

FAIL = [
    lambda: tf.matmul(M, M),
    lambda: tf.reshape(M, [5]),
    lambda: tf.gather(M, [99]),
    lambda: tf.debugging.check_numerics(tf.constant([np.nan]), "here"),
    lambda: tf.linalg.inv(tf.zeros([2, 2])),
    lambda: tf.io.read_file("/nonexistent"),
    lambda: tf.io.decode_jpeg(b"no image"),
    lambda: tf.raw_ops.LRN(input=X, depth_radius=-1),
    lambda: tf.raw_ops.AddV2(x=M, y=tf.ones([7]), name="mine"),
    lambda: tf.Variable([1.0, 2.0]).assign_add([1.0, 2.0, 3.0]),
    lambda: tf.concat([M, tf.ones([3, 3])], 0),
]


@pytest.fixture
def alone(monkeypatch):
    """Returns the list of operations that have run alone."""
    ran = []
    run = single_kernels._alone

    def counting(how, ctx, *given):
        ran.append(given[0])
        return run(how, ctx, *given)

    monkeypatch.setattr(single_kernels, "_alone", counting)
    return ran


def recorded(function):
    """Returns what a function returns while its operations are recorded, or its error."""
    intercept.hold()
    try:
        with intercept.handling(Recorder(Trace())):
            return function()
    except Exception as error:
        return error
    finally:
        intercept.release()


@pytest.mark.parametrize("number", range(len(COMPUTE)))
def test_results(number, alone):
    """They are the same to the bit, on the same device."""
    expected, found = tf.nest.flatten(COMPUTE[number]()), tf.nest.flatten(recorded(COMPUTE[number]))
    assert alone
    for one, other in zip(expected, found, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert (one.device, one.backing_device) == (other.device, other.backing_device)
        assert one.dtype in (tf.qint8, tf.string) or np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert one.dtype != tf.string or one.numpy().tolist() == other.numpy().tolist()


@pytest.mark.parametrize("number", range(len(FAIL)))
def test_errors(number, alone):
    """They have TensorFlow's own message, which names the function around the operation."""
    with pytest.raises(Exception) as expected:
        FAIL[number]()
    found = recorded(FAIL[number])
    assert alone
    assert type(found) is expected.type
    assert str(found) == str(expected.value)
    assert_switched_on()


def assert_switched_on():
    """Whether operations run as functions, as TensorFlow's messages show, and none is noted as under way."""
    assert not single_kernels._under_way
    assert not single_kernels._is_off
    with unhooked(), pytest.raises(tf.errors.InvalidArgumentError, match="__wrapped__"):
        tf.matmul(M, M)


def test_a_kernel_alone_is_none_of_a_function():
    """What this is for: the switch has an effect, which an error shows."""
    attrs = "transpose_a", False, "transpose_b", False
    single_kernels._off()
    try:
        with pytest.raises(core._NotOkStatusException) as error:
            pywrap_tfe.TFE_Py_FastPathExecute(context.context(), "MatMul", None, M, M, *attrs)
    finally:
        single_kernels._on()
    assert "__wrapped__" not in str(error.value)
    assert_switched_on()


@pytest.mark.parametrize("op", ["Softmax", "MaxPool", "MaxPoolGrad", "QuantizeV2"])
def test_what_has_another_kernel_in_a_function(op):
    """oneDNN's, whose results may differ in their last bits."""
    assert not single_kernels._is_alike(op)


def test_variables(alone):
    """Each handle is of a variable of its own, and optimizers' operations write what they write eagerly."""

    def step():
        variables = [tf.Variable(tf.ones([2, 3])), tf.Variable(tf.ones([2, 3]))]
        variables[0].assign_add(tf.ones([2, 3]))
        tf.raw_ops.ResourceApplyGradientDescent(var=variables[1].handle, alpha=0.5, delta=variables[0].value())
        return [v.numpy() for v in variables], variables[0].handle.device

    expected, found = step(), recorded(step)
    assert {"VarHandleOp", "AssignVariableOp", "AssignAddVariableOp", "ResourceApplyGradientDescent"} <= set(alone)
    assert_same(snapshot(expected), snapshot(found))


def test_named_variables_do_not_run_alone(alone):
    """Handles of one name are of one variable, whichever kernel makes them."""

    def step():
        handles = [gen_resource_variable_ops.var_handle_op(tf.float32, [2], shared_name="ours") for _ in range(2)]
        gen_resource_variable_ops.assign_variable_op(handles[0], tf.ones([2]))
        return gen_resource_variable_ops.read_variable_op(handles[1], tf.float32)

    assert_same(snapshot(step()), snapshot(recorded(step)))
    assert "VarHandleOp" not in alone


def test_what_has_state_does_not_run_alone(alone):
    """Kernels that draw numbers go on where eager's stopped, and scatters, which may fail half-way, run once."""

    def draws():
        return [tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32, seed=3, seed2=7) for _ in range(2)]

    tf.random.set_seed(1)
    expected = [draws() for _ in range(3)]
    tf.random.set_seed(1)
    found = [draws(), recorded(draws), draws()]
    assert_same(snapshot(expected), snapshot(found))
    assert "RandomUniform" not in alone

    def scattered():
        variable = tf.Variable(tf.zeros([3]))
        try:
            variable.scatter_add(tf.IndexedSlices(tf.ones([3]), tf.constant([0, 1, 9])))
        except tf.errors.InvalidArgumentError:
            return variable.numpy()

    assert_same(snapshot(scattered()), snapshot(recorded(scattered)))


def test_python_inside_of_an_operation(alone):
    """An accumulator issues operations while another runs, some of which draw from the state of their kernel."""

    def step():
        x = tf.constant([1.0, 2.0])
        with tf.autodiff.ForwardAccumulator(x, tf.ones([2])) as accumulator:
            y = tf.exp(x) * tf.sin(x)
        return y, accumulator.jvp(y)

    assert_same(snapshot(step()), snapshot(recorded(step)))
    assert alone
    assert_switched_on()


def test_other_threads(monkeypatch):
    """An operation on another thread waits for one that runs alone, and none runs alone while it is under way."""
    inside, go, order = threading.Event(), threading.Event(), []
    run = single_kernels._fast_execute  # TensorFlow's own, also where hooks are set

    def slow(*given):
        if threading.current_thread() is first:
            inside.set()
            assert go.wait(30)
        order.append(threading.current_thread().name)
        return run(*given)

    monkeypatch.setattr(single_kernels, "_fast_execute", slow)
    attrs = "transpose_a", False, "transpose_b", True
    ctx = context.context()
    first = threading.Thread(
        target=single_kernels.fast_execute_alone, args=(ctx, "MatMul", None, M, M, *attrs), name="alone"
    )
    first.start()
    assert inside.wait(30)
    second = threading.Thread(
        target=single_kernels.fast_execute, args=(ctx, "MatMul", None, M, M, *attrs), name="beside"
    )
    second.start()
    while not single_kernels._under_way:
        pass
    go.set()
    first.join()
    second.join()
    assert order == ["alone", "beside"]
    assert_switched_on()


@pytest.fixture(autouse=True)
def available():
    assert single_kernels._take_switch()


def test_one_under_way_keeps_others_from_running_alone(monkeypatch):
    switched = []
    monkeypatch.setattr(single_kernels, "_off", lambda: switched.append(False))
    monkeypatch.setattr(single_kernels, "_on", lambda: switched.append(True))
    single_kernels.begin("test")
    try:
        single_kernels.fast_execute_alone(context.context(), "Neg", None, M)
    finally:
        single_kernels.end("test")
    assert not switched
    single_kernels.fast_execute_alone(context.context(), "Neg", None, M)
    assert switched == [False, True]


def test_operations_in_the_background_do_not_run_alone(monkeypatch):
    """They fail when the switch is on again, and could not be run once more."""
    switched = []
    monkeypatch.setattr(single_kernels, "_off", lambda: switched.append(False))
    with context.execution_mode(context.ASYNC):
        result = single_kernels.fast_execute_alone(context.context(), "Neg", None, M)
    assert not switched
    np.testing.assert_array_equal(result, -M.numpy())


@pytest.mark.parametrize("when", ["off", "run", "on"])
def test_an_interrupt_leaves_the_switch_on(monkeypatch, when):
    """Whenever it comes: as the switch is set, as the operation runs, or as the switch is set again."""
    off, on, run = single_kernels._off, single_kernels._on, single_kernels._fast_execute

    def interrupted(name, function):
        def interrupting(*given):
            result = function(*given)
            if name == when:
                raise KeyboardInterrupt
            return result

        return interrupting

    monkeypatch.setattr(single_kernels, "_off", interrupted("off", off))
    monkeypatch.setattr(single_kernels, "_on", interrupted("on", on))
    monkeypatch.setattr(single_kernels, "_fast_execute", interrupted("run", run))
    with pytest.raises(KeyboardInterrupt):
        single_kernels.fast_execute_alone(context.context(), "Neg", None, M)
    monkeypatch.undo()
    assert_switched_on()


def test_a_stack_without_room():
    """The program's own error is raised, and the switch is on."""

    def deeper(depth):
        try:
            return deeper(depth + 1)
        except RecursionError:
            return single_kernels.fast_execute_alone(context.context(), "Neg", None, M)

    with contextlib.suppress(RecursionError):
        deeper(0)
    assert_switched_on()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_a_child_begins_anew():
    """A process forked while another thread's operation runs alone has that thread's lock, but not the thread."""
    held, over = threading.Event(), threading.Event()

    def hold():
        with single_kernels._lock:
            held.set()
            assert over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    single_kernels._under_way.add("test")
    child = os.fork()
    if child == 0:
        os._exit(0 if single_kernels._lock.acquire(blocking=False) and not single_kernels._under_way else 1)
    over.set()
    thread.join()
    single_kernels.end("test")
    assert os.waitpid(child, 0)[1] == 0


HANDLERS = """
import random, signal, sys, threading
import tensorflow as tf
import coexec

def raises(*_):
    raise KeyboardInterrupt

def issues(*_):
    tf.add(y, y)

x, y = tf.ones([4, 4]), tf.ones([2])
signal.signal(signal.SIGALRM, {handler})
random.seed(3)
came = 0
for _ in range(150):
    @coexec.function
    def step(x):
        for _ in range(40):
            x = tf.tanh(x)
        return x

    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0002, 0.006))
        try:
            step(x)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        came += 1
thread = threading.Thread(target=lambda: print("other", float(tf.reduce_sum(step(x) * 0.0 + 1.0))))
thread.start()
thread.join(60)
try:
    tf.matmul(tf.ones([2, 3]), tf.ones([2, 3]))
except tf.errors.InvalidArgumentError as error:
    print("on" if "__wrapped__" in str(error) else "off", came > 20)
"""


@pytest.mark.parametrize("handler", ["raises", "issues"])
def test_signal_handlers(handler):
    """Wherever one comes: no lock is left, nothing waits for itself, and the switch is on."""
    program = [sys.executable, "-c", HANDLERS.replace("{handler}", handler)]
    found = subprocess.run(program, capture_output=True, text=True, timeout=300)
    said = [line for line in found.stdout.splitlines() if line]
    assert said == ["other 16.0", "on True" if handler == "raises" else "on False"], found.stderr[-2000:]


def test_a_first_call_runs_alone(alone):
    """A step's first call, the operations of its second, and what is compared with compiled code."""
    variable = tf.Variable(tf.ones([16, 5]))

    @coexec.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ variable))
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
        return loss

    with testing.always_follow(), tuned(validates_new=True):
        while not step.stats().validated:
            alone.clear()
            step(M)
            assert {"MatMul", "AssignSubVariableOp"} <= set(alone), step.stats()
        assert {"VarHandleOp", "AssignVariableOp"} <= set(alone)  # a copy of the variable for the compiled code
        alone.clear()
        step(M)
    assert not alone
    assert_switched_on()


def test_a_timed_call_runs_alone(alone):
    """One imperative call, by which following is judged, makes no graph functions that no later call needs."""
    variable, random = tf.Variable(tf.ones([16, 5])), tf.random.Generator.from_seed(1)
    again = tf.Variable(variable), tf.random.Generator.from_seed(1)
    said = []

    def step(x, variable, random):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ variable)) + random.normal([])
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
        said.append(tf.executing_eagerly())
        return loss

    followed = coexec.function(step)
    with testing.always_follow(), tuned(calm_before_timing=1, asked_calls_timed=1):
        for _ in range(8):
            before = followed.stats().imperative
            alone.clear()
            assert_same(snapshot(step(M, *again)), snapshot(followed(M, variable, random)))
            if followed.stats().imperative > before:
                timed = set(alone)
    assert {"MatMul", "AssignSubVariableOp", "TanhGrad"} <= timed
    assert 1 <= followed.stats().imperative <= 3, followed.stats()
    assert_same(snapshot(again[0]), snapshot(variable))
    alone.clear()
    with coexec.imperative():
        followed(M, variable, random)
    assert not alone
    assert said == [True] * len(said)
    assert_switched_on()
