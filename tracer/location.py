"""Location: where in the user's program an operation was issued."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy
import tensorflow

from tracer import keras_packages
from tracer.faults import passes
from tracer.frame_slots import method_of, variable_of
from tracer.guards import Guard, guard_of, only_frees, start_of
from tracer.managers import are_plain, global_of, lets_pass


class Frame(NamedTuple):
    """One user frame: the file, the function, the line, and the instruction's offset in the function."""

    file: str
    function: str
    line: int
    offset: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Location(NamedTuple):
    """The call stack (user frames, innermost first) and the iteration.

    The iteration counts how often this operation was issued at this call stack earlier in the call. It identifies the
    iteration of every enclosing loop, and needs neither source nor a hook on jumps.
    """

    frames: tuple[Frame, ...]
    iteration: int

    def __str__(self) -> str:
        where = str(self.frames[0]) if self.frames else "outside of user code"
        return f"{where} (iteration {self.iteration})" if self.iteration else where


def _package_directory(module: Any) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(str(module.__file__))), "")


def files_of(name: str) -> list[str]:
    """Returns the paths of a package's files, which an import hook may put outside the usual directories.

    Does not import it; there are none if it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return [os.path.join(folder, "") for folder in spec.submodule_search_locations or ()] or [str(spec.origin)]


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_tensorflow_prefixes = [
    *map(_package_directory, (tensorflow, numpy)), _HERE, os.path.join(os.path.dirname(_HERE[:-1]), "coexec", ""),
]  # fmt: skip
_library_prefixes = [*_tensorflow_prefixes, *(path for name in keras_packages.NAMES for path in files_of(name))]

# Keyed by the id of the code object, since hashing one hashes its constants, which takes longer than the walk itself.
# The values keep the code objects alive, so ids are not reused.
_codes: dict[int, tuple[CodeType, bool]] = {}
_frames: dict[tuple[int, int], tuple[Frame, bool | Guard, CodeType, bool]] = {}
# By generated code: the name of the file that the first one equal to it has.
_generated: dict[CodeType, str] = {}
# Offsets in the code that a twin was made from, by those in its own: both give the same locations.
_offsets: dict[int, tuple[CodeType, dict[int, int]]] = {}
# The only library code that counts as a guard: Keras adds to an error which layer it came from.
_naming: set[int] = set()
_entries: set[int] = set()
_skipped: set[int] = set()  # ids of library code that is neither of these: most frames of a walk, so asked for first
# What is around the instruction of a suspended generator: managers written as one are asked at each operation.
_suspended: dict[tuple[int, int], tuple[bool | Guard, CodeType]] = {}
MAX_CACHED = 20_000


def add_library(directory: str) -> None:
    """Hides the frames of code in `directory` from locations."""
    _library_prefixes.append(os.path.join(directory, ""))
    _forget()


def mark_entry(code: CodeType) -> None:
    """Makes the walk stop at frames of `code`: its callers are not part of a location."""
    _entries.add(id(code))
    _skipped.discard(id(code))
    _codes[id(code)] = (code, False)


def stand_for(code: CodeType, offsets: dict[int, int]) -> None:
    """Makes frames of `code` give the locations of other code, which has the same instructions at other offsets."""
    _offsets[id(code)] = code, offsets


def is_entry(code: CodeType) -> bool:
    """Returns whether the walk stops at frames of `code`."""
    return id(code) in _entries


def _forget() -> None:
    kept = {key: _codes[key] for key in _entries}
    _codes.clear()
    _frames.clear()
    _naming.clear()
    _skipped.clear()
    _suspended.clear()
    _codes.update(kept)


def is_user(code: CodeType, namespace: dict[str, Any] | None = None) -> bool:
    """Returns whether frames of this code are part of locations, that is, whether it belongs to no library.

    `namespace` is where it runs. The wrappers of operations that `tf.load_op_library` loads are generated, and have no
    file: one of them issues an operation from two lines, which would be two places in the program.
    """
    found = _codes.get(id(code))
    if found is None:
        if len(_codes) > MAX_CACHED:
            _forget()
        name = code.co_filename
        user = not name.startswith("<frozen") and not any(name.startswith(p) for p in _library_prefixes)
        user = user and not (namespace is not None and namespace.get("_IS_TENSORFLOW_PLUGIN", False) is True)
        found = _codes[id(code)] = (code, user)
        if code.co_name == "error_handler" and name.endswith(os.path.join("src", "utils", "traceback_utils.py")):
            _naming.add(id(code))
        elif not user:
            _skipped.add(id(code))
    return found[1]


def is_tensorflow(code: CodeType) -> bool:
    """Returns whether this code is TensorFlow's or NumPy's, Python's, or the runtime's own."""
    return not is_user(code) and code.co_filename.startswith(("<frozen", *_tensorflow_prefixes))


# What may happen to a propagating exception: nothing; Keras adds the layer it came from; the current managers and
# `finally` clauses let it pass, though others might not next time; the program catches it.
FREE, NAMED, PASSED, CAUGHT = range(4)


def call_stack() -> tuple[tuple[Frame, ...], int]:
    """Returns the running thread's user frames, innermost first up to the traced call, and what an exception may meet.

    The latter is FREE, NAMED, PASSED or CAUGHT, for an exception raised now.
    """
    stack, named, passed, caught = _walk(sys._getframe(1), True)
    return tuple(stack), CAUGHT if caught else PASSED if passed else NAMED if named else FREE


def fate() -> int:
    """Returns what an exception raised now may meet: CAUGHT, NAMED or FREE."""
    _, named, _, caught = _walk(sys._getframe(1), True)
    return CAUGHT if caught else NAMED if named else FREE


def is_cleaning_up() -> bool:
    """Returns whether the running code is a cleanup that CPython called: of a closed generator, of a freed object."""
    if _is_closing():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in _entries:
        if is_user(frame.f_code, frame.f_globals) and _is_freeing(frame):
            return True
        frame = frame.f_back
    return False


def _is_freeing(frame: FrameType) -> bool:
    """Returns whether a frame, or what it calls, runs because an object is freed: CPython reports its errors."""
    return frame.f_code.co_name == "__del__" or only_frees(frame.f_code, frame.f_lasti)


def _is_closing() -> bool:
    """Returns whether a generator is being closed: one that is freed reports the errors of its cleanup, and goes on."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, GeneratorExit):
        error = error.__context__
    return error is not None


