"""Random loops, made of what a loop may be made of: on the device they do what they do in Python."""

import linecache
import random

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

NAMES = ("a", "b", "c", "v")  # three scalars and a vector of floats; whole numbers are n, and k counts

pytestmark = [needs_places, pytest.mark.slow]


class Maker:
    """Writes a random function."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.depth = 0

    def scalar(self):
        return self.random.choice(
            ["a", "b", "c", "tf.reduce_sum(v)", "v[0]", "tf.cast(n, tf.float32)", "0.5", "2.0", "helper(a, 0.25)",
             "tf.abs(a - b)", "tf.minimum(b, c)", "(c if a > b else b)", "settings.rate", "tf.cast(k, tf.float32)"]
        )  # fmt: skip

    def condition(self):
        left, right = self.random.choice(["a", "b", "c", "tf.reduce_max(v)", "v[1]"]), self.scalar()
        test = f"{left} {self.random.choice(['<', '>', '<=', '>='])} {right}"
        return self.random.choice(
            [test] * 4
            + [f"not ({test})", f"{test} and b < 40.0", f"n % 3 == 0 or {test}",
             f"-20.0 < {left} < {right} + 4.0", f"0.25 <= b < 30.0 and {test}"])

    def assignment(self):
        x, y = self.scalar(), self.scalar()
        return self.random.choice(
            [f"{name} = {x} * 0.5 + {y}" for name in "abc"]
            + [f"{name} = tf.tanh({x}) * 4.0 - {y}" for name in "abc"]
            + [f"{name} = {name} * 0.5 if {self.condition()} else b - {y}" for name in "ac"]
            + [f"b += c and c * 0.25 + {x}", f"c = (a or b) - ((b and c) or {x} * a)",
               f"a, c = (c, a) if {self.condition()} else (a, b * 0.5)"]
            + [f"a, b = b, {x}", f"v = v * 0.5 + {x}", "v = tf.roll(v, 1, 0)", "n = n // 2 if n % 2 == 0 else n + 3",
               f"late = {x} + 1.0\na = a - late * 0.125", "pair = (b, pair[0])\nc = c + pair[1] * 0.25"]
        )  # fmt: skip

    def block(self, indent, loop=True):
        lines = []
        for _ in range(self.random.randint(1, 3)):
            kind = self.random.random()
            if kind < 0.35 and self.depth < 3:
                self.depth += 1
                lines += [f"if {self.condition()}:", *self.block("    ", loop)]
                if self.random.random() < 0.6:
                    lines += ["else:", *self.block("    ", loop)]
                self.depth -= 1
            elif kind < 0.42 and self.depth and loop:
                lines.append(self.random.choice(["break", "continue", "return a, b, 'early'", "log.append(float(a))"]))
                break
            elif kind < 0.48:
                lines += [f"for _ in range({self.random.randint(1, 3)}):", f"    {self.assignment().splitlines()[0]}"]
            elif kind < 0.62 and loop:
                lines.append(self.random.choice(
                    [f"out.append({self.scalar()} + a)", "rest.append(n)", "out.append(b)",
                     "rest.append(n + len(rest))", "c = c + tf.cast(len(out), tf.float32)"]))  # fmt: skip
            else:
                lines += self.assignment().splitlines()
        return [indent + line for line in lines]

    def branches(self):
        """Writes one whose loop is Python's, and whose branches are the tensors'."""
        body = ["def function(a, log, settings, helper):",
                "    b, c, v, n, k = a * 0.5, a + 1.0, tf.stack([a, -a, a * 2.0]), tf.cast(a * 8.0, tf.int32), 0",
                "    pair, out, rest = (a, b), [], [n]", "    for turn in range(3):",
                *self.block("        "), *self.block("        "),
                "        a = a + 0.75", *self.block("    ", loop=False),
                "    return a, b, c, v, n, k, pair, out, rest"]  # fmt: skip
        return "\n".join(body) + "\n"

    def gates(self):
        """Writes one that calls another, whose branches return."""
        given = "a, b, c, v, n, k, pair, helper, settings"
        body = [f"def gate({given}):", *self.returning("    "), "def function(a, log, settings, helper):",
                "    b, c, v, n, k = a * 0.5, a + 1.0, tf.stack([a, -a, a * 2.0]), tf.cast(a * 8.0, tf.int32), 0",
                "    pair = (a, b)", "    for turn in range(6):", f"        c = gate({given}) * 0.5 + a",
                "        a = a - 0.75", "    return a, b, c"]  # fmt: skip
        return "\n".join(body) + "\n"

    def returning(self, indent):
        """Writes the body of a function that returns on every way."""
        lines = []
        for _ in range(self.random.randint(0, 2)):
            lines += [indent + line for line in self.assignment().splitlines()]
        if self.depth < 3 and self.random.random() < 0.8:
            self.depth += 1
            lines += [f"{indent}if {self.condition()}:", *self.returning(indent + "    ")]
            if self.random.random() < 0.5:
                lines += [f"{indent}else:", *self.returning(indent + "    ")]
            else:
                lines += self.returning(indent)
            self.depth -= 1
        else:
            lines.append(indent + self.random.choice(["return a", "return b", "return c", "return a", "return c * b"]))
        return lines

    def function(self):
        body = ["def function(a, log, settings, helper):",
                "    b, c, v, n, k = a * 0.5, a + 1.0, tf.stack([a, -a, a * 2.0]), tf.cast(a * 8.0, tf.int32), 0",
                f"    out, rest = [], {self.random.choice(['[]', '[n]', 'log'])}",
                "    pair = (a, b)", f"    while {self.condition()} or k < 3:" if self.random.random() < 0.3 else
                f"    while {self.condition()}:"]  # fmt: skip
        if self.random.random() < 0.5:
            body[-1] = f"    while a < {self.random.randint(3, 30)}.0:"
        body += ["        k += 1", "        if k > 25:", "            break", *self.block("        "),
                 "        a = a + 0.75", "    return a, b, c, v, n, k, pair, out, rest"]  # fmt: skip
        return "\n".join(body) + "\n"


def joined(source, seed):
    """The same source with some statements on one line, behind each other or behind the colon."""
    draw, found = random.Random(seed), []
    for line in source.splitlines():
        indent = len(line) - len(line.lstrip())
        before = found[-1] if found else ":"
        is_simple = not line.endswith(":")
        if is_simple and len(before) - len(before.lstrip()) == indent and not before.endswith(":") and (
            ": " not in before and draw.random() < 0.5
        ):
            found[-1] += "; " + line.lstrip()
        else:
            found.append(line)
    lines, found = found, []
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        after = lines[number + 1] if number + 1 < len(lines) else ""
        is_alone = not line.endswith(":") and len(after) - len(after.lstrip()) < indent
        is_body = found and found[-1].endswith(":") and len(found[-1]) - len(found[-1].lstrip()) < indent
        if is_alone and is_body and not found[-1].startswith("def ") and draw.random() < 0.6:
            found[-1] += " " + line.lstrip()
        else:
            found.append(line)
    return "\n".join(found) + "\n"


class Settings:
    rate = 1.25


def helper(x, y):
    """Of the user's."""
    if x > y:
        return x - y
    return x * 0.5 + y


