"""Gradients through backward functions of the program's: their Python runs in each, TensorFlow's around it does not.

Each program is run eagerly and decorated; values, Python effects, state and errors must be the same.
"""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both, unchanged

X = tf.constant(np.random.default_rng(3).normal(size=[4, 3]).astype(np.float32))
PROGRAMS = {}
CALLS = 14
SKIPPED = 8  # gradients of these that are skipped, at least


def program(skipped=SKIPPED):
    """Registers `make()`, which returns a loss of `x`, a variable, the number of the call, and a log."""

    def register(make):
        PROGRAMS[make.__name__] = pytest.param(make, skipped, id=make.__name__)
        return make

    return register


def step_of(make, **tape_options):
    def of(decorate):
        tf.random.set_seed(11)
        loss_of, log = make(), []
        weight = tf.Variable([[0.5, -1.0], [0.25, 2.0], [1.0, 0.1]])

        @decorate
        def step(x, i):
            with tf.GradientTape(**tape_options) as tape:
                loss = loss_of(x, weight, i, log)
            gradient = tf.convert_to_tensor(tape.gradient(loss, weight))
            weight.assign_sub(0.01 * gradient)
            return loss, gradient, weight.read_value(), list(log), tape._recording, tape._tape is None

        return step

    return of


@program()
def clipped():
    @tf.custom_gradient
    def clip(v):
        return v * 2.0, lambda dy: tf.clip_by_value(dy, -0.1, 0.1)

    return lambda x, w, i, log: tf.reduce_mean(clip(tf.tanh(x @ w)) ** 2)


@program()
def made_in_each_call():
    "The function, and what it closes over, are new in each call; its number changes."

    def loss(x, w, i, log):
        @tf.custom_gradient
        def scaled(v):
            e = tf.exp(v)

            def back(dy):
                log.append(i)
                return dy * e * float(i % 3 + 1)

            return tf.math.log(1.0 + e), back

        return tf.reduce_sum(scaled(x @ w))

    return loss


@program()
def two_results():
    "One of the two is used in some calls: the other's cotangent is zeros then."

    @tf.custom_gradient
    def both(a, b):
        return (a * b, a - b), lambda da, db: (da * b + db, da * a - db)

    def loss(x, w, i, log):
        product, difference = both(x @ w, tf.tanh(x @ w))
        return tf.reduce_sum(product) if i % 4 == 3 else tf.reduce_sum(product + difference**2)

    return loss


@program()
def owns_a_variable():
    other = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @tf.custom_gradient
    def product(v):
        def back(dy, variables=None):
            grad = tf.transpose(v) @ dy
            other.assign_add(0.1 * grad)
            return dy @ tf.transpose(other), [grad for _ in variables]

        return v @ other, back

    return lambda x, w, i, log: tf.reduce_sum(product(tf.tanh(x @ w)) ** 2)


@program()
def with_keywords():
    @tf.custom_gradient
    def power(v, n=1.0):
        return v**n, lambda dy: dy * n * v ** (n - 1.0)

    @tf.custom_gradient
    def keyword(v, *, by):
        return v * by, lambda dy: dy * by * 3.0

    return lambda x, w, i, log: tf.reduce_sum(power(x @ w, n=2.0) + keyword(x @ w, by=2.0))


@program()
def one_behind_the_other():
    "What one returns is what the next is given; one returns a tensor of the way there."

    @tf.custom_gradient
    def reversed_(v):
        return tf.identity(v), lambda dy: -dy

    @tf.custom_gradient
    def straight(v):
        return tf.round(v), lambda dy: dy

    @tf.custom_gradient
    def itself(v):
        return v * v, lambda dy: v

    return lambda x, w, i, log: tf.reduce_sum(reversed_(straight(itself(straight(reversed_(x @ w))))))


@program()
def several():
    @tf.custom_gradient
    def scaled(v):
        return v * 1.0, lambda dy: dy * 0.5

    def loss(x, w, i, log):
        h = x @ w
        for _ in range(3):
            h = scaled(tf.tanh(h)) + h
        return tf.reduce_mean(h)

    return loss


