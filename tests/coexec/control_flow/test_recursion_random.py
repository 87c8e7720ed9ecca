"""Random functions that call themselves under tapes: values and gradients are eager's, None included."""

import importlib.util
import random

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage"), pytest.mark.slow]

PROGRAMS = 16
NUMBERS = [1.0, 0.1, 0.6, 0.0, 0.9, 0.3, -0.7, 1.2, 0.5, 0.05, 0.8]

ONE = [
    "tf.sin({})", "tf.tanh({})", "{} * S", "{} * 0.5", "tf.stop_gradient({})", "tf.sqrt(tf.abs({}))",
    "tf.sqrt(tf.maximum({} - 1.0, 0.0))", "tf.floor({})", "{} * W[0]", "{} + C", "tf.exp(-tf.abs({}))",
]  # fmt: skip
TWO = ["{} + {}", "{} * {}", "{} - {}", "tf.maximum({}, {})"]
TESTS = ["{} > 0.5", "{} < 0.1", "t > 1.5", "tf.sin({} * 9.0) > 0.0"]

HEAD = """import tensorflow as tf

S = tf.Variable(0.75)
W = tf.Variable([0.5, -0.25])
C = tf.constant(0.3)


"""


class Writer:
    """Writes a function that calls itself, and a step that asks for its gradient."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.results = self.random.choice([1, 1, 2, 3])

    def value(self, names, depth=2):
        if depth == 0 or self.random.random() < 0.2:
            return self.random.choice(names)
        if self.random.random() < 0.5:
            return self.random.choice(ONE).format(self.value(names, depth - 1))
        parts = self.value(names, depth - 1), self.value(names, depth - 1)
        return f"({self.random.choice(TWO).format(*parts)})"

    def test(self, names):
        return self.random.choice(TESTS).format(self.random.choice(names))

    def returned(self, names):
        return "return " + ", ".join(self.value(names, 1) for _ in range(self.results))

    def program(self):
        names, chance = ["a", "b"], self.random.random
        lines = ["def function(a, b, t):", "    if t < 1.0:"]
        if chance() < 0.3:
            lines += [f"        if {self.test(names)}:", f"            {self.returned(names)}"]
        ends = [f"m{n}" for n in range(self.results)]  # by which the function is left
        lines += [f"        {name} = {self.value(names, 1)}" for name in ends] + [f"        return {', '.join(ends)}"]
        for call in range(self.random.choice([1, 1, 2])):
            given = [f"r{call}{n}" for n in range(self.results)]
            arguments = f"{self.value(names)}, {self.value(names)}, t - {self.random.choice(['1.0', '2.0'])}"
            lines.append(f"    {', '.join(given)} = function({arguments})")
            names += given
            if chance() < 0.6:
                lines.append(f"    v{call} = {self.value(names)}")
                names.append(f"v{call}")
                lines += [f"    if {self.test(names)}:", f"        v{call} = {self.value(names)}"]
                if chance() < 0.5:
                    lines += ["    else:", f"        v{call} = {self.value(names)}"]
            if chance() < 0.3:
                lines += [f"    if {self.test(names)}:", f"        {self.returned(names)}"]
        found = [f"y{n}" for n in range(self.results)]
        lines += [
            f"    {self.returned(names)}", "", "",
            "def step(x, c):", "    with tf.GradientTape() as tape:", "        tape.watch([x, c])",
            f"        {', '.join(found)} = function(x, c, tf.abs(x) * 4.0)",
            f"        loss = {' + '.join(found[: self.random.randint(1, self.results)])}",
            "    return loss, tape.gradient(loss, [x, c, S, W])",
        ]  # fmt: skip
        return HEAD + "\n".join(lines) + "\n"


def test_random_functions_that_call_themselves(backend, tmp_path):
    """Most of them run on the device, and all give what eager gives."""
    on_device = 0
    for seed in range(PROGRAMS):
        path = tmp_path / f"program_{seed}.py"
        path.write_text(Writer(seed).program())
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        fn = coexec.function(module.step, jit_compile=backend == "xla", control_flow=True)
        with testing.compile_everything():
            for x in NUMBERS:
                given = tf.constant(x), tf.constant(0.4 - x)
                results = snapshot(module.step(*given)), snapshot(fn(*given))
                assert_same(*results, rtol=1e-3, atol=1e-5, path=f"program {seed}, of {x}: ")
        on_device += fn.stats().decisions_on_device > 4
    assert on_device >= PROGRAMS // 2
