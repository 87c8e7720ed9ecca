"""Python loops that XLA compiles as loops: values, gradients and state are eager's, and counts show what was folded."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuning
from coexec.compile.compile_thread import background
from coexec.compile.executable import Executable
from coexec.launch import backend_race, executor
from coexec.lowering.emit import Emitter
from coexec.lowering.reroll import reroll
from coexec.lowering.reroll.find_repeats import Sequence
from tests.coexec import outcomes
from tests.snapshots import assert_same

N = 4


@pytest.fixture
def made(monkeypatch, tune):
    """XLA takes every segment, with loops where some operations are saved; returns the executables."""
    found = []
    prepare = Executable.__init__

    def noted(self, plan, backend, varying=None):
        prepare(self, plan, backend, varying)
        self.live = plan.live
        found.append(self)

    monkeypatch.setattr(Executable, "__init__", noted)
    tune(min_folded=8)
    with testing.compile_everything():
        yield found


def loops_of(executable):
    """How many loops are in what is launched, and how many operations each turn of them has."""
    names = [executable.name, *(name.removesuffix("_alone") for name, _, _ in executable.parts)]
    definitions = [executable._context.get_function_def(name) for name in names]
    loops = [node for definition in definitions for node in definition.node_def if node.op == "StatelessWhile"]
    turns = [executable._context.get_function_def(loop.attr["body"].func.name) for loop in loops]
    return [sum(node.name.startswith("turn_") for node in turn.node_def) for turn in turns]


def inputs(shape=(N, N), calls=5, dtype=tf.float32):
    """Tensors, another one for each call."""
    numbers = np.random.default_rng(7)
    return [(tf.cast(tf.constant(numbers.normal(size=shape) * 3), dtype),) for _ in range(calls)]


def both(make, calls, rtol=1e-4):
    """Compares all calls with eager's; returns what was decorated. Sums of turns are taken in another order."""
    fn = make(coexec.function)
    for one, other in zip(outcomes(make(lambda f: f), calls), outcomes(fn, calls), strict=True):
        assert_same(one, other, rtol, rtol)
    return fn


def compared(step, calls, made, folded=True, rtol=1e-4):
    """Compares all calls of a step with eager's; returns what was launched last, folded or not as is asked."""
    fn = both(lambda decorator: decorator(step), calls, rtol)
    assert fn.stats().launches >= len(calls) - 2
    assert made[-1].backend == "xla"
    assert bool(made[-1].folded) == folded
    assert ("compiled as loops" in fn.explain()) == any(e.folded for e in made)
    return made[-1]


WEIGHTS = tf.constant(np.random.default_rng(1).normal(size=(N, N)) * 0.4, tf.float32)


def turned(x):
    """One turn of a solver: four operations."""
    return x + 0.1 * tf.tanh(tf.matmul(x, WEIGHTS))


def test_a_solver_is_one_loop(made):
    """What each turn takes is what the one before gives: one loop, of as many operations as the body has."""

    def solve(x):
        for _ in range(30):
            x = turned(x)
        return x * 2.0

    executable = compared(solve, inputs(), made)
    assert executable.folded >= 29 * 4 - 8  # a turn or two stay outside
    assert executable.ops < 20
    assert loops_of(executable) == [4]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64", "int32"])
def test_dtypes(made, dtype):
    """Constants and states keep their types, sums round as in them."""

    def step(x):
        seen = []
        for t in range(12):
            x = x * 3 - x * x + t if dtype == "int32" else x * 0.5 + tf.cast(t + 1, dtype) * 0.25 - x * x * 0.125
            seen.append(x)
        return tf.add_n(seen), seen[-1], tf.stack(seen)

    rtol = {"float16": 2e-2, "bfloat16": 2e-1}.get(dtype, 1e-5)
    compared(step, inputs(dtype=tf.dtypes.as_dtype(dtype)), made, rtol=rtol)


