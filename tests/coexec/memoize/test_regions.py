"""Library calls followed as one unit: what they must notice, and that they ran. Eager TensorFlow is the oracle."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuned
from tests.coexec import run_both
from tests.snapshots import assert_same, snapshot

CALLS = 16  # enough for learning, confirming, jumping and running again


def batch(i, features=4):
    numbers = np.random.default_rng(i)
    return tf.constant(numbers.normal(size=(6, features)), tf.float32), tf.constant(numbers.integers(3, size=6))


def mlp(*extra):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), *extra, keras.layers.Dense(3)]
    )


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Training:
    """A model, its optimizer, and a training step as the Keras guides write it."""

    def __init__(self, model=None, optimizer=None):
        self.model = mlp() if model is None else model
        self.optimizer = keras.optimizers.Adam(0.01) if optimizer is None else optimizer
        self.objective = cross_entropy()
        self.log = []

    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.objective(y, self.model(x, training=True))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.log.append(float(loss))
        return loss

    def state(self):
        return self.model.variables, self.optimizer.variables, self.log


def compare(make, change=None, calls=CALLS, regions=True, jit_compile="auto", inputs=batch, atol=1e-5):
    """Trains eagerly and co-executed; `change(training, i)` happens before call i. Returns the decorated function."""
    outcomes, function = [], None
    for decorated in (False, True):
        training = make()
        step = training.step
        if decorated:
            step = function = coexec.function(step, jit_compile=jit_compile)
        found = []
        for i in range(calls):
            if change is not None:
                change(training, i)
            found.append(snapshot((step(*inputs(i)), training.state())))
        outcomes.append(found)
    for number, (one, other) in enumerate(zip(*outcomes, strict=True)):
        assert_same(one, other, rtol=1e-4, atol=atol, path=f"call {number}: ")
    assert function.stats().diverged + function.stats().followed >= calls - 2
    if regions:
        assert function.stats().regions >= 3 * (calls - 10), function.explain()
    return function


@pytest.mark.parametrize("jit_compile", ["auto", True, False])
def test_a_training_step_is_four_regions(jit_compile):
    """Model, loss, gradient and optimizer are jumped over, and nothing is left to follow one by one."""
    function = compare(Training, calls=30, jit_compile=jit_compile)
    before = function.stats()
    function(*batch(99))
    after = function.stats()
    assert after.regions - before.regions == 4, function.explain()
    assert after.ops_followed - before.ops_followed > 100
    assert after.launches > before.launches
    if jit_compile != "auto":  # then there are both backends
        assert after.compiles == 1, "what is alive where the segment ends changed while it was learnt"


def test_a_layer_that_is_run_again_leaves_its_gradient_known():
    """The call in which the model, the loss and the optimizer run again jumps over the gradient."""
    training = Training()
    step = coexec.function(training.step, jit_compile=False)
    jumped = []
    with tuned(region_first_check=10):
        for number in range(30):
            before = step.stats().regions
            step(*batch(number))
            jumped.append(step.stats().regions - before)
    assert jumped[0] == 0
    assert jumped[-1] == 4
    assert jumped.count(1) == 1, jumped  # the tenth time that it was jumped over
    assert jumped.count(3) <= 5, jumped  # while the gradient is learnt, and when that runs again


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), lambda: keras.optimizers.AdamW(0.01),
        lambda: keras.optimizers.RMSprop(0.01), lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
        lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ],
)  # fmt: skip
def test_optimizers(optimizer):
    """Slots, averages, accumulators and schedules move as in eager."""
    compare(lambda: Training(optimizer=optimizer()), regions=False)


LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.5, seed=3),
    "batch normalization": lambda: keras.layers.BatchNormalization(),
    "layer normalization": lambda: keras.layers.LayerNormalization(),
    "noise": lambda: keras.layers.GaussianNoise(0.1, seed=2),
    "activity regularizer": lambda: keras.layers.ActivityRegularization(0.1),
    "weight regularizer": lambda: keras.layers.Dense(8, kernel_regularizer="l2"),
    "constraint": lambda: keras.layers.Dense(8, kernel_constraint="max_norm"),
    "lambda": lambda: keras.layers.Lambda(lambda x: x * 2.0),
    "prelu": lambda: keras.layers.PReLU(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Random numbers, moving averages, losses and constraints of layers are eager's."""

    class WithLosses(Training):
        def step(self, x, y):
            with tf.GradientTape() as tape:
                loss = self.objective(y, self.model(x, training=True)) + sum(self.model.losses)
            variables = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return loss, len(self.model.losses)

    def make():
        keras.utils.set_random_seed(1)  # a layer's initializers draw their seeds when it is made
        return WithLosses(mlp(LAYERS[name]()))

    compare(make, regions=False)


