"""Python functions that TensorFlow calls, and what Python, NumPy and other C code does with tensors."""

import array
import collections
import copy
import io
import math
import multiprocessing
import operator
import pickle
import queue
import random
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from tests.entry_points import entry_point


@entry_point
def py_function_result(t):
    return tf.py_function(lambda: t.floats, [], tf.float32)


@entry_point
def py_function_results(t):
    return tf.py_function(lambda: (t.floats, [t.two], t.pair), [], [tf.float32, tf.int32, tf.int64])


@entry_point
def py_function_listed(t):
    return tf.py_function(lambda: [t.number, t.number], [], [tf.float32, tf.float32])


@entry_point
def py_function_of_a_list(t):
    return tf.py_function(lambda: [[t.number, t.number * 2.0]], [], [tf.float32])


@entry_point
def py_function_arguments(t):
    return tf.py_function(lambda a, n: (a * 2.0, n), [t.floats, t.two], [tf.float32, tf.int32])


@entry_point
def py_function_ragged(t):
    spec = tf.RaggedTensorSpec([None, None], tf.float32, row_splits_dtype=tf.int64)
    splits = tf.concat([t.pair, [4]], 0)
    return tf.py_function(lambda: tf.RaggedTensor.from_row_splits(t.floats, splits), [], spec).to_list()


@entry_point
def py_function_sparse(t):
    sparse = tf.SparseTensor(t.pair[:, None], t.floats[:2], tf.constant([4], tf.int64))
    same = tf.py_function(lambda s: s, [sparse], tf.SparseTensorSpec([4], tf.float32))
    return tf.sparse.to_dense(same)


@entry_point
def py_function_under_a_tape(t):
    with tf.GradientTape() as tape:
        tape.watch(t.floats)
        y = tf.py_function(lambda a: a * a * t.number, [t.floats], tf.float32)
    return y, tape.gradient(y, t.floats)


@entry_point
def py_function_returning_its_argument(t):
    with tf.GradientTape() as tape:
        tape.watch(t.floats)
        y = tf.py_function(lambda a: a, [t.floats], tf.float32)
    return y, tape.gradient(y, t.floats)


@entry_point
def py_function_in_a_graph(t):
    return tf.function(lambda: tf.py_function(lambda: t.floats, [], tf.float32))()


@entry_point
def py_function_gradient_in_a_graph(t):
    @tf.function
    def graph(a):
        with tf.GradientTape() as tape:
            tape.watch(a)
            y = tf.py_function(lambda b: b * t.floats, [a], tf.float32)
        return tape.gradient(y, a)

    return graph(t.floats)


@entry_point
def numpy_function_result(t):
    return tf.numpy_function(lambda: t.floats, [], tf.float32)


@entry_point
def numpy_function_results(t):
    return tf.numpy_function(lambda a: [t.floats, a, t.two], [t.pair], [tf.float32, tf.int64, tf.int32])


@entry_point
def compat_py_func(t):
    return tf.compat.v1.py_func(lambda a: a * 2.0, [t.floats], tf.float32)


@entry_point
def python_functions_in_map_fn(t):
    return tf.map_fn(lambda a: tf.py_function(lambda: t.number, [], tf.float32) + a, t.floats)


@entry_point
def dlpack(t):
    capsule = tf.experimental.dlpack.to_dlpack(t.floats)
    return tf.experimental.dlpack.from_dlpack(capsule), np.from_dlpack(t.matrix).tolist(), t.floats.__dlpack_device__()


@entry_point
def numbers(t):
    return (
        int(t.two),
        float(t.number),
        complex(t.number),
        bool(t.true),
        operator.index(t.two),
        math.sqrt(t.number),
        f"{t.number:.3f}",
        str(int(t.two)),
        hash(t.floats.ref()) == hash(t.floats.ref()),
        [1, 2, 3][t.two],
        operator.mul("ab", int(t.two)),
        list(range(t.two)),
        [0, 1, 2, 3][: t.two],
        round(float(t.number)),
        struct.pack("<i", t.two),
        bin(t.two),
    )