def test_what_is_asked_of_each_turn_is_stacked(made):
    """Stacks along both ends, parts side by side, one turn's value, values in reverse, and the sum of all."""

    def step(x):
        seen = []
        for _ in range(10):
            x = turned(x)
            seen.append(x)
        return (
            tf.stack(seen), tf.stack(seen, 1), tf.stack(seen, -1), tf.concat(seen, 0), tf.concat(seen[::-1], 1),
            tf.stack(seen[::2]), tf.stack(seen[::-3]), tf.add_n(seen), tf.add_n([*seen, seen[2], seen[2]]),
            seen[3], tf.concat([seen[0], seen[0], x, x], 1), tf.stack([seen[4], tf.zeros([N, N]), seen[5]]),
        )  # fmt: skip

    compared(step, inputs(), made)


def test_all_turns_are_given_out(made):
    """Each turn's value is a result of its own."""

    def step(x):
        seen = []
        for _ in range(6):
            x = turned(x)
            seen.append(x)
        return seen

    compared(step, inputs(), made)


@pytest.mark.parametrize("take", [
    lambda x, t: x[t], lambda x, t: x[:, t], lambda x, t: x[:, :, t], lambda x, t: x[t, 1], lambda x, t: x[-1 - t],
    lambda x, t: x[:, t : t + 1], lambda x, t: x[t : t + 2][:1], lambda x, t: tf.slice(x, [t, 0, 1], [1, 8, 3]),
    lambda x, t: tf.gather(x, t), lambda x, t: tf.gather(x, [t, 0], axis=1),
])  # fmt: skip
def test_indices_differ_from_turn_to_turn(made, take):
    """A turn takes another part of a tensor each time, and its gradient puts it there."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.zeros([])
            for t in range(6):
                total = tf.tanh(total * 0.5 + tf.reduce_sum(take(x, t) * 0.3))
        return total, tape.gradient(total, x)

    compared(step, inputs((8, 8, 8)), made)


def test_lists_of_a_tensor(made):
    """The parts that `tf.unstack` and `tf.split` give, forwards and backwards."""

    def step(x):
        one, two = x[:, 0], x[0]
        for part in tf.unstack(x, axis=1):
            one = tf.tanh(one @ WEIGHTS + part)
        for part in reversed(tf.unstack(x, axis=0)):
            two = tf.tanh(two @ WEIGHTS + part)
        return one, two

    compared(step, inputs((8, 8, N)), made)


def trained(cell, units=3, steps=8, optimizer=None):
    """A step that trains a cell over time, with the loss at each time, by one optimizer's step."""
    keras.utils.set_random_seed(3)
    cell = cell(units)
    cell.build((N, units))
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    optimizer.build(cell.trainable_variables)

    def make(decorator):
        @decorator
        def step(x):
            states = [tf.zeros([N, units]) for _ in tf.nest.flatten(cell.state_size)]
            losses = []
            with tf.GradientTape() as tape:
                for t in range(steps):
                    out, states = cell(x[:, t], states)
                    losses.append(tf.reduce_mean(tf.square(out - x[:, t + 1])))
                loss = tf.add_n(losses) / steps
            gradients = tape.gradient(loss, cell.trainable_variables)
            optimizer.apply_gradients(zip(gradients, cell.trainable_variables, strict=True))
            return loss, [v.value for v in (*cell.trainable_variables, *optimizer.variables)]

        return step

    return make


@pytest.mark.parametrize("cell", [keras.layers.SimpleRNNCell, keras.layers.GRUCell, keras.layers.LSTMCell])
def test_recurrent_networks_are_trained(made, cell):
    """Forward and back are loops; losses, weights and the optimizer's state are eager's, step by step."""
    calls = inputs((N, 9, 3), 6)
    right = trained(cell)(lambda f: f)
    expected = [right(*call) for call in calls]
    fn = trained(cell)(coexec.function)
    found = [fn(*call) for call in calls]
    for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
        assert one.dtype == other.dtype
    executable = made[-1]
    assert len(loops_of(executable)) >= 2
    assert executable.ops < 0.7 * executable.live
    assert fn.stats().launches >= 4


def test_the_number_of_turns_does_not_matter():
    """What XLA gets is no more for fifty turns than for ten."""

    def sizes(turns):
        plans, make_plan = [], executor.make_plan

        def noted(*args):
            plans.append(make_plan(*args))
            return plans[-1]

        executor.make_plan = noted
        try:
            fn = trained(keras.layers.GRUCell, steps=turns)(coexec.function(jit_compile=False))
            for call in inputs((N, turns + 1, 3), 3):
                fn(*call)
        finally:
            executor.make_plan = make_plan
        emitter = Emitter(plans[-1], True, "counted")
        body = emitter.build()
        before = len(body.definition.node_def)
        _, left = reroll.fold(body, emitter.functions, emitter.outside)
        assert left == reroll.left_by_loops(plans[-1])
        return before, sum(len(b.definition.node_def) for b in (body, *emitter.functions))

    (few, folded), (many, also) = sizes(10), sizes(50)
    assert many > 3 * few
    assert also <= 1.2 * folded


