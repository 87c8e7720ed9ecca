"""The folded graph: each operation in one block, in the order of the program, and few boxes however many operations."""

import keras
import pytest
import tensorflow as tf

import coexec
from coexec.reporting.graph_blocks import blocks_of, drawn, folds
from tests.coexec import run_both
from tracer.graph import TraceGraph
from tracer.location import Frame, Location

X = tf.ones([3, 4])


def assert_whole(graph, blocks):
    """Every node is in one block, and edges lead on, but for those of loops."""
    numbers = [node.number for block in blocks for node in block.nodes]
    assert sorted(numbers) == [node.number for node in graph.nodes[1:]]
    of = {node.number: n for n, block in enumerate(blocks) for node in block.nodes}
    expected = {(of[node.number], of[after]) for node in graph.nodes[1:] for after in node.successors}
    found = {(n, after) for n, block in enumerate(blocks) for after in block.after}
    assert found == {(one, other) for one, other in expected if one != other}
    folded = [number for fold in folds(blocks) for number in fold[1:]]
    assert len(folded) == len(set(folded))


def forking(decorated):
    @decorated
    def step(x, kind):
        y = tf.exp(x) * 2.0
        if kind:
            y = tf.square(y)
            y = tf.sin(y)
        else:
            y = tf.cos(y)
        return tf.reduce_sum(y)

    return step


def test_lines_are_blocks_and_branches_are_apart():
    step = run_both(forking, [(X, n % 2) for n in range(8)])
    graph = step.trace_graph
    blocks = blocks_of(graph, step._controller.ran)
    assert_whole(graph, blocks)
    assert [[node.op for node in block.nodes] for block in blocks] == [
        ["Exp", "Mul"], ["Square"], ["Sin"], ["Cos"], ["Sum"],
    ] or [[node.op for node in block.nodes] for block in blocks] == [
        ["Exp", "Mul"], ["Cos"], ["Square"], ["Sin"], ["Sum"],
    ]  # fmt: skip
    assert len(blocks[0].after) == 2
    assert blocks[-1].before == 2
    in_last = {node.op for block in blocks if block.segments for node in block.nodes}
    assert in_last == {"Exp", "Mul", "Square", "Sin", "Sum"}


def test_a_memoized_call_is_a_block():
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(2, activation="relu")

    @coexec.function
    def step(x):
        return tf.exp(layer(x))

    for _ in range(5):
        step(X)
    assert step.stats().regions
    blocks = blocks_of(step.trace_graph, step._controller.ran)
    assert_whole(step.trace_graph, blocks)
    (memoized,) = [block for block in blocks if block.memoized]
    assert memoized.memoized == f"Dense {layer.name!r}.__call__"
    assert "MatMul" in [node.op for node in memoized.nodes]
    assert "Exp" not in [node.op for node in memoized.nodes]


def test_the_iterations_of_a_loop_are_one_box():
    @coexec.function
    def step(x):
        for _ in range(50):
            x = tf.tanh(x)
            x = x * 0.5
        return tf.reduce_sum(x)

    for _ in range(3):
        step(X)
    shown = drawn(step.trace_graph, step._controller.ran)
    assert shown["nodes"] == 101
    ((period, *numbers),) = shown["folds"]
    assert period == 2
    assert len(numbers) == 100


def made_up(lines):
    """A graph of a chain of operations from these lines."""
    graph = TraceGraph("made_up")
    before = graph.entry
    for n, line in enumerate(lines):
        node = graph.add("Exp", "fast", (), Location((Frame("made_up.py", "step", line, n),), 0))
        graph.link(before, node)
        before = node
    return graph


def test_5000_operations_of_as_many_lines_are_few_boxes():
    graph = made_up(range(5000))
    blocks = blocks_of(graph, [])
    assert_whole(graph, blocks)
    assert len(blocks) == 5000
    folded = folds(blocks)
    assert {len(fold) - 1 for fold in folded} == {64, 5000 % 64}
    assert len(blocks) - sum(len(fold) - 1 for fold in folded) + len(folded) < 100


@pytest.mark.parametrize("period", [1, 3, 7])
def test_what_repeats_is_found_between_what_does_not(period):
    lines = [100, 101, *[k for _ in range(9) for k in range(period)], 200]
    if period == 1:
        lines = [100, 101, 0, 200]  # one block: it is one line
    blocks = blocks_of(made_up(lines), [])
    found = [(fold[0], len(fold) - 1) for fold in folds(blocks)]
    assert found == ([] if period == 1 else [(period, 9 * period)])


def test_a_loop_in_the_graph_leads_back():
    """As where operations of one place come again and again, and have become one node."""
    graph = made_up(range(4))
    graph.link(graph.nodes[3], graph.nodes[2])
    blocks = blocks_of(graph, [])
    assert_whole(graph, blocks)
    back = [(n, after) for n, block in enumerate(blocks) for after in block.after if after <= n]
    assert len(back) == 1
