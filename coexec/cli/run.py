"""`run`: runs a script as `python script.py` does, with Keras' training loops and named functions followed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import keras

import coexec
from coexec.api import Function
from coexec.base import modes
from tracer import hooks
from tracer.faults import passes

MODES: dict[str, Callable[[], Any]] = {
    "follow": contextlib.nullcontext,
    "imperative": modes.imperative,
    "validate": lambda: modes.validate(every=100),
    "fail_on_divergence": modes.fail_on_divergence,
}


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "run", help="run a script with Keras' fit, evaluate and predict followed, and say what that gains"
    )
    parser.add_argument("--function", action="append", default=[], metavar="MODULE:NAME",
                        help="follow this function, too: my.steps:train_step, or my.steps:Agent.learn")  # fmt: skip
    parser.add_argument("--mode", choices=sorted(MODES), default="follow", help="of all calls")
    parser.add_argument("--report", metavar="DIR", help="write a page, JSON and a trace of what happened there")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Runs the script; its errors and its exit status are its own. Prints the verdicts to stderr."""
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script}")
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))  # as `python script.py` has it
    for name in options.function:
        try:
            replace(name)
        except LookupError as error:
            parser.error(f"--function={name}: {error.args[0]}")
    kept = None
    if options.report is not None:
        try:
            kept = coexec.report(options.report)
        except OSError as error:
            parser.error(f"--report={options.report}: {error}")
    _models.hold()
    names: dict[str, Any] = {}  # the script's, held until its functions have been asked
    try:
        with MODES[options.mode]():
            names = runpy.run_path(options.script, run_name="__main__")
    finally:
        _models.release()
        if kept is None:
            found = coexec.explain()
            texts = found.split("\n\n") if found.as_dict()["functions"] else []
        else:  # which has those, too, that are gone by now
            texts = [shown["explain"] for shown in kept.data()["functions"]]
        print("\n".join(_verdicts(texts)), file=sys.stderr)
        if kept is not None:
            kept.close()
            print(f"coexec: the report is in {kept.page}", file=sys.stderr)
        names.clear()
    return 0


def replace(name: str) -> None:
    """Replaces a function or method, `module:name`, by a followed one; raises `LookupError` if there is none."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise LookupError("write it as MODULE:NAME, for example my.steps:train_step")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError as error:
        raise LookupError(f"{module} cannot be imported: {error}") from error
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    found = vars(owner).get(last) if isinstance(owner, (types.ModuleType, type)) else None
    if found is None:
        raise LookupError(f"{module} has no {path}; functions of the script itself take @coexec.function")
    if not isinstance(found, (types.FunctionType, staticmethod, classmethod, Function)):
        raise LookupError(f"it is no function, but {found!r}")
    if not isinstance(found, Function):
        setattr(owner, last, coexec.function(cast(Any, found)))


def _accelerating(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @passes
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if "make_train_function" not in vars(self):
            coexec.accelerate(self)
        return result

    return compile


_models = hooks.HookSet(
    __name__, "`keras.Model.compile`", "models of a script are accelerated when they are compiled", "a script is run"
)
_models.add(keras.Model, "compile", _accelerating(keras.Model.compile))


def _verdicts(texts: list[str]) -> list[str]:
    """Returns the verdicts among the explanations of the followed functions."""
    if not texts:
        return [
            "coexec: nothing was followed: the script has compiled no Keras model, and called no decorated function",
            "  name its training step with --function=MODULE:NAME, or decorate it with @coexec.function",
        ]
    return [f"coexec: {line}" for part in texts for line in part.splitlines()[:3]]
