"""Segments with operations that XLA does not take: what is around those is compiled, and all is as eagerly."""

import gc
import random
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import coexec
from coexec import testing
from coexec.compile.executable import Executable
from coexec.lowering import op_failures
from tests.coexec import run_both
from tracer.variable_ops import SPARSE_OPTIMIZER_OPS

N = 4


@pytest.fixture
def made(monkeypatch):
    """Every segment is launched, by XLA where it may; returns the executables."""
    found = []
    prepare = Executable.__init__

    def noted(self, plan, backend, varying=None):
        prepare(self, plan, backend, varying)
        found.append(self)

    monkeypatch.setattr(Executable, "__init__", noted)
    with testing.compile_everything():
        yield found


def grown(x, rounds=6):
    """Two operations a round, which XLA takes."""
    for _ in range(rounds):
        x = tf.tanh(x * 0.9)
    return x


def positive(x):
    """A symmetric matrix with positive eigenvalues."""
    return tf.matmul(x, x, transpose_b=True) + 2.0 * tf.eye(N)


def inputs(calls=6):
    """Matrices, another one for each call."""
    numbers = np.random.default_rng(7)
    return [(tf.constant(numbers.normal(size=(N, N)), tf.float32),) for _ in range(calls)]


def ops_of(executable):
    """Returns the operations of the function that is launched, and those of each of its parts."""
    names = [executable.name, *(name.removesuffix("_alone") for name, _, _ in executable.parts)]
    definitions = [executable._context.get_function_def(name) for name in names]
    return [[node.op for node in definition.node_def] for definition in definitions]


def test_what_is_around_is_compiled(made):
    """An operation in the middle leaves two parts; a variable is read and written around them, once."""

    def make(decorator):
        total = tf.Variable(tf.zeros([N, N]))

        @decorator
        def step(x):
            factor = tf.linalg.cholesky(positive(grown(x)))
            total.assign_add(grown(factor))
            return factor, tf.reduce_sum(total)

        return step

    fn = run_both(make, inputs())
    assert fn.stats().launches >= 4
    assert fn.stats().launches == fn.stats().followed - 1  # the first visit only looks; nothing was cut
    split = made[-1]
    outer, *parts = ops_of(split)
    assert split.backend == "xla"
    assert len(parts) == 2
    assert sorted(op for op in outer if op != "Const") == [
        "AssignVariableOp", "Cholesky", "NoOp", "PartitionedCall", "PartitionedCall", "ReadVariableOp",
    ]  # fmt: skip
    assert all(part.count("Tanh") == 6 for part in parts)
    assert "it runs between 2 compiled parts" in fn.explain()


def test_there_are_as_few_parts_as_can_be(made):
    """Operations on both sides, that do not wait for each other, are one part, however the program mixes them."""

    def make(decorator):
        @decorator
        def step(x):
            factors = []
            for scale in (1.0, 2.0, 3.0):
                factors.append(tf.linalg.cholesky(positive(grown(x * scale))))
            return [grown(factor) for factor in factors]

        return step

    run_both(make, inputs())
    outer, *parts = ops_of(made[-1])
    assert outer.count("Cholesky") == 3
    assert [part.count("Tanh") for part in parts] == [18, 18]


def test_a_chain(made):
    """Operations that wait for each other leave a part between each two."""

    def make(decorator):
        @decorator
        def step(x):
            for _ in range(3):
                x = grown(tf.linalg.cholesky(positive(grown(x))))
            return x

        return step

    run_both(make, inputs())
    _, *parts = ops_of(made[-1])
    assert len(parts) == 4


def test_small_parts_stay(made):
    """A few operations are not worth a launch of their own: they run beside the others, with the same values."""

    def make(decorator):
        @decorator
        def step(x):
            return tf.linalg.cholesky(positive(grown(x))) * 2.0 + 1.0

        return step

    run_both(make, inputs())
    outer, *parts = ops_of(made[-1])
    assert len(parts) == 1
    assert {"Cholesky", "Mul", "AddV2"} <= set(outer)


