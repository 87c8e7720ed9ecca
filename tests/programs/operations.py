"""The ways an operation runs: wrappers, raw ops, traced and host functions, graphs, TensorFlow's loops."""

import numpy as np
import tensorflow as tf
import tensorflow.experimental.numpy as tnp

from tests.programs import Instance, args, each, integers, program, signed, vector, whole


@program()
def raw_operations(function):
    "`tf.raw_ops`, with list attributes, several outputs and renamed arguments."

    @function
    def step(x):
        y = tf.raw_ops.Mul(x=x, y=x)
        total = tf.raw_ops.Sum(input=y, axis=[0], keep_dims=False)
        left, right = tf.raw_ops.Split(axis=0, value=y, num_split=2)
        packed = tf.raw_ops.Pack(values=[left, right], axis=1)
        copies = tf.raw_ops.IdentityN(input=[total, packed])
        return (
            total,
            packed,
            copies,
            tf.raw_ops.Cast(x=y, DstT=tf.int32, Truncate=True),
            tf.raw_ops.Concat(concat_dim=0, values=[left, right]),
        )

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def several_outputs(function):
    "Operations with several outputs, of which some are never used."

    @function
    def step(x):
        values, indices = tf.math.top_k(x, 2)
        _, variance = tf.nn.moments(x, 0)
        parts = tf.split(x, [1, 3])
        first, *_ = tf.unstack(x)
        q, r = tf.linalg.qr(tf.reshape(x, [2, 2]))
        return values, indices, variance, parts[1], first, q @ r, tf.meshgrid(x, x)[1]

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def traced_function_inside(function):
    "A tf.function is called, with variables, a branch on a tensor, and another one inside."
    total = tf.Variable(0.0)

    @tf.function
    def inner(x):
        if tf.reduce_sum(x) > 0:
            return x * 2.0
        return -x

    @tf.function
    def outer(x, scale=3.0):
        total.assign_add(tf.reduce_sum(x))
        return {"y": inner(x) * scale, "total": total.read_value()}

    @function
    def step(x):
        y = outer(tf.sin(x))
        if y["total"] > 1.0:
            y = outer(x, scale=2.0)
        return y, inner(y["y"])

    return Instance(step, each(lambda i: args(signed(i))), lambda: total)


@program()
def gradient_of_a_traced_function(function):
    "A tape goes through a tf.function and through a ConcreteFunction."
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @tf.function
    def loss(x):
        return tf.reduce_sum(tf.sin(x * weight))

    concrete = tf.function(lambda x: tf.tanh(x) * weight).get_concrete_function(
        tf.TensorSpec([4], tf.float32)
    )

    @function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loss(x) + tf.reduce_sum(concrete(x))
        return y, tape.gradient(y, [x, weight])

    return Instance(step, each(lambda i: args(vector(i))))


@program(launches=False, why="there is nothing but calls of functions")
def compiled_function_inside(function):
    "A tf.function that XLA compiles, and one that traces again for each Python number."
    traces = []

    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.nn.softmax(x) * 2.0

    @tf.function
    def retraced(x, number):
        traces.append(number)
        return x * number

    @function
    def step(x, number):
        return compiled(x), retraced(x, number % 2)

    return Instance(step, each(lambda i: args(vector(i), i)), lambda: traces)


@program()
def python_functions_as_operations(function):
    "`tf.py_function` and `tf.numpy_function` run on the host, each once, with a gradient through the first."
    log = []

    def on_host(x):
        log.append(x.numpy().tolist())
        return x * 2.0

    def in_numpy(x):
        log.append(float(x.sum()))
        return np.sort(x)

    @function
    def step(x):
        y = x + 1.0
        with tf.GradientTape() as tape:
            tape.watch(y)
            z = tf.py_function(on_host, [y], tf.float32)
            loss = tf.reduce_sum(z * z)
        return z, tape.gradient(loss, y), tf.numpy_function(in_numpy, [z], tf.float32) - 1.0

    return Instance(step, each(lambda i: args(integers(i, dtype="float32"))), lambda: log)


@program()
def python_functions_called_by_tensorflow(function):
    "`tf.cond`, `tf.case`, `tf.switch_case` and `tf.while_loop` call Python eagerly."
    log = []

    @function
    def step(x):
        total = tf.reduce_sum(x)
        y = tf.cond(total > 0, lambda: x * 2.0, lambda: log.append("negative") or -x)
        y = tf.case([(total > 100, lambda: y), (total < 0, lambda: y + 1.0)], default=lambda: y - 1.0)
        y = tf.switch_case(tf.cast(total > 0, tf.int32), [lambda: y * 3.0, lambda: y * 4.0])
        n, z = tf.while_loop(
            lambda n, z: n < 3, lambda n, z: (log.append(int(n)) or n + 1, z * y), [tf.constant(0), y]
        )
        return n, z

    return Instance(step, each(lambda i: args(signed(i))), lambda: log)