@program()
def looks_at_values():
    "It cuts the segment in mid-gradient, and what it reads decides nothing."

    @tf.custom_gradient
    def seen(v):
        def back(dy):
            log_of.append(round(float(tf.reduce_sum(tf.abs(dy))), 3))
            return dy * 2.0

        return tf.sin(v), back

    log_of = []

    def loss(x, w, i, log):
        log[:] = log_of
        return tf.reduce_mean(tf.sin(seen(tf.tanh(x @ w))))

    return loss


@program(skipped=4)
def decides_by_a_value():
    "The operations after it depend on what it has read."

    @tf.custom_gradient
    def decided(v):
        def back(dy):
            if float(tf.reduce_sum(v)) > 0.0:
                return dy * 2.0
            return tf.nn.relu(dy) + 1.0

        return tf.sin(v), back

    return lambda x, w, i, log: tf.reduce_mean(decided((x - 0.3 * i + 1.0) @ w))


@program(skipped=0)
def returns_something_else():
    "Nothing in some calls, one of two tensors in others."

    @tf.custom_gradient
    def changing(v, u):
        def back(dy):
            turn = counted.append(0) or len(counted)
            if turn % 5 == 4:
                return None, dy
            return (dy, dy * 2.0) if turn % 2 else (dy * 2.0, dy)

        return v + u, back

    counted = []
    return lambda x, w, i, log: tf.reduce_sum(changing(x @ w, tf.tanh(x @ w)) ** 2)


@program(skipped=2)
def swaps_two_tensors():
    "The same two tensors, the other way round: no operation tells."

    @tf.custom_gradient
    def swapped(v, u):
        def back(dy):
            counted.append(0)
            pair = dy * 2.0, dy * 3.0
            return pair if len(counted) % 3 else pair[::-1]

        return v + u, back

    counted = []
    return lambda x, w, i, log: tf.reduce_sum(swapped(x @ w, tf.tanh(x @ w)) ** 2)


@program()
def returns_constants():
    "A number that changes becomes a tensor that changes."

    @tf.custom_gradient
    def constant(v):
        def back(dy):
            counted.append(0)
            return tf.fill(v.shape, float(len(counted) % 2)) + tf.constant(float(len(counted)))

        return tf.identity(v), back

    counted = []
    return lambda x, w, i, log: tf.reduce_sum(constant(x @ w) * 2.0)


@program()
def rows():
    "`IndexedSlices` go in and come out."

    @tf.custom_gradient
    def sparse(v):
        def back(dy):
            return tf.IndexedSlices(tf.gather(dy, [0, 2]), tf.constant([0, 2]), tf.shape(v))

        return v * 1.0, back

    @tf.custom_gradient
    def passed(v):
        def back(dy):
            log_of.append(type(dy).__name__)
            return dy

        return tf.identity(v), back

    log_of = []

    def loss(x, w, i, log):
        log[:] = log_of
        return tf.reduce_sum(tf.gather(passed(sparse(w)), [i % 3, 1]) ** 2)

    return loss


@program(skipped=3)
def feeds_what_the_gradient_takes():
    "The first to take a tensor from outside, as the gradient itself does behind it; later it takes another one."
    tensors = [tf.constant([[2.0, 3.0]] * 4), tf.constant([[-5.0, 7.0]] * 4)]
    turns = []

    @tf.custom_gradient
    def scaled(v):
        def back(dy):
            turns.append(0)
            return dy * tensors[len(turns) > 8]

        return tf.identity(v), back

    def loss(x, w, i, log):
        result = tf.reduce_sum(scaled((x[:4] @ w) * tensors[0]))
        log.append(round(float(result), 4))  # the gradient is in a segment of its own
        return result

    return loss


@program()
def recomputed():
    f = tf.recompute_grad(lambda v: tf.tanh(v) * 2.0)
    return lambda x, w, i, log: tf.reduce_sum(f(x @ w) ** 2)


