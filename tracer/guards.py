"""Guards: whether an exception raised at an instruction could be caught in the same function.

An operation that fails inside a `try` must fail there and not later. This is decided from CPython's bytecode: by the
exception table since 3.11 (relies on `dis._parse_exception_table`), by `SETUP_FINALLY` blocks in 3.10.
"""

from __future__ import annotations

import builtins
import dis
import functools
from contextlib import redirect_stdout
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import tensorflow as tf

from tracer.frame_slots import READABLE, variables_of
from tracer.managers import (
    ITEMS,
    Cleanup,
    add_failures,
    add_passing,
    is_of_others,
    scan,
)

# Context managers that never swallow an exception, identified by what the program calls. Other `with` blocks
# (`contextlib.suppress`, a test's `raises`) may, and count as guards.
TRANSPARENT_MANAGERS: tuple[Any, ...] = (
    tf.GradientTape, tf.autodiff.ForwardAccumulator, tf.compat.v1.name_scope, tf.name_scope, tf.device,
    tf.control_dependencies, tf.init_scope, open, redirect_stdout,
)  # fmt: skip
add_passing(tf.compat.v1.name_scope.__exit__)
add_failures((tf.errors.OpError, AssertionError), (tf.errors.ResourceExhaustedError,))
_TRANSPARENT_METHODS = frozenset({"stop_recording"})  # of a tape in a local variable


# Instructions that call Python only through finalizers and weak references' callbacks, as they drop a reference.
_FREEING = frozenset({
    "STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_MAYBE_NULL", "STORE_DEREF",
    "DELETE_FAST", "DELETE_DEREF", "POP_TOP", "POP_ITER", "END_FOR", "POP_EXCEPT", "RETURN_VALUE", "RETURN_CONST",
})  # fmt: skip


def only_frees(code: CodeType, offset: int) -> bool:
    """Returns whether what runs below a frame at this instruction was called as an object was freed."""
    return offset >= 0 and dis.opname[code.co_code[offset]] in _FREEING


def is_guarded(code: CodeType, offset: int, namespace: dict[str, Any]) -> bool:
    """Returns whether an exception raised at byte `offset` of `code` may be caught in `code`.

    `namespace` is the function's globals, in which context managers are looked up.
    """
    instructions, entries, position = _disassembled(code)
    if entries is None:
        return _is_guarded_by_blocks(instructions, offset, namespace)
    seen = set()
    while True:
        # The table has the innermost handler; what it re-raises goes to the enclosing one.
        entry = next((e for e in entries if e.start <= offset < e.end), None)
        if entry is None or entry.target in seen:
            return False
        seen.add(entry.target)
        n = position[entry.target]
        if instructions[n].opname == "PUSH_EXC_INFO":  # any other handler cleans up and re-raises
            if instructions[n + 1].opname != "WITH_EXCEPT_START":
                return True
            if not _transparent(instructions, _entering(instructions, entries, entry, position), namespace):
                return True
        offset = entry.target


class Guard(NamedTuple):
    """The handlers around an instruction whose effect on errors depends on values in a running frame."""

    leaves: tuple[tuple[int, frozenset[str]], ...]  # frame slots of `__exit__` methods, names the bodies write
    cleanups: tuple[Cleanup, ...]  # what `finally` clauses do


def guard_of(code: CodeType, offset: int, namespace: dict[str, Any], trusted: bool = False) -> bool | Guard:
    """Returns whether an exception raised at `offset` may be caught or observed in `code`, or what decides it.

    More exact than `is_guarded`. With `trusted`, `finally` clauses of this code are taken to be harmless.
    """
    entries = _exception_table(code)
    if entries is None or not READABLE:
        return is_guarded(code, offset, namespace)
    if not any(e.start <= offset < e.end for e in entries):
        return False  # most code: disassembling all of it would take most of a first call
    instructions, entries, position = _disassembled(code)
    leaves: list[tuple[int, frozenset[str]]] = []
    cleanups: list[Cleanup] = []
    seen = set()
    while True:
        entry = next((e for e in entries if e.start <= offset < e.end), None)
        if entry is None or entry.target in seen:
            return Guard(tuple(leaves), tuple(cleanups)) if leaves or cleanups else False
        seen.add(entry.target)
        n = position[entry.target]
        if instructions[n].opname == "PUSH_EXC_INFO":
            stored = _stored(instructions, entries, entry.target)
            if instructions[n + 1].opname != "WITH_EXCEPT_START":
                cleanup = _cleanup_at(instructions, n, position, namespace)
                if cleanup is None:
                    return True
                if not trusted:
                    if not cleanup.harmless or not stored.isdisjoint(cleanup.attributes):
                        return True
                    if cleanup.chains or cleanup.stores or cleanup.others:
                        cleanups.append(cleanup)
            elif not _transparent(instructions, _entering(instructions, entries, entry, position), namespace):
                leaves.append((variables_of(code) + entry.depth - 1, stored))
        offset = entry.target


