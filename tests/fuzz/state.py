"""What the programs work on: variables, containers, generators, layers, and what tests look at afterwards."""

import contextlib
import functools
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import tensorflow as tf

import coexec
from tracer.errors import FailedTensor


class Planned(Exception):
    """What the programs raise."""


class Lock:
    """A lock that raises where a program would wait for itself for ever."""

    def __init__(self):
        self._lock = threading.Lock()
        self.locked = self._lock.locked

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            raise Planned("it is locked")

    def __exit__(self, *_):
        self._lock.release()


class Own(keras.layers.Layer):
    """A layer whose `call` is the user's."""

    def __init__(self):
        super().__init__(name="own")
        self.inner = keras.layers.Dense(3, name="inner")
        self.seen = 0

    def call(self, x):
        self.seen += 1
        return self.inner(x) + x if self.seen % 3 else self.inner(x)


class Holding(keras.layers.Layer):
    """A layer with a tensor of its own, which the program may have, too."""

    def __init__(self):
        super().__init__(name="holding")
        self.held = SHARED

    def call(self, x):
        return tf.tanh(x) * self.held + x * 0.5


SHARED = tf.constant([0.25, -0.75, 1.25])


@coexec.pure
def shared(x):
    """What is followed as one, and has a tensor that the program may have, too."""
    return tf.sin(x) * SHARED - x * 0.25


def model():
    first, last = keras.layers.Dense(4, "tanh", name="first"), keras.layers.Dense(3, name="last")
    return keras.Sequential([first, keras.layers.Dropout(0.3, name="between"), last], name="model")


# With names of their own: Keras would number them, on and on.
LAYERS = {
    "dense": lambda: keras.layers.Dense(3, "tanh", name="dense"),
    "norm": lambda: keras.layers.LayerNormalization(name="norm"),
    "drop": lambda: keras.layers.Dropout(0.4, name="drop"),
    "model": model,
    "metric": lambda: keras.metrics.Mean(name="metric"),
    "own": Own,
    "leaky": lambda: keras.layers.LeakyReLU(0.25, name="leaky"),
    "add": lambda: keras.layers.Add(name="add"),
    "multiply": lambda: keras.layers.Multiply(name="multiply"),
    "huber": lambda: keras.losses.Huber(name="huber"),
    "holding": Holding,
}


BYTES = b"ab\0\0", b"\0", b"a\0b", b"", b"ab", b"\xff\0a"
WORDS = "ab\0", "a\0b", "", "C\u00e9", b"ab"
SCALARS = (
    np.float32(0.5), np.float64(0.5), np.float16(0.5), np.int8(-3), np.uint8(3), np.int16(-3), np.uint16(3),
    np.int32(3), np.uint32(3), np.int64(3), np.uint64(3), np.bool_(True), np.complex64(0.5), np.complex128(0.5),
    np.float32(-0.0), tf.bfloat16.as_numpy_dtype(0.5),
)  # fmt: skip


