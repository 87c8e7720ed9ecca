"""What prints reads back: graphs of real calls, values to the last bit; garbled text is named by its line."""

import re

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.tracer import FUNCTIONS, graph_of
from tracer.check import check
from tracer.errors import ParseError
from tracer.graph import TraceGraph, Variant, node_key
from tracer.lazy import Output
from tracer.literals import Opaque
from tracer.location import Frame, Location
from tracer.op import Const, freeze
from tracer.show import parse, show
from tracer.spec import intern_spec

PLACE = Location((Frame("a.py", "f", 3, 10),), 0)


def parts(graph):
    """What a graph consists of, in a form that compares."""
    return {
        "name": graph.name,
        "exits": graph.exits,
        "slow": graph.slow,
        "index": {key: node.number for key, node in graph.index.items()},
        "nodes": [
            (
                (
                    n.number,
                    n.op,
                    n.entry,
                    freeze(n.attrs),
                    n.location,
                    n.name,
                    n.host,
                    n.guarded,
                    n.fed,
                    n.inputs,
                ),
                list(n.successors),
                set(n.predecessors),
                [
                    (key, [(o.spec, o.const, o.node.number) for o in v.outputs], v.template)
                    for key, v in n.variants.items()
                ],
            )
            for n in graph.nodes
        ],
    }


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_printed_graph_reads_back(make):
    graph = graph_of(make)
    text = str(graph)
    back = parse(text)
    assert show(back) == text
    assert parts(back) == parts(graph)
    check(back)


def test_the_functions_have_what_is_printed():
    # The test above would pass on graphs that lack these.
    texts = {name: str(graph_of(make)) for name, make in FUNCTIONS.items()}
    assert re.search(r"  next \d+, \d+", texts["branches"])
    assert ", iteration 2" in texts["loops"]
    assert "resource<float32[2]>[]" in texts["variables"]
    assert "(float32[2], float32[2], float32[2])" in texts["lists"]
    assert " as [0, 1]" in texts["lists"]
    assert "  host 'strings cannot be compiled'" in texts["host_operations"]
    assert texts["shapes"].count("variant float32[") > 3
    assert "=array('int32', [2], " in texts["shapes"]
    assert "  fed 1\n" in texts["changing_numbers"]
    assert "  fed 0.1\n" in texts["changing_items"]
    assert "  guarded" in texts["guarded"]
    assert re.search(r"^node 0: Entry\(\) entry\n  at outside\nexits 0\nend$", texts["no_operations"], re.M)


SOURCE = """\
import tensorflow as tf

def step(x, w):
    return tf.nn.relu(x @ w) + 1.0
"""

PRINTED = """\
trace graph 'step'
files:
  f0 = 'golden.py'
node 0: Entry() entry
  at outside
  next 1
node 1: MatMul(transpose_a=False, transpose_b=False, grad_a=False, grad_b=False) fast
  at f0:4 in step +N
  inputs {feed}, {feed}
  variant float32[2,3], float32[3,4] -> float32[2,4]
  next 2
node 2: Relu() fast
  at f0:4 in step +N
  inputs {MatMul:0}
  variant float32[2,4] -> float32[2,4]
  next 3
node 3: AddV2() fast
  at f0:4 in step +N
  inputs {Relu:0}, {constant}
  variant float32[2,4], float32[] -> float32[2,4]
exits 3
end"""


def test_the_printed_form():
    names = {}
    exec(compile(SOURCE, "golden.py", "exec"), names)
    step = coexec.function(names["step"])
    for _ in range(2):
        step(tf.ones([2, 3]), tf.ones([3, 4]))
    assert step.stats().followed == 1
    # Offsets differ from Python to Python.
    assert re.sub(r" \+\d+$", " +N", str(step.trace_graph), flags=re.M) == PRINTED


def graph_with(value=None, attrs=None):
    graph = TraceGraph("made by hand")
    node = graph.add("Relu", "fast", ("a", value) if attrs is None else attrs, PLACE)
    node.host = "it was made by hand"
    graph.link(graph.entry, node)
    graph.exits.add(1)
    return graph


