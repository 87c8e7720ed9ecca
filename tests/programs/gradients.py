"""Gradients: tapes inside, outside, nested, persistent and interrupted; forward mode; custom gradients."""

import tensorflow as tf

from tests.programs import Instance, args, each, program, signed, vector

# XLA's tanh differs from the kernel's in the last places, and a gradient takes it from one where it saturates.
SATURATED = {"atol": 2e-4}


@program(**SATURATED)
def tape_inside(function):
    "A training step by hand: loss, gradient, update."
    weight = tf.Variable(vector(100, 3, 2))
    bias = tf.Variable(tf.zeros(2))

    @function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ weight + bias) - y))
        gradients = tape.gradient(loss, [weight, bias])
        for variable, gradient in zip([weight, bias], gradients):
            variable.assign_sub(0.1 * gradient)
        return loss, gradients

    return Instance(step, each(lambda i: args(vector(i, 4, 3), vector(i + 20, 4, 2))), lambda: (weight, bias))


@program(**SATURATED)
def two_tapes(function):
    "Two tapes see the same operations and answer for different targets."
    generator, critic = tf.Variable([1.0, 2.0, 0.5, 0.25]), tf.Variable([0.5, -1.0, 1.0, 2.0])

    @function
    def step(x):
        with tf.GradientTape() as one, tf.GradientTape() as two:
            fake = tf.tanh(x * generator)
            score = tf.reduce_sum(fake * critic)
            loss_one, loss_two = -score, score * score
        first, second = one.gradient(loss_one, generator), two.gradient(loss_two, critic)
        generator.assign_sub(0.1 * first)
        critic.assign_sub(0.01 * second)
        return first, second

    return Instance(step, each(lambda i: args(vector(i))), lambda: (generator, critic))


@program()
def second_order(function):
    "A tape within a tape: the gradient of a gradient's norm."

    @function
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(x) * x * x)
            first = inner.gradient(y, x)
            penalty = tf.reduce_sum(tf.square(first))
        return first, outer.gradient(penalty, x)

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def third_order(function):
    "Three tapes, of which each asks for its own gradient within the next."

    @function
    def step(x):
        with tf.GradientTape() as third, tf.GradientTape() as second:
            third.watch(x), second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                y = x**5
            one = first.gradient(y, x)
            two = second.gradient(one, x)
        return one, two, third.gradient(two, x)

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def persistent_tape(function):
    "A persistent tape answers several times, for intermediate results too."

    @function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.exp(x * 0.5)
            z = tf.reduce_sum(y * y)
        answers = tape.gradient(z, x), tape.gradient(y, x), tape.gradient(z, y), tape.gradient(z, [x, y])
        del tape
        return answers

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def jacobian(function):
    "`tape.jacobian` and `tape.batch_jacobian` by a loop over the outputs."

    @function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.tanh(x) * x
        whole = tape.jacobian(y, x, experimental_use_pfor=False)
        return whole, tape.batch_jacobian(y, x, experimental_use_pfor=False)

    return Instance(step, each(lambda i: args(vector(i, 2, 3))))


@program(follows=1)
def vectorised_jacobian(function):
    "`tape.jacobian` and `tape.batch_jacobian` through `pfor`, which traces a graph of its own on every call."

    @function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.tanh(x) * x
        return tape.jacobian(y, x), tape.batch_jacobian(y, x)

    return Instance(step, each(lambda i: args(vector(i, 2, 3)), 4))


@program()
def forward_accumulator(function):
    "Forward-mode derivatives, alone and over a tape (a Hessian-vector product)."

    @function
    def step(x, tangent):
        with tf.autodiff.ForwardAccumulator(x, tangent) as forward:
            y = tf.sin(x) * x
        with tf.autodiff.ForwardAccumulator(x, tangent) as over:
            with tf.GradientTape() as tape:
                tape.watch(x)
                z = tf.reduce_sum(x**3)
            gradient = tape.gradient(z, x)
        return y, forward.jvp(y), gradient, over.jvp(gradient)

    return Instance(step, each(lambda i: args(vector(i), vector(i + 30))))