@pytest.mark.parametrize("backend", ["graph", "xla"])
@pytest.mark.parametrize("seed", range(24))
def test_random_loops(seed, backend, tune):
    """Values, effects and counts are plain Python's, whatever way the loop takes."""
    compare(Maker(seed).function(), seed, backend, tune)


@pytest.mark.parametrize("backend", ["graph", "xla"])
@pytest.mark.parametrize("seed", range(100, 120))
def test_random_branches(seed, backend, tune):
    """The same, whatever way the branches take."""
    compare(Maker(seed).branches(), seed, backend, tune)


@pytest.mark.parametrize("seed", range(200, 232))
def test_random_lines(seed, tune):
    """The same, however the statements are spread over lines."""
    maker = Maker(seed)
    source = (maker.function, maker.branches, maker.gates, maker.gates)[seed % 4]()
    compare(joined(source, seed), seed, "graph", tune)


@pytest.mark.parametrize("seed", range(300, 320))
def test_random_returns(seed, tune):
    """The same, where a function that is called is left from one of several branches."""
    compare(Maker(seed).gates(), seed, "graph", tune)


def compare(source, seed, backend, tune):
    """Runs a function plainly and co-executed."""
    tune(decision_patience=1)
    file = f"<random program {seed}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"tf": tf}
    exec(compile(source, file, "exec"), names)
    function = names["function"]
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    inputs = [0.0, 1.0, 0.0, 4.0, -3.0, 11.0, 0.5, 25.0]
    logs = [], []
    with testing.compile_everything():
        for number, value in enumerate(inputs):
            results = []
            for each, log in zip((function, fn), logs, strict=True):
                try:
                    results.append(snapshot(each(tf.constant(value), log, Settings, helper)))
                except Exception as error:
                    results.append(snapshot(error.with_traceback(None)))
            assert_same(*results, rtol=1e-4, atol=1e-4, path=f"{source}\n{fn.explain()}\ncall {number}: ")
    assert_same(snapshot(logs[0]), snapshot(logs[1]), rtol=1e-4, atol=1e-4)
