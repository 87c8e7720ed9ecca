"""Compiler IR: what XLA is given for a segment, and what it makes of that, as text."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.compile.executable import Executable
from coexec.lowering.plan import Plan
from tracer.intercept import handling
from tracer.private import compiler_ir_of, context
from tracer.spec import RESOURCE, Spec

STAGES = ("stablehlo", "hlo", "optimized_hlo")


class IR(str):
    """The text of a program of XLA's; `stage` says which, and `str()` returns it."""

    stage: str

    def __repr__(self) -> str:
        lines = self.splitlines()
        return f"<{self.stage}, {len(lines)} lines, print() shows it: {lines[0][:60] if lines else 'nothing'}>"


def text_of(text: str, stage: str) -> IR:
    """Returns a text as the IR of a stage."""
    ir = IR(text)
    ir.stage = stage
    return ir


def check_stage(stage: object) -> str:
    """Returns the stage; raises `ValueError` if there is none of that name."""
    if not isinstance(stage, str) or stage not in STAGES:
        names = ", ".join(map(repr, STAGES))
        raise ValueError(f"ir() takes one of {names}, not {stage!r}")
    return stage


def ir_of(plan: Plan, stage: str) -> str:
    """Returns the IR of a segment, whichever backend runs it; that of each part, where XLA compiles only parts.

    Raises `NotImplementedError`, with the reason, if XLA can compile nothing of it. The launches of the program do not
    use what is compiled here.
    """
    refusal = plan.refusal or plan.refusal_by_xla(tuning.min_outlined)
    if refusal:
        raise NotImplementedError(f"XLA does not compile this segment: {refusal}")
    with handling(None), tf.init_scope():
        executable = Executable(plan, "xla")
        if not executable.parts:
            words = () if plan.words is None else (plan.words,)
            return _lowered(executable.name, (*plan.feeds, *words), stage)
        texts = [_lowered(name, specs, stage) for name, specs, _ in executable.parts]
    heads = [f"// part {n} of {len(texts)} that XLA compiles\n" for n in range(1, len(texts) + 1)]
    return "\n\n".join(head + text for head, text in zip(heads, texts, strict=True))


def _lowered(name: str, specs: tuple[Spec, ...], stage: str) -> str:
    """Returns the IR of a registered function for arguments of these specs, zeros and variables of our own."""
    ctx = context.context()
    variables: list[Any] = []
    given = []
    for spec in specs:
        if spec.enum == RESOURCE and spec.handle is not None:
            enum, shape = spec.handle[0]
            variables.append(tf.Variable(tf.zeros(shape, tf.dtypes.as_dtype(enum)), trainable=False))
            given.append(variables[-1].handle)
        else:
            given.append(tf.zeros(spec.shape, spec.dtype))
    return compiler_ir_of(ctx, name, given, stage)