@program()
def maps_and_scans(function):
    "`map_fn`, `scan`, `foldl` and `foldr` call their function for each row."
    calls = []

    @function
    def step(x):
        def double(row):
            calls.append(row.shape.rank)
            return row * 2.0

        mapped = tf.map_fn(double, x)
        scanned = tf.scan(lambda total, row: total + row, x)
        return mapped, scanned, tf.foldl(lambda a, b: a - b, x), tf.foldr(lambda a, b: a - b, x)

    return Instance(step, each(lambda i: args(vector(i, 3, 2))), lambda: len(calls))


@program(follows=1)
def vectorised_map(function):
    "`tf.vectorized_map` traces a graph of its own on every call."

    @function
    def step(x):
        return tf.vectorized_map(lambda row: tf.reduce_sum(row) * row, x) + 1.0

    return Instance(step, each(lambda i: args(vector(i, 3, 2)), 4))


@program()
def constants_from_python(function):
    "Numbers, lists, nested lists with tensors in them, arrays, ranges and truth values become tensors."

    @function
    def step(x):
        made = [
            tf.constant(2),
            tf.constant([1.5, 2.5]),
            tf.constant([[1, 2], [3, 4]], tf.int64),
            tf.constant("text"),
        ]
        made += [
            tf.constant(7.0, shape=[2, 2]),
            tf.convert_to_tensor([x[0], 1.0, x[1]]),
            tf.constant(range(3)),
        ]
        made += [
            tf.constant(np.eye(2)),
            tf.constant([True, False]),
            tf.constant(1 + 2j),
            tf.constant([], tf.float32),
        ]
        made += [
            tf.zeros([2]),
            tf.ones_like(x),
            tf.fill([2], 3),
            tf.eye(2),
            tf.range(3),
            tf.linspace(0.0, 1.0, 3),
        ]
        made += [
            tf.one_hot([0, 2], 3),
            tf.cast(3, tf.float64),
            tf.stack([x, [1.0, 2.0, 3.0, 4.0]]),
            x + [1.0, 2.0, 3.0, 4.0],
        ]
        return made, tf.concat([x, [5.0]], 0), tf.where(x > 0, x, 0.0), tf.maximum(x, 0)

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def scopes(function):
    "Name scopes, device scopes, control dependencies and `tf.init_scope` change nothing."
    v = tf.Variable(1.0)

    @function
    def step(x):
        with tf.name_scope("outer"), tf.name_scope("inner") as name:
            y = x * 2.0
        with tf.device("/CPU:0"):
            z = tf.sin(y)
        with tf.control_dependencies([v.assign_add(1.0)]):
            z = z + v
        with tf.init_scope():
            w = tf.constant(3.0) * 2.0
        return z * w, name, z.device, tf.identity(z, name="named")

    return Instance(step, each(lambda i: args(vector(i))), lambda: v)


@program(follows=1)
def a_graph_inside(function):
    "A tf.Graph is built and run in the middle of a step; what is made there is symbolic."

    @function
    def step(x):
        y = x * 2.0
        graph = tf.Graph()
        with graph.as_default():
            symbolic = tf.add(tf.constant([1.0, 2.0, 3.0, 4.0]), 1.0, name="sum")
            inside = tf.executing_eagerly(), tf.is_symbolic_tensor(symbolic), len(graph.get_operations())
        with tf.compat.v1.Session(graph=graph) as session:
            value = session.run(symbolic)
        return y + value, inside

    return Instance(step, each(lambda i: args(vector(i)), 6))


@program()
def experimental_numpy(function):
    "`tf.experimental.numpy`: arrays that are tensors, with NumPy's names and rules."

    @function
    def step(x):
        y = tnp.sum(tnp.array([1.0, 2.0], np.float32) * 2.0) + tnp.mean(x)
        return (
            y,
            tnp.where(x > 0, x, 0.0),
            tnp.matmul(tnp.reshape(x, (2, 2)), tnp.ones((2, 2), np.float32)),
            tnp.argsort(x),
        )

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def linear_algebra(function):
    "Products, decompositions and solvers, in both precisions and in complex numbers."

    @function
    def step(x):
        square = tf.matmul(x, x, transpose_a=True) + 3.0 * tf.eye(3)
        lower = tf.linalg.cholesky(square)
        out = [tf.linalg.solve(square, tf.ones([3, 1])), tf.linalg.det(square), tf.linalg.inv(square), lower]
        out += [
            tf.einsum("ij,jk->ik", x, square),
            tf.tensordot(x, square, 1),
            tf.linalg.band_part(square, 0, -1),
        ]
        out += [
            tf.norm(x),
            tf.linalg.trace(square),
            tf.linalg.diag_part(square),
            tf.linalg.matvec(square, x[0]),
        ]
        double = tf.cast(square, tf.float64)
        return out, tf.linalg.eigvalsh(double), tf.abs(tf.signal.fft(tf.complex(x[:, 0], x[:, 1])))

    return Instance(step, each(lambda i: args(vector(i, 3, 3)), 6))


