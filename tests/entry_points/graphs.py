"""Graphs, gradients, loops, distribution and checks that are given tensors, or capture them."""

import contextlib
import io

import tensorflow as tf
from tensorflow.python.eager import wrap_function

from tests.entry_points import entry_point, refusal


@entry_point
def captured(t):
    return tf.function(lambda: t.floats * t.number + tf.cast(t.two, tf.float32))()


@entry_point
def captured_whole(t):
    return tf.function(lambda: (t.floats, t.two))()


@entry_point
def captured_in_branches(t):
    return tf.function(lambda: tf.cond(t.true, lambda: t.floats, lambda: t.floats * 2.0))()


@entry_point
def concrete_captures(t):
    concrete = tf.function(lambda: t.floats * 2.0 + t.matrix[0, 0]).get_concrete_function()
    return concrete(), concrete.captured_inputs


@entry_point
def concrete_arguments(t):
    graph = tf.function(lambda a, b: a * tf.cast(b["n"], tf.float32))
    concrete = graph.get_concrete_function(t.floats, {"n": t.two})
    return concrete(t.floats, t.two), graph(t.matrix, {"n": t.two}), graph(t.floats, b={"n": t.two})


@entry_point
def replaced_captures(t):
    concrete = tf.function(lambda: t.floats * 2.0).get_concrete_function()
    concrete.set_external_captures([c + 1.0 for c in concrete.captured_inputs])
    return concrete()


@entry_point
def signatures(t):
    graph = tf.function(lambda a, n: a[:n], input_signature=[tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)])
    return graph(t.floats, t.two)


@entry_point
def wrapped_functions(t):
    wrapped = tf.compat.v1.wrap_function(lambda a: a * t.number, [tf.TensorSpec([None])])
    pruned = wrapped.prune(wrapped.inputs[:1], wrapped.outputs)
    return wrapped(t.floats), pruned(t.floats)


@entry_point
def functions_from_graph_defs(t):
    graph = tf.function(lambda a: a * 2.0).get_concrete_function(t.floats).graph.as_graph_def()
    imported = wrap_function.function_from_graph_def(graph, ["a:0"], ["Identity:0"])
    return imported(t.floats)


@entry_point
def sessions(t):
    with tf.Graph().as_default() as graph:
        fed = tf.compat.v1.placeholder(tf.float32, [4])
        doubled = fed * 2.0
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(doubled, {fed: t.floats.numpy()}), refusal(lambda: session.run(doubled, {fed: t.floats}))


@entry_point
def constants_in_a_graph(t):
    with tf.Graph().as_default() as graph:
        constant = tf.constant(t.floats)
        tripled = constant * 3.0
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(tripled)


@entry_point
def eager_in_a_plain_graph(t):
    with tf.Graph().as_default():
        return refusal(lambda: t.floats * 2.0)


@entry_point
def custom_gradients(t):
    @tf.custom_gradient
    def square(a):
        return a * a, lambda upstream: upstream * a * t.number

    with tf.GradientTape() as tape:
        tape.watch(t.floats)
        y = square(t.floats)
    return y, tape.gradient(y, t.floats)


@entry_point
def custom_gradients_in_a_graph(t):
    @tf.custom_gradient
    def square(a):
        return a * a, lambda upstream: upstream * a * t.number

    @tf.function
    def graph(a):
        with tf.GradientTape() as tape:
            tape.watch(a)
            y = square(a)
        return tape.gradient(y, a)

    return graph(t.floats)


@entry_point
def recomputed(t):
    block = tf.recompute_grad(lambda a: tf.sin(a) * t.number)
    with tf.GradientTape() as tape:
        tape.watch(t.floats)
        y = block(t.floats)
    return y, tape.gradient(y, t.floats)


@entry_point
def tapes(t):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([t.floats, t.number])
        y = t.floats * t.floats * t.number
    gradients = tape.gradient(y, {"a": t.floats, "b": t.number}, output_gradients=t.floats)
    return gradients, tape.jacobian(y, t.floats, experimental_use_pfor=False), tape.jacobian(y, t.number)


@entry_point
def tapes_across_functions(t):
    graph = tf.function(lambda a: a * t.floats)
    with tf.GradientTape() as tape:
        tape.watch(t.floats)
        y = graph(t.floats)
    return tape.gradient(y, t.floats)


@entry_point
def accumulators(t):
    with tf.autodiff.ForwardAccumulator(t.floats, t.floats * 2.0) as one:
        with tf.autodiff.ForwardAccumulator(t.floats, t.floats) as two:
            y = t.floats * t.floats * t.number
    return one.jvp(y), two.jvp(y), two.jvp(one.jvp(y)), one.jvp([y, t.floats])


