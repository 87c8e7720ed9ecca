"""Breaking graphs: takes a well-formed graph, harms it, and expects `check` to say which rule that broke."""

import re

import pytest

from tests.tracer import FUNCTIONS, graph_of
from tracer.check import check
from tracer.errors import MalformedGraph
from tracer.lazy import Output
from tracer.op import Const


class Breaks(dict):
    """Functions that break a rule, by name; `@breaks(message, graph)` adds one."""

    def __call__(self, message, name="straight_line"):
        def register(function):
            assert function.__name__ not in self
            self[function.__name__] = (function, message, name)
            return function

        return register

    @staticmethod
    def try_out(harm, message, name):
        """Harms a fresh graph, which was well-formed, and compares the error's text."""
        graph = graph_of(FUNCTIONS[name])
        check(graph)
        harm(graph)
        with pytest.raises(MalformedGraph, match=re.escape(message)):
            check(graph)


def steps_of(node):
    """All steps behind a node, down to the next cuts."""
    ahead, found = list(node.after.next), []
    while ahead:
        found.append(ahead.pop())
        ahead += found[-1].next
    return found


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


def fold(node, spec, value, count=1):
    outputs = tuple(Output(spec, Const(value) if n == 0 else None, node) for n in range(count))
    variant = variant_of(node)
    variant.outputs, variant.template = outputs, -1 if count == 1 else list(range(count))