@program()
def custom_gradient(function):
    "A gradient in Python, with an upstream value, a counter of its calls and a second derivative."
    calls = []

    @tf.custom_gradient
    def clipped(x):
        y = x * x

        def gradient(upstream):
            calls.append("backward")
            return tf.clip_by_norm(upstream * 2.0 * x, 1.0)

        calls.append("forward")
        return y, gradient

    @function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(clipped(tf.sin(x)))
        return loss, tape.gradient(loss, x)

    return Instance(step, each(lambda i: args(vector(i))), lambda: calls)


@program()
def custom_gradient_with_variables(function):
    "A custom gradient that owns a variable answers for it too; `tf.recompute_grad` computes forward twice."
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @tf.custom_gradient
    def scaled(x):
        def gradient(upstream, variables=None):
            return upstream * weight, [upstream * x * 10.0 for _ in variables]

        return x * weight, gradient

    @function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(scaled(x) + tf.recompute_grad(lambda value: tf.sin(value) * weight)(x))
        return loss, tape.gradient(loss, [x, weight])

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def stopped_gradient(function):
    "`tf.stop_gradient` and integers let no gradient through; unconnected sources get None or zeros."

    @function
    def step(x, other):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, other])
            y = tf.stop_gradient(x * 2.0) * x
            count = tf.cast(x > 0, tf.int32)
            z = tf.cast(count, tf.float32) * 3.0
        return (
            tape.gradient(y, x),
            tape.gradient(z, x),
            tape.gradient(y, other),
            tape.gradient(y, other, unconnected_gradients="zero"),
            tape.gradient([y, z], {"x": x, "o": other}),
        )

    return Instance(step, each(lambda i: args(vector(i), vector(i + 1))))


@program()
def gathered_rows(function):
    "The gradient of a look-up is IndexedSlices; they are added, turned dense and scattered."
    table = tf.Variable(vector(100, 5, 3))

    @function
    def step(ids):
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.gather(table, ids)
            loss = tf.reduce_sum(rows * rows)
            twice = loss + tf.reduce_sum(tf.nn.embedding_lookup(table, ids[:1]))
        slices, more = tape.gradient(loss, table), tape.gradient(twice, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * slices.values, slices.indices))
        return slices, more, tf.convert_to_tensor(slices), isinstance(slices, tf.IndexedSlices)

    return Instance(step, each(lambda i: args(tf.constant([i % 5, 2, 2]))), lambda: table)


@program()
def recording_stopped(function):
    "`stop_recording`, `reset`, `watch` in the middle, and a tape that watches nothing by itself."
    weight = tf.Variable(2.0)

    @function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * weight
            with tape.stop_recording():
                hidden = x * x * weight
            z = tf.reduce_sum(y * hidden)
        first = tape.gradient(z, [x, weight])
        with tf.GradientTape(watch_accessed_variables=False) as quiet:
            z = x * weight
        second = quiet.gradient(z, weight)
        with tf.GradientTape() as again:
            lost = x * weight
            again.reset()
            again.watch(x)
            kept = x * weight * 3.0
        return first, second, again.gradient([kept, lost], [x, weight]), len(again.watched_variables())

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def watched_constants(function):
    "A constant, a read value and an argument are watched; numbers and unwatched tensors are not."

    @function
    def step(x):
        constant = tf.constant([1.0, 2.0, 3.0, 4.0])
        unwatched = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(constant)
            y = constant * x * unwatched
        return tape.gradient(y, [constant, x, unwatched])

    return Instance(step, each(lambda i: args(vector(i))))


@program(**SATURATED)
def variables_in_a_list(function):
    "Variables of a list, a dict and an object, with one that the loss does not use."
    layers = [{"w": tf.Variable(vector(n, 4, 4)), "b": tf.Variable(tf.zeros(4))} for n in range(3)]

    @function
    def step(x):
        with tf.GradientTape() as tape:
            y = x[tf.newaxis]
            for layer in layers[:2]:
                y = tf.tanh(y @ layer["w"] + layer["b"])
            loss = tf.reduce_sum(y)
        gradients = tape.gradient(loss, layers)
        return loss, gradients, len(tape.watched_variables())

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def through_a_branch(function):
    "Gradients through an `if` on a tensor and a loop whose length one decides; reads on the way."
    weight = tf.Variable(0.5)

    @function
    def step(x):
        with tf.GradientTape() as tape:
            y = x * weight
            turns = 0
            while tf.reduce_sum(y) < 20.0 and turns < 3:
                y = y * 2.0 + weight
                turns += 1
            if y[0] > 0:
                y = y * weight
            loss = tf.reduce_sum(y)
        return float(loss), tape.gradient(loss, weight), turns

    return Instance(step, each(lambda i: args(signed(i % 2))))


