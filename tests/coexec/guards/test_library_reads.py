"""What a library's code may have read of modules, and whether that is unchanged."""

import types

import pytest

from coexec.guards.library_reads import LibraryReads
from tracer import effects, memory

pytestmark = pytest.mark.skipif(not memory.KNOWN, reason="where objects lie in memory is known of CPython alone")
SOURCE = """
def first():
    return parts.one

def second():
    return parts.two

def third():
    return late.value
"""


@pytest.fixture
def library(monkeypatch):
    """A module whose functions ask another one; a third has its place there later."""
    module, parts = types.ModuleType("some_library"), types.ModuleType("some_library.parts")
    parts.one, parts.two, parts.other = 1, 2, 3
    module.parts, module.late = parts, None
    monkeypatch.setattr(effects, "registered", {module.__name__})
    exec(SOURCE, vars(module))
    return module


def reads_of(library):
    """What a call has read in which all functions of the library ran."""
    ran = [(function.__code__, vars(library)) for function in (library.first, library.second, library.third)]
    return LibraryReads([], ran, {})


@pytest.mark.parametrize("name", ["one", "two"])
def test_each_function_asks_by_its_own_names(library, name):
    reads = reads_of(library)
    library.parts.other = 4  # nobody asked for it
    assert reads.hold()
    setattr(library.parts, name, 5)
    assert not reads.hold()


@pytest.mark.parametrize("change", ["later", "replaced"])
def test_modules_that_come_later(library, change):
    """A name that was no module's when the code was looked through first, or another module's."""
    reads_of(library)
    module = types.ModuleType("some_library.late")
    module.value, module.one, module.two = 1, 1, 2
    setattr(library, *(("late", module) if change == "later" else ("parts", module)))
    reads = reads_of(library)
    assert reads.hold()
    setattr(module, "value" if change == "later" else "two", 3)
    assert not reads.hold()
