"""What the value stack relies on in CPython; the first to fail where an interpreter keeps its frames otherwise."""

import sys

from tests.marks import needs_watch
from tracer import value_stack
from tracer.value_stack import NULL, function_of_frame, instructions, local, top


def watched(function, *args):
    """Returns the instruction, the two topmost values and the function at each opcode event of a call."""
    seen = []

    def trace(frame, event, _):
        if frame.f_code is not function.__code__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            name, _, value = instructions(frame.f_code)[frame.f_lasti]
            depth = {"BINARY_OP": 2, "STORE_ATTR": 2, "PRECALL": 3, "LOAD_ATTR": 1}.get(name, 0)
            seen.append((name, value, [top(frame, k) for k in range(depth)], function_of_frame(frame)))
        return trace

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(None)
    return seen


def test_is_available_on_311():
    """The stack can be read on CPython 3.11, and nowhere else."""
    assert value_stack.available() == (sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11))


@needs_watch
def test_operands():
    """Operands, callables with and without `self`, and cells are where they are looked for."""

    class Holder:
        number = 1

        def method(self, x):
            return x

    holder, one, other = Holder(), object(), [1]

    def function(a, b):
        holder.number = a
        len(b)
        holder.method(a)
        b + b
        return holder.number

    seen = watched(function, one, other)
    found = {name: operands for name, _, operands, _ in seen if operands}
    assert found["STORE_ATTR"] == [holder, one]
    assert found["BINARY_OP"] == [other, other]
    assert found["LOAD_ATTR"] == [holder]
    calls = [operands for name, _, operands, _ in seen if name == "PRECALL"]
    assert calls == [[other, len, NULL], [one, holder, Holder.method]]
    assert all(running is function for *_, running in seen)


@needs_watch
def test_cells_and_long_arguments():
    """A cell is a local; an instruction with a large argument is seen once, at its `EXTENDED_ARG`."""
    cell_value = object()
    found = []

    def function():
        found.append(local(sys._getframe(), 0).cell_contents)
        return cell_value

    function()
    assert found == [cell_value]
    names = [f"name_{k}" for k in range(300)]
    space = {name: k for k, name in enumerate(names)}
    exec(f"def long():\n    return [{', '.join(names)}]", space)
    seen = watched(space["long"])
    assert [value for name, value, *_ in seen if name == "LOAD_GLOBAL"] == names
