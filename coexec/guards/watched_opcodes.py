"""Watched opcodes: what each instruction of CPython 3.11 will read or change, by its operands."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from coexec.guards import c_functions as c
from coexec.guards.class_lookup import HEAP
from coexec.guards.watched_calls import WatchedCalls
from coexec.guards.watched_state import is_key
from tracer.errors import Refused
from tracer.location import is_user
from tracer.value_stack import NULL, instructions, local, top

_Handler = Callable[[WatchedCalls, types.FrameType, Any, Any], None]


def _load_global(watch: WatchedCalls, frame: types.FrameType, _: Any, name: str) -> None:
    watch.state.read_name(frame, name)


def _load_cell(watch: WatchedCalls, frame: types.FrameType, number: int, _: Any) -> None:
    watch.state.read_cell(local(frame, number))


def _store_cell(watch: WatchedCalls, frame: types.FrameType, number: int, _: Any) -> None:
    watch.state.write_cell(local(frame, number))


def _load_attribute(watch: WatchedCalls, frame: types.FrameType, _: Any, name: str) -> None:
    if type(top(frame)) is types.FrameType and not is_user(frame.f_code):
        return  # TensorFlow asks for the names of its functions
    watch.state.attribute(top(frame), name)


def _store_attribute(watch: WatchedCalls, frame: types.FrameType, _: Any, name: str) -> None:
    watch.state.writes(top(frame), name)


def _store_global(watch: WatchedCalls, frame: types.FrameType, _: Any, name: str) -> None:
    watch.state.writes_item(frame.f_globals, name)


def _load_item(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    watch.state.takes(top(frame))
    watch.state.subscript(top(frame, 1), top(frame))


def _store_item(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    watch.state.changes(top(frame, 1))


def _takes_top(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    watch.state.takes(top(frame))


def _takes_both(watch: WatchedCalls, frame: types.FrameType, arg: Any, __: Any) -> None:
    watch.state.takes(top(frame))
    watch.state.takes(top(frame, 1))


def _contains(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    key, holder = top(frame, 1), watch.state.inner(top(frame))
    if type(holder) is dict and is_key(key):
        watch.state.item(holder, key)  # registries have thousands
    else:
        watch.state.takes(holder)
        watch.state.takes(key)


def _operates(watch: WatchedCalls, frame: types.FrameType, number: int, __: Any) -> None:
    watch.state.takes(top(frame))
    watch.state.takes(top(frame, 1))
    if number >= 13 and isinstance(top(frame, 1), (*c.CONTAINERS, np.ndarray)):  # in place
        watch.state.changes(top(frame, 1))
    elif type(top(frame)) is np.ndarray or type(top(frame, 1)) is np.ndarray:
        watch.makes = frame


def _asks_truth(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    value = top(frame)
    if type(value) is bool:
        return
    if isinstance(value, (*c.CONTAINERS, np.ndarray)):
        watch.state.takes(value)
    elif type(value).__flags__ & HEAP:
        watch.state.guards.looked_up(type(value))


def _enters(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    manager = top(frame)
    kind = type(manager)
    if isinstance(manager, c.LOCKS):
        return
    if not kind.__flags__ & HEAP and not watch.state.is_new(manager):
        raise Refused(f"it enters a {kind.__name__}")
    watch.state.guards.looked_up(kind)


def _makes(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    watch.makes = frame


def _calls(watch: WatchedCalls, frame: types.FrameType, count: int, _: Any) -> None:
    args = [top(frame, count - 1 - number) for number in range(count)]
    function = top(frame, count + 1)
    if function is NULL:
        function = top(frame, count)
    else:
        args.insert(0, top(frame, count))
    watch.calls(function, args, frame)


def _calls_with(watch: WatchedCalls, frame: types.FrameType, flags: int, _: Any) -> None:
    at = flags & 1
    given = top(frame, at)
    watch.state.takes(given)
    args = list(given) if isinstance(given, (tuple, list)) else [given]
    if at:
        named = top(frame)
        watch.state.takes(named)
        args += named.values() if isinstance(named, dict) else [named]
    watch.calls(top(frame, at + 1), args, frame)


def _imports(watch: WatchedCalls, frame: types.FrameType, _: Any, name: str) -> None:
    level = top(frame, 1)
    if level:
        name = importlib.util.resolve_name("." * level + name, frame.f_globals.get("__package__"))
    if name not in sys.modules:
        raise Refused(f"it imports {name}")
    watch.state.item(sys.modules, name)


def _refused(watch: WatchedCalls, frame: types.FrameType, _: Any, __: Any) -> None:
    raise Refused(f"it uses {_instruction(frame)}")


def _instruction(frame: types.FrameType) -> str:
    return str(instructions(frame.f_code)[frame.f_lasti][0])


_HANDLERS: dict[str, _Handler] = {
    "LOAD_GLOBAL": _load_global,
    "LOAD_DEREF": _load_cell,
    "STORE_DEREF": _store_cell,
    "DELETE_DEREF": _store_cell,
    "LOAD_ATTR": _load_attribute,
    "LOAD_METHOD": _load_attribute,
    "IMPORT_FROM": _load_attribute,
    "STORE_ATTR": _store_attribute,
    "DELETE_ATTR": _store_attribute,
    "STORE_GLOBAL": _store_global,
    "DELETE_GLOBAL": _store_global,
    "BINARY_SUBSCR": _load_item,
    "STORE_SUBSCR": _store_item,
    "DELETE_SUBSCR": _store_item,
    "COMPARE_OP": _takes_both,
    "CONTAINS_OP": _contains,
    "BINARY_OP": _operates,
    "BEFORE_WITH": _enters,
    "BUILD_MAP": _makes,
    "BUILD_CONST_KEY_MAP": _makes,
    "PRECALL": _calls,
    "CALL_FUNCTION_EX": _calls_with,
    "IMPORT_NAME": _imports,
    **dict.fromkeys(
        ("GET_ITER", "GET_YIELD_FROM_ITER", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE",
         "DICT_MERGE", "FORMAT_VALUE", "MATCH_SEQUENCE", "MATCH_MAPPING", "GET_LEN", "UNARY_NEGATIVE"), _takes_top,
    ),
    "MATCH_KEYS": _takes_both,
    **dict.fromkeys(
        ("UNARY_NOT", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE",
         "POP_JUMP_BACKWARD_IF_TRUE", "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"), _asks_truth,
    ),
    **dict.fromkeys(
        ("LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_BUILD_CLASS", "IMPORT_STAR", "SETUP_ANNOTATIONS", "PRINT_EXPR",
         "GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH", "ASYNC_GEN_WRAP", "END_ASYNC_FOR",
         "MATCH_CLASS", "STORE_NAME", "DELETE_NAME"), _refused,
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def todo(code: types.CodeType) -> dict[int, tuple[_Handler, Any, Any]]:
    """Returns the instructions to inspect, by offset: a handler, and the instruction's argument and its value."""
    return {
        at: (_HANDLERS[name], arg, value)
        for at, (name, arg, value) in instructions(code).items()
        if name in _HANDLERS
    }


def is_call(code: types.CodeType, at: int) -> bool:
    """Returns whether the instruction at an offset is the call that `PRECALL` announced: no result yet."""
    return bool(instructions(code)[at][0] == "CALL")