class State:
    """One run's worth of state. Programs call it `S`."""

    def __init__(self, wrap):
        self.own = tf.Variable([0.5, -0.25, 1.5]), tf.Variable([1.0, 0.25, -0.5])
        self.m = tf.Variable([1, 20, 30])
        self.matrix = tf.constant([[0.5, -1.0, 0.25], [1.0, 0.5, -0.5], [0.0, 2.0, 1.0]])
        self.variables, self.copies = {}, {}  # by name; handles by variable's id
        self.generator = tf.random.Generator.from_seed(3)
        self.seeds = keras.random.SeedGenerator(4)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, -1)
        self.queue = tf.queue.FIFOQueue(100, [tf.float32])
        self.graph = tf.function(lambda x, i: tf.gather(x * 2.0, i))
        self.inner = wrap(lambda x, i: tf.gather(x, i % 4) + self.v)
        self.lock = Lock()
        self.planned = Planned("planned")
        self.out = io.StringIO()
        self.reset(0)

    def reset(self, call):
        """Puts what Python alone holds where it does not depend on how far a call that failed went."""
        self.v, self.alias = self.own
        self.log, self.kept, self.named = [], [], {}
        self.layers, self.optimizer, self.running = {}, None, None
        self.count, self.rate, self.held, self.array = call, 0.5, SHARED, np.float32([1.5, 0.0, -0.5])
        self.out.seek(0)
        self.out.truncate()
        keras.utils.set_random_seed(100 + call)

    def momentum(self, gradient, indices):
        """An optimizer's update of elements, of a variable that may be its own slot."""
        tf.raw_ops.ResourceSparseApplyMomentum(
            var=self.v.handle, accum=self.alias.handle, lr=0.1, grad=gradient, indices=indices, momentum=0.5
        )

    def by_copy(self, variable, value=None):
        """Reads a variable through a copy of its handle, which may be kept; adds to it first."""
        copy = self.copies.setdefault(id(variable), tf.identity(variable.handle))
        if value is not None:
            tf.raw_ops.AssignAddVariableOp(resource=copy, value=value)
        return tf.raw_ops.ReadVariableOp(resource=copy, dtype=tf.float32)

    def add_rows(self, values, indices):
        """Adds up what belongs to one element, as Keras 2 does."""
        there, places = tf.unique(indices)
        added = tf.math.unsorted_segment_sum(values, places, tf.shape(there)[0])
        self.v.scatter_add(tf.IndexedSlices(added * 0.1, there))

    def contents(self, failed):
        """All that can be compared; where an operation `failed` and nobody caught it, Python may have run on."""
        for layer in self.layers.values() if failed else ():
            layer.trainable = True
        seen = {name: 0 if failed else getattr(layer, "seen", 0) for name, layer in self.layers.items()}
        layers = {name: (getattr(layer, "variables", ()), seen[name]) for name, layer in self.layers.items()}
        variables = self.own, self.m, self.variables, self.generator.state, self.seeds.state
        optimizer = self.optimizer and self.optimizer.variables
        table = sorted(zip(*(part.numpy().tolist() for part in self.table.export()), strict=True))
        python = self.v, self.alias, self.kept, self.named, self.count, self.rate, self.out.getvalue(), self.held
        python = self.lock.locked(), () if failed else python
        log = [readable(item) for item in self.log]
        return {"log": log, "variables": variables, "layers": layers, "optimizer": optimizer, "table": table,
                "python": python, "queue": int(self.queue.size())}  # fmt: skip

    # What programs call.

    @functools.cached_property
    def numbers(self):
        """An iterator, made by whoever first asks for it."""
        return iter(tf.data.Dataset.range(1000).map(lambda n: tf.cast(n, tf.float32) * 0.01))

    def made(self, name, value):
        """Makes a variable, on every call a new one."""
        self.variables[name] = tf.Variable(value)

    def late(self, name, value):
        """Returns a variable that is made by whoever first asks for it."""
        if name not in self.variables:
            self.made(name, value)
        return self.variables[name]

    def layer(self, name):
        if name not in self.layers:
            self.layers[name] = LAYERS[name]()
        return self.layers[name]

    def dropout(self, x):
        return self.layer("drop")(x, training=True)

    def embed(self, indices):
        return tf.nn.embedding_lookup(self.v, indices)

    def root(self, x):
        # Of NaN, infinity and what has no root, the kernel gives what memory holds.
        x = tf.where(tf.math.is_finite(x) & (x > 0.1371), x, 1.0)
        return tf.linalg.cholesky(tf.linalg.diag(x))[0]

    def first(self, x, i):
        """Catches what fails and answers with something else."""
        try:
            return tf.gather(x, i % 4)
        except tf.errors.InvalidArgumentError as error:
            self.log.append(error)
            return x * 0.5

    def checked(self, x, i, call):
        """Asserts, and hears of what does not hold."""
        try:
            tf.debugging.assert_less(i, 70, f"in call {call}")
            self.v.assign_add(x * 0.01)
            tf.debugging.Assert(tf.reduce_sum(i) % 4 != 3, ["the sum of", i])
        except tf.errors.InvalidArgumentError as error:
            self.log.append(error)
        return x

    def callback(self, x):
        self.log.append(x.numpy().shape)
        return x * 0.5

    shared = staticmethod(shared)

    def numpy(self, call):
        """A scalar of one of NumPy's dtypes."""
        dtypes = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
        return np.dtype(dtypes.split()[call % 14]).type(call % 3)

    def size(self, x):
        return float(tf.reduce_sum(x))

    @staticmethod
    @tf.custom_gradient
    def bent(x):
        return x * 0.5, lambda upstream: tf.clip_by_value(upstream, -1.0, 1.0)

    def update(self, gradient):
        if gradient is not None:
            self.v.assign_sub(tf.clip_by_value(tf.convert_to_tensor(gradient), -1.0, 1.0) * 0.1)

    def bounded(self, gradient, other):
        return other if gradient is None else tf.tanh(tf.convert_to_tensor(gradient))

    def gathered(self, found, other):
        """Takes in all that a tape has found, of whatever shape, and logs what has no gradient."""
        self.log.append([gradient is None for gradient in found])
        there = [tf.convert_to_tensor(gradient) for gradient in found if gradient is not None]
        return sum([tf.tanh(tf.reduce_sum(gradient) * 0.1) for gradient in there], other)

    def optimize(self, found):
        if self.optimizer is None:
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        if found[0] is not None:
            gradient = tf.clip_by_value(tf.convert_to_tensor(found[0]), -1.0, 1.0)
            self.late("weight", self.matrix[0]).assign_sub(gradient * 0.01)

    def train(self, x):
        """A step of training on a model."""
        network = self.layer("model")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(network(x[None], training=True)))
        weights = network.trainable_variables
        if self.optimizer is None:
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        if not self.optimizer.built or len(self.optimizer.variables) > 2:
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    def in_thread(self, i, function):
        """Runs a function on another thread; everything before has been carried out."""
        self.log.append(int(i[0]))
        results = []

        def run():
            try:
                results.append((function(), None))
            except BaseException as error:
                results.append((None, error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        result, error = results.pop()
        if error is not None:
            raise error
        return result

    def at_once(self, i, *functions):
        """Runs functions on threads at the same time; everything before has been carried out."""
        self.log.append(int(i[0]))
        with ThreadPoolExecutor(len(functions)) as pool:
            waiting = [pool.submit(function) for function in functions]
        return sum(one.result() for one in waiting)

    @staticmethod
    def bytes(call):
        """Bytes that have a NUL in them, are no text, or nothing."""
        return BYTES[call % len(BYTES)]

    @staticmethod
    def word(call):
        return WORDS[call % len(WORDS)]

    @staticmethod
    def scalar(call):
        """A scalar of one of NumPy's dtypes."""
        return SCALARS[call % len(SCALARS)]

    @staticmethod
    def describe(x, i):
        return f"{x.shape} {i.numpy().tolist()}"

    def halves(self, x, i):
        """A generator that writes, computes and reads between what it yields."""
        self.count += 1
        yield x * 0.5
        self.log.append(int(i[0]))
        yield tf.tanh(x) * self.rate

    def sent(self, x, i):
        """A generator that is sent tensors, and closed."""

        def run():
            got = yield x
            try:
                while True:
                    got = yield got * 0.5 + self.v
            finally:
                self.count += 1

        running = run()
        next(running)
        running.send(x)
        result = running.send(tf.cast(i, tf.float32) * 0.01)
        running.close()
        return result

    def paused(self, x, call):
        """A generator that goes on in a later call than it began in."""
        if self.running is None:
            self.running = (self.v * k for k in (0.5, 0.25, 1.0))
        value = next(self.running, None)
        if value is None:
            self.running = None
            return x
        return x + value

    @contextlib.contextmanager
    def scope(self, x):
        """Counts, writes before and after, and swallows what was planned."""
        self.count += 1
        try:
            yield x
        except Planned as error:
            self.log.append(error)
        finally:
            self.v.assign_add(x * 0.01)


def readable(item):
    """What was logged, or a word in place of a tensor that was to come from an operation that has failed."""
    try:
        tf.nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, item)
    except FailedTensor:
        return "never made"
    return item


def arguments(kind):
    """What a call is given: floats and whole numbers, by the number of their kind; the last kinds have other shapes."""
    size = 3 if kind < 3 else 4
    numbers = np.random.default_rng(kind)
    floats = np.round(numbers.normal(size=size) * 4) / 4
    wholes = numbers.integers(0, 97, size=size)
    return tf.constant(floats, tf.float32), tf.constant(wholes, tf.int32)
