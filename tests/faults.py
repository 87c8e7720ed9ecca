"""Fault injection: an error raised from every function of both packages, at its first, middle and last entry.

    python -m tests.faults                     every point of every program (thousands; an hour or more)
    python -m tests.faults --seconds=60        a sample, drawn with --seed
    python -m tests.faults --program=NAME --function=PART   those of one program, or of some functions

Each point is one run of a small program, decorated anew, in which one entry of one function of the runtime raises.
Values, effects and state must be eager's all the same. The packages are imported with a probe at the beginning of each
function, as a trace or profile function would be noticed by what it is to test.
"""

import argparse
import ast
import builtins
import collections
import contextlib
import importlib.abc
import importlib.machinery
import os
import random
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Functions that nothing of ours surrounds, or whose error reaches nobody: why each is left out.
LEFT = "a tape is left"
EXEMPT = {
    "called by the program, TensorFlow or Python themselves; nothing has begun when their first line is reached": (
        "tracer.lazy:LazyTensor.", "tracer.intercept:_fast_path", "tracer.intercept:_execute_hook",
        "tracer.intercept:_execute_cancelable_hook", "tracer.intercept:_constant_hook",
        "tracer.intercept:_record_gradient_hook", "tracer.intercept:_notifying_before.hook",
        "tracer.intercept:_notifying_after.hook", "tracer.intercept:_unwrapping.hook", "tracer.intercept:_shape_slice",
        "tracer.intercept:_offering.hook",
        "tracer.intercept:_put_hook", "tracer.library:_wrap.wrapper", "tracer.library:_telling.write",
        "tracer.answers:_answering.asking", "tracer.operators:_answered.answered",
        "tracer.operators:_multiplied.multiplied", "tracer.operators:_indexed.indexed",
        "tracer.operators:_sliced.sliced", "tracer.operators:_of_variable.answered",
        "tracer.variables:_answered.reading",
        "tracer.keras_variables:_answered.answered", "tracer.keras_variables:_assigning.assigning",
        "tracer.keras_variables:_writing.writing", "coexec.api:",
        "coexec.dispatch.controller:Controller.call", "coexec.dispatch.controller:Controller.__init__",
        "coexec.base.modes:",
        "tracer.gradients:", "tracer.structures:",
        "tracer.seeds:noting_operation_seed", "tracer.buffer:", "tracer.effects:_hook.__setattr__",
        "tracer.effects:Effects._profile", "tracer.effects:written", "tracer.effects:Effects.averted",
        "tracer.effects:_Averted.", "coexec.dispatch.padding:", "coexec.base.options:",
    ),
    "called as objects end: Python prints what they raise": (
        "coexec.memoize.entry:Region.end_of_objects", "coexec.compile.executable:_remove",
        "coexec.compile.inline_call:drop", "tracer.effects:_forget", "tracer.intercept:release",
    ),
    "the border itself: an error in what deals with the first one": (
        "tracer.faults:", "coexec.follow.follower:Follower.fault", "coexec.follow.follower:Follower.give_way",
        "coexec.follow.call_state:CallState.record_plainly", "coexec.follow.call_state:after",
        "coexec.follow.call_state:CallState.move", "coexec.follow.call_state:CallState.errors",
        "coexec.follow.flush:_rescue",
        "coexec.follow.flush:_go_on_plainly",
        "coexec.dispatch.controller:Controller._go_on", "coexec.dispatch.controller:Controller._failed",
        "tracer.recorder:Recorder.fault",
        "coexec.memoize.observe:Observation._give_way",
    ),
    "made for another use, while modules are imported": (
        "coexec.training", "coexec.__main__", "coexec.cli", "coexec.testing:",
    ),
    "restores what a `with` displaced, in assignments that nothing but an interrupt can keep from being made": (
        "tracer.intercept:handling.__exit__", "tracer.stage:Stage.__exit__",
    ),
    "runs the program's own code and nothing else": (
        "coexec.dispatch.controller:run", "coexec.dispatch.controller:Attempt.",
    ),
}  # fmt: skip


class Fault(Exception):
    """What is raised."""


NAMES: list[str] = []
STATE = {"target": -1, "at": 0, "fault": None, "fired": False, "on": False}
COUNTS: collections.Counter = collections.Counter()

_PROBE = """
def probe(k):
    if STATE["on"]:
        COUNTS[k] += 1
        if k == STATE["target"] and COUNTS[k] == STATE["at"] and not STATE["fired"]:
            STATE["fired"] = True
            raise STATE["fault"]
"""


