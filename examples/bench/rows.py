"""Rows: what was measured of each program, as it goes from a program's process into files and tables."""

import json
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

# In the order in which they run: what may crash or leave things behind comes last.
OURS = ("coexec", "control flow", "regions off")
VARIANTS = ("eager", *OURS, "tf.function", "jit")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plan:
    """How much of what is done."""

    compared: int = 6  # steps
    warm_up: int = 14  # steps; regions are learnt in them
    rounds: int = 8  # timed steps
    patience: float = 180.0  # seconds that a variant may take for all before the timed steps, and again for those
    published: bool = False  # the sizes of the publications


@dataclass
class Variant:
    """One way to run a program. Times are in seconds, memory is in MiB."""

    name: str
    error: str | None = None  # "fails: why", "wrong from step 2: where", "crashes: how", "too slow: how slow"
    note: str | None = None  # what to know of one that is right
    first_call: float | None = None
    seconds: list[float] = field(default_factory=list)  # of each timed step; a variant with an error has none
    memory: float | None = None  # by how much the process grew at most in the first steps
    counts: dict[str, int] = field(default_factory=dict)  # of `coexec.Stats`, over all steps
    timed_counts: dict[str, int] = field(default_factory=dict)  # of the timed steps alone
    explanation: str = ""

    @property
    def per_step(self) -> float | None:
        """Seconds of the median step."""
        return statistics.median(self.seconds) if self.seconds else None

    def each_step(self, count: str) -> float | None:
        """How many there were of something in a timed step."""
        return self.timed_counts.get(count, 0) / len(self.seconds) if self.timed_counts and self.seconds else None

    @property
    def share_followed(self) -> float | None:
        """The share of all operations of the timed steps that was followed; None if none was seen."""
        followed, recorded = (self.timed_counts.get(f"ops_{how}", 0) for how in ("followed", "recorded"))
        return followed / (followed + recorded) if followed + recorded else None


@dataclass
class Row:
    """A program and its variants."""

    program: str
    origin: str = ""
    variants: dict[str, Variant] = field(default_factory=dict)
    error: str | None = None  # why there is nothing to compare with
    devices: list[str] = field(default_factory=list)  # beside the processor
    peak: float | None = None  # MiB of the whole process, with everything loaded and all variants alive
    # What a process was at when it was last heard of.
    running: str | None = None  # a variant
    doing: str = ""
    finished: bool = False

    def ratio(self, name: str) -> float | None:
        """The time of a step as a multiple of eager's, the median over steps of one number; None if there is none."""
        mine, eager = self.variants.get(name), self.variants.get("eager")
        if mine is None or eager is None:
            return None
        ratios = [a / b for a, b in zip(mine.seconds, eager.seconds, strict=False)]
        return statistics.median(ratios) if ratios else None

    def right(self, name: str) -> bool:
        """Whether a variant ran, and to eager's results."""
        return name in self.variants and self.variants[name].error is None


def save(row: Row, path: Path) -> None:
    """Writes a row in one go, so that who reads it meanwhile finds the one before."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(row)))
    os.replace(beside, path)


def read(data: dict) -> Row:
    """The row that was written as `data`."""
    return Row(**{**data, "variants": {name: Variant(**variant) for name, variant in data["variants"].items()}})


def without_root(text: str) -> str:
    """`text`, its paths from the root of the source tree, which is elsewhere for its readers."""
    return text.replace(f"{ROOT}/", "")