@program()
def a_graph_function():
    "`tf.function` brings a backward function of its own."

    @tf.function
    def f(v):
        return tf.tanh(v) * 2.0

    return lambda x, w, i, log: tf.reduce_sum(f(x @ w) ** 2)


@program(skipped=0)
def draws_random_numbers():
    @tf.custom_gradient
    def noisy(v):
        return tf.identity(v), lambda dy: dy * tf.random.uniform(tf.shape(dy), seed=5) + tf.random.uniform([])

    return lambda x, w, i, log: tf.reduce_sum(noisy(x @ w) ** 2)


@program()
def changes_python():
    "Attributes, lists and NumPy's random numbers are the program's."

    class Reversal:
        strength, seen = 0.5, 0

        def __call__(self, v):
            @tf.custom_gradient
            def f(v):
                def back(dy):
                    self.seen += 1
                    self.strength = self.strength * 0.9 + 0.01 * self.seen
                    return -self.strength * dy

                return tf.identity(v), back

            return f(v)

    layer = Reversal()

    def loss(x, w, i, log):
        log.append((layer.strength, layer.seen))
        return tf.reduce_sum(layer(tf.tanh(x @ w)) ** 2)

    return loss


@program()
def asks_for_a_gradient():
    "A tape inside of a backward function, with another custom gradient on it."

    @tf.custom_gradient
    def inner(v):
        return v * v, lambda dy: dy * 3.0

    @tf.custom_gradient
    def outer(v):
        def back(dy):
            with tf.GradientTape() as tape:
                tape.watch(v)
                y = tf.reduce_sum(inner(tf.sin(v)))
            return dy * tape.gradient(y, v)

        return tf.sin(v), back

    return lambda x, w, i, log: tf.reduce_sum(outer(x @ w))


@pytest.mark.parametrize("sizes", ["one size", "many sizes"])
@pytest.mark.parametrize(("make", "skipped"), PROGRAMS.values())
def test_backward_functions(make, skipped, sizes):
    calls = [(X * (1.0 + 0.1 * i), i) for i in range(CALLS)]
    if sizes == "many sizes":
        calls += [(tf.concat([X] * (i % 3 + 1), 0) * 0.3, i) for i in range(CALLS)]
    seeded = run_both(step_of(make), calls)
    assert seeded.stats().diverged <= 3 or skipped < SKIPPED, seeded.explain()
    assert seeded.stats().regions >= skipped, seeded.explain()


@pytest.mark.parametrize(("make", "skipped"), PROGRAMS.values())
def test_under_validation_and_wherever_it_diverges(make, skipped):
    """A gradient that has begun goes on imperatively from any operation."""
    calls = [(X * (1.0 + 0.1 * i), i) for i in range(9)]
    for at in (0, 3, 7, 10, 12, 15, 20):
        reference = step_of(make)(unchanged)
        wanted = [reference(*call) for call in calls]
        function = step_of(make)(coexec.function)
        for n, (call, expected) in enumerate(zip(calls, wanted, strict=True)):
            with testing.diverge_at(at if n >= 7 else -1):
                found = function(*call)
            for one, other in zip(expected, found, strict=True):
                if isinstance(one, tf.Tensor):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
                else:
                    assert one == other


@pytest.mark.parametrize("persistent", [False, True])
def test_errors_are_raised_once_and_leave_the_tape_as_eager_does(persistent):
    def make(decorate):
        log, weight = [], tf.Variable([1.0, 2.0, 3.0])

        @tf.custom_gradient
        def failing(v):
            def back(dy):
                log.append(len(log))
                if len(log) in (8, 9, 12):
                    raise ValueError(f"no gradient {len(log)}")
                return dy * 3.0

            return tf.identity(v), back

        @decorate
        def step(x):
            found = []
            with tf.GradientTape(persistent=persistent) as tape:
                loss = tf.reduce_sum(failing(x * weight) ** 2)
            for _ in range(2):
                try:
                    found.append(tape.gradient(loss, weight))
                except (ValueError, RuntimeError) as error:
                    found.append(f"{type(error).__name__}: {error}")
            weight.assign_add([0.1, 0.0, 0.1])
            return found, list(log), weight.read_value()

        return step

    function = run_both(make, [(X * (1.0 + i),) for i in range(16)])
    assert function.stats().regions >= 6, function.explain()


