"""Calls of graph functions in followed calls: part of segments where they only compute, otherwise on their own."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.testing import always_follow, compile_everything
from tests.coexec import run_both
from tests.snapshots import assert_same, snapshot
from tracer.callees import MAX_AT_PLACE, MAX_CALLEES
from tracer.check import check
from tracer.private import context

RNG = np.random.default_rng(5)
ROWS = [tf.constant(RNG.normal(size=[4, 3]).astype(np.float32)) for _ in range(5)]
CALLS = [(ROWS[n % 5],) for n in range(12)]


@pytest.fixture(autouse=True)
def followed():
    """Every call is followed, and every segment launched, however small."""
    with always_follow(), compile_everything():
        yield


@pytest.fixture(params=["graph", "xla"])
def backend(request):
    return {"jit_compile": request.param == "xla"}


def launches(step, calls):
    """How many launches each of these calls takes, made after those that `run_both` has made."""
    before = step.stats().launches
    for arguments in calls:
        step(*arguments)
    return (step.stats().launches - before) / len(calls)


def causes(step):
    return str(step.explain())


def computing(decorate):
    inner = tf.function(lambda a, b: (tf.tanh(a) + b, tf.reduce_sum(a * b)))

    @decorate
    def step(x):
        y, z = inner(x * 2.0, x)
        return inner(y, x + z)

    return step


def reading(decorate):
    weight = tf.Variable([1.0, 2.0, 3.0])
    inner = tf.function(lambda a: a * weight)

    @decorate
    def step(x):
        y = inner(x) + 1.0
        return y, inner(y)

    return step


def nested(decorate):
    weight = tf.Variable([1.0, 2.0, 3.0])
    innermost = tf.function(lambda a: tf.nn.relu(a * weight))

    @tf.function
    def inner(a):
        total = tf.zeros([])
        for row in a:
            if tf.reduce_sum(row) > 0.0:
                total += tf.reduce_sum(innermost(row))
        return total, innermost(a)

    @decorate
    def step(x):
        total, y = inner(tf.sin(x))
        return total + 1.0, y * 2.0

    return step


def compiled(decorate):
    inner = tf.function(lambda a: tf.nn.softmax(a * 3.0), jit_compile=True)

    @decorate
    def step(x):
        return tf.reduce_sum(inner(tf.cos(x)) ** 2)

    return step


def structured(decorate):
    @tf.function
    def inner(a):
        return {"sum": tf.reduce_sum(a), "parts": [a, (a + 1.0,)], "none": None}

    @decorate
    def step(x):
        found = inner(x * 2.0)
        return found["sum"] + found["parts"][1][0], found

    return step


def ragged(decorate):
    inner = tf.function(lambda a: tf.RaggedTensor.from_row_lengths(tf.reshape(a, [-1]), [5, 0, 7]))

    @decorate
    def step(x):
        found = inner(x + 1.0)
        return found.values * 2.0, found.row_lengths()

    return step


def open_shapes(decorate):
    inner = tf.function(
        lambda a: (tf.matmul(a, a, transpose_b=True), tf.shape(a)[0]), input_signature=[tf.TensorSpec([None, 3])]
    )

    @decorate
    def step(x):
        product, size = inner(tf.exp(x))
        return product + 1.0, tf.cast(size, tf.float32) * 2.0

    return step


def with_captured_tensor(decorate):
    outer = tf.constant([0.5, 1.5, 2.5])
    inner = tf.function(lambda a: a * outer)

    @decorate
    def step(x):
        return inner(inner(x) - 1.0) + 1.0

    return step


def without_gradient(decorate):
    @tf.custom_gradient
    def halved(a):
        return a / 2.0, lambda g: 7.0 * g

    inner = tf.function(lambda a: halved(a * 3.0))

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(inner(x) ** 2)
        return y, tape.gradient(y, x)

    return step


def stateless_numbers(decorate):
    inner = tf.function(lambda a, seed: a + tf.random.stateless_normal([4, 3], seed))

    @decorate
    def step(x):
        return inner(x, tf.cast(x[0, :2] * 100.0, tf.int32)) * 2.0

    return step


JOINED = [
    computing, reading, nested, compiled, structured, ragged, open_shapes, with_captured_tensor, without_gradient,
    stateless_numbers,
]  # fmt: skip


@pytest.mark.parametrize("make", JOINED, ids=lambda make: make.__name__)
def test_functions_that_compute_are_part_of_segments(make, backend):
    step = run_both(make, CALLS, **backend)
    assert "runs on its own" not in causes(step)
    assert launches(step, CALLS) <= 1
    assert not step.stats().diverged
    check(step.trace_graph)


# Gradients.


def trained(decorate):
    """A model whose forward pass is a `tf.function`, under a tape: its forward and backward functions are called."""
    weight, bias = tf.Variable([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]]), tf.Variable([0.1, -0.1])
    forward = tf.function(lambda x: tf.tanh(x @ weight) + bias)

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x) ** 2)
        slopes = tape.gradient(loss, [weight, bias])
        for variable, slope in zip([weight, bias], slopes, strict=True):
            variable.assign_sub(0.1 * slope)
        return loss, slopes, weight + 0.0

    return step


def loss_function(decorate):
    weight = tf.Variable([1.0, 2.0, 3.0])
    loss_of = tf.function(lambda a: tf.reduce_mean(tf.nn.softplus(a)))

    @decorate
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(x * weight)
        return tape.gradient(loss, weight), tape.gradient(loss, weight) * 2.0

    return step


def gathered(decorate):
    """A gradient of rows: the forward function hands on the variable, the backward one its shape."""
    table = tf.Variable(np.float32(np.arange(12.0).reshape(6, 2)))
    rows = tf.function(lambda at: tf.gather(table, at) ** 2)

    @decorate
    def step(x):
        at = tf.cast(tf.abs(x[:, 0]) * 2.0, tf.int32) % 6
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(at))
        slope = tape.gradient(loss, table)
        table.assign_sub(0.01 * tf.convert_to_tensor(slope))
        return loss, slope.values, table + 0.0

    return step


def looping(decorate):
    """A loop in the function: its forward function returns lists of tensors, as variants."""
    weight = tf.Variable([1.0, -0.5, 0.3])

    @tf.function
    def forward(x):
        for _ in tf.range(4):
            x = tf.sin(x * weight) + x
        return x

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x))
        slope = tape.gradient(loss, weight)
        weight.assign_sub(0.05 * slope)
        return loss, slope

    return step


def compiled_and_trained(decorate):
    weight = tf.Variable([1.0, -0.5, 0.3])
    forward = tf.function(lambda x: tf.reduce_sum(tf.nn.softmax(x * weight) ** 2), jit_compile=True)

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            loss = forward(x)
        slope = tape.gradient(loss, weight)
        weight.assign_sub(0.05 * slope)
        return loss, slope

    return step


def second_order(decorate):
    weight = tf.Variable([1.0, -0.5, 0.3])
    forward = tf.function(lambda x: tf.reduce_sum(tf.sin(x * weight) ** 3))

    @decorate
    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = forward(x)
            slope = inner.gradient(loss, weight)
            penalty = tf.reduce_sum(slope**2)
        return loss, slope, outer.gradient(penalty, weight)

    return step


def forward_mode(decorate):
    forward = tf.function(lambda x: tf.sin(x) * x)

    @decorate
    def step(x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = forward(x) * 2.0
        return y, accumulator.jvp(y)

    return step


JOINED_GRADIENTS = {
    trained: 1, loss_function: 1, gathered: 1, looping: 1, compiled_and_trained: 1, second_order: 1, forward_mode: 3
}  # fmt: skip


@pytest.mark.parametrize("make", JOINED_GRADIENTS, ids=lambda make: make.__name__)
def test_gradients(make, backend):
    step = run_both(make, CALLS, **backend)
    assert launches(step, CALLS) <= JOINED_GRADIENTS[make], causes(step)
    check(step.trace_graph)


def test_a_read_value_between_forward_and_backward_is_a_cut_like_any_other(backend):
    def make(decorate):
        weight = tf.Variable([1.0, -0.5, 0.3])

        @tf.function
        def forward(x):
            for _ in tf.range(3):
                x = tf.sin(x * weight) + x
            return x

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(forward(x))
                scale = 1.0 if float(loss) > 0.0 else 2.0
                loss = loss * scale
            return loss, tape.gradient(loss, weight)

        return step

    step = run_both(make, CALLS, **backend)
    assert launches(step, CALLS) <= 2, causes(step)


# State.


def test_a_variable_that_is_written_before_is_read_with_its_new_value(backend):
    def make(decorate):
        weight = tf.Variable([1.0, 2.0, 3.0])
        inner = tf.function(lambda a: tf.sin(a) * weight)

        @decorate
        def step(x):
            y = inner(x)
            weight.assign_add(tf.reduce_mean(y, 0))
            z = inner(y)
            weight.assign_sub(0.5 * tf.reduce_mean(z, 0))
            return y, z, inner(z), weight + 0.0

        return step

    step = run_both(make, CALLS, **backend)
    assert launches(step, CALLS) == 3
    assert "reads variables that are written before it" in causes(step)
    check(step.trace_graph)


def writing(decorate):
    count = tf.Variable(0.0)

    @tf.function
    def inner(a):
        count.assign_add(tf.reduce_sum(a))
        return a * count

    @decorate
    def step(x):
        return inner(x + 1.0) * 2.0, count + 0.0

    return step


def creating(decorate):
    made = []

    @tf.function
    def inner(a):
        if not made:
            made.append(tf.Variable([1.0, 2.0, 3.0]))
        return a * made[0]

    @decorate
    def step(x):
        return inner(x) + 1.0, made[0] + 0.0

    return step


def random_numbers(decorate):
    inner = tf.function(lambda a: a + tf.random.normal([4, 3], seed=3))

    @decorate
    def step(x):
        return inner(x * 2.0) - 1.0

    tf.random.set_seed(7)
    return step


def generated(decorate):
    generator = tf.random.Generator.from_seed(4)
    inner = tf.function(lambda a: a + generator.normal([4, 3]))

    @decorate
    def step(x):
        return inner(x * 2.0) - 1.0

    return step


def calling_python(decorate):
    seen = []

    @tf.function
    def inner(a):
        (total,) = tf.py_function(lambda v: [seen.append(float(v)) or v * 2.0], [tf.reduce_sum(a)], [tf.float32])
        return a + total

    @decorate
    def step(x):
        y = inner(x * 2.0) - 1.0
        return y, list(seen)

    return step


def looked_up(decorate):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1]), tf.constant([1.5, 2.5])), -1.0
    )
    inner = tf.function(lambda a: table.lookup(tf.cast(a > 0.0, tf.int32)) + a)

    @decorate
    def step(x):
        return inner(x * 2.0) - 1.0

    return step


ALONE = {
    writing: "AssignAddVariableOp", random_numbers: "RandomStandardNormal", generated: "has effects",
    calling_python: "EagerPyFunc", looked_up: "runs on its own",
}  # fmt: skip


@pytest.mark.parametrize("make", ALONE, ids=lambda make: make.__name__)
def test_functions_with_effects_run_on_their_own(make, backend):
    step = run_both(make, CALLS, **backend)
    assert ALONE[make] in causes(step)
    assert step.stats().followed >= len(CALLS) - 2
    check(step.trace_graph)


def test_a_function_that_makes_its_variables_at_first(backend):
    step = run_both(creating, CALLS, **backend)
    assert launches(step, CALLS) <= 1


def test_what_a_function_prints_comes_once_and_in_order(capfd):
    def make(decorate):
        @tf.function
        def inner(a):
            tf.print("inside", tf.round(tf.reduce_sum(a)))
            return a * 2.0

        @decorate
        def step(x):
            y = inner(x + 1.0)
            tf.print("outside", tf.round(tf.reduce_sum(y)))
            return y + 1.0

        return step

    eager = make(lambda function: function)
    followed = make(coexec.function)
    printed = []
    for step in (eager, followed):
        for arguments in CALLS:
            step(*arguments)
        printed.append(capfd.readouterr().err.splitlines())
    lines = [[line for line in some if line.startswith(("inside", "outside"))] for some in printed]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2 * len(CALLS)


# Failures.


def failing(decorate):
    weight = tf.Variable(0.0)

    @tf.function
    def inner(a):
        tf.debugging.assert_less(tf.reduce_max(a), 100.0, message="too large")
        return a * 2.0

    @decorate
    def step(x):
        weight.assign_add(1.0)
        try:
            y = inner(x)
        except tf.errors.InvalidArgumentError as error:
            return "caught", "too large" in str(error), "Detected at node" in str(error), float(weight)
        weight.assign_add(tf.reduce_sum(y))
        return y + 1.0, float(weight)

    return step


def failing_late(decorate):
    weight = tf.Variable(0.0)

    @tf.function
    def inner(a):
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(a), 100.0, message="too large")]):
            return a * 2.0

    @decorate
    def step(x):
        weight.assign_add(1.0)
        y = inner(x)
        weight.assign_add(100.0)
        return y + 1.0

    def both(x):
        try:
            found = step(x)
        except tf.errors.InvalidArgumentError as error:
            found = type(error), "too large" in str(error), "Detected at node" in str(error)
        return found, float(weight)

    both.stats = getattr(step, "stats", None)
    return both


def failing_in_its_kernel(decorate, taken=True):
    """Writes, then fails by an operation that is not stateful: once inlined, only its results keep it alive."""
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])
    inner = tf.function(lambda a, i: (a * 2.0, tf.gather(a, i)))

    @decorate
    def step(x):
        weight.assign_add(x[:, 0])
        y, z = inner(x, tf.cast(tf.reduce_max(tf.abs(x)) / 100.0, tf.int32))
        weight.assign_add(x[:, 1])
        return (y, z) if taken else y

    def both(x):
        try:
            found = step(x)
        except tf.errors.InvalidArgumentError as error:
            found = type(error), "is not in [0, 4)" in str(error)
        return found, weight.numpy()

    both.stats = getattr(step, "stats", None)
    return both


def failing_for_nobody(decorate):
    return failing_in_its_kernel(decorate, taken=False)


@pytest.mark.parametrize(
    "make", [failing, failing_late, failing_in_its_kernel, failing_for_nobody], ids=lambda make: make.__name__
)
def test_a_function_that_fails(make, backend):
    calls = [(row * (1000.0 if n % 4 == 3 else 1.0),) for n, (row,) in enumerate(CALLS)]
    run_both(make, calls, **backend)


# Functions come and go.


def test_other_shapes_are_traced_anew(backend, exact_sizes):
    def make(decorate):
        traced = []

        @tf.function
        def inner(a):
            traced.append(a.shape)
            return tf.reduce_sum(tf.tanh(a), 1)

        @decorate
        def step(x):
            return inner(x * 2.0) + 1.0, len(traced)

        return step

    calls = [(tf.ones([2 + n // 3 % 3, 3]) * float(n),) for n in range(27)]
    step = run_both(make, calls, **backend)
    assert launches(step, calls) <= 1
    assert not step.stats().diverged
    check(step.trace_graph)


def test_ever_other_sizes_of_an_open_dimension():
    calls = [(tf.ones([2 + n, 3]) * float(n),) for n in range(24)]
    step = run_both(open_shapes, calls)
    assert not step.stats().diverged
    check(step.trace_graph)


def test_a_shape_that_depends_on_values_ends_the_segment(backend):
    def make(decorate):
        inner = tf.function(lambda a: tf.boolean_mask(a, a > 0.0))

        @decorate
        def step(x):
            return inner(x * 2.0) + 1.0

        return step

    step = run_both(make, CALLS, **backend)
    assert "depends on values" in causes(step)


def of_names(kind):
    return [name for name in context.context().list_function_names() if kind in name]


def test_a_function_that_is_made_anew_in_each_call_leaves_nothing_behind():
    def make(decorate):
        @decorate
        def step(x):
            made_anew = tf.function(lambda a: tf.tanh(a) * 2.0)
            return made_anew(x + 1.0) - 1.0

        return step

    step = run_both(make, [*CALLS, *CALLS, *CALLS])
    assert not step.stats().diverged
    gc.collect()
    before = len(context.context().list_function_names())
    for arguments in CALLS:
        step(*arguments)
    gc.collect()
    assert len(context.context().list_function_names()) <= before + 1
    check(step.trace_graph)


def test_a_function_that_is_made_anew_every_few_calls_is_given_up():
    def make(decorate):
        made = []

        def renewed():
            weight = tf.Variable([1.0, 2.0, 3.0])

            @tf.function
            def made_anew_now_and_then(a):
                return tf.tanh(a) * weight

            return made_anew_now_and_then

        @decorate
        def step(x):
            if len(made) % 3 == 0:
                step.inner = renewed()
            made.append(x)
            return step.inner(x + 1.0) - 1.0

        return step

    holder = run_both(make, CALLS * 9)
    gc.collect()
    assert len(of_names("made_anew_now_and_then")) <= 2 * MAX_AT_PLACE < MAX_CALLEES
    check(holder.trace_graph)
    holder.clear()
    gc.collect()
    assert len(of_names("made_anew_now_and_then")) <= 4


def test_a_function_may_die_before_its_call_is_launched():
    def make(decorate):
        kept = {}

        @decorate
        def step(x, drop):
            if "inner" not in kept:
                kept["inner"] = tf.function(lambda a: tf.tanh(a) * 2.0)
            y = kept["inner"](x + 1.0)
            if drop:
                del kept["inner"]
                gc.collect()
            return y - 1.0

        return step

    run_both(make, [(ROWS[n % 5], n % 4 == 3) for n in range(16)])


# Where functions come from.


def test_methods_of_modules(backend):
    class Layer(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]])

        @tf.function
        def __call__(self, x, scale=1.0):
            return tf.nn.relu(x @ self.weight) * scale

    def make(decorate):
        layers = Layer(), Layer()

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                y = layers[0](x) + layers[1](x, scale=2.0)
                loss = tf.reduce_sum(y)
            slopes = tape.gradient(loss, [layer.weight for layer in layers])
            for layer, slope in zip(layers, slopes, strict=True):
                layer.weight.assign_sub(0.1 * slope)
            return loss, slopes

        return step

    step = run_both(make, CALLS, **backend)
    assert launches(step, CALLS) <= 1
    check(step.trace_graph)


@keras.saving.register_keras_serializable()
class Traced(keras.layers.Layer):
    """A layer whose `call` is a graph function."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 2), initializer="ones")

    @tf.function
    def call(self, x):
        return tf.tanh(x @ self.w)


