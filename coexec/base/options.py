"""Options: the settings of a decorated function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tracer.faults import meant


@dataclass(frozen=True)
class Options:
    """The decorator's keywords; those that `tf.function` also has mean the same.

    `jit_compile`: "auto" compiles with XLA what it computes correctly and faster, True whatever it computes correctly,
      False nothing.
    `regions`: memoize calls into Keras (skip their Python), if that makes no observable difference; "all": any calls.
    `control_flow`: run loops and branches on tensors on the device, if they have no effects, and inline calls of graph
      functions that have none; None: `while` loops only, once they ask often.
    `batching`: batch the operations of calls that are not followed, where that takes less time.
    `reduce_retracing`: follow calls whose sizes keep changing at any size (`tracer.dynamic_paths`).
    `strict`: raise `coexec.Divergence` where a call would be recorded.
    `validating`: compare executables with their operations, as `coexec.validate` does for some calls.
    `trusting`: launch new executables without validating them first.
    `xla_soon`: have XLA compile a segment in the background after a few visits, however little time it has taken.
    """

    jit_compile: Literal["auto"] | bool = "auto"
    input_signature: Any = None
    reduce_retracing: bool = True
    strict: bool = False
    name: str | None = None
    regions: Literal["all"] | bool = True
    control_flow: bool | None = None
    batching: bool = False
    validating: bool = False
    trusting: bool = False
    xla_soon: bool = False

    def __post_init__(self) -> None:
        if self.jit_compile is not True and self.jit_compile is not False and self.jit_compile != "auto":
            raise ValueError(f"jit_compile is 'auto', True or False, not {self.jit_compile!r}")
        if self.regions is not True and self.regions is not False and self.regions != "all":
            raise ValueError(f"regions is 'all', True or False, not {self.regions!r}")
        if self.control_flow is not None and not isinstance(self.control_flow, bool):
            raise ValueError(f"control_flow is True, False or None, not {self.control_flow!r}")


class Divergence(RuntimeError):
    """Raised where a `strict` function does something that its trace graph does not contain; says what and where.

    The call's operations up to that point have run. Without `strict`, the call would continue
    imperatively.
    """


meant(Divergence)