@entry_point
def accumulators_through_functions(t):
    graph = tf.function(lambda a: tf.sin(a) * t.number)
    with tf.autodiff.ForwardAccumulator(t.floats, t.floats) as accumulator:
        y = graph(t.floats)
    return accumulator.jvp(y)


@entry_point
def symbolic_gradients(t):
    graph = tf.function(lambda a: tf.gradients(a * t.floats, a, grad_ys=t.floats))
    return graph(t.floats)


@entry_point
def loops(t):
    total = tf.while_loop(lambda i, s: i < t.two, lambda i, s: (i + 1, s + t.floats), [0, t.floats])[1]
    return total, tf.scan(lambda a, b: a + b * t.number, t.floats), tf.foldl(lambda a, b: a * b, t.floats)


@entry_point
def loops_in_a_graph(t):
    graph = tf.function(
        lambda: tf.while_loop(lambda i, s: i < t.two, lambda i, s: (i + 1, s + t.floats), [0, t.floats])
    )
    return graph(), tf.function(lambda: tf.map_fn(lambda a: a * t.number, t.floats))()


@entry_point
def mapped(t):
    return (
        tf.map_fn(lambda a: a * t.number, t.floats),
        tf.vectorized_map(lambda a: a * t.number + t.floats[1], t.floats),
        tf.map_fn(lambda ab: ab[0] + ab[1], (t.floats, t.floats), fn_output_signature=tf.float32),
    )


@entry_point
def branches(t):
    return (
        tf.cond(t.true, lambda: t.floats, lambda: t.number),
        tf.case([(t.true, lambda: t.number)], lambda: t.floats[1]),
        tf.switch_case(t.two, [lambda: t.floats[0], lambda: t.floats[1], lambda: t.floats[2]]),
    )


@entry_point
def arrays_of_tensors(t):
    array = tf.TensorArray(tf.float32, t.two, dynamic_size=True, clear_after_read=False)
    array = array.write(0, t.floats).write(t.two, t.floats * 2.0).write(1, t.floats)
    split = tf.TensorArray(tf.float32, 0, dynamic_size=True).unstack(t.floats)
    return array.stack(), array.read(t.two), array.size(), split.gather(t.pair)


@entry_point
def arrays_in_graphs(t):
    array = tf.TensorArray(tf.float32, 2, clear_after_read=False).unstack(t.matrix)
    return tf.function(lambda a: a.write(0, t.matrix[1]).stack())(array)


@entry_point
def replicas(t):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    doubled = strategy.run(lambda a: a * t.number, (t.floats,))
    values = strategy.experimental_distribute_values_from_function(lambda _: t.floats)
    with strategy.scope():
        v = tf.Variable(t.floats)
    strategy.run(lambda a: v.assign_add(a), (t.floats,))
    return strategy.reduce("SUM", doubled, axis=None), strategy.experimental_local_results(values), v.numpy()


@entry_point
def one_device(t):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    return strategy.run(lambda a: a * t.number, (t.floats,)), strategy.gather(t.floats, axis=0)


@entry_point
def devices(t):
    with tf.device("CPU:0"):
        inside = t.floats * t.number, tf.identity(t.floats)
    return inside, t.floats.cpu(), t.floats.device, t.floats.backing_device, tf.identity(t.matrix)


@entry_point
def checks(t):
    tf.debugging.assert_equal(t.floats, t.floats)
    tf.debugging.assert_shapes([(t.floats, ("n",)), (t.matrix, ("a", "a"))])
    tf.debugging.assert_type(t.two, tf.int32)
    tf.debugging.assert_rank(t.matrix, t.two)
    tf.debugging.Assert(t.true, [t.floats, t.two])
    tf.debugging.assert_near(t.floats, t.floats, rtol=t.number)
    return tf.debugging.check_numerics(t.floats, "numbers"), tf.debugging.is_numeric_tensor(t.floats)


@entry_point
def failed_checks(t):
    checks = (
        lambda: tf.debugging.assert_equal(t.floats, t.floats * 2.0),
        lambda: tf.debugging.Assert(t.floats[0] < 0.0, [t.floats, t.two]),
        lambda: tf.debugging.assert_rank(t.floats, t.two),
        lambda: tf.debugging.assert_type(t.floats, tf.int32),
    )
    return [refusal(check) for check in checks]


@entry_point
def prints(t):
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        tf.print(t.floats, t.two, output_stream=__import__("sys").stdout)
        print(t.floats, t.two)
    return written.getvalue()


@entry_point
def distinct_tensors(t):
    return (
        [bool(v) for v in (t.floats == t.floats)],
        t.floats is t.floats,
        tf.function(lambda a, b: a is b)(t.floats, t.floats),
    )
