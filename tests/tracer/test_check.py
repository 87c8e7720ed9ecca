"""Graphs of real calls are well-formed; for each rule of `check`, one that breaks it and the error's text."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.tracer import FUNCTIONS, graph_of
from tracer.check import check
from tracer.errors import MalformedGraph
from tracer.graph import CONST, Node, Step, Variant
from tracer.lazy import Output
from tracer.location import Location
from tracer.op import Const
from tracer.spec import Spec, _interned, intern_spec

FLOAT = tf.float32.as_datatype_enum
INT = tf.int32.as_datatype_enum


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_graphs_of_calls_are_well_formed(make):
    check(graph_of(make))


def steps_of(node):
    """All steps behind a node, down to the next cuts."""
    ahead, found = list(node.after.next), []
    while ahead:
        found.append(ahead.pop())
        ahead += found[-1].next
    return found


def test_the_graphs_have_steps_of_every_kind():
    # The test above would pass on graphs without steps.
    steps = [s for make in FUNCTIONS.values() for n in graph_of(make).nodes if n.after for s in steps_of(n)]
    assert any(s.host for s in steps)
    assert any(s.lists for s in steps)
    assert any(slot >= 0 for s in steps for slot in s.slots)
    assert any(CONST < slot < 0 for s in steps for slot in s.slots)
    assert any(CONST in s.slots for s in steps)
    assert any(len(s.next) > 1 for s in steps)


# Each breaks one rule of a well-formed graph of three nodes in a row, followed: MatMul, Relu, AddV2.

BREAKS = {}


def breaks(message, name="straight_line"):
    """Registers a function that breaks a rule, with the message that says so."""

    def register(function):
        BREAKS[function.__name__] = (function, message, name)
        return function

    return register


@pytest.mark.parametrize(("harm", "message", "name"), BREAKS.values(), ids=BREAKS)
def test_a_broken_rule_is_named(harm, message, name):
    graph = graph_of(FUNCTIONS[name])
    check(graph)
    harm(graph)
    with pytest.raises(MalformedGraph, match=re.escape(message)):
        check(graph)


def variant_of(node):
    return next(iter(node.variants.values()))


def rekeyed(node, key):
    """Gives a node's only variant another key."""
    variant = variant_of(node)
    node.variants.clear()
    variant.key = key
    node.variants[key] = variant


def step_of(graph, number):
    """The first step found of a node."""
    return next(s for n in graph.nodes if n.after for s in steps_of(n) if s.node is graph.nodes[number])


def node_named(graph, op):
    return next(n for n in graph.nodes if n.op == op)


@breaks("node 7 (Relu, ")
def a_number_names_the_node(graph):
    graph.nodes[2].number = 7


@breaks("its number is its position, which is 2")
def numbers(graph):
    graph.nodes[2].number = 7


@breaks("node 0 (Entry, outside of user code): the entry is the first node")
def another_entry(graph):
    graph.entry = Node(0, "Entry", "entry", (), Location((), 0))


@breaks("node 0 (Entry, outside of user code): nothing comes before the entry")
def a_way_back_to_the_entry(graph):
    graph.link(graph.nodes[3], graph.entry)


@breaks("node 0 (Entry, outside of user code): the entry is no operation")
def an_entry_with_a_variant(graph):
    graph.entry.variants[()] = Variant((), (), None)


@breaks("its edges lead to nodes of the graph, which 9 is not")
def an_edge_out_of_the_graph(graph):
    graph.link(graph.nodes[3], Node(9, "Relu", "fast", (), Location((), 0)))


@breaks("its edges lead to nodes of the graph, which 2 is not")
def an_edge_to_a_copy(graph):
    graph.nodes[1].successors[2] = Node(2, "Relu", "fast", (), Location((), 0))


@breaks("it precedes its successors: 2 does not know of it")
def an_edge_forth_only(graph):
    del graph.nodes[2].predecessors[1]


@breaks("it succeeds its predecessors: 1 does not know of it")
def an_edge_back_only(graph):
    del graph.nodes[1].successors[2]


@breaks("node 0 (Entry, outside of user code): exits are nodes of the graph, which 4 is not")
def an_exit_out_of_the_graph(graph):
    graph.exits.add(4)


@breaks("a path leads to it from the entry")
def an_island(graph):
    del graph.nodes[1].successors[2]
    del graph.nodes[2].predecessors[1]


@breaks("the index finds it by its type, attributes and location")
def an_attribute_that_changed(graph):
    graph.nodes[1].attrs = ("transpose_a", True)


@breaks("the index holds each node but the entry")
def an_index_of_more(graph):
    graph.index["another"] = graph.nodes[1]


@breaks("slow operations are those issued by `execute`, unlike Relu at outside of user code")
def a_slow_operation_without_a_node(graph):
    graph.slow.add(("Relu", Location((), 0)))


@breaks("slow operations are those issued by `execute`, unlike EagerPyFunc", "host_operations")
def a_node_that_is_not_slow(graph):
    node = node_named(graph, "EagerPyFunc")
    del graph.index[next(k for k, n in graph.index.items() if n is node)]
    node.entry = "execute"
    graph.index["EagerPyFunc", "execute", node.location] = node


