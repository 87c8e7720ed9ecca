"""The training programs: without the lines that name the package they are plain TensorFlow, and learn the same."""

import importlib
import types

import numpy as np
import pytest

from coexec.api import functions

NAMES = ("digits_fit", "gan", "actor_critic", "char_gpt", "detector")
STEPS = 16


@pytest.mark.parametrize("name", NAMES)
def test_two_lines_make_no_difference_but_of_speed(name):
    """At most two lines are not plain TensorFlow; losses are equal, and the steps were followed."""
    module = importlib.import_module(f"examples.training.{name}")
    with open(module.__file__) as file:
        lines = file.read().splitlines()
    plain = [line for line in lines if "coexec" not in line]
    assert len(lines) - len(plain) == 2
    eager = types.ModuleType(f"plain_{name}")
    exec(compile("\n".join(plain), module.__file__, "exec"), vars(eager))
    expected = eager.train(STEPS)
    before = {id(f): f.stats().ops_followed for f in functions()}
    found = module.train(STEPS)
    used = [f for f in functions() if f.stats().ops_followed > before.get(id(f), 0)]
    assert len(expected) >= STEPS
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5)
    assert used
    assert all(f.stats().launches >= STEPS // 2 for f in used), [f.explain() for f in used]
    assert all(f.stats().share_followed > 0.5 for f in used), [f.explain() for f in used]
