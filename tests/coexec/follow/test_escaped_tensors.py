"""Escapes: a lazy tensor that leaves its call works for ever, as the eager tensor it stands for, and leaks nothing."""

import collections
import copy
import dataclasses
import gc
import json
import os
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import assert_quiet, holders, run_both
from tests.snapshots import assert_same, snapshot
from tracer import intercept
from tracer.lazy import LazyTensor
from tracer.private import context

EagerTensor = type(tf.constant(0))
X = tf.constant([1.0, 2.0, 3.0, 4.0])
WARM = 4


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


class Box:
    """Where a tensor stays."""


def escaped():
    """Returns the decorated function and a lazy tensor that it has left in a box; its value is [3, 6, 9, 12]."""
    box = Box()

    @coexec.function
    def step(x):
        box.kept = x * 3.0
        return tf.reduce_sum(box.kept)

    for _ in range(WARM):
        step(X)
    assert (step.stats().followed, step.stats().diverged) == (WARM - 1, 0)
    assert step.stats().launches > 0
    assert type(box.kept) is LazyTensor
    return step, box


def through_a_function(y):
    return tf.function(lambda t: t * 2.0)(y).numpy()


def through_a_captured_function(y):
    return tf.function(lambda: y * 2.0)().numpy()


def through_a_dataset(y):
    return [float(t) for t in tf.data.Dataset.from_tensor_slices(y).map(lambda t: t + 1.0).batch(2).unbatch()]


def through_a_captured_dataset(y):
    return [float(t) for t in tf.data.Dataset.range(2).map(lambda n: tf.reduce_sum(y) + tf.cast(n, tf.float32))]


def through_a_generator(y):
    def items():
        yield from y

    signature = tf.TensorSpec([], tf.float32)
    return [float(t) for t in tf.data.Dataset.from_generator(items, output_signature=signature)]


def through_tapes(y):
    with tf.GradientTape() as tape:
        tape.watch(y)
        z = tf.sin(y) * y
    return tape.gradient(z, y).numpy()


def through_tapes_with_numbers(y):
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(y)
        with tf.GradientTape() as inner:
            inner.watch(y)
            z = tf.reduce_sum(y**3)
        first = inner.gradient(z, y)
    second = outer.jacobian(first, y, experimental_use_pfor=False)
    return first.numpy(), outer.gradient(first, y).numpy(), second.numpy()


def through_a_variable(y):
    v = tf.Variable(y)
    v.assign_add(y)
    v.scatter_nd_update([[0]], [y[0]])
    return v.numpy(), v.shape, v.dtype


def through_keras(y):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    return model(y[None, :]).shape, keras.ops.convert_to_numpy(y), keras.losses.MeanSquaredError()(y, y * 2.0).numpy()


def through_keras_predict(y):
    return keras.Sequential([keras.layers.Rescaling(2.0)]).predict(tf.reshape(y, [4, 1]), verbose=0)


def through_numpy(y):
    return np.asarray(y), np.stack([y, y]), np.sin(y), np.dot(y, y), np.array([y]).shape, y.numpy().dtype, y.__array__()


def through_dlpack(y):
    capsule = tf.experimental.dlpack.to_dlpack(y)
    return tf.experimental.dlpack.from_dlpack(capsule).numpy()


def through_a_memoryview(y):
    view = memoryview(y)
    return view.format, view.shape, view.tolist(), bytes(view)


def through_copies(y):
    deep = copy.deepcopy({"y": y, "again": [y]})
    return copy.copy(y).numpy(), deep["y"].numpy(), deep["y"] is deep["again"][0], type(deep["y"]).__name__


def through_a_pickle(y):
    again = pickle.loads(pickle.dumps(y))
    return again.numpy(), type(again).__name__


def through_a_py_function(y):
    doubled = tf.py_function(lambda t: t * 2.0, [y], tf.float32)
    return doubled.numpy(), tf.numpy_function(np.sin, [y], tf.float32).numpy()


def through_debugging(y):
    tf.debugging.assert_equal(y, y)
    tf.debugging.assert_all_finite(y, "finite")
    tf.debugging.assert_shapes([(y, ("n",))])
    return tf.debugging.check_numerics(y, "numbers").numpy()


def through_structures(y):
    ragged = tf.RaggedTensor.from_row_lengths(y, [1, 3])
    sparse = tf.sparse.from_dense(y)
    flat = tf.nest.flatten({"a": [y], "b": (y, y)})
    return ragged.to_list(), tf.sparse.to_dense(sparse).numpy(), len(flat), tf.nest.map_structure(float, list(y))


def through_loops(y):
    total = tf.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, s + y), [0, y])[1]
    return total.numpy(), tf.map_fn(tf.sin, y).numpy()


def through_a_tensor_array(y):
    return tf.TensorArray(tf.float32, 2, element_shape=[4]).write(0, y).write(1, y * 2.0).stack().numpy()


def through_references(y):
    return len({y.ref(), y.ref()}), y.ref().deref() is y, weakref.ref(y)() is y, hash(y.ref()) == hash(y.ref())