VALUES = [
    None, True, False, 0, 1, -7, 2**70, 0.0, -0.0, 1.5, 1e300, 1e-7, float("inf"), float("-inf"),
    float("nan"), complex(-0.0, float("nan")), "", "it's", 'say "x"',
    "a\nb\r\x85\u2028\ud800\U0001f600 \\ end", b"", b"\x00\xff'\"\n", [], (), (1,),
    [1, [2.0, (True, None)], "x"], tf.float32, tf.bfloat16, tf.string, tf.resource, tf.TensorShape(None),
    tf.TensorShape([]), tf.TensorShape([2, None]), np.float32(0.1), np.float64(-0.0), np.bool_(True),
    np.int64(3), np.longlong(3), np.str_("x"), np.bytes_(b"x"), np.complex64(1 - 2j), np.float16(np.nan),
    np.array(3), np.array([]), np.zeros([2, 0, 3], np.int8), np.arange(6).reshape(2, 3),
    np.arange(6).reshape(2, 3).T, np.array([0.0, -0.0, np.nan]),
    np.array([0x7FC00001], np.uint32).view(np.float32), np.array([1], ">i4"), np.array([True, False]),
    np.array([b"a", "b", None], object), np.array(b"a", object), np.array(["a", "bcd"]),
    np.array([1.5], ml_dtypes.bfloat16), np.array([1.5], ml_dtypes.float8_e4m3fn),
    np.array(["2020-01-01"], "datetime64[D]"), np.array([1, 2], "timedelta64[ns]"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{v!r}"[:50])
def test_a_value_reads_back_as_it_was(value):
    graph = graph_with(value)
    back = parse(show(graph))
    assert freeze(back.nodes[1].attrs) == freeze(graph.nodes[1].attrs)
    assert show(back) == show(graph)


@pytest.mark.parametrize("attrs", [("a",), (1, 2), ("not a name", 2), (), ("T", 1, "T", 2)], ids=repr)
def test_attributes_that_are_no_pairs_read_back(attrs):
    back = parse(show(graph_with(attrs=attrs)))
    assert back.nodes[1].attrs == attrs


class Tagged(np.ndarray):
    """An array of the user's own type."""


@pytest.mark.parametrize("value", [len, object(), [1, print], np.zeros(2).view(Tagged), np.zeros(1, "i4,f8")], ids=type)
def test_what_text_cannot_hold_prints_the_same_again(value):
    text = show(graph_with(value))
    assert "opaque(" in text
    back = parse(text)
    assert show(back) == text
    held = back.nodes[1].attrs[1]
    assert isinstance(held[1] if isinstance(held, list) else held, Opaque)


def test_constants_of_a_type_of_the_user_stay_apart_and_print_again():
    graph = graph_with(attrs=())
    node = graph.nodes[1]
    node.inputs = [{"constant"}]
    spec = intern_spec(tf.float32.as_datatype_enum, (2,))
    for number in range(2):
        key = (Const(np.full(2, number).view(Tagged)),)
        node.variants[key] = Variant(key, (Output(spec, None, node),), -1)
    text = show(graph)
    assert show(parse(text)) == text
    assert len(parse(text).nodes[1].variants) == 2


@pytest.mark.parametrize(
    "name",
    ["float32", "int32", "string", "int64", "bool", "bfloat16", "resource", "variant", "float8_e5m2", "int4"],
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize("handle", [None, (), ((1, (2, 3)),), ((3, None), (7, ()), (1, (-1,)))])
def test_a_spec_reads_back_as_the_same_object(name, shape, handle):
    graph = graph_with(attrs=())
    node = graph.nodes[1]
    spec = intern_spec(tf.as_dtype(name).as_datatype_enum, shape, handle)
    node.variants[spec, (spec, spec), ()] = Variant((spec, (spec, spec), ()), (), None)
    (key,) = parse(show(graph)).nodes[1].variants
    assert key[0] is spec
    assert key[1] == (spec, spec)
    assert key[2] == ()


def test_odd_names_read_back():
    frames = (Frame("C:\\a b\n.py", "<lambda>", 3, 10), Frame("<ipython-input-1>", "f.<locals>.ü g", 0, 2))
    graph = TraceGraph("it's\n'odd'")
    node = graph.add("a function, with: spaces", "execute", (), Location(frames, 3))
    graph.link(graph.entry, node)
    node.host, node.name = "'because'", "a/b"
    node.inputs = [set(), {"x y", "MatMul:0"}]
    back = parse(show(graph))
    assert parts(back) == parts(graph)
    assert back.index[node_key(node.op, "execute", (), node.location)] is back.nodes[1]


# Text that is no graph.

TEXT = show(graph_of(FUNCTIONS["lists"]))


@pytest.mark.parametrize("line", range(0, TEXT.count("\n"), 7))
def test_a_text_that_ends_early_is_refused_at_its_end(line):
    cut = "\n".join(TEXT.split("\n")[: line + 1])
    with pytest.raises(ParseError, match=f"line {line + 2}, column 1: expected .* in the end of the text"):
        parse(cut)


@pytest.mark.parametrize("at", range(5, len(TEXT), len(TEXT) // 60))
def test_garbled_text_gives_a_parse_error_or_another_graph(at):
    for text in (
        TEXT[:at] + "\u00a7" + TEXT[at + 1 :],
        TEXT[:at] + TEXT[at + 1 :],
        TEXT[:at] + "[" * 4 + TEXT[at:],
    ):
        try:
            back = parse(text)
        except ParseError as error:
            number = int(re.match(r"line (\d+), column \d+: expected .+ in ", str(error))[1])
            assert number - 1 >= TEXT[:at].count("\n"), "what comes before is as it was"
        else:
            assert show(back) != TEXT or text == TEXT
            assert show(parse(show(back))) == show(back)


GOOD = """\
trace graph 'g'
files:
  f0 = 'a.py'
node 0: Entry() entry
  at outside
  next 1
node 1: Relu(a=1) fast
  at f0:3 in f +10
  inputs {feed}
  variant float32[2] -> float32[2]
exits 1
end"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trace graph", "graph", "line 1, column 1: expected 'trace graph ' in \"graph 'g'\""),
        ("'g'", "g", "line 1, column 13: expected a string in 'trace graph g'"),
        ("files:", "file:", "line 2, column 1: expected 'files:' in 'file:'"),
        ("= 'a.py'", "'a.py'", "line 3, column 5: expected ' = ' in \"  f0 'a.py'\""),
        ("node 1", "node 2", "line 7, column 1: expected 'node 1: ' in 'node 2: Relu(a=1) fast'"),
        ("node 0", "nod", "line 4, column 1: expected 'node 0' in 'nod: Entry() entry'"),
        ("(a=1)", "(a=x)", "line 7, column 16: expected a value in 'node 1: Relu(a=x) fast'"),
        ("(a=1)", "(1=1)", "line 7, column 14: expected an attribute's name in 'node 1: Relu(1=1) fast'"),
        ("(a=1)", "(a=1", "line 7, column 17: expected ', ' in 'node 1: Relu(a=1 fast'"),
        ("a=1", "a='\\z'", "expected a string in"),
        ("a=1", "a='\\U99999999'", "expected a string in"),
        ("a=1", "a=array('float32', [3], [1.0])", "expected a dtype, a shape and values that fit them in"),
        ("a=1", "a=array('nothing', [], [1])", "expected a dtype, a shape and values that fit them in"),
        ("a=1", "a=array('int32', [1], [bits='0'])", "expected a dtype, a shape and values that fit them in"),
        ("a=1", "a=TensorShape([-1])", "expected None or a list of sizes in"),
        ("a=1", "a=tf.float33", "expected a dtype in"),
        ("a=1", "a=" + "[" * 9999, "expected fewer nested brackets in"),
        ("f0:3", "f1:3", "line 8, column 6: expected a short name from 'files:' in '  at f1:3 in f +10'"),
        (":3 in", ":x in", "line 8, column 9: expected a whole number in '  at f0:x in f +10'"),
        ("{feed}", "feed", "line 9, column 10: expected '{' in '  inputs feed'"),
        ("float32[2] ->", "float33[2] ->", "line 10, column 11: expected a dtype in"),
        ("-> float32[2]", "-> float32[?]", "line 10, column 25: expected a spec with a known shape in"),
        ("-> float32[2]", "-> float32[-2]", "line 10, column 25: expected a spec with a known shape in"),
        ("-> float32[2]", "", "line 10, column 21: expected ' -> ' in '  variant float32[2] '"),
        ("-> float32[2]", "-> float32[2] x", "line 10, column 35: expected the end of the line in"),
        (
            "  next 1",
            "  next 2",
            "line 6, column 9: expected numbers of nodes, which 2 is not, in '  next 2'",
        ),
        ("exits 1", "exits 2", "line 11, column 8: expected numbers of nodes in 'exits 2'"),
        ("exits 1", "leaves 1", "line 11, column 1: expected 'node 2' or 'exits' in 'leaves 1'"),
        ("end", "end\nnode", "line 13, column 1: expected nothing behind 'end' in 'node'"),
        ("exits 1", "node 2: Relu(a=1) fast\n  at f0:3 in f +10\nexits 1", "another place than node 1"),
        (
            "exits 1",
            "  variant float32[2] -> nothing\nexits 1",
            "line 11, column 32: expected inputs that no variant",
        ),
    ],
    ids=lambda text: str(text)[:40],
)
def test_the_message_names_line_text_and_expectation(old, new, message):
    assert show(parse(GOOD)) == GOOD
    assert old in GOOD
    with pytest.raises(ParseError, match=re.escape(message)):
        parse(GOOD.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "\n", "end"])
def test_an_empty_text_is_refused(text):
    with pytest.raises(ParseError, match="line 1, column 1: expected 'trace graph '"):
        parse(text)
