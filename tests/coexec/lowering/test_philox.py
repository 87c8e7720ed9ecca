"""Random numbers: those that eager would have drawn, in graphs and under XLA. Eager TensorFlow is the oracle."""

import functools
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.snapshots import assert_same, snapshot


@pytest.fixture(autouse=True)
def compiled_at_any_price(tune):
    """What is launched does not hang on how busy the machine is."""
    tune(compile_allowance=1000.0)


BACKENDS = {"graph": False, "xla": True}
EXACT = {"rtol": 0, "atol": 0}
# XLA has a logarithm, a sine and a cosine of its own; a number of few bits may round the other way.
NORMAL = {
    tf.float16: {"rtol": 1e-3, "atol": 1e-3}, tf.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
    tf.float32: {"rtol": 1e-6, "atol": 5e-7}, tf.float64: {"rtol": 1e-13, "atol": 1e-13},
}  # fmt: skip
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]


def follow(step, calls, backend, seed=None, launches=None, xla=True, **tolerance):
    """Makes all calls eagerly and co-executed; returns the decorated function. `calls`: the arguments of each."""
    outcomes = []
    decorated = coexec.function(step, jit_compile=BACKENDS[backend])
    for function in (step, decorated):
        if seed is not None:
            keras.utils.set_random_seed(seed)
        with testing.compile_everything():
            outcomes.append([snapshot(function(*arguments)) for arguments in calls])
    for number, (one, other) in enumerate(zip(*outcomes, strict=True)):
        assert_same(one, other, **(tolerance or EXACT), path=f"call {number}: ")
    stats = decorated.stats()
    assert stats.followed >= len(calls) - 2, decorated.explain()
    # The first call records, the second is the first of its segments, which has them run one by one.
    assert stats.launches == (len(calls) - 2 if launches is None else launches), decorated.explain()
    if backend == "xla" and xla:
        assert "not compiled by XLA" not in decorated.explain(), decorated.explain()
    return decorated


def seeds(count=6):
    return [(tf.constant([i, 7 - i]),) for i in range(count)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_stateless_floats(dtype, backend):
    """Uniform numbers are the same to the bit, for any number of them; normal ones to rounding."""

    def uniform(seed):
        return [tf.random.stateless_uniform(shape, seed, dtype=dtype) for shape in ([], [1], [3], [0], [8, 33])]

    def normal(seed):
        return [tf.random.stateless_normal(shape, seed, dtype=dtype) for shape in ([], [1], [3], [0], [8, 33])]

    follow(uniform, seeds(), backend)
    follow(normal, seeds(), backend, **(NORMAL[dtype] if backend == "xla" else EXACT))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.uint32, tf.uint64], ids=lambda d: d.name)
def test_stateless_integers(dtype, backend):
    """Integers, in a range of any width and of all bits."""
    ranges = [(0, 10), (3, 4), (dtype.max - 5, dtype.max)]
    if dtype.min < 0:
        ranges += [(dtype.min, dtype.max), (-7, 11)]

    def step(seed):
        full = tf.random.stateless_uniform([5], seed, None, None, dtype)
        if dtype not in (tf.int32, tf.int64):
            return full
        return full, [tf.random.stateless_uniform([3, 3], seed, *between, dtype) for between in ranges]

    follow(step, seeds(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_range_that_is_given_at_run_time(backend):
    """An empty range fails as it does eagerly; nothing else does."""

    def step(seed, least):
        return tf.random.stateless_uniform([4], seed, least, 10, tf.int32) + 1

    calls = [(tf.constant([i, 1]), tf.constant(least)) for i, least in enumerate([0, -5, 9, 3, -(2**31)])]
    decorated = follow(step, calls, backend, launches=3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Need minval < maxval"):
        decorated(tf.constant([1, 2]), tf.constant(10))
    assert_same(snapshot(step(*calls[1])), snapshot(decorated(*calls[1])))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda d: d.name)
def test_seeds_below_zero(dtype, backend):
    """XLA takes a negative seed for another one than the kernels do."""

    def step(seed):
        split = tf.random.split(seed, 3)
        return split, tf.random.fold_in(seed, -5), tf.random.stateless_uniform([2], split[0])

    extremes = [(5, 8), (-5, 8), (5, -8), (-1, -1), (dtype.max, dtype.min), (dtype.min, 0)]
    follow(step, [(tf.constant(pair, dtype),) for pair in extremes], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stateless_operations_that_xla_does_otherwise(backend):
    """They stay with the kernels, and say so."""

    def step(seed):
        return (
            tf.random.stateless_truncated_normal([50], seed),
            tf.random.stateless_categorical(tf.zeros([2, 3]), 5, seed),
            tf.random.stateless_gamma([3], seed, alpha=2.0),
            tf.random.experimental.stateless_shuffle(tf.range(6), seed),
        )

    decorated = follow(step, seeds(), backend, xla=False)
    assert ("not compiled by XLA" in decorated.explain()) == (backend == "xla")


def layers():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((6, 8)),
            keras.layers.SpatialDropout1D(0.3),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.5, seed=11),
            keras.layers.GaussianDropout(0.2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5, noise_shape=(None, 1)),
            keras.layers.AlphaDropout(0.2),
            keras.layers.Dense(3),
        ]
    )


