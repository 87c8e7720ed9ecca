"""Steps under the nodes: for each rule of `check` about them, one that breaks it and the error's text."""

import numpy as np
import pytest
import tensorflow as tf

from tests.tracer import FUNCTIONS, graph_of
from tests.tracer.breaking import Breaks, fold, node_named, step_of, steps_of, variant_of
from tracer.graph import CONST, Step, Variant
from tracer.lazy import Output
from tracer.op import Const
from tracer.spec import intern_spec

FLOAT = tf.float32.as_datatype_enum
INT = tf.int32.as_datatype_enum

breaks = Breaks()


def test_the_graphs_have_steps_of_every_kind():
    # That graphs of calls are well-formed would say nothing of steps if they had none.
    steps = [s for make in FUNCTIONS.values() for n in graph_of(make).nodes if n.after for s in steps_of(n)]
    assert any(s.host for s in steps)
    assert any(s.lists for s in steps)
    assert any(slot >= 0 for s in steps for slot in s.slots)
    assert any(CONST < slot < 0 for s in steps for slot in s.slots)
    assert any(CONST in s.slots for s in steps)
    assert any(len(s.next) > 1 for s in steps)


# Each breaks one rule of a well-formed graph of three nodes in a row, followed: MatMul, Relu, AddV2.


@breaks("node 0 (Entry, outside of user code): the steps behind it hang on a root of its own")
def a_root_of_another_node(graph):
    graph.entry.after.node = graph.nodes[1]


@breaks("a segment begins with nothing")
def a_root_with_a_tensor(graph):
    graph.entry.after.end = 1


@breaks("step of node 2 (Relu) in the segments behind node 0: ")
def the_place_of_a_step(graph):
    step_of(graph, 2).first = 5


@breaks("it refers back to the step before it")
def a_step_of_other_parents(graph):
    step_of(graph, 2).parent = graph.entry.after


@breaks("a segment ends at an operation that runs on its own", "host_operations")
def a_step_behind_a_cut(graph):
    step = next(s for n in graph.nodes if n.after for s in steps_of(n) if s.host)
    step.early = False
    step.next.append(Step(step, "Relu", graph.nodes[1], None, (), {}, {}, ()))


@breaks("the step tried first is one of those behind it")
def a_hot_step_that_is_gone(graph):
    graph.entry.after.next.clear()


@breaks("its node is one of the graph")
def a_step_of_another_graph(graph):
    step_of(graph, 2).node = graph_of(FUNCTIONS["straight_line"]).nodes[2]


@breaks("it has its node's type and attributes")
def a_step_of_another_type(graph):
    step_of(graph, 2).op = "Tanh"


@breaks("it has its node's type and attributes")
def a_step_of_other_attributes(graph):
    step_of(graph, 1).attrs = ()


@breaks("an edge leads to it from node 1")
def a_step_without_an_edge(graph):
    graph.link(graph.entry, graph.nodes[2])
    del graph.nodes[1].successors[2]
    del graph.nodes[2].predecessors[1]


@breaks("its tensors are numbered from 1")
def tensors_numbered_anew(graph):
    step_of(graph, 2).first = 0


@breaks("each output is a tensor")
def a_tensor_too_many(graph):
    step_of(graph, 3).end += 1


@breaks("the segment has 2 feeds up to it")
def a_feed_too_many(graph):
    step_of(graph, 3).external += 1


@breaks("the segment has 0 draws up to it")
def a_draw_too_many(graph):
    step_of(graph, 3).draws += 1


@breaks("it has a slot for each input")
def another_arity(graph):
    step_of(graph, 3).arity = 1


@breaks("what runs on its own has no wiring")
def a_step_alone(graph):
    step_of(graph, 3).host = True


@breaks("what runs on its own has no wiring", "host_operations")
def a_wired_step_alone(graph):
    step = next(s for n in graph.nodes if n.after for s in steps_of(n) if s.host)
    step.slots, step.arity = (CONST,), 1


@breaks("its variant is one of its node")
def a_forgotten_variant(graph):
    node = graph.nodes[2]
    variant = variant_of(node)
    node.variants[variant.key] = Variant(variant.key, variant.outputs, variant.template)


@breaks("its outputs are its variant's")
def outputs_of_its_own(graph):
    step = step_of(graph, 2)
    step.outputs = (Output(step.outputs[0].spec, None, step.node),)


@breaks("it returns one tensor if its variant does")
def a_step_of_several_tensors(graph):
    step_of(graph, 2).single = False


@breaks("it has a slot for each of 1 inputs")
def a_slot_too_many(graph):
    step = step_of(graph, 2)
    step.slots, step.arity = (0, 0), 2


@breaks("its list slots are those with a wiring of their own", "lists")
def a_list_without_wiring(graph):
    step = next(s for n in graph.nodes if n.after for s in steps_of(n) if s.lists)
    step.lists = {}


@breaks("it has a slot for each item of input 0", "lists")
def a_list_with_a_slot_too_few(graph):
    step = next(s for n in graph.nodes if n.after for s in steps_of(n) if 0 in s.lists)
    slots, consts = step.lists[0]
    step.lists[0] = (slots[1:], consts)


@breaks("it uses the feeds that it adds")
def a_feed_that_nobody_uses(graph):
    step = step_of(graph, 3)
    step.specs, step.external = (intern_spec(FLOAT, ()),), step.external + 1


@breaks("its constant slots are those with a constant")
def a_constant_that_is_missing(graph):
    step_of(graph, 3).consts = {}


@breaks("input 0 is an earlier tensor, which 1 is not")
def a_tensor_of_its_own(graph):
    step_of(graph, 2).slots = (1,)


@breaks("input 0 is a tensor that is computed")
def a_tensor_that_is_known(graph):
    fold(graph.nodes[1], intern_spec(INT, ()), np.array(3, np.int32))
    step_of(graph, 1).outputs = variant_of(graph.nodes[1]).outputs


@breaks("input 0 is a tensor of the spec float32[2,4]")
def a_tensor_of_another_spec(graph):
    variant_of(graph.nodes[1]).outputs[0].spec = intern_spec(FLOAT, (4, 2))


@breaks("input 1 is a feed of the segment, which 2 is not")
def a_feed_that_is_not_there(graph):
    step_of(graph, 1).slots = (-1, -3)


@breaks("input 0 is a feed of the spec float32[2,3]")
def a_feed_of_another_spec(graph):
    step_of(graph, 1).slots = (-2, -1)


@breaks("input 1 is its variant's constant, Const(array([2, 0], dtype=int32))", "shapes")
def a_constant_of_another_value(graph):
    node = node_named(graph, "Reshape")
    step = next(s for n in graph.nodes if n.after for s in steps_of(n) if s.node is node)
    del node.variants[step.variant.key]
    step.variant.key = (step.variant.key[0], Const(np.array([2, 0], np.int32)))
    node.variants[step.variant.key] = step.variant


@pytest.mark.parametrize(("harm", "message", "name"), breaks.values(), ids=breaks)
def test_a_broken_rule_is_named(harm, message, name, exact_sizes):
    breaks.try_out(harm, message, name)