def test_layers(backend):
    def make(decorate):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Dense(3, activation="relu"), Traced(), keras.layers.Dense(1)])
        model.build([None, 3])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            slopes = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(slopes, model.trainable_variables)
            return loss

        return step

    step = run_both(make, CALLS * 2, **backend)
    assert launches(step, CALLS) <= 1, causes(step)
    check(step.trace_graph)


@keras.saving.register_keras_serializable()
class Refusing(keras.layers.Layer):
    """A layer whose graph function fails on some inputs: Keras names the layer in its error."""

    @tf.function
    def call(self, x):
        tf.debugging.assert_less(tf.reduce_max(x), 100.0, message="too large")
        return x * 2.0


def test_layers_that_fail(backend):
    def make(decorate):
        layer = Refusing(name="refusing")

        @decorate
        def step(x):
            return layer(x + 1.0) - 1.0

        def both(x):
            try:
                return step(x)
            except tf.errors.InvalidArgumentError as error:
                kept = [line for line in str(error).splitlines() if line[:1].strip() and "{{" not in line]
                return type(error), ["too large" in str(error), "Refusing.call()" in str(error)], kept

        return both

    run_both(make, [(row * (1000.0 if n % 4 == 3 else 1.0),) for n, (row,) in enumerate(CALLS)], **backend)