class Attention(keras.layers.Layer):
    """A layer of the user's, with attention of Keras' inside."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.4)
        self.dense = keras.layers.Dense(3)

    def call(self, x, training=None):
        return self.dense(self.attention(x, x, training=training)[:, 0])


def attention():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((6, 8)), Attention()])


def train(make, jit_compile, count=12):
    """Trains a model, eagerly (None) or co-executed; returns what became of it, and the step."""
    model = make()
    optimizer = keras.optimizers.Adam(0.01)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    step = step if jit_compile is None else coexec.function(step, jit_compile=jit_compile)
    numbers = np.random.default_rng(1)
    losses = []
    for _ in range(count):
        x = tf.constant(numbers.normal(size=(4, 6, 8)), tf.float32)
        losses.append(snapshot(step(x, tf.constant(numbers.integers(3, size=4)))))
    states = [v for v in model.variables if v.dtype == "int64" or "seed" in v.path]
    assert len(states) > 0
    return snapshot((losses, states)), step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [layers, attention])
def test_a_model_with_dropout_is_trained_as_eagerly(make, backend):
    """Its losses and the states of its seed generators are eager's; every step is one launch, of XLA if asked."""
    expected, _ = train(make, None)
    found, step = train(make, BACKENDS[backend])
    assert_same(expected, found, rtol=1e-4, atol=1e-5)
    stats = step.stats()
    assert (stats.followed, stats.launches) == (11, 10), step.explain()
    assert "not compiled by XLA" not in step.explain()
    if make is layers:
        assert stats.regions >= 4 * 6, step.explain()


# Operations with seeds of their own, which TensorFlow draws anew for each.


def every_kind(x):
    """One operation of each kind, a dropout, and numbers that go on into others."""
    return (
        x + tf.random.uniform([3]),
        [tf.random.uniform([5], dtype=dtype) for dtype in FLOATS],
        tf.random.uniform([3, 3], -5, 12, tf.int32),
        tf.random.uniform([7], 3, 2**40, tf.int64),
        tf.nn.dropout(tf.ones([4, 5]) + x[0], 0.4),
        tf.random.uniform([0]) + tf.random.uniform([]),
        (tf.random.uniform([99]) + 0.1, tf.random.uniform([99]) - 0.7, 1.0 - tf.random.uniform([99]) + 1e-3),
    )