@breaks("it was issued by 'fast' or 'execute'")
def another_entry_point(graph):
    node = graph.nodes[1]
    key = next(k for k, n in graph.index.items() if n is node)
    node.entry = "slowly"
    graph.index[(key[0], "slowly", *key[2:])] = graph.index.pop(key)


@breaks("its iteration is not negative")
def an_iteration_before_the_first(graph):
    node = graph.nodes[1]
    key = next(k for k, n in graph.index.items() if n is node)
    node.location = Location(node.location.frames, -1)
    graph.index[(*key[:3], node.location)] = graph.index.pop(key)


@breaks("it has a variant, or runs on its own")
def a_node_without_variants(graph):
    graph.nodes[1].variants.clear()


@breaks("what is no registered operation runs on its own")
def a_function_in_a_segment(graph):
    node = graph.nodes[1]
    key = next(k for k, n in graph.index.items() if n is node)
    node.op = "__inference_f"
    del graph.index[key]
    graph.index[node.op, node.entry, node.location] = node


@breaks("it knows the sources of its 2 inputs")
def a_source_too_few(graph):
    graph.nodes[1].inputs.pop()


@breaks("its fed inputs are among its inputs")
def a_feed_beyond_the_inputs(graph):
    graph.nodes[1].fed.add(2)


@breaks("its fed inputs are among its inputs", "changing_items")
def a_fed_item_beyond_the_inputs(graph):
    graph.nodes[1].fed.add((1, 0))


@breaks("a variant is kept under its own key")
def a_key_that_differs(graph):
    variant_of(graph.nodes[1]).key = ()


@breaks("a variant's key has 2 parts, one per input")
def a_key_that_is_too_short(graph):
    rekeyed(graph.nodes[1], variant_of(graph.nodes[1]).key[:1])


@breaks("input 0 of a variant's key is no list")
def a_list_where_none_is_due(graph):
    rekeyed(graph.nodes[2], (variant_of(graph.nodes[2]).key,))


@breaks("input 0 of a variant's key is a list", "lists")
def no_list_where_one_is_due(graph):
    node = node_named(graph, "Pack")
    rekeyed(node, variant_of(node).key[0][:1])


@breaks("input 0 of a variant's key is made of specs and constants, not 3")
def a_key_of_numbers(graph):
    rekeyed(graph.nodes[2], (3,))


@breaks("its specs are interned: float32[2,4]")
def a_spec_of_its_own(graph):
    rekeyed(graph.nodes[2], (Spec(FLOAT, (2, 4), None),))


@breaks("its specs have exact shapes: ")
def an_open_shape(graph):
    spec = object.__new__(Spec)  # TensorFlow makes no such shape
    spec.enum, spec.shape, spec.handle, spec.dtype = FLOAT, (-1, 4), None, tf.float32
    _interned[FLOAT, (-1, 4), None] = spec
    rekeyed(graph.nodes[2], (spec,))


@breaks("output 0 refers back to it")
def an_output_of_another_node(graph):
    variant_of(graph.nodes[2]).outputs[0].node = graph.nodes[1]


def fold(node, spec, value, count=1):
    outputs = tuple(Output(spec, Const(value) if n == 0 else None, node) for n in range(count))
    variant = variant_of(node)
    variant.outputs, variant.template = outputs, -1 if count == 1 else list(range(count))


@breaks("the known value of output 0 is an array")
def a_known_value_that_is_a_number(graph):
    fold(graph.nodes[2], intern_spec(INT, ()), 3)


@breaks("output 0 is known, so it is an int32 or int64")
def a_known_value_that_is_a_float(graph):
    fold(graph.nodes[2], intern_spec(FLOAT, ()), np.array(3.0, np.float32))


@breaks("the known value of output 0 has the dtype and shape of its spec, int32[2]")
def a_known_value_of_another_shape(graph):
    fold(graph.nodes[2], intern_spec(INT, (2,)), np.zeros(3, np.int32))


@breaks("the known value of output 0 has the dtype and shape of its spec, int32[2]")
def a_known_value_of_another_dtype(graph):
    fold(graph.nodes[2], intern_spec(INT, (2,)), np.zeros(2, np.int64))


@breaks("the values of all outputs of a variant are known, or of none")
def a_value_that_is_known_of_one_output_only(graph):
    fold(graph.nodes[2], intern_spec(INT, ()), np.array(3, np.int32), count=2)


@breaks("the template [0, 0] names each of 2 outputs once, in order", "lists")
def a_template_that_repeats(graph):
    variant_of(node_named(graph, "TopKV2")).template = [0, 0]


@breaks("the template None names each of 1 outputs once, in order")
def a_template_that_forgets(graph):
    variant_of(graph.nodes[2]).template = None


@breaks("a variant has as many outputs as Relu, which are 1")
def an_output_too_many(graph):
    variant = variant_of(graph.nodes[2])
    variant.outputs, variant.template = variant.outputs * 2, [0, 1]


@breaks("what `execute` returns is a list")
def a_tensor_alone_from_execute(graph):
    node = graph.nodes[2]
    key = next(k for k, n in graph.index.items() if n is node)
    node.entry = "execute"
    graph.index[(key[0], "execute", *key[2:])] = graph.index.pop(key)
    graph.slow.add((node.op, node.location))


# Steps.


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


@breaks("it has a slot for each input")
def another_arity(graph):
    step_of(graph, 3).arity = 1


@breaks("it runs on its own because its node does")
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
