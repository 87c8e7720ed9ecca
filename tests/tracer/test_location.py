"""Locations: which code is the program's."""

import types

import numpy as np
import tensorflow as tf

from tests.coexec import run_both
from tracer import effects, location

# As TensorFlow generates it for a library of operations: it has no file, and issues the operation from two places.
PLUGIN = """
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, core, execute

def plus(x, y, name=None):
    ctx = context.context()
    try:
        return pywrap_tfe.TFE_Py_FastPathExecute(ctx, "AddV2", name, x, y)
    except core._FallbackException:
        pass
    return plus_eager_fallback(x, y, name, ctx)

def plus_eager_fallback(x, y, name, ctx):
    attr, (x, y) = execute.args_to_matching_eager([x, y], ctx, [])
    return execute.execute(b"AddV2", 1, inputs=[x, y], attrs=("T", attr), ctx=ctx, name=name)[0]
"""


def plugin_module():
    module = types.ModuleType("0123456789abcdef")
    exec(PLUGIN, vars(module))
    module._IS_TENSORFLOW_PLUGIN = True
    return module


def test_generated_wrappers_of_loaded_operations_are_library_code():
    """An operation that takes TensorFlow's slow path is the same one in each call: nothing diverges."""
    plugin = plugin_module()

    def make(decorate):
        @decorate
        def step(x):
            y = plugin.plus(x * 2.0, np.float32(0.5))
            return plugin.plus(y, y)

        return step

    step = run_both(make, [(tf.constant([1.0 + i, 2.0]),) for i in range(10)])
    assert step.stats().diverged == 0, step.explain()
    assert step.stats().followed == 9


def test_they_are_no_code_of_the_programs_either():
    """Whoever asks first: a library call that is observed, or a place that is looked for."""
    code, namespace = (plugin := plugin_module()).plus.__code__, vars(plugin)
    assert not effects.is_programs(code, namespace)
    assert not location.is_user(code, namespace)
    own = vars(types.ModuleType("another"))
    exec(PLUGIN, own)
    assert effects.is_programs(own["plus"].__code__, own)


def generated(number, expression):
    """A function as generators of code make it: in a file that does not exist, and has another name each time."""
    space = {"tf": tf}
    exec(compile(f"def made(x):\n    return {expression}\n", f"<generated-{number}>", "exec"), space)
    return space["made"]


def test_code_that_is_generated_again_is_known():
    def make(function):
        return function(lambda x, number: generated(number, "tf.tanh(x) * 2.0 + tf.reduce_sum(x)")(x))

    step = run_both(make, [(tf.constant([0.1 * call, 1.0]), call) for call in range(8)])
    assert step.stats().diverged == 0
    assert step.stats().recorded == 1
    assert step.stats().followed >= 6


def test_other_code_in_a_file_of_the_same_name_is_another():
    ways = ["tf.tanh(x) * 2.0", "tf.tanh(x) * 3.0", "tf.sinh(x) * 2.0", "tf.tanh(x * 2.0)"]

    def make(function):
        return function(lambda x, number: generated("", ways[number])(x) + 1.0)

    run_both(make, [(tf.constant([0.1 * call, 1.0]), call * 7 % 4) for call in range(16)])


def test_generated_code_fails_at_its_own_lines():
    def make(function):
        return function(lambda x, number: generated(number, "tf.gather(tf.constant([1, 2, 3]), x)")(x) * 2)

    run_both(make, [(tf.constant(9 if call == 5 else 1), call) for call in range(8)])
