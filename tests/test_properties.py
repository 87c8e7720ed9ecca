"""Small programs made up by hypothesis, eager and co-executed: the same results, state, log and exceptions.

A program is data, and one interpreter runs it, so that all its operations come from the same few lines.
Registers hold whole numbers that stay below 97, and every float is a small whole number too: whatever order
a compiler sums in, no branch can flip, and everything is compared exactly.
"""

import contextlib
from dataclasses import dataclass, field

import keras
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coexec
from coexec import testing
from tests.snapshots import assert_same, snapshot

CALLS = 6
REGISTERS = 3
MODULUS = 97

COMPUTE = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": tf.maximum,
    "roll": lambda a, b: tf.roll(a, 1, 0) + b,
    "sum": lambda a, b: tf.reduce_sum(a) + b,
    "select": lambda a, b: tf.where(a > b, a, b),
    "gather": lambda a, b: tf.gather(a, tf.math.floormod(b, 3)),
    "pieces": lambda a, b: tf.stack([tf.unstack(a)[0], *tf.unstack(b)[1:]]),
    "index": lambda a, b: tf.concat([a[1:], b[:1]], 0),
}
READ = {
    "numpy": lambda value: value.numpy().tolist(),
    "int": lambda value: int(value[0]),
    "bool": lambda value: bool(value[0] > 10),
    "str": str,
    "format": lambda value: f"{value[1]:d}",
    "list": lambda value: [int(item) for item in value],
    "equal": lambda value: value[0] == value[1],
}


@dataclass(frozen=True)
class Compute:
    "A register becomes what an operation makes of two."

    operation: str
    target: int
    left: int
    right: int


@dataclass(frozen=True)
class Constant:
    "A Python number is added to a register: the same always, another on each call, another at last."

    target: int
    value: int
    changes: str


@dataclass(frozen=True)
class Write:
    "A variable is assigned from a register, or added to."

    variable: int
    source: int
    how: str


@dataclass(frozen=True)
class Load:
    "A variable is read into a register."

    target: int
    variable: int


@dataclass(frozen=True)
class Read:
    "Python takes a register's value, and logs it."

    source: int
    how: str


@dataclass(frozen=True)
class Keep:
    "A register is put where later calls find it."

    source: int
    place: str


@dataclass(frozen=True)
class Recall:
    "What was kept, by this call or an earlier one, comes back into a register."

    target: int
    place: str


@dataclass(frozen=True)
class Differentiate:
    "A gradient with respect to the weight and a register; the weight is updated."

    source: int
    persistent: bool


@dataclass(frozen=True)
class Branch:
    "One of two blocks, as a register, the number of the call or a counter says."

    on: str
    source: int
    yes: tuple
    no: tuple


@dataclass(frozen=True)
class Loop:
    "A block is repeated, a fixed number of times or as a register says."

    on: str
    source: int
    body: tuple


@dataclass(frozen=True)
class Fail:
    "An exception leaves the call when a register's first number is odd."

    source: int


@dataclass
class Machine:
    """Everything a program can change."""

    variables: list = field(default_factory=lambda: [tf.Variable([1, 2, 3]), tf.Variable([4, 5, 6])])
    weight: tf.Variable = field(default_factory=lambda: tf.Variable([1.0, 2.0, 3.0]))
    kept: dict = field(default_factory=dict)
    log: list = field(default_factory=list)
    count: int = 0