def _entering(instructions: list[Any], entries: Any, entry: Any, position: dict[int, int]) -> int:
    """Returns the index of the instruction that entered the `with` statement of a handler."""
    at = position[min(e.start for e in entries if e.target == entry.target)]
    while at and instructions[at].opname not in ("BEFORE_WITH", "LOAD_SPECIAL", "BEFORE_ASYNC_WITH"):
        at -= 1
    return at


def _stored(instructions: list[Any], entries: list[Any], target: int) -> frozenset[str]:
    """Returns the names of variables and attributes that the body guarded by this handler writes."""
    body, before = {e for e in entries if e.target == target}, 0
    while len(body) > before:  # includes nested statements, whose handlers are part of the body
        before = len(body)
        body |= {e for e in entries if any(b.start <= e.target < b.end for b in body)}
    inside = (i for i in instructions if any(e.start <= i.offset < e.end for e in body))
    names: set[str] = set()
    for instruction in inside:
        if instruction.opname.startswith("STORE_"):
            value = instruction.argval
            if instruction.opname == "STORE_SUBSCR":
                value = ITEMS
            names.update(map(str, value if isinstance(value, tuple) else (value,)))
    return frozenset(names)


def _cleanup_at(
    instructions: list[Any], handler: int, position: dict[int, int], namespace: dict[str, Any]
) -> Cleanup | None:
    """Returns what a handler does if it re-raises every error of an operation; None if it may not."""
    cleanup = Cleanup()
    reached, ahead = set[int](), [handler]
    catches = instructions[handler + 1].opname == "POP_TOP"  # a bare `except`
    while ahead:
        n = ahead.pop()
        if n in reached:
            continue
        reached.add(n)
        instruction = instructions[n]
        name = instruction.opname
        if name.startswith("RETURN_") or (name == "RAISE_VARARGS" and instruction.arg != 0):
            return None
        catches = catches or name in ("RAISE_VARARGS", "CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH", "CHECK_EG_MATCH")
        if instruction.opcode in _JUMPS:
            if "BACKWARD" in name:
                return None
            ahead.append(position[instruction.argval])
        if name == "CHECK_EXC_MATCH" and (others := _others(instructions, n, namespace)):
            cleanup.others += others
            over = next(i for i in instructions[n + 1 :] if i.opname != "EXTENDED_ARG")  # jumps over their handler
            ahead.append(position[over.argval])
        elif name not in _ENDS and not name.startswith("JUMP_FORWARD"):
            ahead.append(n + 1)
    found = [instructions[n] for n in sorted(reached)]
    scan(cleanup, found, handling=True)
    if catches:  # it runs for errors only, so it must not have effects
        cleanup.harmless &= not cleanup.stores and not any(i.opname.startswith(_EFFECTS) for i in found)
    return cleanup


