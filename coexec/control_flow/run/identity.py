"""Identity: whether the program may notice that a tensor which a statement hands on is another object afterwards.

Eagerly, `y = x if c else 2 * x` makes `y` the very tensor that `x` is, or a new one. On the device the result is a new
one each time. Values are the same; what tells the difference is `is`, `id()`, `Tensor.ref()`, and a tape that begins to
watch one of the two afterwards. So a statement that may hand on a tensor is Python's where such may come after it: in
its function, in what called that, or in functions that are defined in these. Outside of the decorated function only
tapes count, as others ask for objects of any kind. Functions that are called later are known to watch tensors once they
have done so in a call that was followed.
"""

from __future__ import annotations

import dis
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

from coexec.base.tuning import tuning
from coexec.control_flow.trace.conditionals import TracedBranch
from coexec.control_flow.trace.while_loops import TracedLoop
from tracer.block import BRANCH, LOOP, STRUCTURES, Block, Branch, WhileLoop, steps_of
from tracer.effects import is_programs
from tracer.lazy import LazyTensor
from tracer.location import is_entry
from tracer.private import EagerTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coexec.control_flow.program_types import Value
    from coexec.control_flow.run.sites import Staged
    from coexec.control_flow.trace.range_loops import RangeIterations
    from coexec.follow.device_control import FollowedCall
    from tracer.graph import Step

_TAPES = frozenset({"watch", "ForwardAccumulator"})
_ASKING = _TAPES | {"id", "ref", "is_", "is_not"}


class _Places(NamedTuple):
    """Where code asks, by the offset of the instruction, and its loops: first and last instruction."""

    code: CodeType
    asking: tuple[int, ...]
    watching: tuple[int, ...]  # those of them that begin to watch
    loops: tuple[tuple[int, int], ...]


_known: dict[int, _Places] = {}  # by the id of the code


def hands_on(part: Block | WhileLoop) -> bool:
    """Returns whether a result may be a tensor from before the statement, and need not be one."""
    blocks = [part] if isinstance(part, Block) else [part.body]
    for block in blocks:
        for outer in block.steps:
            for step in (outer, *steps_of(outer)):
                if step.op in (BRANCH, LOOP) and _may_return_argument(step):
                    return True
    return isinstance(part, WhileLoop) and _returns_argument(part.body)


def gives_twice(staged: Staged, seen: frozenset[str]) -> bool:
    """Returns whether one tensor may come out of a statement in two ways: as two variables, or as one and in a list.

    `seen` has the names that anything but the statement reads: what others get is of no matter.
    """
    if isinstance(staged, TracedBranch):
        return _is_twice(staged.block.results) or any(map(_ways_give_twice, staged.block.steps))
    return any(_loop_gives_twice(loop, seen) for loop in _loops_of(staged))


def lists_what_it_is_given(staged: Staged) -> bool:
    """Returns whether a list may get a tensor from before the iteration that appends it: maybe from before the loop."""
    for loop in [] if isinstance(staged, TracedBranch) else _loops_of(staged):
        if loop.lists and (loop.turn is None or any(isinstance(slot, int) and slot < 0 for slot in _appended(loop))):
            return True
    return False


def _loops_of(staged: TracedLoop | RangeIterations) -> list[TracedLoop]:
    loops = [staged] if isinstance(staged, TracedLoop) else [staged.turns, staged.last]
    return [loop for loop in loops if loop is not None]


def _appended(loop: TracedLoop) -> tuple[object, ...]:
    return () if loop.turn is None else loop.turn.results[len(loop.turn.results) - len(loop.taken) :]


def _loop_gives_twice(staged: TracedLoop, seen: frozenset[str]) -> bool:
    body, place = staged.loop.body, 0
    kept: list[object] = []
    for variable in staged.states:
        after = place + (variable.form[1] if variable.form is not None else 1)
        if variable.name in seen and variable.step is None:
            kept += body.results[place:after]
        place = after
    for step in body.steps:
        if step.op in (BRANCH, LOOP) and (_may_return_argument(step) or _ways_give_twice(step)):
            if any(slot in range(step.first, step.first + len(step.outputs)) for slot in kept):
                return True
    return (bool(staged.lists) and staged.turn is None) or _is_twice([*kept, *_appended(staged)])


def _may_return_argument(step: Step) -> bool:
    if step.op == LOOP:
        return True  # it may make no iteration
    inner: Branch = step.attrs[1]
    return _returns_argument(inner.then) or _returns_argument(inner.other)


def _ways_give_twice(step: Step) -> bool:
    """Returns whether two results of a branch may be one tensor of the way that is taken."""
    if step.op != BRANCH:
        return False
    inner: Branch = step.attrs[1]
    return _is_twice(inner.then.results) or _is_twice(inner.other.results)


def _is_twice(results: Sequence[object]) -> bool:
    slots = [slot for slot in results if isinstance(slot, int)]
    return len(set(slots)) < len(slots)


def hands_on_any(parts: Sequence[Block | WhileLoop], arguments: list[Value], run: FollowedCall) -> bool:
    """Returns whether one that does so may hand on a tensor that others may have, too, and nobody knows which.

    For a branch, that is one from before the call. For a loop, it is any that passes through a branch or a loop inside:
    the program may have put it into a list, set attributes of it, return it as well, or ask for its gradient. What else
    a loop hands on is known once it has run; see `handed_on`.
    """
    for part in parts:
        if isinstance(part, WhileLoop):
            results = zip(part.body.results, _origins(part.body), strict=True)
            unclear = [origin for slot, origin in results if isinstance(slot, int) and slot >= 0]
            places = {part.body_inputs[number] for number in set().union(*unclear)}
            if any(isinstance(arguments[place], (EagerTensor, LazyTensor)) for place in places):
                return True
        elif any(_is_from_before(value, run) for value in arguments[: len(part.arguments)]):
            return True
    return False