def at(number, action):
    """A change before one call in the middle, when everything is jumped over."""
    return lambda training, i: action(training) if i == number else None


def freeze(training):
    training.model.layers[0].trainable = False


def faster(training):
    training.optimizer.learning_rate = 0.5


def swap_optimizer(training):
    training.optimizer = keras.optimizers.SGD(0.1)


def set_weights(training):
    training.model.set_weights([w * 0.5 for w in training.model.get_weights()])


def replace_activation(training):
    training.model.layers[0].activation = tf.tanh


def replace_model(training):
    training.model = mlp()
    training.optimizer = keras.optimizers.Adam(0.01)


def replace_loss(training):
    training.objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)


def add_layer(training):
    training.model.add(keras.layers.Dense(3))
    training.optimizer = keras.optimizers.SGD(0.1)


def set_policy(training):
    training.model.layers[0].dtype_policy = keras.DTypePolicy("mixed_bfloat16")


def turn_reduction(training):
    training.objective.reduction = "sum"


def clip(training):
    training.optimizer.clipvalue = 0.01


def patch_call(training):
    layer = training.model.layers[0]
    original = layer.call
    layer.call = lambda x, **_: original(x) * 2.0


@pytest.mark.parametrize(
    "action",
    [freeze, faster, swap_optimizer, set_weights, replace_activation, replace_model, replace_loss, add_layer,
     set_policy, turn_reduction, clip, patch_call],
)  # fmt: skip
def test_changes_are_noticed(action):
    """What a program changes between two calls holds in the next one."""
    compare(Training, at(9, action), atol=1e-3 if action is set_policy else 1e-5)  # bfloat16 has three digits


def test_changes_on_every_call():
    """A learning rate that moves costs no region; a layer that is frozen and thawed is right each time."""
    compare(Training, lambda training, i: setattr(training.optimizer, "learning_rate", 0.01 * (i + 1)))
    compare(
        Training,
        lambda training, i: setattr(training.model.layers[0], "trainable", i % 3 != 2),
        calls=24,
        regions=False,
    )


def test_scopes():
    """Autocasting, stopped recording and device scopes count."""

    class Scoped(Training):
        def step(self, x, y, number):
            with tf.GradientTape() as tape:
                if number % 3 == 2:
                    with tape.stop_recording():
                        loss = self.objective(y, self.model(x, training=True))
                elif number % 3 == 1:
                    with tf.device("/CPU:0"), tf.name_scope("named"):
                        loss = self.objective(y, self.model(x, training=False))
                else:
                    loss = self.objective(y, self.model(x))
            return loss, tape.gradient(loss, self.model.trainable_variables), len(tape.watched_variables())

    compare(Scoped, calls=30, regions=False, inputs=lambda i: (*batch(i), i))


def test_settings():
    """Keras' settings hold at once, a small number that losses add among them."""

    class Clipped(Training):
        def step(self, x, y):
            loss = keras.losses.BinaryCrossentropy() if self.objective is None else self.objective
            self.objective = loss
            return loss(tf.cast(y > 1, tf.float32), tf.cast(y > 0, tf.float32))

    def make():
        training = Clipped()
        training.objective = None
        return training

    before = keras.config.epsilon()
    try:
        compare(make, lambda _, i: keras.config.set_epsilon(1e-3 if i >= 10 else 1e-7), regions=False)
    finally:
        keras.config.set_epsilon(before)


