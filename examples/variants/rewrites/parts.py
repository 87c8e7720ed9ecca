"""What the step is given, and what its model and its optimizer are."""

import ast

from examples.variants.rewrites import rewrite
from examples.variants.rewrites.forms import _redirect
from examples.variants.source import NotApplicable, Source

# Conversions are made once for each batch: only what TensorFlow does with them counts.
CONVERTED = """
class Converted:
    def __init__(self, function, convert):
        self.function, self.convert, self.known = function, convert, {{}}

    def one(self, value):
        found = self.known.get(id(value))
        if found is None:
            if len(self.known) > 100:
                self.known.clear()
            found = self.known[id(value)] = value, self.convert(value)
        return found[1]

    def __call__(self, *batch):
        return self.function(*[self.one(value) for value in batch])
"""


def _convert(source: Source, how: str) -> None:
    if source.converted:
        raise NotApplicable("converted already")
    source.converted = True
    source.import_("numpy as np")
    source.define(CONVERTED.replace("{{}}", "{}"))
    name = source.called
    source.after_step(f"train_with = Converted({name}, {how})")
    _redirect(source, name)


@rewrite("inputs as arrays")
def arrays(source: Source) -> None:
    _convert(source, "lambda value: value.numpy()")


@rewrite("inputs as lists")
def lists(source: Source) -> None:
    asked = [n for n in ast.walk(source.step) if isinstance(n, (ast.Subscript, ast.Attribute))]
    if any(ast.unparse(n.value) in source.parameters() for n in asked):
        raise NotApplicable("asks for parts of its inputs")
    _convert(source, "lambda value: value.numpy().tolist()")


@rewrite("inputs that are new in each call")
def fresh(source: Source) -> None:
    name = source.called
    source.after_step(f"train_with = lambda *batch: {name}(*[tf.identity(value) for value in batch])")
    _redirect(source, name)


@rewrite("labels of 64 bits")
def int64(source: Source) -> None:
    _convert(source, "lambda value: tf.cast(value, tf.int64) if value.dtype == tf.int32 else value")


@rewrite("inputs as variables")
def variables(source: Source) -> None:
    _convert(source, "lambda value: tf.Variable(value, trainable=False)")


@rewrite("tensors made of arrays in the step")
def made(source: Source) -> None:
    _convert(source, "lambda value: value.numpy()")
    source.begin_step("\n".join(f"{n} = tf.convert_to_tensor({n})" for n in source.parameters()))


@rewrite("constants made of arrays in the step")
def constants(source: Source) -> None:
    _convert(source, "lambda value: value.numpy()")
    source.begin_step("\n".join(f"{n} = tf.constant({n}, {n}.dtype)" for n in source.parameters()))


FUNCTIONAL = """
def functional(layers):
    inputs = layers[0]
    x = inputs
    for layer in layers[1:]:
        x = layer(x)
    return keras.Model(inputs, x)
"""
SUBCLASS = """
class Subclass(keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.stack = layers[1:]
        self(tf.zeros((1, *layers[0].shape[1:])))

    def call(self, x, training=False):
        for layer in self.stack:
            x = layer(x, training=training) if isinstance(layer, DROPS) else layer(x)
        return x
DROPS = (keras.layers.Dropout, keras.layers.BatchNormalization)
"""
NAMED = """
class Named(keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.names = []
        for number, layer in enumerate(layers[1:]):
            setattr(self, f'layer{number}', layer)
            self.names.append(f'layer{number}')
        self(tf.zeros((1, *layers[0].shape[1:])))

    def call(self, x, training=None):
        for name in self.names:
            layer = getattr(self, name)
            x = layer(x, training=training) if isinstance(layer, DROPS) else layer(x)
        return x
DROPS = (keras.layers.Dropout, keras.layers.BatchNormalization)
"""
LAYER = """
class Stack(keras.layers.Layer):
    def __init__(self, layers):
        super().__init__()
        self.stack = layers[1:]
        self(tf.zeros((1, *layers[0].shape[1:])))

    def call(self, x, training=False):
        for layer in self.stack:
            x = layer(x)
        return x
"""
PLAIN = """
class Plain:
    def __init__(self, layers):
        self.stack = layers[1:]
        self(tf.zeros((1, *layers[0].shape[1:])))

    @property
    def variables(self):
        return [v for layer in self.stack for v in layer.variables]

    @property
    def trainable_variables(self):
        return [v for layer in self.stack for v in layer.trainable_variables]

    def __call__(self, x, training=False):
        for layer in self.stack:
            x = layer(x, training=training) if isinstance(layer, DROPS) else layer(x)
        return x
DROPS = (keras.layers.Dropout, keras.layers.BatchNormalization)
"""
MODULE = """
class Dense(tf.Module):
    def __init__(self, layer):
        super().__init__()
        self.kernel, self.bias = tf.Variable(layer.kernel), tf.Variable(layer.bias)
        self.activation = {'relu': tf.nn.relu, 'linear': tf.identity}[layer.activation.__name__]

    def __call__(self, x):
        return self.activation(tf.matmul(x, self.kernel) + self.bias)


class Network(tf.Module):
    def __init__(self, layers):
        super().__init__()
        keras.Sequential(layers)
        self.stack = [Dense(layer) for layer in layers[1:]]

    def __call__(self, x, training=False):
        for layer in self.stack:
            x = layer(x)
        return x
"""
FUNCTION = """
class Weights:
    def __init__(self, layers):
        keras.Sequential(layers)
        self.trainable_variables = [tf.Variable(v.value) for layer in layers[1:] for v in layer.trainable_variables]
        self.variables = self.trainable_variables

    def __call__(self, x, training=False):
        weights = self.trainable_variables
        for n in range(0, len(weights), 2):
            x = x @ weights[n] + weights[n + 1]
            if n + 2 < len(weights):
                x = tf.maximum(x, 0.0)
        return x
"""
ADAM = """
class Adam:
    def __init__(self, rate):
        self.rate, self.t = rate, tf.Variable(0.0)

    def build(self, variables):
        raw = [getattr(v, 'value', v) if not isinstance(v, tf.Variable) else v for v in variables]
        self.slots = [(tf.Variable(tf.zeros(v.shape)), tf.Variable(tf.zeros(v.shape))) for v in raw]

    @property
    def variables(self):
        return [self.t, *(v for pair in self.slots for v in pair)]

    def apply_gradients(self, pairs):
        self.t.assign_add(1.0)
        rate = self.rate * tf.sqrt(1.0 - 0.999 ** self.t) / (1.0 - 0.9 ** self.t)
        for (gradient, variable), (m, v) in zip(pairs, self.slots):
            m.assign(0.9 * m + 0.1 * gradient)
            v.assign(0.999 * v + 0.001 * tf.square(gradient))
            variable.assign_sub(rate * m / (tf.sqrt(v) + 1e-7))
"""


