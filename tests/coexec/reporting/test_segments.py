"""What a call launches can be looked at: its segments, XLA's programs for them, and what they cost."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.reporting.segments import ends_in
from tests.coexec import run_both
from tests.marks import needs_stablehlo

X = tf.constant(np.arange(12, dtype="float32").reshape(3, 4))


@pytest.fixture(autouse=True)
def compiled():
    """Segments are launched as graphs from their second visit on, however small."""
    with coexec.base.tuning.tuned(launch_visits=2, launch_operations=1):
        yield


def reading(decorated):
    """A step of two segments, with a value read between them."""
    w = tf.Variable(tf.ones([4, 5]))

    @decorated
    def step(x):
        y = tf.matmul(x, w)
        if float(tf.reduce_sum(y)) > 0.0:
            w.assign_sub(0.001 * tf.matmul(x, y, transpose_a=True))
            y = -y
        else:
            y = tf.square(y)
        return tf.exp(y)

    return step


@pytest.mark.parametrize("jit_compile", [False, True])
def test_plans_and_executables_print_their_operations(jit_compile):
    """Those of the segment, in its order, with their inputs and what comes out; XLA's may be fewer."""
    with testing.compile_everything():
        step = run_both(reading, [(X,)] * 6, jit_compile=jit_compile)
    _, second = step.segments()
    text = str(second.plan).splitlines()
    assert text[0].startswith(f"plan of {second.operations} operations, with ")
    assert text[1:] == str(second).splitlines()[1:]
    assert text[1] == "  feed 0: float32[3,4]"
    made = [re.match(r"  (?:%\d+ = )?(\w+)\(", line) for line in text]
    operations = ["MatMul", "Mul", "AssignSubVariableOp", "Neg", "Exp"]
    assert [found[1] for found in made if found] == operations
    text = str(second.executable).splitlines()
    how = "by XLA" if jit_compile else "a graph"
    assert re.fullmatch(rf"executable coexec_segment_\w+, {how}: 5 operations, launched [3-6] times", text[0])
    made = [re.match(r"  \w+ = (\w+)\(", line) for line in text]
    operations.remove("AssignSubVariableOp")  # what is written may be computed apart from writing it
    assert [found[1] for found in made if found and found[1] in operations] == operations
    assert re.fullmatch(r"  gives \S.*", text[-1])


def test_a_plan_says_what_cannot_be_compiled():
    fn = coexec.function(lambda x: tf.linalg.inv(x[:, :3]) + 1.0, jit_compile=False)
    for _ in range(4):
        fn(X + tf.eye(3, 4))
    assert "  not for XLA, MatrixInverse: " in str(fn.segments()[0].plan)
    single = coexec.function(lambda x: tf.strings.as_string(x))
    for _ in range(3):
        single(X)
    assert all(segment.executable is None for segment in single.segments())


def test_segments_are_those_of_the_last_followed_call():
    """In order; calls compute what eager does meanwhile."""
    step = run_both(reading, [(X,)] * 6, jit_compile=False)
    first, second = segments = step.segments()
    assert [s.backend for s in segments] == ["graph", "graph"]
    assert first.operations == 3
    assert second.operations == 5
    assert [s.visits for s in segments] == [5, 5]
    assert first.launches == second.launches == 4
    assert step.stats().launches == 8
    assert first.ends != second.ends
    assert __file__ in first.ends
    nodes = step.trace_graph.nodes
    assert [nodes[n].op for n in first.nodes] == ["ReadVariableOp", "MatMul", "Sum"]
    assert str(segments).splitlines()[1].startswith("  segment 1 of 2: 3 operations, as a graph, launched 4 times, ")
    assert repr(segments) == str(segments)
    assert repr(first).startswith("<segment 1 of 2: ")
    assert {s.nodes for s in segments} == {tuple(n.node.number for n in e.chain()) for e in ends_in(step.trace_graph)}
    json.dumps([s.as_dict() for s in segments])


def test_a_segment_prints_its_operations():
    step = run_both(reading, [(X,)] * 4, jit_compile=False)
    lines = str(step.segments()[0]).splitlines()
    assert lines[1:3] == ["  feed 0: resource<float32[4,5]>[]", "  feed 1: float32[3,4]"]
    assert [line for line in lines if not line.startswith("  #")][3:] == [
        "  %0 = ReadVariableOp(feed 0) -> float32[4,5]",
        "  %1 = MatMul(feed 1, %0) -> float32[3,5]",
        "  %2 = Sum(%1, [0, 1]) -> float32[]",
        "  gives %1, %2",
    ]
    assert lines[3].startswith("  # ")
    assert lines[3].endswith(" in reading.<locals>.step")


def test_operations_that_run_one_by_one_are_a_segment_too():
    with coexec.base.tuning.tuned(launch_operations=100):
        step = run_both(reading, [(X,)] * 4, jit_compile=False)
    assert [s.backend for s in step.segments()] == ["operations", "operations"]
    assert "one by one, run 3 times" in str(step.segments())
    assert step.ir("hlo").count("HloModule") == 2


@pytest.mark.parametrize("backend", [True, False])
@pytest.mark.parametrize(
    ("stage", "sign"),
    [
        pytest.param("stablehlo", "stablehlo.dot", marks=needs_stablehlo),
        ("hlo", " dot("),
        ("optimized_hlo", "ENTRY"),
    ],
)
def test_the_ir_of_each_stage(backend, stage, sign):
    """Whether XLA runs the segments or not; what the program launches stays as it was."""
    step = run_both(reading, [(X,)] * 4, jit_compile=backend)
    before, names = step.stats(), [s.backend for s in step.segments()]
    assert names == ["xla" if backend else "graph"] * 2
    text = step.ir(stage)
    assert sign in text
    assert text.count("// segment ") == 2
    assert text.stage == stage
    assert repr(text).startswith(f"<{stage}, ")
    assert isinstance(step.segments()[0].ir(stage), str)
    assert step.stats() == before
    eager = reading(lambda f: f)
    expected = [eager(X) for _ in range(5)][-1]
    np.testing.assert_allclose(step(X), expected, rtol=1e-5)
    assert [s.backend for s in step.segments()] == names