def user_frames() -> tuple[Frame, ...]:
    """Returns the running thread's user frames alone."""
    return tuple(_walk(sys._getframe(1), False)[0])


def _walk(frame: Any, judging: bool) -> tuple[list[Frame], bool, bool, bool]:
    """Returns the user frames from here outwards, and, if `judging`, whether an error is named, passed, caught."""
    stack = []
    named = passed = False
    caught = judging and _is_closing()
    skipped = _skipped
    while frame is not None:
        code = frame.f_code
        if id(code) in skipped:
            frame = frame.f_back
            continue
        found = _codes.get(id(code))
        if found[1] if found is not None else is_user(code, frame.f_globals):
            key = (id(code), frame.f_lasti)
            known = _frames.get(key)
            if known is None:
                name = getattr(code, "co_qualname", code.co_name)
                offset = start_of(code, frame.f_lasti)
                if id(code) in _offsets:
                    offset = _offsets[id(code)][1].get(offset, offset)
                place = Frame(_file_of(code), name, frame.f_lineno or 0, offset)
                known = _frames[key] = (
                    place, guard_of(code, frame.f_lasti, frame.f_globals), code, _is_freeing(frame)
                )  # fmt: skip
            stack.append(known[0])
            if judging:
                if known[1] is not False:
                    passed = True
                    caught = caught or not _lets_pass(frame, known[1])
                caught = caught or known[3]
        elif id(code) in _naming:
            named = True
        elif id(code) in _entries:
            break
        frame = frame.f_back
    return stack, named, passed, caught


def _file_of(code: CodeType) -> str:
    """Returns the name of the file of some code; of generated code, of the first that was equal but for that name.

    What generates code (`sympy.lambdify`, templates, notebooks) numbers these names, also where it generates it again.
    """
    name = code.co_filename
    if not name.startswith("<"):
        return name
    if len(_generated) > MAX_CACHED:
        _generated.clear()
    return _generated.setdefault(code, name)


def _lets_pass(frame: Any, guard: bool | Guard) -> bool:
    """Returns whether the handlers around a frame's instruction let errors pass, given the frame's values."""
    if isinstance(guard, bool):
        return not guard

    def look_up(kind: str, name: str) -> Any:
        return global_of(frame.f_globals, name) if kind == "global" else variable_of(frame, name)

    return all(
        lets_pass(method_of(frame, place), stored, is_user, _generator_lets_pass) for place, stored in guard.leaves
    ) and all(are_plain(cleanup, look_up) for cleanup in guard.cleanups)


def _generator_lets_pass(frame: Any) -> bool:
    """Returns whether a suspended generator lets errors pass that are raised at its `yield`."""
    code = frame.f_code
    key = id(code), frame.f_lasti
    known = _suspended.get(key)
    if known is None:
        if len(_suspended) > MAX_CACHED:
            _suspended.clear()
        known = _suspended[key] = guard_of(code, frame.f_lasti, frame.f_globals, trusted=not is_user(code)), code
    return _lets_pass(frame, known[0])


def place_of() -> str:
    """Returns the current user line, for messages."""
    frames, _ = call_stack()
    return str(Location(frames, 0))


@passes
def raise_at(error: BaseException, location: Location) -> None:
    """Raises `error` with the user's lines in its traceback: the operation was issued there, and fails only now.

    Those of calls that have returned since, down to the operation; above them, the traceback has the lines of those
    that are still running. No frame of it refers to the error: what the program's frames hold would live until the next
    collection.
    """
    errors = [error]
    del error
    if not location.frames:
        raise errors.pop()
    running = {(frame.file, frame.function) for frame in user_frames()}
    names: dict[str, Any] = {"errors": errors}
    code: CodeType | None = None
    for place in location.frames:
        if code is None:
            code = _stand_in(place, "raise errors.pop()")
        else:
            code, names = _stand_in(place, "run(code, names)"), {"run": exec, "code": code, "names": names}
        if (place.file, place.function) in running:
            break
    assert code is not None
    exec(code, names)


def _stand_in(place: Frame, statement: str) -> CodeType:
    """Returns code whose frame shows in a traceback as the user's: its function, and its line as a whole."""
    line = linecache.getline(place.file, place.line).rstrip()
    tree = ast.parse(statement)
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = place.line
            node.col_offset, node.end_col_offset = len(line) - len(line.lstrip()), len(line.encode())
    return compile(tree, place.file, "exec").replace(co_name=place.function.rpartition(".")[2])
