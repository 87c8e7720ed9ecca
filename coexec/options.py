"""Options: what a user may ask of a decorated function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Options:
    """The decorator's keywords, with `tf.function`'s meaning where it has one for them.

    `jit_compile`: "auto" compiles with XLA what XLA runs right and well, True whatever XLA runs right, False nothing.
    `regions`: follow calls into Keras as one unit, their Python not run, where that is known to make no difference.
    `control_flow`: let loops that decide on tensors turn on the device, and branches be taken there, where they do
      nothing but compute, and follow calls of graph functions that do no more.
    `strict`: raise `coexec.Divergence` where a call would be recorded anew.
    `validating`: compare what is compiled with the operations, one by one, as `coexec.validate` asks for some calls.
    `trusting`: launch what was compiled anew without comparing it first.
    `xla_soon`: have XLA compile, in the background, what has come a few times, however little time it has taken.
    """

    jit_compile: Literal["auto"] | bool = "auto"
    input_signature: Any = None
    reduce_retracing: bool = True
    strict: bool = False
    name: str | None = None
    regions: bool = True
    control_flow: bool = False
    validating: bool = False
    trusting: bool = False
    xla_soon: bool = False

    def __post_init__(self) -> None:
        if self.jit_compile is not True and self.jit_compile is not False and self.jit_compile != "auto":
            raise ValueError(f"jit_compile is 'auto', True or False, not {self.jit_compile!r}")


class Divergence(RuntimeError):
    """A `strict` function met something that its trace graph does not know; the message says what and where.

    The call's operations up to there were carried out. Without `strict`, the call would have gone on imperatively.
    """