def test_a_failure_in_the_middle(made):
    """An operation that fails between two parts raises eager's error, and nothing is written."""

    def make(decorator):
        total = tf.Variable(0.0)

        @decorator
        def step(x, sign):
            total.assign_add(tf.reduce_sum(grown(x)))
            try:
                found = tf.reduce_sum(grown(tf.linalg.cholesky(positive(grown(x)) * sign)))
            except tf.errors.InvalidArgumentError as error:
                return "failed", type(error), total + 0.0
            total.assign_add(found)
            return found, total + 0.0

        return step

    signs = [1.0, 1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 1.0]
    fn = run_both(make, [(x, tf.constant(sign)) for (x,), sign in zip(inputs(8), signs, strict=True)])
    assert fn.stats().launches >= 4
    assert any(executable.parts for executable in made)


def test_a_check_within_a_part(made):
    """What XLA would not tell is foreseen in a part as in a whole segment."""

    def make(decorator):
        count = tf.Variable(tf.zeros([N, N], tf.int32))

        @decorator
        def step(x, divisor):
            factor = tf.linalg.cholesky(positive(grown(x)))
            count.assign_add(tf.cast(tf.abs(grown(factor)) * 100.0, tf.int32) // divisor)
            return count + 0

        return step

    divisors = [3, 3, 3, 3, 0, 3, 3]
    calls = [(x, tf.constant(d)) for (x,), d in zip(inputs(7), divisors, strict=True)]
    run_both(make, calls)
    assert made[-1].checked
    assert made[-1].parts


def test_random_numbers(made):
    """What XLA would draw otherwise is drawn by its kernel, what it draws alike is drawn in a part: eager's numbers."""

    def make(decorator):
        tf.random.set_seed(3)

        @decorator
        def step(x):
            seed = tf.cast(tf.reduce_sum(x) * 100.0, tf.int32) + tf.constant([0, 1])
            one = tf.random.stateless_truncated_normal([N, N], seed)
            return grown(x + tf.random.uniform([N, N])), grown(one)

        return step

    run_both(make, inputs())
    outer, *parts = ops_of(made[-1])
    assert "StatelessTruncatedNormalV2" in outer
    assert parts


def test_gradients(made):
    """A step with a tape, and an operation in the middle whose gradient is compiled too."""

    def make(decorator):
        weights = tf.Variable(tf.eye(N))

        @decorator
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.linalg.cholesky(positive(grown(tf.matmul(x, weights)))) ** 2)
            gradient = tape.gradient(loss, weights)
            weights.assign_sub(0.01 * gradient)
            return loss, gradient

        return step

    run_both(make, inputs(8))
    assert any(executable.parts for executable in made)


TAKEN = (
    lambda x, y: tf.tanh(x + y),
    lambda x, y: tf.matmul(x, y) * 0.5,
    lambda x, y: tf.where(x > y, x, y * 0.5),
    lambda x, y: tf.nn.softmax(x - y),
    lambda x, y: tf.transpose(x) * tf.sigmoid(y),
    lambda x, y: tf.gather(x, tf.argmax(y, 1)),
)
NOT_TAKEN = (
    lambda x, y: tf.linalg.cholesky(positive(x) + positive(y)),
    lambda x, y: tf.math.ndtri(tf.sigmoid(x)) * 0.5,
    lambda x, y: tf.math.igamma(tf.abs(x) + 1.0, tf.abs(y) + 0.1),
    lambda x, y: tf.linalg.inv(positive(x)),
)


@pytest.mark.sample("0", "1")
@pytest.mark.parametrize("seed", range(6))
def test_random_programs(made, seed):
    """However operations of both kinds depend on each other, and on variables, values and state are eager's."""
    draw = random.Random(seed)
    ops = [draw.choice(NOT_TAKEN if draw.random() < 0.15 else TAKEN) for _ in range(40)]
    plan = [(op, draw.random(), draw.random()) for op in ops]

    def make(decorator):
        states = [tf.Variable(tf.eye(N) * scale) for scale in (1.0, 0.5)]

        @decorator
        def step(x):
            values = [x, states[0] + 0.0, states[1] * x]
            for number, (op, one, other) in enumerate(plan):
                values.append(op(*(values[-1 - int(part * min(len(values), 6))] for part in (one, other))))
                if number % 13 == 12:
                    states[number % 2].assign(tf.tanh(values[-1]))
                    values.append(states[number % 2] * 0.9)
            return values[-4:], [state + 0.0 for state in states]

        return step

    fn = run_both(make, inputs())
    assert fn.stats().launches >= 4
    assert any(executable.parts for executable in made) or not set(ops) & set(NOT_TAKEN)