def execute(block, registers, machine, call):
    """Run a block of statements: the whole language."""
    for statement in block:
        machine.count += 1
        match statement:
            case Compute(operation, target, left, right):
                registers[target] = COMPUTE[operation](registers[left], registers[right]) % MODULUS
            case Constant(target, value, changes):
                number = value + {"never": 0, "each call": call, "late": int(call >= 4)}[changes]
                registers[target] = (registers[target] + number) % MODULUS
            case Write(variable, source, "assign"):
                machine.variables[variable].assign(registers[source])
            case Write(variable, source, "add"):
                machine.variables[variable].assign_add(registers[source] - machine.variables[variable] // 2)
            case Load(target, variable):
                registers[target] = machine.variables[variable] % MODULUS
            case Read(source, how):
                machine.log.append(READ[how](registers[source]))
            case Keep(source, place):
                machine.kept[place] = registers[source]
            case Recall(target, place):
                registers[target] = machine.kept.get(place, registers[target])
            case Differentiate(source, persistent):
                x = tf.cast(registers[source], tf.float32)
                with tf.GradientTape(persistent=persistent) as tape:
                    tape.watch(x)
                    loss = tf.reduce_sum(x * x * machine.weight)
                by_weight, by_x = tape.gradient(loss, [machine.weight, x])
                if persistent:
                    by_x = by_x + tape.gradient(loss, x)
                machine.weight.assign(tf.clip_by_value(machine.weight - by_weight, -50.0, 50.0))
                registers[source] = tf.cast(by_x, tf.int32) % MODULUS
            case Branch(on, source, yes, no):
                taken = call % 2 if on == "call" else machine.count % 2
                if registers[source][0] > 40 if on == "register" else taken:
                    execute(yes, registers, machine, call)
                else:
                    execute(no, registers, machine, call)
            case Loop(on, source, body):
                turns = 2 if on == "fixed" else int(registers[source][0] % 3)
                for _ in range(turns):
                    execute(body, registers, machine, call)
            case Fail(source):
                if registers[source][0] % 2 == 1:
                    raise ArithmeticError(registers[source].numpy().tolist())


def run(block, inputs, decorator, around=lambda call: contextlib.nullcontext()):
    """All calls of one program: a snapshot after each, and the decorated step."""
    keras.utils.set_random_seed(7)
    machine = Machine()

    @decorator
    def step(*registers, call):
        registers = list(registers)
        execute(block, registers, machine, call)
        return registers

    calls = []
    for call in range(CALLS):
        numbers = inputs[call % len(inputs)]
        arguments = [tf.constant(numbers) + place for place in range(REGISTERS)]
        with around(call):
            try:
                result = step(*arguments, call=call)
            except ArithmeticError as error:
                result = error.with_traceback(None)
        calls.append(snapshot((result, machine)) if call % 2 else snapshot(result))
    return [*calls, snapshot(machine)], step


def assert_same_run(block, inputs, jit_compile, around=lambda call: contextlib.nullcontext()):
    expected, _ = run(block, inputs, lambda step: step)
    found, step = run(block, inputs, coexec.function(jit_compile=jit_compile), around)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=0, atol=0, path=f"call {number}: ")
    return step.stats()


register = st.integers(0, REGISTERS - 1)
place = st.sampled_from(["a", "b"])
straight = st.one_of(
    st.builds(Compute, st.sampled_from(sorted(COMPUTE)), register, register, register),
    st.builds(Constant, register, st.integers(0, 9), st.sampled_from(["never", "each call", "late"])),
    st.builds(Write, st.integers(0, 1), register, st.sampled_from(["assign", "add"])),
    st.builds(Load, register, st.integers(0, 1)),
    st.builds(Read, register, st.sampled_from(sorted(READ))),
    st.builds(Keep, register, place),
    st.builds(Differentiate, register, st.booleans()),
)


def nested(inner):
    block = st.lists(inner, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Branch, st.sampled_from(["register", "call", "count"]), register, block, block),
        st.builds(Loop, st.sampled_from(["fixed", "register"]), register, block),
    )


anything = st.recursive(
    st.one_of(straight, st.builds(Recall, register, place), st.builds(Fail, register)), nested, max_leaves=6
)
blocks = st.lists(anything, min_size=2, max_size=8).map(tuple)
numbers = st.lists(st.lists(st.integers(0, 96), min_size=3, max_size=3), min_size=1, max_size=2)
some = settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@some
@given(blocks, numbers)
def test_any_program(block, inputs):
    assert_same_run(block, inputs, jit_compile=False)


@some
@given(blocks, numbers)
def test_any_program_through_xla(block, inputs):
    assert_same_run(block, inputs, jit_compile="auto")


@some
@given(blocks, numbers, st.integers(0, 12))
def test_any_program_that_is_left_at_an_event(block, inputs, event):
    def around(call):
        return testing.diverge_at(event) if call % 2 else contextlib.nullcontext()

    assert_same_run(block, inputs, jit_compile=False, around=around)


@some
@given(st.lists(straight, min_size=2, max_size=10).map(tuple), numbers)
def test_a_program_without_branches_is_followed(block, inputs):
    # Two calls to record (a number of Python's turns into an input on the second), and one that differs late.
    stats = assert_same_run(block, inputs, jit_compile="auto")
    computes = any(not isinstance(statement, Keep | Load) for statement in block)
    assert not computes or stats.followed >= CALLS - 3, stats