@entry_point
def iterated(t):
    a, b = t.pair
    return (
        [float(v) for v in t.floats],
        int(a),
        int(b),
        len(t.floats),
        list(reversed(t.matrix)),
        max(t.floats),
        sum(t.floats),
    )


@entry_point
def buffers(t):
    return (
        memoryview(t.floats).tolist(),
        bytes(memoryview(t.pair)),
        np.frombuffer(t.floats, np.float32),
        bytes(t.matrix),
        array.array("f", t.floats).tolist(),
        io.BytesIO().write(t.floats),
    )


@entry_point
def numpy_of_tensors(t):
    return (
        np.asarray(t.floats),
        np.array(t.matrix, dtype=np.float64),
        np.array([t.number, t.two]),
        np.stack([t.floats] * 2),
        np.concatenate([t.floats, t.floats]),
        np.arange(4)[t.two],
        np.arange(4)[t.pair],
        np.add(np.ones(4), t.floats),
        np.dot(t.floats, t.floats),
        np.isclose(t.floats, t.floats),
        np.zeros(t.two),
        np.zeros([t.two, t.two]).shape,
        np.where(t.true, 1, 2),
        np.float32(t.number),
        np.array(t.floats, copy=True),
        np.sum(t.matrix, axis=1),
    )


@entry_point
def numpy_beside_tensors(t):
    ones = np.ones(4, np.float32)
    target = np.zeros(4, np.float32)
    target[:] = t.floats
    target[t.two] = t.number
    return ones + t.floats, t.floats * ones, ones == t.floats, ones * t.number, target


@entry_point
def object_arrays(t):
    held = np.empty(2, object)
    held[0], held[1] = t.floats, t.two
    return held[0], tf.convert_to_tensor(held[0]), int(held[1])


@entry_point
def copies(t):
    deep = copy.deepcopy({"a": [t.floats], "b": t.floats})
    return copy.copy(t.floats), deep["a"][0] is deep["b"], deep["a"], type(deep["b"]).__name__


@entry_point
def pickles(t):
    again = pickle.loads(pickle.dumps([t.floats, t.two, {"a": t.matrix}], protocol=5))
    return again, [type(again[0]).__name__]


@entry_point
def queues(t):
    one, two = queue.Queue(), multiprocessing.SimpleQueue()
    one.put(t.floats)
    two.put(t.floats)  # pickled
    end, other = multiprocessing.Pipe()
    end.send([t.floats, t.two])
    return one.get(), two.get(), other.recv()


@entry_point
def feeder_threads(t):
    fed = multiprocessing.Queue()  # pickles on a thread of its own
    fed.put((t.floats, t.two))
    result = fed.get(timeout=60)
    fed.close()
    fed.join_thread()
    return result


@entry_point
def weak_references(t):
    values = weakref.WeakValueDictionary(a=t.floats)
    return weakref.ref(t.floats)() is t.floats, values["a"] is t.floats, t.floats.ref().deref() is t.floats


@entry_point
def containers(t):
    by_reference = {t.floats.ref(): 1}
    return collections.deque([t.floats], maxlen=1)[0], by_reference[t.floats.ref()], random.Random(0).choice([t.two])


@entry_point
def pools(t):
    with ThreadPoolExecutor(2) as pool:
        doubled = list(pool.map(lambda a: a * 2.0, [t.floats, t.matrix]))
        return (
            doubled,
            pool.submit(lambda: t.floats + t.number).result(),
            pool.submit(tf.convert_to_tensor, [t.two] * 2).result(),
        )


@entry_point
def texts(t):
    return repr(t.floats), str(t.two), f"{t.matrix}", tf.strings.format("{}", [t.floats]), tf.strings.as_string(t.pair)