@program()
def reductions_and_sorting(function):
    "Sums, products, extremes, cumulative sums, sorts and segments along axes."

    @function
    def step(x, n):
        out = [
            tf.reduce_sum(x, 0),
            tf.reduce_max(x, 1, keepdims=True),
            tf.reduce_prod(x),
            tf.math.cumsum(x, 1, reverse=True),
        ]
        out += [
            tf.sort(x, 1),
            tf.argsort(x, 0),
            tf.argmin(x, 1),
            tf.reduce_logsumexp(x),
            tf.math.reduce_std(x, 1),
        ]
        out += [
            tf.reduce_any(n > 2),
            tf.reduce_all(n > -9),
            tf.math.segment_sum(x, [0, 0, 1]),
            tf.math.bincount(abs(n)),
        ]
        out += [
            tf.math.unsorted_segment_mean(x, [1, 0, 1], 2),
            tf.nn.softmax(x),
            tf.nn.log_softmax(x, 0),
            tf.math.argmax(n),
        ]
        return out

    return Instance(step, each(lambda i: args(vector(i, 3, 4), integers(i))))


@program()
def images(function):
    "Resizing, which some compilers refuse, between operations they take."

    @function
    def step(image):
        y = image * 2.0
        large = tf.image.resize(y, [5, 5], method="bicubic", antialias=True)
        near = tf.image.resize(y, [2, 2], method="nearest")
        return (
            tf.reduce_sum(large, 2) + 1.0,
            near,
            tf.image.flip_up_down(y),
            tf.image.rgb_to_grayscale(tf.repeat(y, 3, -1)),
        )

    return Instance(step, each(lambda i: args(vector(i, 3, 3, 1))))


@program()
def reshaping(function):
    "Transposes, tiles, pads, gathers, scatters, rolls and slices with constants of every place."

    @function
    def step(x):
        out = [
            tf.reshape(x, [-1]),
            tf.transpose(x, [1, 0]),
            tf.tile(x, [1, 2]),
            tf.pad(x, [[1, 0], [0, 2]], constant_values=9),
        ]
        out += [
            tf.gather(x, [2, 0], axis=1),
            tf.gather_nd(x, [[0, 1], [1, 2]]),
            tf.scatter_nd([[1]], x[:1], [3, 3]),
        ]
        out += [
            tf.tensor_scatter_nd_update(x, [[0]], x[1:]),
            tf.roll(x, 1, 1),
            tf.reverse(x, [0]),
            tf.slice(x, [0, 1], [2, 1]),
        ]
        out += [
            tf.expand_dims(x, -1),
            tf.squeeze(x[:1]),
            tf.broadcast_to(x[0], [2, 3]),
            tf.repeat(x, [1, 2], 0),
        ]
        out += [tf.nn.space_to_depth(tf.reshape(x[:, :2], [1, 2, 2, 1]), 2)]
        return (
            out,
            tf.linalg.diag(x[0]),
            tf.sequence_mask([1, 3], 3),
            tf.strided_slice(x, [0, 0], [2, 3], [1, 2]),
        )

    return Instance(step, each(lambda i: args(vector(i, 2, 3))))


@program()
def assertions_in_order(function):
    "Operations without results (`Assert`, `no_op`) keep their place between writes."
    v = tf.Variable(0.0)

    @function
    def step(x):
        v.assign_add(1.0)
        tf.debugging.Assert(v > 0, [v])
        tf.no_op()
        v.assign_add(x)
        tf.debugging.assert_greater_equal(v, 1.0)
        tf.group(v.assign_add(1.0))
        return v * 1.0

    return Instance(step, each(lambda i: args(whole(i))), lambda: v)


@program()
def dispatched_types(function):
    "A class of the user's own that TensorFlow dispatches on, and one that turns into a tensor."

    class Scaled:
        def __init__(self, value):
            self.value = value

        def __tf_tensor__(self, dtype=None, name=None):
            return self.value * 2.0

    class Listed:
        def __array__(self, dtype=None, copy=None):
            return np.array([1.0, 2.0, 3.0, 4.0], np.float32)

    @function
    def step(x):
        return tf.add(x, Listed()), tf.sin(Scaled(x)), tf.convert_to_tensor(Scaled(x)), x * np.float32(2.0)

    return Instance(step, each(lambda i: args(vector(i))))
