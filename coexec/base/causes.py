"""Causes: the table of what can keep a call, or a part of it, from the fast path, and how often each has come.

Each kind has an id, by which reports, programs and searches name it for good: ids are never used for anything else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Meaning(NamedTuple):
    """What is said of a kind of cause."""

    id: str
    label: str  # what the same is called in headings
    meaning: str  # one sentence
    expected: str  # what the fast path would be
    todo: str  # what to do, where the place does not tell better
    topic: str = ""  # of `COEXEC_LOGS`
    cuts: bool = False  # whether each costs a launch
    calls: bool = False  # whether what was measured are whole calls, of which only the excess is lost
    urgent: bool = False  # whether it comes first, whatever it costs
    told: bool = False  # whether it is no more than a note: nothing is lost


class Kind(enum.Enum):
    """The kinds of causes that `explain()` lists; each distinct cause is kept once, with a count."""

    FAULT = Meaning(
        "CX-FAULT", "failure of the runtime itself", "coexec's own code raised an error; the call went on imperatively",
        "no error of coexec's", "report it, with the traceback", "diverge", urgent=True,
    )  # fmt: skip
    VALIDATION = Meaning(
        "CX-VALIDATION", "found by validation", "an executable, or a memoized call, gave other values than eager",
        "eager's values", "report it; it is not used any more", "compile", urgent=True,
    )  # fmt: skip
    DIVERGENCE = Meaning(
        "CX-DIVERGE", "divergence", "the program did something new: the rest of that call was recorded",
        "an operation that an earlier call has issued there", "nothing, if this path is one of few", "diverge",
        calls=True,
    )  # fmt: skip
    LEARNING = Meaning(
        "CX-LEARN", "new way", "a call did known operations in a way that no call had, and was learnt like a first one",
        "a way that an earlier call has taken", "nothing, if such ways are few: each is learnt once", "diverge",
        calls=True,
    )  # fmt: skip
    SIZES = Meaning(
        "CX-SIZES", "backed off", "arguments keep coming in new sizes, and such calls run imperatively",
        "arguments of few shapes", "pad batches to few sizes, for example with coexec.dynamic", "diverge",
        calls=True,
    )  # fmt: skip
    BACKOFF = Meaning(
        "CX-BACKOFF", "backed off", "some calls run imperatively, since following them has not paid",
        "followed calls that take less than plain ones", "see the other causes: the dearest one is why", "diverge",
        calls=True,
    )  # fmt: skip
    GRADIENT = Meaning(
        "CX-GRADIENT", "library call not followed as one", "the Python of a gradient runs on each call",
        "a gradient of what only memoized calls and followed operations have recorded",
        "ask a tape once it has ended, or one that is not persistent", "region",
    )  # fmt: skip
    LIBRARY = Meaning(
        "CX-LIBRARY", "library call not followed as one", "the Python of a library call runs on each call",
        "a call that runs no Python of yours, changes nothing, and is given the same again",
        "give it tensors and values that stay the same; coexec.pure marks helpers that only compute", "region",
    )  # fmt: skip
    READ = Meaning(
        "CX-READ", "segment cut", "Python read a value: what computes it was launched, and waited for",
        "no read before the end of the call", "read it later, or together with others", "read", cuts=True,
    )  # fmt: skip
    CUT = Meaning(
        "CX-ALONE", "segment cut", "an operation runs on its own, between two launches",
        "operations that can be launched together", "move it to the beginning or end of the step, or out of it",
        "compile", cuts=True,
    )  # fmt: skip
    IMPERATIVE = Meaning(
        "CX-UNCOMPILED", "not compiled", "a segment's operations run one by one",
        "a segment that a graph or XLA can run", "have coexec.opaque keep out what cannot be compiled", "compile",
    )  # fmt: skip
    LARGE = Meaning(
        "CX-LARGE", "segment cut", "a segment is so long that compiling it would hold up a call",
        "segments of at most some thousand operations", "read a value in between: shorter segments take less",
        "compile",
    )  # fmt: skip
    INPUT = Meaning(
        "CX-INPUT", "segment cut", "TensorFlow refuses what an operation is given",
        "an input that a tensor can be made of", "give it a tensor, or a value that becomes one", "diverge", cuts=True,
    )  # fmt: skip
    XLA = Meaning(
        "CX-XLA", "not compiled by XLA", "a segment, or a part of it, runs as a TensorFlow graph",
        "operations that XLA computes as eager does", "nothing, unless the graph is slow: keep them out of the step",
        "compile",
    )  # fmt: skip
    FAILURE = Meaning(
        "CX-FAILED", "failed operation", "an operation raised, as it does eagerly",
        "an operation that succeeds", "see the error", "diverge",
    )  # fmt: skip
    DECISION = Meaning(
        "CX-DECISION", "decision on a tensor", "who decides a branch or a loop on a tensor, and why",
        "a branch or loop that only computes", "nothing, unless its reads are dear: see CX-READ", "read", told=True,
    )  # fmt: skip
    PAUSE = Meaning(
        "CX-PAUSE", "segment cut", "Python takes its time: the operations before it run beside it",
        "launches beside Python", "nothing", "read", told=True,
    )  # fmt: skip
    BACKEND = Meaning(
        "CX-BACKEND", "backend chosen by measurement", "XLA or the graph, whichever was faster",
        "the faster one", "nothing", "compile", told=True,
    )  # fmt: skip
    FOLDED = Meaning(
        "CX-LOOPS", "compiled as loops", "operations that repeat were written as a loop, which compiles faster",
        "a loop, which XLA compiles once", "nothing", "compile", told=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Why a call, or a part of it, missed the fast path: the place, what was expected, and what was seen."""

    kind: Kind
    text: str
    location: str
    hint: str = ""
    expected: str = ""
    seen: str = ""


class Tally:
    """How often a cause has come, and what it has cost as far as that was measured."""

    __slots__ = ("count", "seconds")

    def __init__(self, count: int = 0, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds
