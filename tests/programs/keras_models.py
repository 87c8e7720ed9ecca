"""Keras: layers, models, losses, metrics and optimizers in training steps written by hand."""

import keras
import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, vector


def batch(number, features=4, size=6):
    return args(vector(number, size, features), integers(number, size, low=0, high=3))


def train(model, optimizer, loss, x, y, **options):
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True, **options))
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return value


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@program()
def mlp_with_momentum(function):
    "Two dense layers, cross entropy, SGD with momentum."
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    optimizer, loss = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), cross_entropy()

    @function
    def step(x, y):
        return train(model, optimizer, loss, x, y)

    return Instance(step, each(batch), lambda: (model.variables, optimizer.variables))


@program(follows=4)
def built_late_with_adam(function):
    "The first call builds the model and Adam's slots."
    model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    optimizer, loss = keras.optimizers.Adam(0.01), cross_entropy()

    @function
    def step(x, y):
        return train(model, optimizer, loss, x, y)

    return Instance(step, each(batch), lambda: (model.variables, optimizer.variables))


@program()
def dropout(function):
    "Dropout in training and not in inference, with Keras' own seed state."
    layer = keras.layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), layer, keras.layers.Dense(3)])
    optimizer, loss = keras.optimizers.SGD(0.1), cross_entropy()

    @function
    def step(x, y):
        value = train(model, optimizer, loss, x, y)
        return value, model(x, training=False), layer(tf.ones([2, 8]), training=True)

    return Instance(step, each(batch), lambda: (model.variables, layer.seed_generator.state))


@program(rtol=1e-4, atol=1e-5)  # the variance of six numbers is a difference of near ones
def batch_normalization(function):
    "Moving statistics change in training and are used in inference."
    normalization = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), normalization, keras.layers.Dense(3)])
    optimizer, loss = keras.optimizers.SGD(0.1), cross_entropy()

    @function
    def step(x, y):
        return train(model, optimizer, loss, x, y), model(x, training=False)

    return Instance(step, each(batch), lambda: model.variables)


@program(rtol=1e-4, atol=1e-5)  # twenty chained products
def lstm(function):
    "An LSTM over five steps of two features."
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.LSTM(3), keras.layers.Dense(3)])
    optimizer, loss = keras.optimizers.SGD(0.1), cross_entropy()

    @function
    def step(x, y):
        return train(model, optimizer, loss, x, y)

    calls = each(lambda i: args(vector(i, 4, 5, 2), integers(i, 4, low=0, high=3)), 6)
    return Instance(step, calls, lambda: model.variables)


@program(follows=3, rtol=1e-4, atol=1e-5)
def stateful_gru(function):
    "A GRU cell driven by a Python loop; its state stays on an object from call to call."

    class Memory:
        state = None

    cell, memory = keras.layers.GRUCell(3), Memory()
    cell.build((2, 2))

    @function
    def step(x):
        state = tf.zeros([2, 3]) if memory.state is None else memory.state
        for turn in range(x.shape[1]):
            out, state = cell(x[:, turn], [state])
            state = state[0]
        memory.state = state
        return out

    return Instance(step, each(lambda i: args(vector(i, 2, 3, 2)), 6), lambda: memory.state)


@program()
def embedding(function):
    "Embeddings give IndexedSlices, which Adam scatters."
    layers = [
        keras.Input((3,), dtype="int32"),
        keras.layers.Embedding(5, 4),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    optimizer, loss = keras.optimizers.Adam(0.1), cross_entropy()
    optimizer.build(model.trainable_variables)

    @function
    def step(x, y):
        return train(model, optimizer, loss, x, y)

    calls = each(lambda i: args(integers(i, 2, 3, low=0, high=5), integers(i, 2, low=0, high=3)))
    return Instance(step, calls, lambda: (model.variables, optimizer.variables))


@program(rtol=1e-4, atol=1e-5)  # convolutions are summed in another order
def convolutions(function):
    "Conv2D, pooling and global pooling over small images."
    layers = [
        keras.Input((6, 6, 1)),
        keras.layers.Conv2D(2, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
    ]
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)])
    optimizer, loss = keras.optimizers.SGD(0.1), cross_entropy()

    @function
    def step(x, y):
        return train(model, optimizer, loss, x, y)

    calls = each(lambda i: args(vector(i, 2, 6, 6, 1), integers(i, 2, low=0, high=3)), 6)
    return Instance(step, calls, lambda: model.variables)


@program(follows=4)
def layer_of_the_users_own(function):
    "A layer with a late build, Python state, an added loss and a metric inside its call."

    class Scaled(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="scaled")
            self.calls, self.seen = 0, []

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, x):
            self.calls += 1
            self.add_loss(0.01 * tf.reduce_sum(self.scale**2))
            if self.calls % 2:
                self.seen.append(float(tf.reduce_sum(self.scale)))
            return x * self.scale

    layer = Scaled()
    optimizer = keras.optimizers.SGD(0.1)

    @function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x))) + sum(layer.losses)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        )
        return loss

    return Instance(step, each(batch), lambda: (layer.variables, layer.calls, layer.seen))


@program(follows=4)
def model_with_python_in_its_call(function):
    "A subclassed model whose call looks at tensors, counts, and stops early."

    class Adaptive(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = [keras.layers.Dense(4, "tanh") for _ in range(3)]
            self.head = keras.layers.Dense(3)
            self.depths = []

        def call(self, x, training=False):
            depth = 0
            for layer in self.hidden:
                x = layer(x)
                depth += 1
                if tf.reduce_mean(tf.abs(x)) > 10.0 or (training and len(self.depths) % 2 and depth == 2):
                    break
            self.depths.append(depth)
            return self.head(x)

    model = Adaptive()
    optimizer, loss = keras.optimizers.SGD(0.1), cross_entropy()
    model(tf.zeros([1, 4]))

    @function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        pairs = [(g, v) for g, v in zip(gradients, model.trainable_variables) if g is not None]
        for gradient, variable in pairs:
            variable.assign_sub(0.1 * gradient)
        return value, len(pairs), optimizer.iterations + 0

    return Instance(step, each(batch), lambda: (model.variables, model.depths))


@program()
def metrics(function):
    "Metrics are updated in a step, read by the caller, and reset now and then."
    accuracy, mean = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    @function
    def step(x, y, number):
        if number % 4 == 3:
            accuracy.reset_state()
        logits = model(x)
        accuracy.update_state(y, logits)
        mean.update_state(tf.reduce_mean(logits), sample_weight=2.0)
        return float(accuracy.result()), mean.result()

    def arguments(i):
        (x, y), _ = batch(i)
        return args(x, y, i)

    return Instance(
        step, each(arguments), lambda: (accuracy.variables, mean.variables), after=lambda _: accuracy.result()
    )


@program()
def learning_rate_changes(function):
    "A schedule of Keras', and a rate that the step sets from Python."
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)
    scheduled, plain = keras.optimizers.SGD(schedule), keras.optimizers.SGD(0.1)
    a, b = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    scheduled.build([a]), plain.build([b])

    @function
    def step(x, number):
        scheduled.apply([x], [a])
        plain.learning_rate = 0.1 / (1 + number // 3)
        plain.apply([x], [b])
        return float(plain.learning_rate), a + b

    return Instance(step, each(lambda i: args(vector(i, 2), i)), lambda: (a, b, scheduled.iterations))


@program(follows=3)
def frozen_in_the_middle(function):
    "Half of the layers stop being trainable after the fourth call."
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
    loss = cross_entropy()

    @function
    def step(x, y, number):
        if number == 4:
            model.layers[0].trainable = False
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        for variable, gradient in zip(
            model.trainable_variables, tape.gradient(value, model.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return value, len(model.trainable_variables)

    def arguments(i):
        (x, y), _ = batch(i)
        return args(x, y, i)

    return Instance(step, each(arguments, 10), lambda: model.variables)


@program()
def two_optimizers(function):
    "A small adversarial step: each half trains in its turn."
    generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    first, second = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
    first.build(generator.trainable_variables), second.build(critic.trainable_variables)
    history = []

    @function
    def step(noise, real):
        with tf.GradientTape() as one, tf.GradientTape() as two:
            fake = generator(noise)
            fooled, sure = critic(fake), critic(real)
            lose, win = -tf.reduce_mean(fooled), tf.reduce_mean(fooled) - tf.reduce_mean(sure)
        if len(history) % 2 == 0:
            first.apply_gradients(
                zip(one.gradient(lose, generator.trainable_variables), generator.trainable_variables)
            )
        second.apply_gradients(zip(two.gradient(win, critic.trainable_variables), critic.trainable_variables))
        history.append(float(lose))
        return win

    calls = each(lambda i: args(vector(i, 4, 2), vector(i + 9, 4, 3)))
    return Instance(step, calls, lambda: (generator.variables, critic.variables, history))


@program()
def functional_model(function):
    "Two inputs, a shared layer, a regularizer and a clipped optimizer."
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    shared = keras.layers.Dense(4, "relu", kernel_regularizer=keras.regularizers.L2(0.1))
    joined = keras.layers.Concatenate()([shared(left), shared(right)])
    model = keras.Model({"left": left, "right": right}, [keras.layers.Dense(1)(joined), joined])
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    optimizer.build(model.trainable_variables)

    @function
    def step(a, b):
        with tf.GradientTape() as tape:
            out, features = model({"left": a, "right": b})
            loss = tf.reduce_mean(out**2) + tf.add_n(model.losses)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )
        return loss, features

    return Instance(step, each(lambda i: args(vector(i, 4, 3), vector(i + 1, 4, 3))), lambda: model.variables)


@program(follows=3, rtol=1e-4, atol=1e-5)
def attention(function):
    "Attention with a causal mask and layer normalization."
    attention = keras.layers.MultiHeadAttention(2, 3)
    normalization = keras.layers.LayerNormalization()
    normalization.build((2, 4, 4)), attention.build((2, 4, 4), (2, 4, 4))

    @function
    def step(x):
        with tf.GradientTape() as tape:
            y = normalization(x + attention(x, x, use_causal_mask=True))
            loss = tf.reduce_mean(y**3)
        return loss, tape.gradient(loss, attention.trainable_variables[:2])

    return Instance(step, each(lambda i: args(vector(i, 2, 4, 4)), 5))


@program()
def keras_ops_and_variables(function):
    "`keras.ops` and `keras.Variable` on their own."
    counter = keras.Variable(0, dtype="int32")
    weight = keras.Variable([[1.0, 2.0], [3.0, 4.0]])

    @function
    def step(x):
        counter.assign_add(1)
        y = keras.ops.softmax(keras.ops.matmul(x, weight))
        weight.assign(weight * 0.9 + keras.ops.mean(y))
        if keras.ops.convert_to_numpy(counter) % 2 == 0:
            y = keras.ops.flip(y, 0)
        return y, keras.ops.shape(y), keras.ops.one_hot(counter, 4), weight[0]

    return Instance(step, each(lambda i: args(vector(i, 3, 2))), lambda: (counter, weight))


@program(rtol=5e-3, atol=5e-3)  # half precision has three decimal digits
def mixed_precision(function):
    "Layers that compute in half precision, with loss scaling."
    policy = keras.mixed_precision.DTypePolicy("mixed_float16")
    layers = [keras.layers.Dense(4, "tanh", dtype=policy), keras.layers.Dense(3, dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    optimizer.build(model.trainable_variables)
    loss = cross_entropy()

    @function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(loss(y, model(x, training=True)))
        optimizer.apply_gradients(
            zip(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        )
        return value, model.layers[0](x)

    return Instance(step, each(batch), lambda: (model.variables, optimizer.dynamic_scale))


@program()
def predicted_in_the_loop(function):
    "Predictions are read and scored by Python in the middle of a step, as a scikit-learn metric would."
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, kernel_initializer=keras.initializers.Ones())]
    )
    optimizer, loss, scores = keras.optimizers.SGD(0.0), cross_entropy(), []

    @function
    def step(x, y):
        logits = model(x) + tf.constant([0.0, 1.0, 2.0])
        predicted = tf.argmax(logits, axis=1).numpy()
        scores.append(float((predicted == y.numpy()).mean()))
        value = train(model, optimizer, loss, x, y)
        if scores[-1] > 0.4:
            value = value * 0.5
        return value

    return Instance(step, each(batch), lambda: (scores, model.variables))


@program()
def model_methods(function):
    "A step as a method of a model, with its optimizer, its metric and a counter as attributes."

    class Trainer(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.dense.build((None, 4))
            self.tracker = keras.metrics.Mean(name="loss")
            self.rule, self.loss_of = keras.optimizers.SGD(0.1), cross_entropy()
            self.rule.build(self.dense.trainable_variables)
            self.steps_done = 0

        def call(self, x):
            return self.dense(x)

        @function
        def learn(self, x, y):
            self.steps_done += 1
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x))
            self.rule.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result(), "steps": self.steps_done}

    model = Trainer()
    return Instance(model.learn, each(batch), lambda: (model.variables, model.steps_done))
