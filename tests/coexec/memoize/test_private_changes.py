"""What is changed past all methods in what a memoized call has read is noticed by the next call. Eager is the oracle.

Private attributes of variables, classes of objects, losses that wait in a layer, the graph of a functional model.
"""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as k2

import coexec
from coexec.base.tuning import tuned
from tests.coexec import run_both

pytestmark = [  # of tf_keras itself, of some versions
    pytest.mark.filterwarnings("ignore:non-integer arguments to randrange:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]
PACKAGES = {"Keras 3": keras, "Keras 2": k2}
CHANGED = 8  # the call before which something changes


def batch(i):
    return tf.constant(np.random.default_rng(i).normal(size=(5, 4)), tf.float32)


def halved(weights):
    return weights * 0.5


class Halving:
    """Mixed into a constraint: what it gives is halved."""

    def __call__(self, weights):
        return weights * 0.5


class Faster:
    """Mixed into an optimizer of Keras 3."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * 3.0)


def become(holder, mixin):
    """Gives an object another class, past its `__setattr__`."""
    object.__setattr__(holder, "__class__", type("Other", (mixin, type(holder)), {}))


def compare(make, change, *, calls=18, skipped=0.5):
    """Runs what `make` returns eagerly and co-executed: a function, and what `change` is given before one of the calls.

    At least this share of the later calls' library calls is skipped.
    """
    functions = []

    def changing(decorate):
        step, changed = make()
        step = decorate(step)
        functions.append(step)

        def run(x, number):
            if number == CHANGED:
                change(changed)
            return step(x)

        return run

    with tuned(region_first_check=10_000):  # no run of a call's Python finds it, but the check before it
        run_both(changing, [(batch(i), i) for i in range(calls)])
    stats = functions[1].stats()
    assert stats.regions >= skipped * (calls - 6), functions[1].explain()


def training(package, **options):
    """A training step of a model whose last layer has these options."""

    def make():
        package.utils.set_random_seed(1)
        model = package.Sequential([package.layers.Dense(3), package.layers.Dense(2, **options)])
        model.build((5, 4))
        optimizer = package.optimizers.SGD(0.1)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.cast(model(x), tf.float32) ** 2)
            weights = model.layers[0].weights + model.layers[1].weights
            pairs = [pair for pair in zip(tape.gradient(loss, weights), weights, strict=True) if pair[0] is not None]
            optimizer.apply_gradients(pairs)
            return loss

        return step, (model, optimizer)

    return make


def kernel(made):
    return made[0].layers[1].kernel


def replace_handle(made):
    variable = kernel(made)
    made[0].kept = tf.Variable(variable * 3.0)
    variable._handle = made[0].kept.handle


VARIABLES = {  # the package, options of the layer, what changes
    "a constraint": (k2, {}, lambda made: setattr(kernel(made), "_constraint", halved)),
    "a constraint, in the dict": (keras, {}, lambda made: vars(kernel(made)).update(_constraint=halved)),
    "an attribute of a constraint": (
        keras, {"kernel_constraint": "max_norm"}, lambda made: vars(kernel(made).constraint).update(max_value=0.1),
    ),
    "the class of a constraint": (
        keras, {"kernel_constraint": "max_norm"}, lambda made: become(kernel(made).constraint, Halving),
    ),
    "the class of an optimizer": (keras, {}, lambda made: become(made[1], Faster)),
    "whether it is trained": (k2, {}, lambda made: setattr(kernel(made), "_trainable", False)),
    "what it refers to": (k2, {}, replace_handle),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_private_attributes_of_variables(name):
    package, options, change = VARIABLES[name]
    compare(training(package, **options), change, skipped=1.0)


def test_a_variable_alone():
    """One of TensorFlow's, to which nothing leads but the optimizer's arguments."""

    def make():
        variable, optimizer = tf.Variable(np.ones((4, 3), np.float32)), k2.optimizers.SGD(0.1)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ variable) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
            return loss

        return step, variable

    compare(make, lambda variable: setattr(variable, "_constraint", halved))


def test_the_variable_behind_one_that_is_cast():
    def change(made):
        kernel(made)._variable._constraint = halved

    k2.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        compare(training(k2), change)
    finally:
        k2.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_the_class_of_a_layer(package):
    class Twice:
        def call(self, x):
            return super().call(x) * 2.0

    def make():
        package.utils.set_random_seed(1)
        model = package.Sequential([package.layers.Dense(3), package.layers.Dense(2)])
        model.build((5, 4))
        return (lambda x: model(x)), model.layers[0]

    compare(make, lambda layer: become(layer, Twice))


def replace_storage(layer):
    storage = threading.local()
    storage._eager_losses = [tf.constant(5.0)]
    vars(layer)["_thread_local"] = storage


LOSSES = {
    "one more": lambda layer: layer._eager_losses.append(tf.constant(5.0)),
    "other ones": lambda layer: setattr(layer._thread_local, "_eager_losses", [tf.constant(5.0)]),
    "of another storage": replace_storage,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_wait_in_a_layer(name):
    """Each call of the model drops them."""

    def make():
        k2.utils.set_random_seed(1)
        model = k2.Sequential([k2.layers.Dense(3), k2.layers.Dense(2)])
        model.build((5, 4))

        def step(x):
            return model(x), len(model.losses)

        return step, model.layers[0]

    compare(make, LOSSES[name])


def nodes(model):
    graph = getattr(model, "_functional", model)
    return [node for level in graph._nodes_by_depth.values() for node in level]


def replace_layer(made):
    model, other = made
    for node in nodes(model):
        name = "operation" if hasattr(node, "operation") else "layer"
        if getattr(node, name) is model.layers[-1]:
            setattr(node, name, other)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("form", ["functional", "sequential"])
def test_layers_in_the_graph_of_a_model(package, form):
    def make():
        package.utils.set_random_seed(1)
        layers = package.layers.Dense(4), package.layers.Dense(4)
        if form == "functional":
            x = package.Input((4,))
            model = package.Model(x, layers[1](layers[0](x)))
        else:
            model = package.Sequential(layers)
            model.build((None, 4))
        other = package.layers.Dense(4)
        other(batch(0))
        return (lambda x: model(x)), (model, other)

    compare(make, replace_layer)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_attributes_of_a_layer_that_was_put_there(package):
    def make():
        x = package.Input((4,))
        model = package.Model(x, package.layers.Rescaling(2.0)(x))
        other = package.layers.Rescaling(3.0)
        replace_layer((model, other))
        return (lambda x: model(x)), other

    compare(make, lambda other: vars(other).update(scale=5.0))


def put_argument(node):
    node.arguments.kwargs["by"] = 5.0


def replace_arguments(node):
    node.arguments.kwargs = {"by": 5.0}


def replace_flat_arguments(node):
    node._flat_arguments = [5.0 if isinstance(v, float) else v for v in node._flat_arguments]


@pytest.mark.parametrize(
    ("package", "change"), [(keras, put_argument), (keras, replace_arguments), (k2, replace_flat_arguments)],
    ids=["one", "all, in Keras 3", "all, in Keras 2"],
)  # fmt: skip
def test_arguments_in_the_graph_of_a_model(package, change):
    class Scale(package.layers.Layer):
        def call(self, x, by=1.0):
            return x * by

    def make():
        x = package.Input((4,))
        model = package.Model(x, Scale()(x, by=2.0))
        return (lambda x: model(x)), nodes(model)

    compare(make, lambda found: [change(node) for node in found if not node.is_input])


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_a_guard_of_a_graph_keeps_nothing_alive(package):
    x = package.Input((4,))
    other = package.layers.Dense(4)
    last = other(package.layers.Dense(4)(x))
    model = package.Model(x, package.layers.Rescaling(2.0)(x))
    vars(other)["items"] = [model]
    replace_layer((model, other))
    step = coexec.function(lambda x, model: model(x))
    for i in range(8):
        step(batch(i), model)
    assert step.stats().regions, step.explain()
    ends = [weakref.ref(model), weakref.ref(other)]
    del model, other, x, last
    gc.collect()
    assert [end() for end in ends] == [None, None]