def test_a_loaded_model(tmp_path, backend):
    class Saved(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]])

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def score(self, x):
            return {"score": tf.nn.softmax(x @ self.weight)}

    tf.saved_model.save(Saved(), str(tmp_path))

    def make(decorate):
        loaded = tf.saved_model.load(str(tmp_path))

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loaded.score(x * 2.0)["score"] ** 2)
            return loss, tape.gradient(loss, loaded.weight)

        return step

    step = run_both(make, CALLS, **backend)
    assert launches(step, CALLS) <= 1, causes(step)


def test_concrete_functions(backend):
    def make(decorate):
        weight = tf.Variable([1.0, 2.0, 3.0])
        inner = tf.function(lambda a: tf.sin(a) * weight).get_concrete_function(tf.TensorSpec([4, 3]))

        @decorate
        def step(x):
            return inner(inner(x) + 1.0) * 2.0

        return step

    assert launches(run_both(make, CALLS, **backend), CALLS) <= 1


# Around them.


def test_whether_functions_run_eagerly_may_change():
    def make(decorate):
        ran = []

        @tf.function
        def inner(a):
            ran.append(0)
            return tf.tanh(a) * 2.0

        @decorate
        def step(x, eagerly):
            tf.config.run_functions_eagerly(eagerly)
            try:
                return inner(x) + 1.0, len(ran)
            finally:
                tf.config.run_functions_eagerly(False)

        return step

    run_both(make, [(ROWS[n % 5], n % 4 == 3) for n in range(16)])