def test_two_models_take_turns():
    """Two models of one architecture, on one path: each call uses its own variables, also where only one is swapped."""

    def make(function):
        models = [mlp(), mlp()]
        models[1].set_weights([w + 0.5 for w in models[1].get_weights()])
        objective = cross_entropy()

        @function
        def step(i):
            x, y = batch(i)
            one, other = models[i % 2], models[(i // 2) % 2]
            with tf.GradientTape() as tape:
                loss = objective(y, one(x))
            gradients = tape.gradient(loss, other.trainable_variables)
            return loss, [g is None for g in gradients], gradients

        return step

    assert run_both(make, [(i,) for i in range(32)]).stats().regions > 20


def test_arguments_in_another_order():
    """The same tensors at other places are other arguments."""

    def make(function):
        layer = keras.layers.Add()
        dense = mlp()

        @function
        def step(x, y, swapped):
            a, b = x * 2.0, y + 1.0
            a, b = (b, a) if swapped else (a, b)
            return layer([a, b]) - a, dense(a), dense(b), dense(x)

        return step

    calls = [(batch(i)[0], batch(i + 50)[0], i % 5 == 4) for i in range(CALLS)]
    assert run_both(make, calls).stats().regions > 10


def test_shapes_and_flags():
    """Batches of several sizes, and training switched off and on."""

    class Switching(Training):
        def step(self, x, y, training):
            return self.model(x, training=training), self.model(x[:2], training=not training)

    make = lambda: Switching(mlp(keras.layers.BatchNormalization(), keras.layers.Dropout(0.4, seed=1)))  # noqa: E731
    compare(make, calls=24, regions=False, inputs=lambda i: (*[t[: 3 + i % 3] for t in batch(i)], i % 4 < 2))


def test_user_code_inside_runs_on_every_call():
    """Losses, layers, constraints and metrics of the user's are called each time."""
    counts = {}

    def make(function):
        seen = counts[function] = []
        keras.utils.set_random_seed(2)  # an initializer draws its seed where its layer is made

        class Layer(keras.layers.Layer):
            def call(self, x):
                seen.append("layer")
                return x * 2.0

        class Constraint(keras.constraints.Constraint):
            def __call__(self, w):
                seen.append("constraint")
                return tf.clip_by_value(w, -1.0, 1.0)

        def activation(x):
            seen.append("activation")
            return tf.tanh(x)

        training = Training(mlp(Layer(), keras.layers.Dense(4, activation=activation, kernel_constraint=Constraint())))
        return function(lambda i: (training.step(*batch(i)), list(seen)))

    assert run_both(make, [(i,) for i in range(CALLS)]).stats().regions > CALLS
    eager, followed = counts.values()
    assert eager == followed
    assert len(eager) >= 3 * CALLS


def test_a_value_read_between_forward_and_backward():
    """The loss is printed before the gradient is taken: what tapes need comes out of the first launch."""

    class Reading(Training):
        def step(self, x, y):
            with tf.GradientTape() as tape:
                loss = self.objective(y, self.model(x, training=True))
                self.log.append(float(loss))
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.log.append(float(tf.linalg.global_norm(gradients)))
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss, tape.watched_variables()

    function = compare(Reading)
    assert function.stats().launches >= 2 * (CALLS - 4)
    # Behind a read, another forward pass leads to the same place.
    for action in (replace_activation, freeze, patch_call, replace_model):
        compare(Reading, at(9, action), calls=24)


def test_operations_of_the_users_between_regions():
    """The user's own operations before, between and behind library calls are on the tape too."""

    class Mixed(Training):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(2.0)

        def step(self, x, y):
            with tf.GradientTape() as tape:
                tape.watch(x)
                hidden = self.model(tf.tanh(x) * self.scale)
                loss = tf.reduce_mean(tf.square(self.objective(y, hidden * self.scale)))
            return tape.gradient(loss, [x, self.scale, *self.model.trainable_variables])

        def state(self):
            return self.model.variables, self.scale

    compare(Mixed, regions=False)


TAPES = {}


def tapes(function):
    TAPES[function.__name__] = function
    return function


@tapes
def two(model, objective, x, y):
    with tf.GradientTape() as one, tf.GradientTape() as other:
        a = objective(y, model(x))
        b = objective(y, model(x * 0.5))
    return one.gradient(a, model.trainable_variables), other.gradient(b, model.trainable_variables)


@tapes
def persistent(model, objective, x, y):
    with tf.GradientTape(persistent=True) as tape:
        loss = objective(y, model(x))
        more = loss * 2.0
    return tape.gradient(loss, model.trainable_variables), tape.gradient(more, model.trainable_variables)


@tapes
def nested(model, objective, x, y):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            out = model(x)
        penalty = tf.reduce_sum(tf.square(inner.gradient(out, x)))
        loss = objective(y, out) + penalty
    return loss, outer.gradient(loss, model.trainable_variables)


@tapes
def jacobian(model, objective, x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = model(x[:2])
    return tape.jacobian(out, x)


@tapes
def reopened(model, objective, x, y):
    tape = tf.GradientTape()
    with tape:
        hidden = model(x)
    y = y + 0
    with tape:
        loss = objective(y, hidden)
    return tape.gradient(loss, model.trainable_variables)


@tapes
def reset(model, objective, x, y):
    with tf.GradientTape() as tape:
        model(x * 2.0)
        tape.reset()
        loss = objective(y, model(x))
    return tape.gradient(loss, model.trainable_variables), len(tape.watched_variables())


@tapes
def selective(model, objective, x, y):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(model.trainable_variables[0].value)
        loss = objective(y, model(x))
    return tape.gradient(loss, model.trainable_variables)


@tapes
def used_twice(model, objective, x, y):
    with tf.GradientTape() as tape:
        loss = objective(y, model(x))
    first = tape.gradient(loss, model.trainable_variables)
    try:
        tape.gradient(loss, model.trainable_variables)
    except RuntimeError as error:
        return first, str(error)


@tapes
def weighted(model, objective, x, y):
    with tf.GradientTape() as tape:
        out = model(x)
    weights = tf.cast(y, tf.float32)[:, None] * tf.ones_like(out)
    return tape.gradient(out, {"all": model.trainable_variables}, output_gradients=weights)


@tapes
def stopped(model, objective, x, y):
    with tf.GradientTape() as tape:
        loss = objective(y, tf.stop_gradient(model(x)) + model(x * 0.5))
    return tape.gradient(loss, [x, *model.trainable_variables], unconnected_gradients="zero")


@tapes
def custom(model, objective, x, y):
    @tf.custom_gradient
    def clipped(v):
        return tf.identity(v), lambda dy: tf.clip_by_value(dy, -0.01, 0.01)

    with tf.GradientTape() as tape:
        loss = objective(y, clipped(model(x)))
    return tape.gradient(loss, model.trainable_variables)


@tf.function
def doubled(v):
    return tf.tanh(v) * 2.0


@tapes
def within_a_function(model, objective, x, y):
    with tf.GradientTape() as tape:
        loss = objective(y, doubled(model(x)))
    return tape.gradient(loss, model.trainable_variables)


@tapes
def accumulator(model, objective, x, y):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        out = model(x)
    return forward.jvp(out)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("name", TAPES)
def test_tapes(name, read):
    """However tapes are used, around library calls they give eager's gradients."""

    def make(function):
        model, objective = mlp(), cross_entropy()

        def watched(y, out):
            loss = objective(y, out)
            assert not read or float(tf.reduce_sum(loss)) > 0.0
            return loss

        @function
        def step(i):
            return TAPES[name](model, watched, *batch(i))

        return step

    function = run_both(make, [(i,) for i in range(CALLS)])
    assert function.stats().followed >= CALLS - 3, function.explain()


def test_a_tape_around_the_call():
    """A tape of the caller's sees every operation, as before."""
    model, objective = mlp(), cross_entropy()
    step = coexec.function(lambda x, y: objective(y, model(x)))
    for i in range(CALLS):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            loss = step(x, y) if i % 4 else objective(y, model(x))
        with tf.GradientTape() as expected:
            other = objective(y, model(x))
        assert_same(
            snapshot(expected.gradient(other, model.trainable_variables)),
            snapshot(tape.gradient(loss, model.trainable_variables)),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_a_tape_that_outlives_the_call():
    """A persistent tape is asked after the call has ended."""
    model, objective = mlp(), cross_entropy()

    @coexec.function
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = objective(y, model(x))
        return tape, loss

    for i in range(CALLS):
        x, y = batch(i)
        tape, loss = step(x, y)
        with tf.GradientTape() as expected:
            other = objective(y, model(x))
        assert_same(
            snapshot(expected.gradient(other, model.trainable_variables)),
            snapshot(tape.gradient(loss, model.trainable_variables)),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("event", [0, 7, 25, 60, 100, 140, 155])
def test_divergence_behind_and_inside_of_regions(event):
    """A call that leaves the known path between library calls, or where one would be, goes on imperatively."""
    outcomes = []
    for decorated in (False, True):
        training = Training()
        step = coexec.function(training.step) if decorated else training.step
        found = []
        for i in range(CALLS):
            if decorated and i > 5 and i % 3 == 0:
                with testing.diverge_at(event):
                    found.append(snapshot((step(*batch(i)), training.state())))
            else:
                found.append(snapshot((step(*batch(i)), training.state())))
        outcomes.append(found)
        if decorated:
            assert step.stats().diverged > 0
            assert step.stats().regions > 0
    for number, (one, other) in enumerate(zip(*outcomes, strict=True)):
        assert_same(one, other, rtol=1e-4, atol=1e-5, path=f"call {number}: ")


def test_branches_between_regions():
    """Python picks which library calls come; a gradient knows which it was, though the paths meet again."""

    def make(function):
        models, objective = [mlp(), mlp(), mlp()], cross_entropy()
        for number, model in enumerate(models):
            model.set_weights([w * (number + 1.0) for w in model.get_weights()])

        @function
        def step(i):
            x, y = batch(i)
            with tf.GradientTape() as tape:
                hidden = models[0](x)
                if float(tf.reduce_sum(hidden)) > 0.0:
                    hidden = models[1](x)
                else:
                    hidden = models[2](x)
                total = float(tf.reduce_sum(hidden))
                loss = objective(y, hidden) * 2.0
            everything = [v for model in models for v in model.trainable_variables]
            return total, loss, tape.gradient(loss, everything)

        return step

    assert run_both(make, [(i,) for i in range(40)]).stats().regions > 20


def test_masks_and_sparse_gradients():
    """A mask that Keras hangs on a tensor is an argument too; embeddings have sparse gradients."""

    def make(function):
        keras.utils.set_random_seed(2)
        embedding, lstm = keras.layers.Embedding(10, 4, mask_zero=True), keras.layers.LSTM(5)
        head, optimizer, objective = keras.layers.Dense(3), keras.optimizers.Adam(0.01), cross_entropy()
        head(lstm(embedding(tf.zeros([1, 5], tf.int32))))
        variables = [*embedding.trainable_variables, *lstm.trainable_variables, *head.trainable_variables]

        @function
        def step(i):
            numbers = np.random.default_rng(i)
            words = tf.constant(numbers.integers(10, size=(4, 5)) * (numbers.random((4, 5)) > 0.4))
            with tf.GradientTape() as tape:
                hidden = embedding(words)
                if i % 3 == 0:
                    hidden = hidden * 1.0  # loses the mask
                loss = objective(tf.constant([0, 1, 2, 0]), head(lstm(hidden)))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss, [v + 0.0 for v in variables]

        return step

    run_both(make, [(i,) for i in range(12)])


def test_metrics():
    """Metrics are updated, asked and reset as in eager."""

    def make(function):
        model, accuracy, mean = mlp(), keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()

        @function
        def step(i):
            x, y = batch(i)
            if i % 7 == 6:
                accuracy.reset_state()
            out = model(x)
            accuracy.update_state(y, out)
            mean(tf.reduce_sum(out))
            return accuracy.result(), float(mean.result())

        return step

    assert run_both(make, [(i,) for i in range(24)]).stats().regions > 24


def test_an_error_in_a_known_call():
    """A wrong shape raises eager's error, also where the call is known for the right one."""

    def make(function):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="only")], name="model")
        return function(lambda i: model(tf.ones([2, 4 if i % 4 != 3 else 5])))

    assert run_both(make, [(i,) for i in range(CALLS)]).stats().regions > 2


def test_an_operation_that_fails_in_a_known_call():
    """Eager's class and message, with the user's line, though Keras could not note the layer; then all is as before."""
    embedding, dense = keras.layers.Embedding(4, 3), keras.layers.Dense(2)
    step = coexec.function(lambda ids: dense(embedding(ids)))
    for i in range(CALLS):
        step(tf.constant([[i % 4, 1]]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[0,1\] = 99 is not in \[0, 4\)") as caught:
        step(tf.constant([[0, 99]]))
    assert any(entry.path == __file__ or str(entry.path) == __file__ for entry in caught.traceback)
    del caught
    before = step.stats().regions
    np.testing.assert_allclose(step(tf.constant([[2, 1]])), dense(embedding(tf.constant([[2, 1]]))), rtol=1e-6)
    assert step.stats().regions == before + 2


def test_a_known_call_inside_a_try():
    """A failure that the program catches around a library call is caught there, on every call."""

    def make(function):
        keras.utils.set_random_seed(1)
        embedding, log = keras.layers.Embedding(4, 3), []

        @function
        def step(i):
            try:
                found = embedding(tf.constant([[0, 99 if i % 5 == 4 else i % 4]]))
                log.append("found")
            except tf.errors.InvalidArgumentError:
                found = None
                log.append("caught")
            return found, list(log)

        return step

    run_both(make, [(i,) for i in range(20)])


def test_models_are_freed():
    """A function that has seen a model does not keep it alive, and another model at its address is another."""
    objective = cross_entropy()

    @coexec.function
    def step(model, x, y):
        return objective(y, model(x))

    references = []
    for number in range(4):
        model = mlp()
        model.set_weights([w * number for w in model.get_weights()])
        for i in range(6):
            x, y = batch(i)
            np.testing.assert_allclose(step(model, x, y), objective(y, model(x)), rtol=1e-5)
        references.append(weakref.ref(model))
        del model
    step.clear()
    gc.collect()
    assert [r() for r in references] == [None] * 4


def test_without_regions():
    """`regions=False` runs the library's Python on every call."""
    training = Training()
    training.optimizer.build(training.model.trainable_variables)
    step = coexec.function(training.step, regions=False)
    for i in range(8):
        step(*batch(i))
    assert (step.stats().regions, step.stats().followed) == (0, 7)


def test_gradients_of_concatenations_read_nothing():
    """TensorFlow asks for the shapes of what was concatenated, and for no value: one launch a call, by regions."""
    layer = keras.layers.Dense(3)
    layer(tf.ones([1, 4]))

    def backward(x, z):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.concat([layer(x), layer(z) * 2.0], 0) ** 2)
        return tape.gradient(loss, layer.trainable_variables)

    step = coexec.function(backward)
    for i in range(9):
        x, z = tf.random.stateless_normal([2, 4], [i, 0]), tf.random.stateless_normal([5, 4], [i, 1])
        before = step.stats()
        assert_same(snapshot(backward(x, z)), snapshot(step(x, z)), rtol=1e-5, atol=1e-6)
    after = step.stats()
    assert (after.launches - before.launches, after.regions - before.regions) == (1, 3)
    assert after.followed > before.followed


def test_an_array_that_is_multiplied_in_place():
    """`layer.scale *= 3` writes the same array back, and is noticed at once."""
    layer = keras.layers.Rescaling(np.array([1.0, 2.0], np.float32))

    @coexec.function
    def step(x):
        return layer(x) * 2.0

    x = tf.constant([[0.1, 0.2]])
    for _ in range(6):
        step(x)
    assert step.stats().regions > 0
    layer.scale *= 3.0
    np.testing.assert_allclose(step(x), [[0.6, 2.4]], rtol=1e-6)


def test_labels_that_are_equal_to_a_shape_by_chance():
    """Two labels are two integers, as a shape is: only values that operations really take for a shape are compared."""
    layer, table = keras.layers.Dense(3), tf.Variable(tf.random.stateless_normal([4, 5], [1, 2]))
    layer(tf.ones([1, 4]))

    def backward(x, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2) + tf.reduce_sum(tf.gather(table, labels) ** 3)
        return tape.gradient(loss, [*layer.trainable_variables, table])

    step, jumped = coexec.function(backward), []
    for i in range(12):
        x, labels = tf.random.stateless_normal([2, 4], [i, 0]), tf.constant([[2, 3], [0, 1], [2, 3], [1, 0]][i % 4])
        before = step.stats().regions
        assert_same(snapshot(backward(x, labels)), snapshot(step(x, labels)), rtol=1e-5, atol=1e-6)
        jumped.append(step.stats().regions - before)
    assert jumped[-3:] == [2, 2, 2], (jumped, step.explain())


@pytest.mark.parametrize("persistent", [False, True])
def test_the_gradient_of_a_program_without_layers(persistent):
    """Variables, products and a tape: the gradient is followed as one though no other library call is."""

    def make(decorate):
        weights = [tf.Variable(tf.random.stateless_normal([4, 4], [i, 3])) for i in range(3)]
        momenta = {}

        @decorate
        def step(x, y):
            with tf.GradientTape(persistent) as tape:
                h = x
                for weight in weights:
                    h = tf.nn.relu(h @ weight) + h
                loss = tf.reduce_mean((h - y) ** 2)
            for i, gradient in enumerate(tape.gradient(loss, weights)):
                momenta[i] = 0.9 * momenta.get(i, tf.zeros_like(gradient)) + gradient
                weights[i].assign_sub(0.01 * momenta[i])
            return loss, [w + 0.0 for w in weights]

        return step

    step = run_both(make, [(tf.fill([2, 4], 0.1 * i), tf.ones([2, 4])) for i in range(9)])
    assert step.stats().regions >= 4, step.explain()
    assert not step.stats().diverged


@pytest.mark.parametrize("lookup", [False, True])
def test_tapes_hear_of_variables_in_what_is_jumped_over(lookup):
    """A helper's plain variables are watched, and have gradients, also where its Python does not run."""

    def make(decorate):
        kernel, bias = tf.Variable(tf.random.stateless_normal([4, 4], [1, 2])), tf.Variable(tf.zeros(4))
        fixed = tf.Variable(tf.ones(4), trainable=False)

        def dense(x):
            rows = tf.gather(kernel, tf.constant([1, 0])) if lookup else kernel
            return tf.nn.relu(x[:, : rows.shape[0]] @ rows + bias) * fixed

        helper = coexec.pure(dense)

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(helper(helper(x)) ** 2)
            watched = [any(v is w for w in tape.watched_variables()) for v in (kernel, bias, fixed)]
            gradients = tape.gradient(loss, [kernel, bias, fixed])
            kernel.assign_sub(0.01 * tf.convert_to_tensor(gradients[0]))
            return loss, watched, gradients

        return step

    step = run_both(make, [(tf.random.stateless_normal([3, 4], [i, 5]),) for i in range(9)])
    assert step.stats().regions >= 8, step.explain()


def test_a_layer_without_operations():
    """What it was given is returned, the same object; its Python is skipped."""

    def make(decorate):
        nothing, same = keras.layers.Dropout(0.0), keras.layers.Identity()

        @decorate
        def step(i):
            x = tf.ones((2, 3)) * i
            y = nothing(x, training=True)
            return y is x, same(y) is x, nothing(x, training=False) + 1.0

        return step

    step = run_both(make, [(i,) for i in range(12)])
    assert step.stats().regions >= 3 * 6, step.explain()
