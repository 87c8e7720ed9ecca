"""Guards: whether an exception raised at an instruction could be caught in the same function.

An operation that fails inside a `try` must fail there and not later. CPython keeps that knowledge in its bytecode:
an exception table since 3.11 (relies on `dis._parse_exception_table`), `SETUP_FINALLY` blocks in 3.10.
"""

from __future__ import annotations

import bisect
import builtins
import dis
import functools
import operator
from contextlib import redirect_stdout
from types import CodeType
from typing import Any

import tensorflow as tf

# Context managers that never swallow an exception, by what the program calls. `with` blocks of others
# (`contextlib.suppress`, a test's `raises`) may, and count as guards.
TRANSPARENT_MANAGERS: tuple[Any, ...] = (
    tf.GradientTape, tf.autodiff.ForwardAccumulator, tf.compat.v1.name_scope, tf.name_scope, tf.device,
    tf.control_dependencies, tf.init_scope, open, redirect_stdout,
)  # fmt: skip
_TRANSPARENT_METHODS = frozenset({"stop_recording"})  # of a tape in a local variable


def is_guarded(code: CodeType, offset: int, namespace: dict[str, Any]) -> bool:
    """Returns whether an exception raised by the instruction at byte `offset` of `code` may be caught in `code`.

    `namespace` holds the globals of the function, in which context managers are looked up.
    """
    instructions, entries, position = _disassembled(code)
    if entries is None:
        return _is_guarded_by_blocks(instructions, offset, namespace)
    seen = set()
    while True:
        # The table names the innermost handler; what that one raises again goes to the handler of its own place.
        entry = next((e for e in entries if e.start <= offset < e.end), None)
        if entry is None or entry.target in seen:
            return False
        seen.add(entry.target)
        n = position[entry.target]
        if instructions[n].opname == "PUSH_EXC_INFO":  # others clean up and raise again
            if instructions[n + 1].opname != "WITH_EXCEPT_START":
                return True
            before = position[min(e.start for e in entries if e.target == entry.target)]
            while before and instructions[before].opname not in ("BEFORE_WITH", "LOAD_SPECIAL", "BEFORE_ASYNC_WITH"):
                before -= 1
            if not _transparent(instructions, before, namespace):
                return True
        offset = entry.target


def start_of(code: CodeType, offset: int) -> int:
    """Returns the offset of the instruction that a frame is at, which is the same however CPython runs it.

    Since 3.11 a frame that calls Python from a specialised instruction is at the last of that one's cache entries, and
    on 3.11 a call is at either of its two instructions; with a profile hook nothing is specialised.
    """
    instructions, _, position = _disassembled(code)
    at = position.get(offset)
    if at is None:
        at = bisect.bisect(instructions, offset, key=operator.attrgetter("offset")) - 1
    return int(instructions[at + (instructions[at].opname == "PRECALL")].offset)


@functools.lru_cache(maxsize=32)  # asked for each operation of a function; a line takes 0.1 ms to take apart
def _disassembled(code: CodeType) -> tuple[list[Any], Any, dict[int, int]]:
    """Returns the instructions of `code`, its exception table (None before 3.11), and the instructions' numbers."""
    parse = getattr(dis, "_parse_exception_table", None)
    instructions = list(dis.get_instructions(code))
    position = {instruction.offset: n for n, instruction in enumerate(instructions)}
    return instructions, None if parse is None else parse(code), position


_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)
_ENDS = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE")
_NAME_CLEANUP = ("LOAD_CONST", "STORE", "DELETE", "RERAISE")  # how `except ... as name` forgets its name


def _is_guarded_by_blocks(instructions: list[Any], offset: int, namespace: dict[str, Any]) -> bool:
    """Answers `is_guarded` on 3.10, which keeps blocks on a run-time stack: it is followed along every jump."""
    position = {instruction.offset: n for n, instruction in enumerate(instructions)}
    stacks: dict[int, tuple[int, ...]] = {}  # for each reachable instruction, those that set up the blocks around it
    ahead: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while ahead:
        n, stack = ahead.pop()
        if n in stacks:
            continue
        stacks[n] = stack
        name = instructions[n].opname
        if instructions[n].opcode in _JUMPS:
            ahead.append((position[instructions[n].argval], stack))  # a handler runs outside of its own block
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
    """Returns whether the `with` entered by this instruction calls a manager that swallows nothing."""
    at = entering
    while at and not _ends_statement(instructions[at - 1]):
        at -= 1
    chain: list[Any] = []
    for instruction in instructions[at:entering]:
        if instruction.opname.startswith("CALL"):
            break
        if instruction.opname.startswith(_STARTS):
            if chain:
                break  # its arguments
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