def test_what_has_no_kernel_stays(made):
    """The gradient of an enlarged image, which XLA cannot compile, leaves the rest of the step to XLA."""

    def make(decorator):
        @decorator
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                image = tf.image.resize(grown(x)[None, :, :, None], [2 * N, 2 * N], "nearest")
                loss = tf.reduce_sum(grown(image) ** 2)
            return loss, tape.gradient(loss, x)

        return step

    run_both(make, inputs())
    outer, *parts = ops_of(made[-1])
    assert "ResizeNearestNeighborGrad" in outer
    assert len(parts) == 2


def test_which_operations_have_kernels():
    """Every operation that is given to XLA has a kernel there."""
    tf.function(lambda x: x + 1.0, jit_compile=True)(1.0)  # they are registered when XLA first compiles

    def has(op):
        return any(kernel.device_type == "XLA_CPU_JIT" for kernel in kernels.get_registered_kernels_for_op(op).kernel)

    given = SPARSE_OPTIMIZER_OPS | op_failures.TOTAL | op_failures.CHECKED | op_failures.DIVISIONS | op_failures.SHIFTS
    given -= op_failures.RANDOM | op_failures.TAILS
    assert {op for op in given if not has(op)} == op_failures.WITHOUT_KERNEL


@pytest.mark.distrusting
def test_the_faster_stays():
    """XLA's parts are compared with their operations, and compete with the graph, as whole segments do."""
    fn = coexec.function(lambda x: grown(tf.linalg.cholesky(positive(grown(x, 20))), 20))
    calls = inputs(40)
    expected = [fn.__wrapped__(*call).numpy() for call in calls]
    for _ in range(200):
        found = [fn(*call).numpy() for call in calls]
        if "faster than the graph" in fn.explain() or "no slower than XLA" in fn.explain():
            break
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert "it runs between 2 compiled parts" in fn.explain()
    assert fn.stats().validated >= 2


def test_parts_are_compiled_beforehand(monkeypatch, made):
    """What was compiled in the background is not compiled again by the first launch."""
    took = []
    execute, prepare = Executable._execute, Executable.__init__

    def timed(self, feeds, into):
        start = time.perf_counter()
        execute(self, feeds, into)
        took.append(time.perf_counter() - start)

    def prepared(self, plan, backend, varying=None):
        prepare(self, plan, backend, varying)
        start = time.perf_counter()
        self.prepare(None)
        took.append(time.perf_counter() - start)

    monkeypatch.setattr(Executable, "_execute", timed)
    monkeypatch.setattr(Executable, "__init__", prepared)
    fn = coexec.function(lambda x: grown(tf.linalg.cholesky(positive(grown(x, 40))), 40))
    for call in inputs(3):
        fn(*call)
    assert made[-1].parts
    compiling, first, *_ = took
    assert compiling > 4 * first  # some 50 times as long


def test_parts_are_released(made):
    """With the executable go the functions of its parts."""
    fn = coexec.function(lambda x: grown(tf.linalg.cholesky(positive(grown(x)))))
    for call in inputs():
        fn(*call)
    context, names = made[-1]._context, [made[-1].name, *(name for name, _, _ in made[-1].parts)]
    assert len(names) == 3
    assert all(context.has_function(name) for name in names)
    made.clear()
    fn.clear()
    gc.collect()
    assert not any(context.has_function(name) for name in names)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (3,)])
def test_a_variable_made_in_front_of_a_part_has_its_value(shape, made):
    """It holds nothing as the launch reads what it would keep, which a scalar would be broadcast to."""

    def step(x, i):
        variable = tf.Variable(tf.fill(shape, 0.1))
        checked = grown(tf.gather(x, i))  # may fail, which keeps the variable from being written
        return variable, grown(tf.linalg.cholesky(positive(checked)))

    fn = coexec.function(step, jit_compile=True)
    x = inputs(1)[0][0]
    for i in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0], [2, 3, 2, 3], [3, 3, 0, 0], [1, 2, 1, 2]):
        variable, result = fn(x, tf.constant(i))
        expected, known = step(x, tf.constant(i))
        assert variable.numpy().tolist() == expected.numpy().tolist()
        np.testing.assert_allclose(result.numpy(), known.numpy(), rtol=1e-5, atol=1e-6)
    assert any(executable.parts for executable in made)
    assert fn.stats().launches >= 3
