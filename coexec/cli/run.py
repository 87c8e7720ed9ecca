"""`run`: runs a script as `python script.py` does, with Keras' training loops, and named or hot functions, followed."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import os
import runpy
import sys
import time
import tokenize
import types
from collections.abc import Callable
from typing import Any

import keras

import coexec
from coexec.base import modes
from coexec.base.tuning import tuned, tuning
from coexec.cli.hot_loops import HotLoop, HotLoops, follow
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
                        help="follow this, too: my.steps:train_step, my.steps:Agent.learn, __main__:step")  # fmt: skip
    parser.add_argument("--no-search", dest="search", action="store_false",
                        help="where none is named: do not look for those that a loop calls")  # fmt: skip
    parser.add_argument("--mode", choices=sorted(MODES), default="follow", help="of all calls")
    parser.add_argument("--report", metavar="DIR", help="write a page, JSON and a trace of what happened there")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Runs the script; its errors and its exit status are its own. Prints the verdicts, and the gain, to stderr."""
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script}")
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))  # as `python script.py` has it
    own = ("__main__", os.path.splitext(os.path.basename(options.script))[0])
    paths = [name.partition(":")[2] for name in options.function if name.partition(":")[0] in own]
    code = None
    for name in options.function:
        try:
            if name.partition(":")[0] not in own:
                replace(name)
            elif code is None:
                code = code_of(options.script, paths)
        except LookupError as error:
            parser.error(f"--function={name}: {error.args[0]}")
    kept = None
    if options.report is not None:
        try:
            kept = coexec.report(options.report)
        except OSError as error:
            parser.error(f"--report={options.report}: {error}")
    loops = HotLoops(run.__code__)
    searches = options.search and not options.function and options.mode != "imperative"
    names: dict[str, Any] = {}  # the script's, held until its functions have been asked
    began = time.perf_counter()
    _models.hold()
    try:
        if searches:
            loops.start()
        with MODES[options.mode](), tuned(calm_before_timing=tuning.run_calm):
            names = runpy.run_path(options.script, run_name="__main__") if code is None else run_code(code)
    finally:
        took = time.perf_counter() - began
        _models.release()
        if searches:
            loops.stop()
        if kept is None:
            found = coexec.explain()
            texts = found.split("\n\n") if found.as_dict()["functions"] else []
            verdicts = [shown["verdict"] for shown in found.as_dict()["functions"]]
        else:  # which has those, too, that are gone by now
            functions = kept.data()["functions"]
            texts, verdicts = ([shown[key] for shown in functions] for key in ("explain", "verdict"))
        lines = [*_loops(loops.found), *_verdicts(texts), *_gained(verdicts, took)]
        if kept is not None:
            kept.close()
            lines.append(f"the report is in {kept.page}")
        print("\n".join(f"coexec: {line}" for line in lines), file=sys.stderr)
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
    if owner is None or last not in vars(owner):
        raise LookupError(f"{module} has no {path}")
    follow(owner, last)


def code_of(script: str, paths: list[str]) -> types.CodeType:
    """Returns a script's code, with these functions of it decorated; raises `LookupError` if one is missing.

    It is decorated where it is defined: the script may call it at once, and is not imported to find it.
    """
    with tokenize.open(script) as file:
        tree = ast.parse(file.read(), script)
    for path in paths:
        *outer, last = path.split(".")
        body = tree.body
        for part in outer:
            body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
        found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == last]
        if not found:
            raise LookupError(f"{script} has no {path}")
        for node in found:
            decorator = ast.parse("__import__('coexec').function", mode="eval").body
            for inner in ast.walk(decorator):
                ast.copy_location(inner, node)
            node.decorator_list.insert(0, decorator)
    return compile(tree, script, "exec")


def run_code(code: types.CodeType) -> dict[str, Any]:
    """Runs a script's code as `__main__`; returns its names."""
    module = types.ModuleType("__main__")
    names = vars(module)
    names.update(__file__=code.co_filename, __cached__=None, __package__="")
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        exec(code, names)
    finally:
        sys.modules["__main__"] = before
    return dict(names)


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


def _loops(found: list[HotLoop]) -> list[str]:
    """Returns a line for each hot loop that was found."""
    lines = []
    for loop in found:
        text = f"{loop.share:.0%} of the eager time that was looked at is in {loop.place}"
        if loop.function is None:
            lines.append(f"{text}, which cannot be followed: {loop.why_not}")
        elif loop.function.stats().calls:
            lines.append(f"{text}, which was followed from then on")
        else:
            lines.append(f"{text}, but it was not called by that name since: decorate it with @coexec.function")
    return lines


def _verdicts(texts: list[str]) -> list[str]:
    """Returns the verdicts among the explanations of the followed functions."""
    if not texts:
        return [
            "nothing was followed: the script has compiled no Keras model, called no decorated function, and no "
            "function again and again for eager operations",
            "  name its training step with --function=MODULE:NAME, or decorate it with @coexec.function",
        ]
    return [line for part in texts for line in part.splitlines()[:3]]


def _gained(verdicts: list[dict[str, Any]], took: float) -> list[str]:
    """Returns a line on the time that was gained: of those functions of which some calls were timed imperatively."""
    known = [verdict["gained_seconds"] for verdict in verdicts if verdict["gained_seconds"] is not None]
    if not verdicts:
        return []
    if not known:
        return [f"what that gained is not known: too few calls to time some imperatively; the script took {took:.3g} s"]
    gained = sum(known)
    left_out = len(verdicts) - len(known)
    besides = f", without {left_out} more functions, of too few calls to time" if left_out else ""
    if gained < 0:
        return [f"lost: {-gained:.3g} s of the {took:.3g} s that the script took, most of it to learn{besides}"]
    return [f"gained: {gained:.3g} s; the script took {took:.3g} s instead of {took + gained:.3g}{besides}"]