def arguments(count=8):
    return [(tf.constant([i, 2.0, 3.0]),) for i in range(count)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_without_a_seed_of_their_own(backend):
    """Under a global seed, what they draw is eager's to the bit; they cut nothing and go to XLA."""
    decorated = follow(every_kind, arguments(), backend, seed=5)
    assert "segment cut" not in decorated.explain()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_normal_numbers(dtype, backend):
    """Normal numbers are eager's, to rounding under XLA, whatever their number."""

    def step(x):
        drawn = [tf.random.normal(shape, dtype=dtype) for shape in ([], [1], [0], [5, 7], [64])]
        return drawn, tf.random.normal([3], 2.0, 0.5, dtype) * tf.cast(x, dtype)

    tolerance = NORMAL[dtype] if backend == "xla" else EXACT
    follow(step, arguments(), backend, seed=5, **{k: 4 * v for k, v in tolerance.items()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_truncated_normal_numbers(backend):
    """They stay with the kernel, which draws again and again, and keep their place in a graph."""

    def step(x):
        return tf.random.truncated_normal([50]) * x[1], tf.random.uniform([2])

    decorated = follow(step, arguments(), backend, seed=5, xla=False)
    assert "segment cut" not in decorated.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_range_of_seeded_integers_that_is_given_at_run_time(backend):
    """An empty range fails as eagerly, and the next call draws what eager draws next."""

    def step(least):
        return tf.random.uniform([4], least, 10, tf.int32) + 1

    outcomes = []
    decorated = coexec.function(step, jit_compile=BACKENDS[backend])
    for function in (step, decorated):
        tf.random.set_seed(4)
        found = []
        with testing.compile_everything():
            for least in (0, -5, 9, 3, 10, 4, 11, -(2**31), 1):
                try:
                    found.append(function(tf.constant(least)))
                except tf.errors.InvalidArgumentError as error:
                    found.append("Need minval < maxval" in str(error))
        outcomes.append(snapshot(found))
    assert_same(*outcomes, **EXACT)
    assert decorated.stats().launches >= 5, decorated.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_of_the_operations_own(backend):
    """An operation that is given a seed goes on where it was, with others, and other kinds of it, between."""

    def step(x, seed):
        return (
            tf.random.uniform([2], seed=1),
            x + tf.random.uniform([3]) * tf.random.uniform([2], seed=1)[0],
            tf.random.uniform([2], seed=seed),
            tf.random.normal([2], seed=1) * x[0],
            tf.nn.dropout(x * 2.0, 0.5, seed=seed),
        )

    outcomes = []
    decorated = coexec.function(step, jit_compile=BACKENDS[backend])
    for function in (step, decorated):
        tf.random.set_seed(8)
        found = []
        with testing.compile_everything():
            for i in range(12):
                with testing.diverge_at(4) if i % 4 == 3 else testing.diverge_at(-1):
                    found.append(function(tf.constant([1.0, 2.0, 3.0]), None if i % 3 == 2 else i % 2))
                found.append(tf.random.uniform([2], seed=1))
        outcomes.append(snapshot(found))
    assert_same(*outcomes, **(NORMAL[tf.float32] if backend == "xla" else EXACT))
    stats = decorated.stats()
    assert stats.followed >= 6, decorated.explain()
    assert stats.launches >= stats.followed, decorated.explain()
    assert "segment cut" not in decorated.explain(), decorated.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_whose_kernels_alone_know(backend):
    """Shuffles, classes, gamma and Poisson numbers are the kernels'; they cut only where their input is to come."""

    def known(x):
        a, b = tf.random.shuffle(x), tf.random.categorical(x[None, :], 5)
        return a * 2.0, b, tf.random.shuffle(tf.range(6)), tf.random.poisson([3], [4.0]) + x[0]

    def to_come(x):
        y = x * 2.0
        return tf.random.shuffle(y), tf.random.categorical(y[None, :], 5) + 1, tf.random.gamma([3], y) * x

    decorated = follow(known, [(tf.random.normal([4]),) for _ in range(8)], backend, seed=5, launches=12)
    assert "RandomShuffle runs on its own" not in decorated.explain()
    decorated = follow(to_come, arguments(), backend, seed=5, launches=24)
    assert "RandomShuffle runs on its own" in decorated.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_comes_between(backend):
    """Two functions in turns, plain calls, other paths, other generators, and a seed that is set again and again."""
    outcomes = []
    for decorated in (False, True):
        keras.utils.set_random_seed(3)
        wrap = coexec.function(jit_compile=BACKENDS[backend]) if decorated else lambda function: function

        @wrap
        def first(x, more):
            y = x + tf.random.uniform([3]) * float(np.random.random())
            if more:
                y = y * tf.random.uniform([3]) + tf.random.uniform([])
            return y, tf.nn.dropout(y, 0.5)

        @wrap
        def second(x):
            a = tf.random.uniform([2], 0, 100, tf.int32)
            if float(x) > 3:  # read in the middle
                tf.random.set_seed(int(x))
            return a, tf.random.uniform([2]), tf.random.uniform([2])

        found = []
        with testing.compile_everything():
            for i in range(16):
                x = tf.constant([1.0, 2.0, 3.0])
                found.append(first(x, i % 5 == 3))
                found.append(second(tf.constant(float(i % 7))))
                found.append(tf.random.uniform([2]))
                with testing.diverge_at(2) if i % 4 == 3 else testing.diverge_at(-1):
                    found.append(first(x, False))
                if i == 9:
                    tf.random.set_seed(12)
                found.append(keras.random.uniform((2,)))
        outcomes.append(snapshot(found))
    # XLA makes one operation of a multiplication and an addition.
    assert_same(*outcomes, **({"rtol": 2e-7, "atol": 0} if backend == "xla" else EXACT))
    assert first.stats().diverged >= 4
    assert first.stats().launches >= 16, first.explain()
    assert second.stats().launches >= 14, second.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_draw_in_their_turns(backend):
    """The generator is the process'; whoever comes next takes the next seed."""
    outcomes = []
    decorated = coexec.function(every_kind, jit_compile=BACKENDS[backend])
    for function in (every_kind, decorated):
        tf.random.set_seed(2)
        with testing.compile_everything(), ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            found = [pool.submit(function, *given).result() for given in arguments() for pool in (one, other, one)]
        outcomes.append(snapshot(found))
    assert_same(*outcomes, **EXACT)
    assert decorated.stats().launches >= 20, decorated.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_seed_numbers_never_repeat(backend, no_seed):
    """Two functions, many calls, threads: all numbers differ, and they are as large as they should be."""

    def step():
        return tf.random.uniform([50]), tf.random.normal([50]), tf.random.uniform([50], 0, 2**31 - 1, tf.int32)

    functions = [coexec.function(step, jit_compile=BACKENDS[backend]) for _ in range(2)]
    found = []
    with testing.compile_everything(), ThreadPoolExecutor(4) as pool:
        found += [function() for _ in range(20) for function in functions]
        found += [f.result() for f in [pool.submit(functions[i % 2]) for i in range(40)]]
    for function in functions:
        assert function.stats().launches >= 20, function.explain()
        assert "segment cut" not in function.explain()
    uniform, normal, integers = (np.concatenate([np.asarray(call[n]) for call in found]) for n in range(3))
    assert len(np.unique(integers)) == len(integers)  # of 4000 among 2**31, two are equal once in 270 runs
    assert len(np.unique(uniform)) > 0.998 * len(uniform)
    assert abs(uniform.mean() - 0.5) < 0.03
    assert abs(uniform.var() - 1 / 12) < 0.01
    assert abs(normal.mean()) < 0.1
    assert abs(normal.var() - 1.0) < 0.15
    assert 0 <= uniform.min() <= uniform.max() < 1


@pytest.fixture
def no_seed():
    """No global seed is set."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(1)


def test_a_library_call_that_draws_is_jumped_over():
    """A Keras layer around a random operation of TensorFlow's is a region, and draws as many seeds as its Python."""
    outcomes = []
    for decorated in (False, True):
        tf.random.set_seed(6)
        noise = keras.layers.Lambda(functools.partial(tf.nn.dropout, rate=0.5))
        never = keras.layers.Lambda(functools.partial(tf.nn.dropout, rate=0))  # draws a seed, and uses it for nothing
        model = keras.Sequential([keras.Input((4,)), never, noise, never, noise])
        step = lambda x: (model(x), tf.random.uniform([2]))  # noqa: B023, E731
        step = coexec.function(step, jit_compile=True) if decorated else step
        found = []
        with testing.compile_everything():
            for i in range(24):
                if i == 14:
                    tf.random.set_seed(None)
                if i == 18:
                    tf.random.set_seed(1)
                found.append(snapshot(step(tf.ones([3, 4]))) if not 14 <= i < 18 else len(step(tf.ones([3, 4]))))
        outcomes.append(snapshot(found))
    assert_same(*outcomes, **EXACT)
    assert step.stats().regions >= 16, step.explain()
    assert step.stats().followed == 23
    assert step.stats().launches >= 20, step.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_generators(backend):
    """A `tf.random.Generator` is a variable: its counter moves on as eagerly, also from one half into the other."""
    outcomes = []
    for decorated in (False, True):
        source = tf.random.Generator.from_seed(3)

        def step(x):
            drawn = [source.uniform([3]), source.uniform([2, 5], 0, 9, tf.int32), source.uniform_full_int([4])]  # noqa: B023
            return x + drawn[0], drawn, tf.random.stateless_uniform([2], source.make_seeds(1)[:, 0])  # noqa: B023

        step = coexec.function(step, jit_compile=BACKENDS[backend]) if decorated else step
        found = []
        with testing.compile_everything():
            for i in range(10):
                if i == 5:
                    source.reset_from_key_counter(7, tf.constant([-1000, 1], tf.int64))
                with testing.diverge_at(3) if i == 7 else testing.diverge_at(-1):
                    found.append((step(tf.constant([1.0, 2.0, float(i)])), source.state.numpy()))
                found.append(source.uniform([2]))
        outcomes.append(snapshot(found))
    assert_same(*outcomes, **EXACT)
    assert step.stats().launches >= 6, step.explain()
    assert "segment cut" not in step.explain(), step.explain()
    assert "not compiled by XLA" not in step.explain(), step.explain()


@pytest.mark.parametrize("seed", [None, 4])
def test_draws_between_regions(seed):
    """A draw in the midst of a training step leaves the model, the gradient and the optimizer regions."""
    outcomes = []
    for decorated in (False, True):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.2)])
        optimizer = keras.optimizers.SGD(0.05)

        def step(x):
            with tf.GradientTape() as tape:
                hidden = tf.nn.dropout(model(x, training=True), 0.5, seed=seed)  # noqa: B023
                loss = tf.reduce_mean(hidden * hidden)
            gradients = tape.gradient(loss, model.trainable_variables)  # noqa: B023
            optimizer.apply(gradients, model.trainable_variables)  # noqa: B023
            return loss

        step = coexec.function(step, jit_compile=True) if decorated else step
        inputs = [tf.constant(np.random.normal(size=(3, 4)), tf.float32) for _ in range(20)]
        outcomes.append(snapshot([(step(x), model.variables) for x in inputs]))
    assert_same(*outcomes, rtol=1e-5, atol=1e-6)
    stats = step.stats()
    assert stats.followed == 19
    assert stats.launches >= 16, step.explain()
    assert stats.regions >= 3 * 10, step.explain()
    assert "not compiled by XLA" not in step.explain(), step.explain()