def _model(source: Source, text: str, new: str, dense: bool = False) -> None:
    """Makes another kind of model of the layers that a `keras.Sequential` is made of."""
    calls = [n for n in ast.walk(source.factory) if isinstance(n, ast.Call)]
    found = [n for n in calls if ast.unparse(n.func) == "keras.Sequential"]
    if not found:
        raise NotApplicable("no Sequential")
    layers = [e for n in found for e in n.args[0].elts[1:]]
    if dense and not all(ast.unparse(e.func).endswith("Dense") for e in layers):
        raise NotApplicable("other layers than Dense")
    source.define(text)
    for call in found:
        call.func = ast.Name(new, ast.Load())


@rewrite("a functional model")
def functional(source: Source) -> None:
    _model(source, FUNCTIONAL, "functional")


@rewrite("a model with a `call` of its own")
def subclass(source: Source) -> None:
    _model(source, SUBCLASS, "Subclass")


@rewrite("a model that looks its layers up")
def named(source: Source) -> None:
    _model(source, NAMED, "Named")


@rewrite("a layer of layers")
def layer(source: Source) -> None:
    _model(source, LAYER, "Stack", dense=True)


@rewrite("a plain class of Keras layers")
def plain(source: Source) -> None:
    _model(source, PLAIN, "Plain")


@rewrite("a tf.Module")
def module(source: Source) -> None:
    _model(source, MODULE, "Network", dense=True)


@rewrite("a plain class of variables")
def weights(source: Source) -> None:
    _model(source, FUNCTION, "Weights", dense=True)


def _made_otherwise(source: Source, callee: str, text: str, new: str) -> None:
    """Calls a class or function of the program's own, defined by `text`, in place of Keras'."""
    calls = [n for n in ast.walk(source.factory) if isinstance(n, ast.Call)]
    found = [n for n in calls if ast.unparse(n.func) == callee]
    if not found:
        raise NotApplicable(f"no {callee}")
    source.define(text)
    for call in found:
        call.func = ast.Name(new, ast.Load())


@rewrite("an optimizer of one's own")
def optimizer(source: Source) -> None:
    _made_otherwise(source, "keras.optimizers.Adam", ADAM, "Adam")


@rewrite("an optimizer derived from Keras'")
def derived(source: Source) -> None:
    _made_otherwise(source, "keras.optimizers.Adam", "class Mine(keras.optimizers.Adam):\n    pass", "Mine")


@rewrite("a loss class of one's own")
def loss(source: Source) -> None:
    _made_otherwise(
        source,
        "keras.losses.SparseCategoricalCrossentropy",
        "class Entropy(keras.losses.Loss):\n    def __init__(self, from_logits):\n        super().__init__()\n"
        "    def call(self, y_true, y_pred):\n"
        "        return keras.ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)",
        "Entropy",
    )


@rewrite("a loss function of one's own")
def loss_function(source: Source) -> None:
    _made_otherwise(
        source,
        "keras.losses.SparseCategoricalCrossentropy",
        "def entropy(from_logits):\n    def compute(y_true, y_pred):\n"
        "        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y_true, logits=y_pred)\n"
        "        return tf.reduce_mean(losses)\n    return compute",
        "entropy",
    )