def test_a_python_number_is_another_function(backend):
    def make(decorate):
        inner = tf.function(lambda a, power: a**power)

        @decorate
        def step(x, power):
            return inner(tf.abs(x), power) + 1.0

        return step

    step = run_both(make, [(ROWS[n % 5], n % 3) for n in range(18)], **backend)
    assert not step.stats().diverged
    check(step.trace_graph)


def test_many_calls_in_a_loop(backend):
    def make(decorate):
        weight = tf.Variable([1.0, 2.0, 3.0])
        inner = tf.function(lambda a: tf.sin(a) * weight)

        @decorate
        def step(x, times):
            for _ in range(times):
                x = inner(x)
            return x

        return step

    step = run_both(make, [(ROWS[n % 5], 30 + n // 5) for n in range(20)], **backend)
    assert step.stats().diverged <= 1
    assert launches(step, [(ROWS[0], 33)] * 5) <= 1, causes(step)
    check(step.trace_graph)


def test_batches_taken_from_ever_other_places_share_what_follows():
    def make(decorate):
        weight = tf.Variable([1.0, 2.0, 3.0])
        forward = tf.function(lambda x: tf.tanh(x * weight))
        data = tf.constant(np.float32(np.arange(120.0).reshape(40, 3)) / 100.0)

        @decorate
        def step(n):
            x = data[2 * n : 2 * n + 4]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(forward(x) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        return step

    step = run_both(make, [(n % 17,) for n in range(60)])
    assert len([size for size in step.stats().ops_per_segment if size > 2]) <= 4, causes(step)
    assert step.stats().launches >= 50
    check(step.trace_graph)


def test_validated_calls_agree(backend):
    step = trained(lambda function: coexec.function(function, **backend))
    for _ in range(3):
        step(ROWS[0])
    with coexec.validate(every=1):
        for arguments in CALLS:
            step(*arguments)
    assert "one by one" not in causes(step)


def test_results_kept_beyond_the_call(backend):
    kept = []
    inner = tf.function(lambda a: (tf.tanh(a), tf.reduce_sum(a)))

    @coexec.function(**backend)
    def step(x):
        y, total = inner(x * 2.0)
        kept.append(total)
        return y

    for (x,) in CALLS:
        assert_same(snapshot(step(x)), snapshot(tf.tanh(x * 2.0)))
    assert_same(snapshot(kept), snapshot([tf.reduce_sum(x * 2.0) for (x,) in CALLS]))
