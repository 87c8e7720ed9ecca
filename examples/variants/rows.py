"""What was measured of a variant, as it goes from a program's process into files and the table."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.variants.rewrites import DEARER

WORSE = 1.2  # how many times the time of the original a variant may take


@dataclass
class Row:
    """What came of a variant. Per call: launches, regions and operations; of all calls: the share that was followed."""

    base: str
    rewrites: tuple[str, ...]
    error: str | None = None  # why it was not measured, or what was wrong
    wrong: bool = False
    cpu: float = 0.0  # times the original's
    wall: float = 0.0
    eager: float = 0.0  # the same of eager calls
    launches: float = 0.0
    regions: float = 0.0
    followed: float = 0.0
    operations: float = 0.0
    more_launches: float = 0.0  # than the original
    fewer_regions: float = 0.0
    cause: str = ""
    explanation: str = ""

    @property
    def name(self) -> str:
        """What was rewritten."""
        return " + ".join(self.rewrites) or "as it was"

    @property
    def ratio(self) -> float:
        """How many times the time of the original: by the clock that says less, as the machine may be busy."""
        return min(self.cpu, self.wall)

    @property
    def badness(self) -> float:
        """By what variants are sorted: wrong ones first, then slow ones, and those with more launches."""
        return 1000.0 if self.wrong else self.ratio + max(self.more_launches, 0.0)

    @property
    def falls_out(self) -> bool:
        """Whether spelling has decided."""
        if self.error:
            return self.wrong
        dearer = not DEARER.isdisjoint(self.rewrites)
        return (self.ratio > WORSE and not dearer) or self.more_launches > 0.05 or self.followed < 0.9


def save(rows: Iterable[Row], path: Path) -> None:
    """Writes rows to a file."""
    path.write_text("\n".join(json.dumps(asdict(row)) for row in rows) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Reads rows from a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [Row(**{**row, "rewrites": tuple(row["rewrites"])}) for row in rows]