@needs_stablehlo
def test_random_numbers_and_gradients_have_an_ir():
    """Seeds are an argument of their own; a whole Keras step is one program."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)

    @coexec.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x + tf.random.normal([3, 4]), training=True) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    for _ in range(4):
        step(X)
    assert step.ir().count("func.func public ") + step.ir().count("func.func @") == 1
    assert step.cost().flops > 2 * 3 * (4 * 4 + 4) * 3


@pytest.mark.parametrize("stage", ["StableHLO", "", None, 3, "optimized_hlo_dot"])
def test_a_stage_that_there_is_not(stage):
    step = coexec.function(tf.exp)
    step(X)
    with pytest.raises(ValueError, match=r"ir\(\) takes one of 'stablehlo', 'hlo', 'optimized_hlo', not "):
        step.ir(stage)


def test_before_a_call_was_followed():
    """There are no segments, which cost nothing, and whose IR is refused with what to do; as behind `clear`."""
    step = coexec.function(reading(lambda f: f), name="step")
    for calls in (0, 1):
        assert step.stats().calls == calls
        assert step.segments() == ()
        assert str(step.segments()) == "step: no segments, as no call has been followed yet"
        assert step.cost().operations == 0
        with pytest.raises(ValueError, match="step has no segments: no call has been followed yet; call it twice"):
            step.ir()
        step(X)
    assert len(step.segments()) == 2
    step.clear()
    assert step.segments() == ()


@needs_stablehlo
def test_what_xla_refuses_has_no_ir():
    """The reason is in the message; beside a segment that it takes, in a comment."""

    @coexec.function
    def step(x, both):
        if both:
            x = x + float(tf.reduce_sum(x))
        return tf.linalg.inv(x[:3, :3] + 100.0 * tf.eye(3))

    def refused():
        for _ in range(3):
            step(X, False)
        return step.ir()

    with pytest.raises(NotImplementedError, match=r"there is no IR of .*step: XLA does not compile this segment: "):
        refused()
    for _ in range(3):
        step(X, True)
    text = step.ir()
    assert "stablehlo.reduce" in text
    assert "// XLA does not compile this segment: MatrixInverse at " in text


def test_costs_follow_from_shapes():
    """Two for a multiply-add, one for each element of the others; what moves data costs no arithmetic."""
    kernel, image = tf.ones([3, 3, 2, 8]), tf.ones([1, 10, 10, 2])

    @coexec.function(jit_compile=False)
    def step(a, b):
        product = tf.matmul(a, b, transpose_a=True)  # 4x3 by 3x5
        batches = tf.linalg.matmul(tf.stack([product, product]), product, adjoint_b=True)  # 2 of 4x5 by 5x4
        ein = tf.einsum("ij,kj->ik", product, product)  # 4x5 by 5x4
        convolved = tf.nn.conv2d(image, kernel, 1, "VALID")  # 8x8x8, each of 3x3x2
        return tf.exp(batches), tf.reduce_sum(ein), tf.reshape(convolved, [-1])

    for _ in range(3):
        step(X, tf.ones([3, 5]))
    cost = step.cost()
    found = {op: flops for op, _, flops in cost.kinds}
    products = 2 * 4 * 5 * 3 + 2 * 2 * 4 * 4 * 5 + 2 * 4 * 4 * 5
    assert sum(found[op] for op in ("MatMul", "BatchMatMulV2", "Einsum") if op in found) == products
    assert found["Conv2D"] == 2 * 8 * 8 * 8 * 3 * 3 * 2
    assert (found["Exp"], found["Sum"], found["Reshape"], found["Pack"]) == (32, 16, 0, 0)
    assert cost.flops == sum(found.values())
    came = 4 * (3 * 4 + 3 * 5 + 10 * 10 * 2 + 3 * 3 * 2 * 8)
    gone = 4 * (32 + 1 + 512)
    assert cost.bytes_transferred == came + gone
    assert came + gone <= cost.memory <= cost.bytes_accessed
    assert str(cost).splitlines()[1].split() == ["arithmetic", "19.1", "kflop"]
    json.dumps(cost.as_dict())


def test_memory_is_what_is_alive_at_once():
    """A chain of operations needs two results at a time, however long it is."""

    @coexec.function
    def chain(x, count):
        for _ in range(count):
            x = tf.exp(-x)
        return x

    memory = []
    for count in (4, 40):
        for _ in range(3):
            chain(tf.ones([100]), count)
        memory.append(chain.cost().memory)
    assert memory == [3 * 400] * 2


def test_the_last_call_that_diverged_shows_what_it_launched():
    step = run_both(reading, [(X,)] * 3 + [(-X,)], jit_compile=False)
    assert step.stats().diverged == 1
    assert len(step.segments()) == 1


def test_the_segments_of_calls_on_other_threads_are_not_mixed():
    """Those of the call that began last."""
    from tests.coexec import in_threads

    step = reading(coexec.function)
    step(X)
    in_threads(*[lambda: [step(X) for _ in range(10)]] * 2)
    with testing.always_follow():
        step(X)
    assert len(step.segments()) == 2
