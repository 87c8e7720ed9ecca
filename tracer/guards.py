"""Guards: whether an exception raised at an instruction could be caught in the same function.

An operation that fails inside a `try` must fail there and not later. CPython keeps that knowledge in its bytecode:
an exception table since 3.11 (relies on `dis._parse_exception_table`), `SETUP_FINALLY` blocks in 3.10.
"""

from __future__ import annotations

import dis
from types import CodeType
from typing import Any

# Context managers that never swallow an exception. `with` blocks of others (`contextlib.suppress`, a test's
# `raises`) may, and count as guards.
TRANSPARENT_MANAGERS = frozenset(
    {"GradientTape", "ForwardAccumulator", "name_scope", "device", "control_dependencies", "init_scope", "scope",
     "stop_recording", "open", "Lock", "lock", "redirect_stdout"}
)  # fmt: skip


def is_guarded(code: CodeType, offset: int) -> bool:
    """Returns whether an exception raised by the instruction at byte `offset` of `code` may be caught in `code`."""
    parse = getattr(dis, "_parse_exception_table", None)
    if parse is None:
        # 3.10 keeps blocks on a run-time stack: any `try` in the function counts, a `with` by its manager.
        return any(
            i.opname == "SETUP_FINALLY" or (i.opname == "SETUP_WITH" and not _transparent(code, i))
            for i in dis.get_instructions(code)
        )
    entries = parse(code)
    if not entries:
        return False
    instructions = list(dis.get_instructions(code))
    position = {instruction.offset: n for n, instruction in enumerate(instructions)}
    for entry in entries:
        if not entry.start <= offset < entry.end:
            continue
        n = position[entry.target]
        if instructions[n].opname != "PUSH_EXC_INFO":
            continue  # clean-up code that raises again
        if instructions[n + 1].opname != "WITH_EXCEPT_START":
            return True
        before = position.get(entry.start, 0)
        while before and instructions[before].opname not in ("BEFORE_WITH", "LOAD_SPECIAL", "BEFORE_ASYNC_WITH"):
            before -= 1
        if not _transparent(code, instructions[before]):
            return True
    return False


def _transparent(code: CodeType, entering: Any) -> bool:
    """Returns whether the `with` entered by this instruction names a manager that swallows nothing."""
    named: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset >= entering.offset:
            break
        if instruction.opname in ("POP_TOP", "STORE_FAST", "RESUME", "NOP") or instruction.opname.startswith("STORE"):
            named.clear()
        elif isinstance(instruction.argval, str):
            named.append(instruction.argval)
    return any(name in TRANSPARENT_MANAGERS for name in named)