def through_python(y):
    return bool(y[0]), float(y[1]), int(y[2]), f"{y[3]:.2f}", repr(y), str(y), len(y), [float(t) for t in y], y.shape[0]


def through_checks(y):
    return (
        isinstance(y, tf.Tensor), isinstance(y, EagerTensor), tf.is_tensor(y), tf.executing_eagerly(), y.device,
        tf.get_static_value(y).tolist(), tf.convert_to_tensor(y) is y, tf.identity(y) is y, keras.ops.is_tensor(y),
        type(y).__name__,
    )  # fmt: skip


def through_vectorized_map(y):
    return tf.vectorized_map(lambda t: t * 2.0 + y[0], y).numpy()


USES = {name: value for name, value in dict(globals()).items() if name.startswith("through_")}


def refused_calls(y):
    """What Python's and NumPy's own C code says of a tensor that it cannot use, and what its type is called."""
    said = [repr(type(y)), type(y).__module__, type(y).__qualname__]
    for misuse in (
        lambda: y(), lambda: next(y), lambda: y.unknown, lambda: y.astype, lambda: setattr(y, "shape", 1),
        lambda: {y: 1}, lambda: range(y), lambda: os.stat(y), lambda: "".join(y), lambda: "a" + y, lambda: b"a" + y,
        lambda: isinstance(1, y), lambda: json.dumps(y), lambda: len(y[0]), lambda: y["a"], lambda: iter(y[0]),
        lambda: [][y], lambda: tf.constant(np.array([y, None], object)), lambda: eval(y), lambda: dict(y),
    ):  # fmt: skip
        with pytest.raises(Exception) as caught:
            misuse()
        said.append((type(caught.value).__name__, str(caught.value)))
    return said


def test_named_as_an_eager_tensor_is():
    """Error messages of C code, which knows a class by the name in its type object, are eager's."""
    _, box = escaped()
    assert type(box.kept) is LazyTensor
    assert refused_calls(box.kept) == refused_calls(X * 3.0)


KEEPING = (through_a_captured_function, through_a_captured_dataset, through_a_generator)  # their graphs keep captures


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_used_after_its_call(use):
    """A tensor left on an object is used as an eager one, other calls of its function between."""
    before = holders()
    expected = snapshot(use(X * 3.0))
    step, box = escaped()
    kept = box.kept
    for _ in range(3):
        step(X + 1.0)
    box.kept = None
    assert_same(expected, snapshot(use(kept)))
    del kept
    if use not in KEEPING:
        assert_quiet(before)


@pytest.mark.parametrize("end", ["clear", "del"])
@pytest.mark.parametrize("use", [through_tapes, through_numpy, through_a_function], ids=lambda use: use.__name__)
def test_used_after_its_function(use, end):
    """A tensor works on after its function has been cleared, and when it is gone."""
    before = holders()
    expected = snapshot(use(X * 3.0))
    step, box = escaped()
    if end == "clear":
        step.clear()
    else:
        del step
        gc.collect()
    assert_same(expected, snapshot(use(box.kept)))
    box.kept = None
    assert_quiet(before)


