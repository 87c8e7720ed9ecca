"""Kernels that update several variables at once are part of segments, and write what TensorFlow's kernels write."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.lowering.optimizer_ops import VARIABLES
from tracer.op import signature_of
from tracer.variable_ops import OPTIMIZER_OPS

# By operation, its numbers by name; each call scales them.
GIVEN = {
    "ResourceApplyAdadelta": {"lr": 0.1, "rho": 0.9, "epsilon": 1e-6},
    "ResourceApplyAdagradV2": {"lr": 0.1, "epsilon": 1e-7},
    "ResourceApplyAdam": {"beta1_power": 0.9, "beta2_power": 0.99, "lr": 0.01, "beta1": 0.9, "beta2": 0.99,
                          "epsilon": 1e-7},
    "ResourceApplyCenteredRMSProp": {"lr": 0.1, "rho": 0.9, "momentum": 0.5, "epsilon": 1e-3},
    "ResourceApplyGradientDescent": {"alpha": 0.1},
    "ResourceApplyKerasMomentum": {"lr": 0.1, "momentum": 0.9},
    "ResourceApplyMomentum": {"lr": 0.1, "momentum": 0.9},
    "ResourceApplyRMSProp": {"lr": 0.1, "rho": 0.9, "momentum": 0.5, "epsilon": 1e-7},
}  # fmt: skip
FLAGS = {"ResourceApplyAdagradV2": "update_slots", "ResourceApplyAdam": "use_nesterov",
         "ResourceApplyKerasMomentum": "use_nesterov", "ResourceApplyMomentum": "use_nesterov"}  # fmt: skip


def run(op, dtype, shape, attrs, backend):
    """What three variables hold after each of some calls, eagerly and followed; and the followed function."""
    raw = getattr(tf.raw_ops, op)
    arguments = [arg.name for arg in signature_of(op).definition.input_arg]
    names = arguments[: VARIABLES[op]]
    gradient = "delta" if "delta" in arguments else "grad"

    def build():
        numbers = np.random.default_rng(0)
        return [tf.Variable(numbers.uniform(0.5, 1.0, shape), dtype=dtype) for _ in names]

    def step_on(variables):
        def step(grad, scale):
            given = {name: scale * value for name, value in GIVEN[op].items()}
            raw(**{name: v.handle for name, v in zip(names, variables, strict=True)}, **given, **attrs,
                **{gradient: grad * variables[0]})  # fmt: skip
            return variables[0] * 2.0

        return step

    eager, mine = build(), build()
    followed = coexec.function(step_on(mine), jit_compile=backend == "xla")
    plain = step_on(eager)
    found = []
    with testing.compile_everything():
        for number in range(8):
            grad = tf.constant(np.random.default_rng(number).normal(size=shape), dtype)
            scale = tf.constant(1.0 - 0.05 * number, dtype)
            pairs = [(plain(grad, scale), followed(grad, scale)), *zip(eager, mine, strict=True)]
            found += [(number, a.numpy(), b.numpy()) for a, b in pairs]
    return found, followed


@pytest.mark.parametrize("backend", ["graph", "xla"])
@pytest.mark.parametrize(("op", "flag"), [(op, flag) for op in sorted(GIVEN) for flag in {False, op in FLAGS}])
def test_formulas_are_those_of_the_kernels(op, flag, backend):
    attrs = {FLAGS[op]: flag} if op in FLAGS else {}
    for dtype, shape in ((tf.float32, [3, 4]), (tf.float64, []), (tf.float16, [5])):
        found, followed = run(op, dtype, shape, attrs, backend)
        places = 1e-2 if dtype == tf.float16 else 1e-5
        for number, one, other in found:
            np.testing.assert_allclose(other, one, rtol=places, atol=places, err_msg=f"call {number}")
        stats = followed.stats()
        assert stats.followed == 7, followed.explain()
        assert stats.launches <= 7, followed.explain()  # one a call: nothing runs on its own
        assert stats.diverged == 0


def test_every_operation_has_a_formula():
    assert OPTIMIZER_OPS == VARIABLES.keys() == GIVEN.keys()


@pytest.mark.parametrize("backend", ["graph", "xla"])
def test_a_slice_of_a_variable_is_assigned_within_a_segment(backend):
    def build():
        return tf.Variable(tf.zeros([4, 3]))

    def step_on(v):
        def step(x, row):
            v[1:3].assign(tf.stack([x, x * 2.0]))
            v[0, 1].assign(x[0])
            v[row].assign(x + v[1])
            return v + 1.0

        return step

    eager, mine = build(), build()
    followed = coexec.function(step_on(mine), jit_compile=backend == "xla")
    with testing.compile_everything():
        for number in range(6):
            given = tf.constant([1.0, 2.0, 3.0]) * number, 3
            np.testing.assert_array_equal(followed(*given), step_on(eager)(*given))
            np.testing.assert_array_equal(mine, eager)
    assert followed.stats().followed == 5, followed.explain()
    assert followed.stats().launches <= 5, followed.explain()


def test_a_position_that_does_not_exist_fails_as_in_eager():
    v = tf.Variable(tf.zeros([4]))

    @coexec.function
    def step(row):
        v[row].assign(1.0)

    with testing.compile_everything():
        for _ in range(4):
            step(tf.constant(2))
        v.assign(tf.zeros([4]))
        with pytest.raises((tf.errors.InvalidArgumentError, IndexError)):
            step(tf.constant(7))
    np.testing.assert_array_equal(v, [0.0, 0.0, 0.0, 0.0])