def test_an_error_keeps_its_traceback():
    @tf.custom_gradient
    def failing(v):
        def back(dy):
            if fails[0]:
                raise ValueError("here")
            return dy

        return tf.identity(v), back

    @coexec.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(failing(x * 2.0))
        return tape.gradient(loss, x)

    fails = [False]
    for _ in range(8):
        step(X)
    assert step.stats().regions >= 4
    fails[0] = True
    with pytest.raises(ValueError, match="here") as raised:
        step(X)
    names = [entry.name for entry in raised.traceback]
    assert names[-1] == "back"
    assert names.count("back") == names.count("step") == 1


def test_a_backward_function_may_use_the_tape_again():
    """The tape is still there while the function runs, and is used up behind it."""

    def make(decorate):
        seen, weight = [], tf.Variable(2.0)

        @decorate
        def step(x):
            @tf.custom_gradient
            def looking(v):
                def back(dy):
                    seen.append((tape._recording, tape._tape is None))
                    return dy * 2.0

                return tf.identity(v), back

            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(looking(x * weight))
                inside = tape.gradient(loss, weight)
            return inside, tape._recording, tape._tape is None, tape.watched_variables(), list(seen)

        return step

    run_both(make, [(X * (1.0 + i),) for i in range(12)])


def test_threads_may_call_from_a_backward_function():
    """The runtime's lock is free while the program's Python runs."""
    from tests.coexec import in_thread

    def make(decorate):
        @decorate
        def other(x):
            return x * 2.0

        @tf.custom_gradient
        def threaded(v):
            return tf.identity(v), lambda dy: dy * in_thread(lambda: other(tf.constant(3.0)))

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(threaded(x * x))
            return tape.gradient(loss, x)

        return step

    function = run_both(make, [(X * (1.0 + i),) for i in range(10)])
    assert function.stats().regions >= 4, function.explain()


def test_several_gradients_of_one_tape():
    def make(decorate):
        log, weight = [], tf.Variable([1.0, 2.0, 3.0])

        @tf.custom_gradient
        def scaled(v):
            def back(dy):
                log.append(0)
                return dy * 0.5 * float(len(log))

            return v * v, back

        @decorate
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                h = scaled(x * weight)
                loss, other = tf.reduce_sum(h**2), tf.reduce_mean(tf.sin(h))
            return tape.gradient(loss, weight), tape.gradient(other, [weight, h]), len(log)

        return step

    function = run_both(make, [(X * (1.0 + 0.1 * i),) for i in range(14)])
    assert function.stats().regions >= 16, function.explain()


def test_in_a_layer():
    """A layer of the program's, in a model of Keras'."""
    from keras import layers, utils

    class Reversal(layers.Layer):
        def call(self, v):
            @tf.custom_gradient
            def f(v):
                return tf.identity(v), lambda dy: -0.5 * dy

            return f(v)

    def make(decorate):
        utils.set_random_seed(3)
        dense, reversal, last = layers.Dense(4, activation="tanh"), Reversal(), layers.Dense(1)

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(last(reversal(dense(x))) ** 2)
            variables = [*dense.trainable_variables, *last.trainable_variables]
            gradients = tape.gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss, gradients

        return step

    function = run_both(make, [(X * (1.0 + 0.1 * i),) for i in range(14)])
    assert function.stats().regions >= 16, function.explain()


def test_a_backward_function_that_is_let_go_takes_its_tensors_with_it():
    import gc
    import weakref

    class Big:
        pass

    held = []

    @coexec.function
    def step(x):
        big = Big()
        held.append(weakref.ref(big))

        @tf.custom_gradient
        def f(v):
            return tf.identity(v), lambda dy: dy * (2.0 if big else 1.0)

        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(f(x))
        return tape.gradient(loss, x)

    for _ in range(10):
        step(X)
    assert step.stats().regions >= 5
    gc.collect()
    assert not any(reference() is not None for reference in held)