@pytest.mark.parametrize("shared", [True, False])
def test_layers(made, shared):
    """Equal layers are turns where they share their weights; to stack weights of their own would copy them all."""

    def make(decorator):
        numbers = np.random.default_rng(2)
        weights = [tf.Variable(numbers.normal(size=(N, N)) * 0.1, dtype=tf.float32) for _ in range(1 if shared else 12)]

        @decorator
        def step(x):
            with tf.GradientTape() as tape:
                for w in weights * (12 // len(weights)):
                    x = tf.tanh(x @ w) + x
                loss = tf.reduce_mean(x * x)
            for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
                w.assign_sub(0.01 * g)
            return loss, [w.value() for w in weights]

        return step

    both(make, inputs())
    assert bool(made[-1].folded) == shared


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_few_turns_are_not_folded(made, turns, tune):
    """Where a loop saves little, there is none."""
    tune(min_folded=64)

    def step(x):
        for _ in range(turns):
            x = turned(x)
        return x * 2.0

    assert compared(step, inputs(), made, folded=False).folded == 0


def test_nested_loops(made):
    """The outer loop's turns are one loop's, with the inner one's in each."""

    def step(x):
        for _ in range(6):
            for k in range(3):
                x = turned(x) * (1.0 + 0.1 * k)
            x = tf.nn.relu(x) - 0.1
        return x

    assert loops_of(compared(step, inputs(), made))[0] > 12


def test_trip_counts_change(made):
    """Python's numbers say how often; each count is a segment of its own, and the rest goes on."""

    def step(x, turns):
        for t in range(20):
            if t == turns:
                break
            x = turned(x)
        return tf.reduce_sum(x), x

    calls = [(x, turns) for turns in (12, 12, 12, 7, 7, 12, 0, 1, 12, 7, 20, 20, 20) for x, in inputs(calls=1)]
    both(lambda decorator: decorator(step), calls)
    assert sum(bool(e.folded) for e in made) >= 3


def test_growing_states_are_not_folded(made):
    """A state whose shape changes is another operation each turn."""

    def step(x):
        for _ in range(8):
            x = tf.concat([x, tf.tanh(x[:1] * 0.5)], 0)
        return x

    compared(step, inputs(), made, folded=False)


def test_variables_are_written_in_turns(made):
    """What turns write to a variable, and read of it, is followed from turn to turn, and written once."""

    def make(decorator):
        total = tf.Variable(tf.ones([N, N]))

        @decorator
        def step(x):
            for t in range(10):
                total.assign_add(tf.tanh(x) * 0.1)
                x = x @ WEIGHTS + total * (0.1 * t)
            total.assign(total * 0.5)
            return x, total.read_value()

        return step

    both(make, inputs())
    assert made[-1].folded


def test_a_value_read_in_the_middle(made):
    """What Python reads ends a segment; each part is folded by itself."""
    seen = []

    def step(x):
        for t in range(20):
            x = turned(x)
            if t == 9:
                seen.append(round(float(x[0, 0]), 4))
        return x, len(seen) and seen[-1]

    compared(step, inputs(), made)
    assert len({e.name for e in made if e.folded}) == 2


@pytest.mark.parametrize("shape", [(0, N), (3, 0, N)])
def test_nothing_in_it(made, shape):
    """Tensors without elements."""

    def step(x):
        seen = []
        for _ in range(10):
            x = tf.tanh(x * 0.5) + 1.0
            seen.append(x)
        return x, tf.stack(seen), tf.concat(seen, -2), tf.add_n(seen)

    compared(step, inputs(shape), made)


def test_what_fails_in_a_turn_fails_as_eagerly(made):
    """A check of one turn that does not hold: nothing is written, and eager's error is raised."""

    def make(decorator):
        count = tf.Variable(0.0)

        @decorator
        def step(x, table):
            count.assign_add(1.0)
            for t in range(10):
                x = tf.debugging.check_numerics(turned(x), "bad")
                x = x + tf.gather(table, tf.cast(x[:, 0] * 0.0, tf.int32) + t - 5 + tf.cast(table[0, 0], tf.int32))
            return x, count.read_value()

        return step

    good, low = tf.ones([16, N]) * 5.0, tf.ones([16, N])
    xs = [x for x, in inputs(calls=6)]
    calls = [(x, good) for x in xs[:4]] + [(xs[4], low), (xs[5] * np.nan, good), (xs[5], good)]
    fn = both(make, calls)
    assert made[0].folded
    assert fn.stats().launches >= 3


def test_what_xla_does_not_take_parts_loops(made):
    """An operation in front of loops and behind them leaves parts, with a loop in each."""

    def step(x):
        for _ in range(10):
            x = turned(x)
        x = tf.linalg.cholesky(x @ tf.transpose(x) + 5.0 * tf.eye(N))
        for _ in range(10):
            x = turned(x)
        return x

    executable = compared(step, inputs(), made)
    assert len(executable.parts) == 2
    assert loops_of(executable) == [4, 4]


def test_states_that_take_each_others_places(made):
    """A turn takes what was there two turns ago."""

    def step(x):
        a, b = x, x * 2.0
        for _ in range(16):
            a, b = b, tf.tanh(a @ WEIGHTS) + 0.3 * b
        return a, b

    compared(step, inputs(), made)


def test_random_numbers_are_eagers(made):
    """Numbers drawn in turns come from the seeds that eager draws."""

    def make(decorator):
        generator = tf.random.Generator.from_seed(5)

        @decorator
        def step(x):
            for _ in range(8):
                x = x * tf.random.stateless_uniform([N, N], [3, 4]) + generator.uniform([N, N]) * 0.1
            return x

        return step

    both(make, inputs())


def test_global_seeds_in_turns(made):
    """The seeds of random operations are fed, another one for each turn."""

    def run(decorator):
        tf.random.set_seed(11)

        @decorator
        def step(x):
            for _ in range(8):
                x = tf.tanh(x + tf.random.uniform([N, N]))
            return x

        return [step(x).numpy() for x, in inputs()]

    for one, other in zip(run(lambda f: f), run(coexec.function), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


KINDS = {
    "a": lambda a, b, t: tf.tanh(a + b), "b": lambda a, b, t: a * b * 0.3, "c": lambda a, b, t: a - b,
    "d": lambda a, b, t: tf.matmul(a, b) * 0.2, "e": lambda a, b, t: tf.where(a > b, a, b * 0.5),
    "f": lambda a, b, t: a * (0.1 * t), "g": lambda a, b, t: tf.concat(tf.split(a, 2, 1)[::-1], 1),
}  # fmt: skip


def programs(seed):
    """A loop made by chance: its turns take states of this turn and of those before, parts of a tensor, constants."""
    chance = random.Random(seed)
    width, lines = chance.randint(1, 3), []
    for _ in range(chance.randint(3, 8)):
        lines.append((chance.choice("abcdefg"), chance.randrange(9), chance.randrange(9), chance.randrange(width)))
    turns, asked = chance.randint(9, 14), chance.randrange(4)

    def step(x):
        states, first, seen = [x[k] * 0.5 for k in range(width)], x[0], []
        with tf.GradientTape() as tape:
            tape.watch(x)
            for t in range(turns):
                values = [*states, x[t], first]
                for kind, one, two, into in lines:
                    a, b = values[one % len(values)], values[two % len(values)]
                    value = KINDS[kind](a, b, t)
                    values.append(value)
                    states[into] = tf.clip_by_value(value, -2.0, 2.0)
                seen.append(tf.add_n([values[-1], *states]))
            found = [states, tf.stack(seen), tf.add_n(seen), [*seen[::2]]][asked]
            loss = tf.add_n([tf.reduce_sum(v) for v in (found if isinstance(found, list) else [found])])
        return found, tape.gradient(loss, x)

    return step


@pytest.mark.sample("1")
@pytest.mark.parametrize("group", range(4))
def test_programs_made_by_chance(made, group):
    """Whatever the turns take, and whatever is asked of them, comes out as eagerly; some ask but for the last."""
    for seed in range(6 * group, 6 * group + 6):
        step = programs(seed)
        both(lambda decorator, step=step: decorator(step), inputs((16, N, N), 4))
    assert all(executable.backend == "xla" for executable in made)
    assert sum(bool(executable.folded) for executable in made) >= 3


# When XLA is asked.


def test_many_operations_are_counted_before_xla_is_asked():
    """A large segment is looked at early; what loops save decides when XLA gets it. A small one has its full price."""
    small, large = backend_race.Compiled(seconds=1.0), backend_race.Compiled(seconds=1.0)
    assert not small.is_worth_xla(1.01 / (tuning.many_operations - 1), tuning.many_operations - 1)
    assert small.is_worth_xla(0.99 / (tuning.many_operations - 1), tuning.many_operations - 1)
    assert not large.is_worth_xla(1e-2, 100 * tuning.folded_hope + 8)
    assert large.is_worth_xla(1e-2, 100 * tuning.folded_hope)
    large.ops = 101
    assert not large.is_worth_xla(1e-2, 100 * tuning.folded_hope)
    large.ops = 99
    assert large.is_worth_xla(1e-2, 100 * tuning.folded_hope)
    large.widen()
    assert large.ops is None


@pytest.mark.parametrize("price", [0.0, 1e9])
def test_xla_is_asked_for_the_operations_that_are_left(monkeypatch, tune, price):
    """In the background the operations are counted; XLA gets the segment if its time is worth what loops leave."""
    tune(many_operations=50)
    tune(xla_price=0.0)

    @coexec.function
    def solve(x):
        for _ in range(40):
            x = turned(x)
        return x

    expected = solve(WEIGHTS)
    was_worth = backend_race.Compiled.is_worth_xla
    asked = []

    def is_worth_xla(self, _, live):
        asked.append(self.ops)
        return was_worth(self, 0.0 if self.ops is None else price, live)

    monkeypatch.setattr(backend_race.Compiled, "is_worth_xla", is_worth_xla)
    for _ in range(4):
        np.testing.assert_allclose(solve(WEIGHTS), expected, rtol=1e-4, atol=1e-5)
        assert background.wait(120)
    left = {ops for ops in asked if ops is not None}
    assert len(left) == 1
    assert left.pop() < 20
    assert solve.stats().compiles == (2 if price == 0.0 else 1)
    assert ("are turns of loops" in solve.explain()) == (price == 0.0)


# What is found, on sequences made up.


def sequence(*nodes):
    """A sequence of operations: each a kind and the numbers of the operations it takes, negative ones outside."""
    tensors = sorted({t for _, *taken in nodes for t in taken if t < 0})
    numbers = {t: k for k, t in enumerate(range(len(nodes)))} | {t: len(nodes) + k for k, t in enumerate(tensors)}
    taken = [[numbers[t] for t in taken] for _, *taken in nodes]
    makers = [*range(len(nodes)), *[-1] * len(tensors)]
    return Sequence([ord(kind) for kind, *_ in nodes], taken, makers, [0] * len(makers))


def found(seq, least=1):
    return [(r.start, r.period, r.turns) for r in seq.repeats(least, lambda repeat: True)]


def test_chains_are_found():
    """Pairs that take each other's results; what they begin with is outside."""
    chain = [(kind, 2 * n + k - 1 if n + k else -1) for n in range(5) for k, kind in enumerate("ab")]
    assert found(sequence(*chain)) == [(0, 2, 5)]


def test_equal_operations_that_are_wired_otherwise_are_not():
    """Of equal kinds alone nothing follows."""
    wires = [-1, 0, 0, 2, 1, 4, 3, 6, 4, 8]
    assert found(sequence(*[("a", w) for w in wires])) == []


def test_stretches_that_end_early():
    """Where the wiring changes, the loop ends."""
    chain = [("a", n - 1) for n in range(10)]
    assert found(sequence(*chain[:6], ("b", 0), ("a", 1), ("a", 1))) == [(0, 1, 6)]


def test_the_larger_period_is_preferred_where_it_saves_more():
    """Turns with turns in them."""
    kinds = "aaab" * 6
    assert found(sequence(*[(kind, n - 1) for n, kind in enumerate(kinds)]))[0][1:] == (4, 6)