class _Probing(ast.NodeTransformer):
    def __init__(self, module):
        self.path, self.module = [], module

    def visit_ClassDef(self, node):
        self.path.append(node.name)
        self.generic_visit(node)
        self.path.pop()
        return node

    def visit_FunctionDef(self, node):
        self.path.append(node.name)
        self.generic_visit(node)
        name = f"{self.module}:{'.'.join(self.path)}"
        self.path.pop()
        NAMES.append(name)
        at = int(isinstance(node.body[0], ast.Expr) and isinstance(getattr(node.body[0], "value", None), ast.Constant))
        where = node.body[min(at, len(node.body) - 1)]
        call = ast.Call(ast.Name("__probe__", ast.Load()), [ast.Constant(len(NAMES) - 1)], [])
        node.body.insert(at, ast.fix_missing_locations(ast.copy_location(ast.Expr(call), where)))
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        tree = ast.parse(self.get_data(self.path), self.path)
        return compile(_Probing(fullname).visit(tree), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ("coexec", "tracer"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def install():
    """Has both packages imported with probes."""
    assert "tracer" not in sys.modules
    space = {"STATE": STATE, "COUNTS": COUNTS}
    exec(compile(_PROBE, str(ROOT / "coexec" / "probe.py"), "exec"), space)
    builtins.__probe__ = space["probe"]
    sys.meta_path.insert(0, _Finder())


def is_exempt(name):
    return any(name.startswith(part) for parts in EXEMPT.values() for part in parts)


def outcome(program, decorate):
    """What the program's calls came to, with all that they left behind."""
    from tests.snapshots import snapshot

    found = []
    program.begin()
    step = decorate(program.step)
    for number in range(program.calls):
        try:
            STATE["on"] = True
            try:
                result = program.call(step, number)
            finally:
                STATE["on"] = False
            found.append(snapshot(("returned", result)))
        except Fault:
            raise
        except Exception as error:
            found.append(snapshot(("raised", type(error).__name__, str(error)[:60])))
        found.append(snapshot(program.state()))
    return found, step


@contextlib.contextmanager
def armed(target, at):
    COUNTS.clear()
    STATE.update(target=target, at=at, fault=Fault("planned"), fired=False)
    try:
        yield
    finally:
        STATE.update(on=False, fault=None)


def points(program):
    """Counts the entries of each function in a run without a fault; returns pairs of its number and an entry."""
    import coexec

    with armed(-1, 0):
        outcome(program, lambda f: coexec.function(f, **program.options))
    found = []
    for k, count in sorted(COUNTS.items()):
        if not is_exempt(NAMES[k]):
            found += [(k, at) for at in sorted({1, (count + 1) // 2, count})]
    return found


def attempt(program, expected, k, at):
    """Runs a program with a fault; returns what is wrong, or None, and whether the fault came about."""
    import coexec
    from tests.snapshots import assert_same
    from tracer import intercept
    from tracer.private import pywrap_tfe

    problem = None
    try:
        with armed(k, at):
            found, _ = outcome(program, lambda f: coexec.function(f, **program.options))
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_same(one, other, path=f"call {number // 2}: ")
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = "".join(traceback.format_exception(error)[-8:])
    if problem is None and intercept.current_handler() is not None:
        problem = "a handler is left"
    if problem is None and intercept._running:
        problem = f"runs are left: {intercept._running}"
    if problem is None and intercept.holders() < 0:
        problem = f"hooks are held {intercept.holders()} times"
    if problem is None and not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
        problem = LEFT
    intercept.handle(None)
    intercept._running.clear()
    return problem, STATE["fired"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", default="")
    parser.add_argument("--function", default="")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["COEXEC_DEBUG"], os.environ["COEXEC_CACHE_DIR"] = "0", "off"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    install()
    from coexec import testing
    from coexec.base.tuning import tuned
    from tests.faulty_programs import PROGRAMS

    draw, wrong, tried, fired = random.Random(options.seed), 0, 0, 0
    chosen = [make for make in PROGRAMS if options.program in make.__name__]
    began = time.monotonic()
    with tuned(launch_visits=2, launch_operations=1), testing.always_follow():
        for number, make in enumerate(chosen):
            program = make()
            expected, _ = outcome(program, lambda f: f)
            todo = [p for p in points(program) if options.function in NAMES[p[0]]]
            total = len(todo)
            if options.seconds is not None:
                draw.shuffle(todo)
            until = None if options.seconds is None else began + options.seconds * (number + 1) / len(chosen)
            before = tried, wrong
            for k, at in todo:
                if until is not None and time.monotonic() > until:
                    break
                problem, came = attempt(program, expected, k, at)
                tried, fired = tried + 1, fired + came
                if problem == LEFT:  # every operation from here on is recorded on it
                    print(f"WRONG {make.__name__}: {NAMES[k]}, entry {at}: {LEFT}", flush=True)
                    os._exit(1)
                if problem is not None:
                    wrong += 1
                    shown = problem if options.verbose else problem.strip().splitlines()[-1][:150]
                    print(f"WRONG {make.__name__}: {NAMES[k]}, entry {at}: {shown}", flush=True)
            print(f"{make.__name__}: {tried - before[0]} of {total} points, {wrong - before[1]} wrong "
                  f"({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip
    print(f"{tried} points tried, {fired} faults came about, {wrong} wrong")
    sys.stdout.flush()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