HOLDERS = {
    "list": lambda y: [y],
    "dict": lambda y: {"y": y},
    "set": lambda y: {y.ref()},
    "tuple": lambda y: (1, (y, y)),
    "deque": lambda y: collections.deque([y], maxlen=1),
    "closure": lambda y: lambda: y,
    "generator": lambda y: (t for t in [y]),
    "object": lambda y: dataclasses.make_dataclass("Held", ["y"])(y),
    "exception": lambda y: ValueError(y),
    "method": lambda y: y.numpy,
    "array": lambda y: np.array([y, None], dtype=object),
    "weak keys": lambda y: {id(y): weakref.ref(y), "y": y},
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_hooks_go_with_the_last_tensor(hold):
    """Whatever holds a lazy tensor, the hooks stay in place as long as it does and go when it lets go."""
    before = holders()
    held = []

    @coexec.function
    def step(x):
        held.append(hold(x * 3.0))
        return tf.reduce_sum(x)

    for _ in range(WARM):
        step(X)
    assert step.stats().followed == WARM - 1
    assert holders() - before == WARM - 1  # the first call's tensors are eager
    assert intercept.installed()
    held.clear()
    assert_quiet(before)


def test_a_generator_made_in_a_call_goes_on_after_it():
    """A generator that issues operations runs partly inside and partly outside of the call that made it."""

    def make(decorate):
        def doubling(y):
            while True:
                y = y * 2.0
                yield y

        @decorate
        def step(x):
            generator = doubling(x + 1.0)
            return next(generator), generator

        def caller(x):
            first, generator = step(x)
            return first, next(generator), next(generator)

        caller.stats = getattr(step, "stats", None)
        return caller

    before = holders()
    fn = run_both(make, [(X + float(n),) for n in range(6)])
    assert fn.stats().followed >= 4
    del fn
    assert_quiet(before)


RESULTS = {
    "tensor": lambda y: y,
    "list": lambda y: [y, [y + 1.0]],
    "tuple": lambda y: (y, (y + 1.0, 2)),
    "dict": lambda y: {"a": y, "b": {"c": y + 1.0}},
    "namedtuple": lambda y: Pair(y, y + 1.0),
}
Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_returned_tensors_are_eager(make):
    """What a followed call returns, alone or in a structure, is a real `EagerTensor`; the hooks go with the call."""
    before = holders()
    fn = coexec.function(lambda x: make(x * 3.0))
    for _ in range(WARM):
        result = fn(X)
    assert fn.stats().followed == WARM - 1
    assert fn.stats().launches > 0
    tensors = [t for t in tf.nest.flatten(result) if tf.is_tensor(t)]
    assert [type(t) is EagerTensor for t in tensors] == [True] * len(tensors)
    assert_quiet(before)


def test_a_tensor_returned_twice_is_eager():
    """One tensor at two places of the result is one eager tensor."""
    fn = coexec.function(lambda x: (lambda y: (y, [y]))(x * 3.0))
    for _ in range(WARM):
        first, (second,) = fn(X)
    assert first is second
    assert type(first) is EagerTensor


def test_a_result_that_contains_itself():
    """A list that contains itself is returned as it is."""

    def ring(x):
        items = [x * 3.0]
        items.append(items)
        return items

    fn = coexec.function(ring)
    for _ in range(WARM):
        items = fn(X)
    assert items[1] is items
    np.testing.assert_array_equal(items[0].numpy(), X.numpy() * 3.0)


class Window(tuple):
    """A tuple whose constructor takes something else than an iterable."""

    def __new__(cls, low, high):
        return super().__new__(cls, (low, high))


def test_a_result_of_the_users_own_tuple_type():
    """A tuple of a class with its own constructor is returned, of the same class."""
    fn = coexec.function(lambda x: Window(x, x * 3.0))
    for _ in range(WARM):
        window = fn(X)
    assert type(window) is Window
    np.testing.assert_array_equal(window[1].numpy(), X.numpy() * 3.0)


def test_a_weak_reference_to_a_result():
    """A weak reference that the call took to its result lives as long as the result."""
    cache = weakref.WeakValueDictionary()

    def step(x):
        cache["y"] = y = x * 3.0
        return y

    for fn in (step, coexec.function(step)):
        for _ in range(WARM):
            y = fn(X)
            assert cache.get("y") is y
        del y


# Leaks.


def test_nothing_is_left_of_a_call():
    """1,000 followed calls leave the number of Python objects flat, and arguments and results die when dropped."""
    before = holders()
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @coexec.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * x)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    for _ in range(20):
        step(X)
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(1000):
        step(X)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    x = X + 1.0
    result = step(x)
    references = [weakref.ref(x), weakref.ref(result)]
    del x, result
    gc.collect()
    assert [r() for r in references] == [None, None]
    assert (step.stats().followed, step.stats().diverged) == (1020, 0)
    assert_quiet(before)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_kept_loss_keeps_nothing_else(persistent):
    """A loss that a log keeps does not keep the activations of its step."""
    losses, activations = [], []

    def step(x):
        with tf.GradientTape(persistent=persistent) as tape:
            tape.watch(x)
            hidden = tf.tanh(x)
            activations.append(weakref.ref(hidden))
            losses.append(tf.reduce_sum(hidden * hidden))

    for fn in (step, coexec.function(step)):
        for _ in range(WARM):
            fn(X)
        gc.collect()
        assert [r() for r in activations] == [None] * len(activations)


def segments():
    """How many compiled segments TensorFlow's runtime knows."""
    gc.collect()
    names = context.context().list_function_names()
    return sum("coexec_segment" in (n if isinstance(n, str) else n.decode()) for n in names)


@pytest.mark.parametrize("end", ["clear", "del"])
def test_executables_go_with_their_function(end):
    """What was compiled for a function leaves TensorFlow's runtime when the function forgets it or dies."""
    before = segments()
    fn = coexec.function(lambda x: tf.reduce_sum(tf.tanh(x) * 2.0))
    for n in range(WARM):
        fn(tf.ones([n % 2 + 1]))
        fn(tf.ones([n % 2 + 1]))
    assert segments() > before
    if end == "clear":
        fn.clear()
    else:
        del fn
    assert segments() == before


def test_an_object_that_stands_for_a_tensor():
    """What an operation converts by itself is on the tape as the tensor that it stands for, in every call."""

    class Holder:
        def __init__(self, value):
            self.value = value

        def __tf_tensor__(self, dtype=None, name=None):
            return self.value

    def make(function):
        state = {"v": tf.zeros([3])}

        @function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(state["v"])
                loss = tf.reduce_sum(tf.square(tf.nn.bias_add(x, Holder(state["v"]))))
            gradient = tape.gradient(loss, state["v"])
            state["v"] = state["v"] - 0.1 * gradient
            return loss, gradient

        return step

    function = run_both(make, [(tf.ones([2, 3]) * float(i),) for i in range(8)])
    assert function.stats().followed == 7