def _others(
    instructions: list[Any], match: int, namespace: dict[str, Any]
) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the names of the exception classes caught here, if operations currently raise none of them; else []."""
    chains: list[list[str]] = []
    at = match
    while instructions[at - 1].opname in (*_ATTRIBUTES, *_LOADING):
        at -= 1
    for instruction in instructions[at:match]:
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append([str(instruction.argval)])
        elif instruction.opname in _ATTRIBUTES and chains:
            chains[-1].append(str(instruction.argval))
    for name, *path in chains:
        caught: Any = namespace.get(name, getattr(builtins, name, None))
        for attribute in path:
            caught = getattr(caught, attribute, None) if isinstance(caught, ModuleType) else None
        if not is_of_others(caught):
            return []
    return [("global", name, tuple(path)) for name, *path in chains]


_LOADING = ("LOAD_GLOBAL", "LOAD_NAME", "BUILD_TUPLE", "PUSH_NULL", "EXTENDED_ARG")
_EFFECTS = ("CALL", "PRECALL", "BINARY_OP", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "COMPARE_OP")


def start_of(code: CodeType, offset: int) -> int:
    """Returns the offset of a frame's current instruction, normalised across CPython's specialisations.

    Since 3.11 a frame that calls Python from a specialised instruction is at the last of its cache entries, and on 3.11
    a call is at either of its two instructions; under a profile hook nothing is specialised.
    """
    codes = code.co_code  # as it was before specialisation, caches included
    at = offset
    while at and codes[at] == _CACHE:
        at -= 2
    if codes[at] == _PRECALL:
        at += 2
        while codes[at] == _CACHE:
            at += 2
    return at


_CACHE = dis.opmap.get("CACHE", -1)
_PRECALL = dis.opmap.get("PRECALL", -1)


@functools.lru_cache(maxsize=4096)
def _exception_table(code: CodeType) -> list[Any] | None:
    """Returns the exception table of `code`; None before 3.11."""
    parse = getattr(dis, "_parse_exception_table", None)
    return None if parse is None else parse(code)


@functools.lru_cache(maxsize=256)  # called for operations inside a `try` or `with`; it takes 0.1 ms per line
def _disassembled(code: CodeType) -> tuple[list[Any], Any, dict[int, int]]:
    """Returns the instructions of `code`, its exception table (None before 3.11), and instruction indexes by offset."""
    instructions = list(dis.get_instructions(code))
    position = {instruction.offset: n for n, instruction in enumerate(instructions)}
    return instructions, _exception_table(code), position


_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)
_ENDS = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE")
_NAME_CLEANUP = ("LOAD_CONST", "STORE", "DELETE", "RERAISE")  # how `except ... as name` deletes its name


def _is_guarded_by_blocks(instructions: list[Any], offset: int, namespace: dict[str, Any]) -> bool:
    """Implements `is_guarded` for 3.10, whose block stack exists only at run time: simulates it along every jump."""
    position = {instruction.offset: n for n, instruction in enumerate(instructions)}
    stacks: dict[int, tuple[int, ...]] = {}  # per reachable instruction, those that set up its blocks
    ahead: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while ahead:
        n, stack = ahead.pop()
        if n in stacks:
            continue
        stacks[n] = stack
        name = instructions[n].opname
        if instructions[n].opcode in _JUMPS:
            ahead.append((position[instructions[n].argval], stack))  # a handler runs outside its own block
            if name.startswith("SETUP_"):
                stack = (*stack, n)
        elif name == "POP_BLOCK":
            stack = stack[:-1]
        if name not in _ENDS:
            ahead.append((n + 1, stack))

    def catches(setup: int) -> bool:
        if instructions[setup].opname == "SETUP_WITH":
            return not _transparent(instructions, setup, namespace)
        target = position[instructions[setup].argval]
        handler = zip(instructions[target:], _NAME_CLEANUP, strict=False)
        return not all(i.opname.startswith(name) for i, name in handler)

    return any(catches(setup) for setup in stacks.get(position[offset], ()))


_STARTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def _transparent(instructions: list[Any], entering: int, namespace: dict[str, Any]) -> bool:
    """Returns whether the `with` entered by this instruction calls a manager that never swallows an exception."""
    at = entering
    while at and not _ends_statement(instructions[at - 1]):
        at -= 1
    chain: list[Any] = []
    for instruction in instructions[at:entering]:
        if instruction.opname.startswith("CALL"):
            break
        if instruction.opname.startswith(_STARTS):
            if chain:
                break  # the call's arguments
            chain.append(instruction)
        elif instruction.opname in _ATTRIBUTES and chain:
            chain.append(instruction)
    calls = [n for n in range(at, entering) if instructions[n].opname.startswith("CALL")]
    later = instructions[calls[0] if calls else entering : entering]
    if not chain or any(i.opname in _ATTRIBUTES for i in later):
        return False
    if chain[-1].argval in _TRANSPARENT_METHODS:
        return True
    if chain[0].opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return False
    manager: Any = namespace.get(chain[0].argval, getattr(builtins, str(chain[0].argval), None))
    for attribute in chain[1:]:
        manager = getattr(manager, str(attribute.argval), None)
    return any(manager is known for known in TRANSPARENT_MANAGERS)


def _ends_statement(instruction: Any) -> bool:
    name = instruction.opname
    return name in ("POP_TOP", "RESUME", "NOP", "SETUP_WITH") or name.startswith(("STORE_", "POP_JUMP", "JUMP"))
