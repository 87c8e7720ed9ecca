"""The source of running code: found where it is the code's own, and nowhere else."""

import ast
import linecache
import sys
import textwrap

import pytest

from tests.marks import needs_places
from tracer.source import function_of
from tracer.syntax import asks_identity, assigned_names, decision_at, line_of

pytestmark = needs_places


class Asked:
    """Notes what its truth decides."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.found = []

    def __bool__(self):
        frame = sys._getframe(1)
        self.found.append(decision_at(frame.f_code, frame.f_lasti, frame.f_globals))
        return self.answers.pop(0)


def made(source, name="function", file="<made up>"):
    """A function of a made-up file that linecache knows."""
    source = textwrap.dedent(source)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {}
    exec(compile(source, file, "exec"), names)
    return names[name]


def test_the_source_of_a_function():
    """Found by its code, decorated and nested ones too."""
    function = made("""
        def outer():
            def function(x):
                return x + 1
            return function
        function = outer()
    """)
    tree = function_of(function.__code__, function.__globals__)
    assert ast.unparse(tree) == "def function(x):\n    return x + 1"


def test_a_file_that_has_changed_is_no_source():
    """Nor is one that is gone, or holds other code at the same lines."""
    function = made("def function(x):\n    return x + 1\n", file="<changing>")
    made("def function(x):\n    return x + 2\n", file="<changing>")
    assert function_of(function.__code__, function.__globals__) is None
    del linecache.cache["<changing>"]
    assert function_of(function.__code__, function.__globals__) is None


def test_two_lambdas_on_one_line_are_not_told_apart():
    """One alone is found."""
    assert made("function, other = (lambda x: x), (lambda x: x)\n", file="<two>") is not None
    two = made("function, other = (lambda x: x), (lambda x: x)\n", file="<two>")
    assert function_of(two.__code__, {}) is None
    one = made("function = lambda x: x * 2\n", file="<one>")
    assert isinstance(function_of(one.__code__, {}), ast.Lambda)


@pytest.mark.parametrize(
    ("test", "negated"),
    [("a", False), ("not a", True), ("a and True", False), ("True and a", False), ("not False and not a", True)],
)
def test_what_a_loop_asks(test, negated):
    """An expression, its negation, or one of a chain."""
    function = made(f"def function(a):\n    while {test}:\n        break\n", file=f"<{test}>")
    asked = Asked(False, False)
    function(asked)
    assert asked.found[0].negated is negated
    assert ast.dump(asked.found[0].statement.test) == ast.dump(ast.parse(test, mode="eval").body)


@pytest.mark.parametrize(
    "test",
    ["(a < 3) > 0 or 0 < a < 3", "(a or 0) + 0", "(1 if a else 0)", "(True and a) or False", "True and not a",
     "any([a, a])", "bool(a) == True", "(not a) is False", "[b for b in [a] if b]"],
)  # fmt: skip
def test_what_else_asks_decides_no_loop(test):
    """The truth of a part says nothing of the whole; nor what a comprehension asks, if it has code of its own."""
    function = made(f"def function(a):\n    while {test}:\n        break\n", file=f"<{test}>")

    class Compared(Asked):
        def __gt__(self, other):
            return self

        def __lt__(self, other):
            return self

    asked = Compared(False, False)
    function(asked)
    assert asked.found
    assert all(found is None or isinstance(found.statement, ast.Return) for found in asked.found)


@pytest.mark.parametrize("word", ["if", "while"])
def test_the_truth_of_a_comparison(word):
    """From Python 3.13 on, the comparison itself takes it."""
    function = made(f"def function(a):\n    {word} a < 3:\n        a = 1\n", file=f"<{word} a < 3>")
    asked = Compares(False)
    function(asked)
    assert [found.negated for found in asked.found] == [False]
    assert isinstance(asked.found[0].statement, {"if": ast.If, "while": ast.While}[word])


@pytest.mark.parametrize("test", ["0 < a < 3", "True and 0 < a < 3", "0 < a < 3 < a and a"])
def test_a_chain_of_comparisons_asks_as_and_does(test):
    """Of a loop, on one line; of an `if`, anywhere."""
    function = made(f"def function(a):\n    while {test}:\n        break\n", file=f"<chain {test}>")
    asked = Compares(False)
    function(asked)
    assert isinstance(asked.found[0].statement, ast.While)
    assert asked.found[0].asks_often
    assert asked.found[0].compares_on
    broken = test.replace("< a", "<\\\n        a")
    asked = Compares(False)
    made(f"def function(a):\n    while {broken}:\n        break\n", file=f"<broken {test}>")(asked)
    assert asked.found == [None]
    asked = Compares(False)
    made(f"def function(a):\n    if {broken}:\n        pass\n", file=f"<broken if {test}>")(asked)
    assert isinstance(asked.found[0].statement, ast.If)


class Compares(Asked):
    """Is compared with, and asked then."""

    def __gt__(self, other):
        return self

    def __lt__(self, other):
        return self


@pytest.mark.parametrize(
    "statement",
    ["b = 1 if a else 2", "b = a and 1", "b = [0, (a or 1)]", "b = 0 < a < 3", "b: int = 1 if not a else 2",
     "b += 1 if a else 2", "return 1 if a else 2", "b, c = (1 if a else 2), 3",
     "b = (\n        1\n        if a else 2)"],
)  # fmt: skip
def test_what_an_expression_asks_decides_a_statement(statement):
    """The one that it is in the midst of."""
    file = f"<statement {statement}>"
    asked = Compares(False)
    made(f"def function(a, b=0):\n    c = 1\n    {statement}\n    return b, c\n", file=file)(asked)
    assert ast.unparse(asked.found[0].statement) == ast.unparse(ast.parse(statement))
    assert asked.found[0].asks_often


@pytest.mark.parametrize(
    "body",
    ["b = 1 if a else 2; c = 3", "c = 3; b = 1 if a else 2", "for b in [1]: b = 1 if a else 2", "b = not a",
     "print(1 if a else 2, end='')", "b = any([a])", "assert not a or b", "assert not a"],
)  # fmt: skip
def test_what_decides_no_statement(body):
    """Where it shares a line with others, where nothing comes of it, or where no jump asks."""
    asked = Asked(False)
    made(f"def function(a, b=0):\n    {body}\n", file=f"<none {body}>")(asked)
    assert asked.found == [None]


@pytest.mark.parametrize("test", ["a", "True and a", "0 < a < 3"])
def test_an_assertion_asks_for_what_has_to_hold(test):
    """And for nothing else."""
    asked = Compares(True, True)
    made(f"def function(a):\n    assert {test}, 'so'\n", file=f"<assert {test}>")(asked)
    assert all(isinstance(found.statement, ast.Assert) for found in asked.found)


@pytest.mark.parametrize("test", ["(a and 0) or a", "1 if a else 0", "not (a and 1)", "not 0 < a < 3"])
def test_a_branch_may_ask_in_any_way(test):
    """It is one decision."""
    asked = Compares(False, False)
    made(f"def function(a):\n    if {test}:\n        a = 1\n", file=f"<mixed {test}>")(asked)
    assert all(isinstance(found.statement, ast.If) for found in asked.found)
    assert asked.found[0].asks_often


def test_a_loop_seen_from_its_middle():
    """Turns begin and end where an `if` leaves the loop."""
    function = made("""
        def function(a, n=0):
            while n < 3:
                n += 1
                if a:
                    break
                n -= 0
    """, file="<middle>")
    asked = Asked(True)
    function(asked)
    loop = asked.found[0].statement
    assert asked.found[0].negated is True
    assert ast.unparse(loop).splitlines() == [
        "while not a:", "    n -= 0", "    if not n < 3:", "        break", "    n += 1",
    ]  # fmt: skip


def test_assigned_names():
    """Targets of all kinds, but none of what has names of its own."""
    tree = ast.parse("a, (b, *c) = 1\nd += 1\nfor e in f: pass\ng = [h for h in i]\nk = lambda l: m\nn.o = p[q] = 1\n")
    assert assigned_names(tree.body) == {"a", "b", "c", "d", "e", "g", "k"}


def test_a_branch_and_what_comes_behind_it():
    """The next statement, with its line, the rest of the function, and names that are of no use there."""
    function = made("""
        def function(a, n=0):
            if a:
                n += 1
                k = n
            else:
                n += 2
            m = n
            return m
    """, file="<branch>")
    asked = Asked(True)
    function(asked)
    found = asked.found[0]
    assert isinstance(found.statement, ast.If)
    assert [ast.unparse(s) for s in found.rest] == ["m = n", "return m"]
    assert ast.unparse(found.next) == "m = n"
    assert line_of(function.__code__, found.next) == 8
    assert found.unread == {"k"}


def test_a_branch_at_the_end_of_a_loop():
    """Behind it comes the test of a `while` loop, and nothing that can be gone to of a `for` loop."""
    for loop, following in (("while n < 2:", ast.While), ("for n in range(2):", type(None))):
        function = made(f"""
            def function(a, n=0):
                {loop}
                    n += 1
                    if a:
                        n += 2
                return n if n < 0 else 1
        """, file=f"<{loop}>")
        asked = Asked(*[True] * 3)
        function(asked)
        found = asked.found[0]
        assert found.rest is None
        assert isinstance(found.next, following)


def test_a_loop_over_a_range_that_a_branch_leaves():
    """Where the branch does no more than that."""
    for numbers, leave, is_one in (("range(3)", "break", True), ("range(n, 9, -1)", "break", True),
                                   ("[1, 2]", "break", False), ("range(3)", "n += 1; break", False)):  # fmt: skip
        function = made(f"""
            def function(a, n=12):
                for k in {numbers}:
                    n += 0 if k else 1
                    if a:
                        {leave}
        """.replace("n += 0 if k else 1", "k + 1" if "n," in numbers else "n += 1"), file=f"<{numbers} {leave}>")
        asked = Asked(True)
        function(asked)
        assert isinstance(asked.found[0].statement, ast.For) is is_one


def test_who_asks_for_identities():
    """Of two values, and not of a constant."""
    asks = made("def function(a, b):\n    return a is b\n", file="<asks>")
    other = made("def function(a, b):\n    return a is None or b is not True\n", file="<other>")
    assert asks_identity(asks.__code__, {})
    assert not asks_identity(other.__code__, {})


@pytest.mark.parametrize("handler", ["except", "except*"])
def test_nothing_is_known_to_come_behind_a_branch_in_a_finally(handler):
    """Its line is there once for each way out of the `try`."""
    function = made(f"""
        def function(a, n=0):
            try:
                n += 1
            {handler} ValueError:
                n += 2
            finally:
                if a:
                    n += 3
                n += 4
            return n
    """, file=f"<finally {handler}>")
    asked = Asked(True)
    function(asked)
    assert isinstance(asked.found[0].statement, ast.If)
    assert asked.found[0].next is None