@program()
def output_gradients(function):
    "Several targets with gradients given for them; a target that is its own source."

    @function
    def step(x, upstream):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y, z = tf.split(x * x, 2)
        given = tape.gradient([y, z], x, output_gradients=[upstream, upstream * 2.0])
        return given, tape.gradient(x, x), tape.gradient(z, x)

    return Instance(step, each(lambda i: args(vector(i), vector(i + 5, 2))))


@program()
def clipped_and_accumulated(function):
    "Gradients are summed over micro-batches, clipped by their global norm, and applied on every second call."
    weight, state = tf.Variable(vector(100, 4)), {"sum": None, "calls": 0}

    @function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(weight * x - 1.0))
        gradient = tape.gradient(loss, weight)
        state["sum"] = gradient if state["sum"] is None else state["sum"] + gradient
        state["calls"] += 1
        if state["calls"] % 2 == 0:
            (clipped,), norm = tf.clip_by_global_norm([state["sum"]], 1.0)
            weight.assign_sub(0.5 * clipped)
            state["sum"] = None
            return loss, norm
        return loss, None

    return Instance(step, each(lambda i: args(vector(i))), lambda: (weight, state))


@program()
def tape_across_calls(function):
    "A tape that one call opens is asked by the next."
    open_tapes = []
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @function
    def step(x):
        answer = None
        if open_tapes:
            tape, loss = open_tapes.pop()
            answer = tape.gradient(loss, weight)
        tape = tf.GradientTape()
        with tape:
            loss = tf.reduce_sum(tf.sin(weight * x))
        open_tapes.append((tape, loss))
        return answer

    return Instance(step, each(lambda i: args(vector(i))))


@program(**SATURATED)
def tape_outside(function):
    "The caller's tape is open around a decorated part, and its gradient goes through."
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @function
    def forward(x):
        hidden = tf.tanh(x * weight)
        if tf.reduce_sum(x) > 0:
            hidden = hidden * 2.0
        return tf.reduce_sum(hidden), hidden

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss, hidden = forward(x)
            loss = loss * loss + hidden[0]
        return tape.gradient(loss, [x, weight])

    return Instance(step, each(lambda i: args(signed(i))), function=forward)


@program()
def tapes_inside_and_outside(function):
    "A gradient penalty: the inner tape's answer is part of what the outer tape differentiates."
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @function
    def penalised(x):
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.sin(x * weight))
        slope = inner.gradient(y, x)
        return y + tf.reduce_sum(slope * slope)

    def step(x):
        with tf.GradientTape() as outer:
            loss = penalised(x)
        return loss, outer.gradient(loss, weight)

    return Instance(step, each(lambda i: args(vector(i))), function=penalised)


@program(**SATURATED)
def asked_after_the_call(function):
    "A tape that a step returns, or leaves in a list, is asked by the caller."
    weight = tf.Variable([1.0, 2.0, 3.0, 4.0])
    tapes = []

    @function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            hidden = tf.tanh(weight * x)
            loss = tf.reduce_sum(hidden * hidden)
        tapes.append(tape)
        return loss, hidden

    return Instance(
        step, each(lambda i: args(vector(i))), after=lambda r: tapes[-1].gradient(r[0], [weight, r[1]])
    )


@program(follows=0, why="the decorated function is only ever called while tf.function traces it")
def inside_a_traced_function(function):
    "A decorated part that a tf.function calls is traced like any other Python."

    @function
    def part(x):
        return tf.sin(x) * 2.0

    @tf.function
    def step(x):
        return part(x) + part(x * 2.0)

    return Instance(step, each(lambda i: args(vector(i))), function=part)


@program()
def gradient_errors(function):
    "A tape asked twice, a target that is no tensor, and a watch of integers are answered as eagerly."
    errors = []

    @function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * 3.0
        gradient = tape.gradient(y, x)
        try:
            tape.gradient(y, x)
        except RuntimeError as error:
            errors.append(str(error))
        try:
            tape.jacobian(y, x)
        except RuntimeError as error:
            errors.append(str(error))
        return gradient

    return Instance(step, each(lambda i: args(vector(i))), lambda: errors)