@pytest.mark.parametrize("seed", [np.int64(5), np.array(5), -3, 10**12, 0, 2.5, True, tf.constant(7)], ids=repr)
def test_global_seeds_of_any_kind(seed):
    """Whatever TensorFlow takes for a seed gives eager's numbers; whole numbers keep the segment whole."""
    outcomes = []
    decorated = coexec.function(lambda x: (x * tf.random.uniform([3]), tf.random.uniform([2], seed=3)))
    for function in (decorated.python_function, decorated):
        tf.random.set_seed(seed)
        with testing.compile_everything():
            outcomes.append(snapshot([function(tf.constant([1.0, 2.0, 4.0])) for _ in range(6)]))
    assert_same(*outcomes, **EXACT)
    stats = decorated.stats()
    assert stats.followed == 5
    if isinstance(seed, (int, np.integer)):
        assert stats.launches == 4, decorated.explain()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_draws_the_same_numbers_twice(backend, seed):
    """A segment that is carried out twice draws from the same seeds, also where none is set, and then goes on."""
    tf.random.set_seed(seed)
    decorated = coexec.function(every_kind, jit_compile=BACKENDS[backend])
    with testing.compile_everything(), coexec.validate(every=1):
        found = [decorated(*given) for given in arguments()]
    assert decorated.stats().validated >= 6, decorated.explain()
    assert decorated.stats().followed == 7
    assert "differ" not in decorated.explain(), decorated.explain()
    drawn = np.concatenate([np.asarray(call[3]) for call in found])
    assert len(np.unique(drawn)) == len(drawn)
    if seed is not None:
        tf.random.set_seed(seed)
        assert_same(snapshot([every_kind(*given) for given in arguments()]), snapshot(found), **EXACT)


@pytest.mark.parametrize("operations", [0, 20])
def test_a_seed_that_is_set_twice_in_a_call(operations):
    """Each time draws begin anew, in segments that are replayed and in those that are launched."""

    def step(x):
        drawn = []
        for _ in range(2):
            tf.random.set_seed(5)
            drawn.append(tf.random.uniform([3]) + tf.random.normal([3]))
        for _ in range(operations):
            x = x * 0.5
        return drawn[0] + x, drawn[1] + x, tf.random.uniform([2])

    follow = coexec.function(step)
    x = tf.ones([3])
    for _ in range(6):
        expected = step(x)
        for one, other in zip(follow(x), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert follow.stats().followed == 5
