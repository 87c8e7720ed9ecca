"""Programs of papers, run eagerly and co-executed: the same losses and state, and launches to show for it."""

import dataclasses
from typing import Any

import coexec
from coexec.base.stats import Stats
from examples.programs import Program
from tests.snapshots import assert_same, snapshot

STEPS = 10


def check(
    program: Program, steps: int = STEPS, rtol: float | None = None, atol: float | None = None, **options: Any
) -> Stats:
    """Fails where the co-executed run differs from the eager one, or was not followed and launched; returns its counts.

    Each step's losses are compared before the state, so that a failure names the first step that went wrong. A program
    may decorate more than one function; their counts are added up. Tolerances are the program's unless they are given,
    and options are `coexec.function`'s.
    """
    rtol, atol = program.rtol if rtol is None else rtol, program.atol if atol is None else atol
    eager_losses, eager_state = run(program, lambda function: function, steps)
    made: list[Any] = []

    def decorate(function: Any) -> Any:
        made.append(coexec.function(function, **options))
        return made[-1]

    losses, state = run(program, decorate, steps)
    for step, (expected, found) in enumerate(zip(eager_losses, losses, strict=True)):
        assert_same(expected, found, rtol, atol, f"{program.name}: losses of step {step}")
    assert_same(eager_state, state, rtol, atol, f"{program.name}: state")

    assert made, f"{program.name} decorated nothing"
    stats = total([function.stats() for function in made])
    reasons = "\n".join(function.explain() for function in made)
    assert stats.calls >= steps, f"{program.name}: a step went around the decorated functions"
    assert stats.followed, f"{program.name}: no call was followed to its end\n{reasons}"
    assert stats.launches, f"{program.name}: nothing was launched\n{reasons}"
    return stats


def run(program: Program, decorate: Any, steps: int) -> tuple[list[Any], Any]:
    """The losses of each step, as they were then, and the state at the end."""
    training = program.build(decorate)
    losses = [snapshot(training.step()) for _ in range(steps)]
    return losses, snapshot(training.state())


def total(counts: list[Stats]) -> Stats:
    """The counts of several functions as those of one."""
    # Numbers and the tuple of segments both add up.
    names = [field.name for field in dataclasses.fields(Stats)]
    added = {name: getattr(counts[0], name) for name in names}
    for more in counts[1:]:
        added = {name: added[name] + getattr(more, name) for name in names}
    return Stats(**added)
