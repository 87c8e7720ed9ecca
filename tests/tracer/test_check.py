"""Graphs of real calls are well-formed; for each rule of `check`, one that breaks it and the error's text."""

import numpy as np
import pytest
import tensorflow as tf

from tests.tracer import FUNCTIONS, graph_of
from tests.tracer.breaking import Breaks, fold, node_named, rekeyed, variant_of
from tracer.check import check
from tracer.graph import Node, Variant
from tracer.location import Location
from tracer.spec import Spec, _interned, intern_spec

FLOAT = tf.float32.as_datatype_enum
INT = tf.int32.as_datatype_enum


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_graphs_of_calls_are_well_formed(make):
    check(graph_of(make))


# Each breaks one rule of a well-formed graph of three nodes in a row, followed: MatMul, Relu, AddV2.

breaks = Breaks()


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


@breaks("what is no registered operation runs on its own, or is a function that segments call")
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
    graph.nodes[1].fed |= {2}


@breaks("its fed inputs are among its inputs", "changing_items")
def a_fed_item_beyond_the_inputs(graph):
    graph.nodes[1].fed |= {(1, 0)}


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


@breaks("the known value of output 0 is an array")
def a_known_value_that_is_a_number(graph):
    fold(graph.nodes[2], intern_spec(INT, ()), 3)


@breaks("output 0 is known, so it is an int32, int64 or bool")
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


@pytest.mark.parametrize(("harm", "message", "name"), breaks.values(), ids=breaks)
def test_a_broken_rule_is_named(harm, message, name):
    breaks.try_out(harm, message, name)