def handed_on(loop: WhileLoop, turns: int) -> dict[int, int]:
    """Returns the states that are, after so many iterations, the very tensor of an input; both by number.

    As in `old, x = x, f(x)` after one iteration, or in `a, b = b, a` after any. Takes a time of the order of the number
    of states, squared.
    """
    found = {number: _handed_on_by(loop, number, turns) for number in range(len(loop.states))}
    return {number: place for number, place in found.items() if place is not None}


def _handed_on_by(loop: WhileLoop, number: int, turns: int) -> int | None:
    seen: dict[int, int] = {}
    while turns:
        if number in seen:
            turns %= seen[number] - turns  # states go round: so many iterations make no difference
            seen.clear()
            continue
        slot = loop.body.results[number]
        if not isinstance(slot, int) or slot >= 0:
            return None  # made in an iteration
        place, seen[number] = loop.body_inputs[-1 - slot], turns
        if place not in loop.states:
            return place
        number, turns = loop.states.index(place), turns - 1
    return loop.states[number]


def _origins(block: Block) -> list[set[int]]:
    """Returns for each result of a block which of its arguments it may be."""
    known: dict[int, set[int]] = {}

    def of(slot: object) -> set[int]:
        if not isinstance(slot, int):
            return set()  # a constant
        return {-1 - slot} if slot < 0 else known.get(slot, set())

    for step in block.steps:
        if step.op in STRUCTURES:
            given = [of(slot) for slot in step.slots]
            for number, origin in enumerate(_origins_of(step, given)):
                known[step.first + number] = origin
    return [of(slot) for slot in block.results]


def _origins_of(step: Step, given: list[set[int]]) -> list[set[int]]:
    """Returns the same for the results of a structure, by what its inputs may be."""
    part = step.attrs[1]
    if isinstance(part, Branch):
        ways = (part.then, part.then_inputs), (part.other, part.other_inputs)
        found = [[_among(given[1:], inputs, origin) for origin in _origins(block)] for block, inputs in ways]
        return [one | other for one, other in zip(*found, strict=True)]
    if isinstance(part, WhileLoop):
        anything = set().union(*(given[place] for place in (*part.states, *part.body_inputs)))
        return [anything for _ in part.states]
    return [set().union(*given) for _ in step.outputs]


def _among(given: list[set[int]], inputs: tuple[int, ...], origin: set[int]) -> set[int]:
    return set().union(*(given[inputs[number]] for number in origin))


def _is_from_before(value: Value, run: FollowedCall) -> bool:
    return type(value) is EagerTensor or (type(value) is LazyTensor and value._run is not run)


def _returns_argument(block: Block) -> bool:
    return any(isinstance(slot, int) and slot < 0 for slot in block.results)


def may_be_asked(frame: FrameType | None) -> bool:
    """Returns whether the code that is running asks which object a tensor is, after the place where it is now."""
    outside = False
    while frame is not None:
        code = frame.f_code
        known = _known.get(id(code))
        if known is None:
            if len(_known) >= tuning.max_callers:
                _known.clear()
            ours = is_programs(code, frame.f_globals)
            known = _known[id(code)] = _places_of(code) if ours else _Places(code, (), (), ())
        places = known.watching if outside else known.asking
        if places and any(_comes_after(place, frame.f_lasti, known.loops) for place in places):
            return True
        outside = outside or is_entry(code)
        frame = frame.f_back
    return False


class Watchers:
    """The functions of the program by which tapes have begun to watch tensors, in calls of one function."""

    def __init__(self) -> None:
        self._known: dict[int, CodeType] = {}

    def note(self, frame: FrameType | None) -> None:
        """Notes those that are running."""
        while frame is not None and not is_entry(frame.f_code):
            if len(self._known) < tuning.max_callers and is_programs(frame.f_code, frame.f_globals):
                self._known[id(frame.f_code)] = frame.f_code
            frame = frame.f_back

    def elsewhere(self, frame: FrameType | None) -> bool:
        """Returns whether one of them is not running, and may be called later; places in others are known."""
        if not self._known:
            return False
        running = set()
        while frame is not None and not is_entry(frame.f_code):
            running.add(id(frame.f_code))
            frame = frame.f_back
        return not running.issuperset(self._known)


def _comes_after(place: int, now: int, loops: tuple[tuple[int, int], ...]) -> bool:
    return place > now or any(first <= place and now <= last for first, last in loops)


def _places_of(code: CodeType) -> _Places:
    asking, watching, loops, before = [], [], [], None
    for at in dis.get_instructions(code):
        if at.opname == "IS_OP":
            if before is None or before.opname != "LOAD_CONST":
                asking.append(at.offset)
        elif isinstance(at.argval, CodeType):
            inner = _places_of(at.argval)
            asking += [at.offset] if inner.asking else []
            watching += [at.offset] if inner.watching else []
        elif isinstance(at.argval, str) and at.argval in _ASKING and "LOAD" in at.opname and at.opname != "LOAD_CONST":
            asking.append(at.offset)
            watching += [at.offset] if at.argval in _TAPES else []
        elif "JUMP_BACKWARD" in at.opname:
            loops.append((int(at.argval), at.offset))
        before = at
    return _Places(code, tuple(asking), tuple(watching), tuple(loops))
