"""The registry of hooks: complete, counted, and gone without a trace; other people's patches survive it."""

import ast
import gc
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import keras
import pytest

import coexec
import coexec.cli.run
import coexec.control_flow
from tracer import effects, hooks
from tracer.hooks import ClassHooks, Hooks, HookSet

assert coexec  # imported so that everything is registered

ROOT = Path(__file__).resolve().parent.parent.parent


class Base:
    """A class with an attribute that others inherit."""

    def said(self):
        return "base"


def hook(*_):
    return "hook"


@pytest.fixture
def registry(monkeypatch):
    """Sets made here are not those of the package."""
    monkeypatch.setattr(hooks, "registry", [])
    return hooks.registry


@pytest.fixture
def place():
    """A module with two functions, and a class with one of its own and an inherited one."""
    module = types.ModuleType("place")
    module.one, module.two = (lambda: "one"), (lambda: "two")
    kind = type("Kind", (Base,), {"own": lambda self: "own"})
    return module, kind


@pytest.fixture
def hookset(registry, place):
    module, kind = place
    made = HookSet("here", "all of it", "tests", hooks.CALL)
    for target, name in ((module, "one"), (module, "two"), (kind, "own"), (kind, "said")):
        made.add(target, name, lambda *_, name=name: f"hook of {name}")
    return made


def contents(place):
    """What is there, by identity, whether as an attribute of its own or inherited."""
    module, kind = place
    return {**vars(module), "__": None}, dict(vars(kind))


def same(some, others):
    return all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(some, others, strict=True))


def test_users_are_counted_and_the_last_restores_everything(hookset, place):
    module, kind = place
    before = contents(place)
    assert hookset.entries() == []
    hookset.hold()
    assert (module.one(), module.two(), kind().own(), kind().said()) == (
        "hook of one", "hook of two", "hook of own", "hook of said",
    )  # fmt: skip
    assert len(hookset.entries()) == 4
    inside = contents(place)
    hookset.hold()
    assert same(contents(place), inside)
    hookset.release()
    assert same(contents(place), inside)
    hookset.release()
    assert same(contents(place), before)
    assert "said" not in vars(kind)
    assert (hookset.users, hookset.entries()) == (0, [])


def test_what_is_added_later_is_in_place_at_once_and_restored(hookset, place):
    module, _ = place
    module.three = three = lambda: "three"
    before = contents(place)
    hookset.hold()
    hookset.add(module, "three", hook)
    assert module.three is hook
    with pytest.raises(ValueError, match="three"):
        hookset.add(module, "three", hook)
    hookset.release()
    assert module.three is three
    assert same(contents(place), before)


def test_an_exception_while_installing_leaves_nothing_behind(registry, place):
    module, kind = place
    before = contents(place)
    made = HookSet("here", "all of it", "tests", hooks.CALL)
    made.add(module, "one", hook)
    made.add(kind, "own", hook)
    made.add(int, "bit_length", hook)  # no attribute of this class can be set
    for _ in range(2):
        with pytest.raises(TypeError):
            made.hold()
        assert made.users == 0
        assert same(contents(place), before)


def test_an_exception_between_two_users_leaves_nothing_behind(hookset, place):
    before = contents(place)
    hookset.hold()
    try:
        hookset.hold()
        try:
            raise RuntimeError
        finally:
            hookset.release()
    except RuntimeError:
        pass
    hookset.release()
    assert same(contents(place), before)


@pytest.mark.parametrize("name", ["one", "own", "said"])
def test_a_patch_laid_over_a_hook_is_not_lost(hookset, place, name):
    module, kind = place
    target = module if name == "one" else kind
    before = contents(place)
    hookset.hold()
    ours = vars(target)[name]

    def theirs(*args):
        return f"their {ours(*args)}"

    setattr(target, name, theirs)
    hookset.hold()  # puts nothing over it
    hookset.release()
    assert vars(target)[name] is theirs
    hookset.release()
    assert vars(target)[name] is theirs
    hookset.hold()
    assert vars(target)[name] is theirs
    assert vars(target)[name](None) == f"their hook of {name}"
    setattr(target, name, ours)  # they take their patch out
    hookset.release()
    assert same(contents(place), before)


@pytest.mark.parametrize("name", ["one", "own", "said"])
def test_a_patch_that_was_there_before_is_there_again(hookset, place, name):
    target = place[0] if name == "one" else place[1]
    before = contents(place)
    hookset.hold()
    hookset.release()

    def theirs(*_):
        return "theirs"

    setattr(target, name, theirs)
    hookset.hold()
    assert vars(target)[name](None) == f"hook of {name}"
    hookset.release()
    assert vars(target)[name] is theirs
    if name in before[1] or name == "one":
        setattr(target, name, before[name != "one"][name])
    else:
        delattr(target, name)
    hookset.hold()
    hookset.release()
    assert same(contents(place), before)


def test_a_hook_is_put_back_where_somebody_restored_what_was_there_before(hookset, place):
    module, _ = place
    before = contents(place)
    hookset.hold()
    module.one = before[0]["one"]
    hookset.hold()
    assert module.one() == "hook of one"
    hookset.release()
    hookset.release()
    assert same(contents(place), before)


def test_many_threads(hookset, place):
    before = contents(place)

    def busy():
        for _ in range(200):
            hookset.hold()
            hookset.release()

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert hookset.users == 0
    assert same(contents(place), before)


def test_all_can_be_taken_out_whoever_holds_them(registry, hookset, place):
    before = contents(place)
    hookset.hold()
    hookset.hold()
    hooks.uninstall()
    assert same(contents(place), before)
    assert hookset.users == 0


def test_hooks_of_classes_keep_none_alive(registry):
    made = ClassHooks("here", "`said`", "tests", hooks.PROCESS, "said")

    class Own(Base):
        def said(self):
            return f"own, {super().said()}"

    class Inheriting(Own):
        pass

    before = [dict(vars(kind)) for kind in (Own, Inheriting)]
    for kind in (Own, Inheriting):
        original = kind.said
        made.add(kind, lambda self, original=original: f"hook, {original(self)}")
    assert Inheriting().said() == "hook, hook, own, base"
    assert made.entries() == [(Own, "said"), (Inheriting, "said")]
    made.uninstall()
    assert same([dict(vars(kind)) for kind in (Own, Inheriting)], before)
    assert made.entries() == []
    for kind in (Own, Inheriting):
        original = kind.said
        made.add(kind, lambda self, original=original: f"hook, {original(self)}")
    gone = [weakref.ref(Own), weakref.ref(Inheriting)]
    del Own, Inheriting, kind, original, before
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_hooks_of_keras_objects_are_in_the_registry():
    class Layer(keras.layers.Layer):
        pass

    class Noting(effects.Watcher):
        def __init__(self):
            super().__init__()
            self.seen = []

        def changed(self, what):
            self.seen.append(what)

    layer, watcher = Layer(), Noting()
    before = dict(vars(Layer))
    effects.watch([layer], watcher)
    assert (Layer, "__setattr__") in effects._hooks.entries()
    layer.rate = 3.0
    assert watcher.seen == ["rate of Layer"]
    hook = vars(Layer)["__setattr__"]
    assert not hasattr(hook, "__wrapped__")  # inherited
    del Layer.__setattr__
    assert same([dict(vars(Layer))], [before])


# Whatever the package changes is in the registry.

OF_HOOKS = "tracer/hooks.py"
MECHANISMS = {
    "os.register_at_fork": OF_HOOKS,
    "atexit.register": OF_HOOKS,
    "sys.setprofile": None,
    "sys.settrace": None,
    "signal.signal": None,
    "gc.disable": None,
}


def changes(tree):
    """What a file does to CPython or to modules that it imports: mechanisms, and assignments to attributes."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (
            node.module == "tracer.private" or not node.module.startswith(("coexec", "tracer"))
        ):
            foreign |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in MECHANISMS:
                yield node.lineno, called
            elif called in ("setattr", "delattr") and ast.unparse(node.args[0]).split(".")[0] in foreign:
                yield node.lineno, "attribute"
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            root = node.value
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name) and root.id in foreign:
                text = ast.unparse(node)
                own = ("os.environ", "sys.argv", "sys.modules", "sys.path")
                yield node.lineno, next((name for name in own if text.startswith(name)), "attribute")


def test_no_file_changes_anything_that_is_not_declared():
    declared = {}
    for each in hooks.registry:
        declared.setdefault(each.owner, []).append(each.what)
    found, seen = [], set()
    for package in ("coexec", "tracer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            module = name.removesuffix(".py").replace("/", ".")
            for line, what in changes(ast.parse(path.read_text())):
                seen.add(what)
                said = " ".join(declared.get(module, []))
                if what in MECHANISMS and name != OF_HOOKS:
                    fine = MECHANISMS[what] is None and f"`{what}`" in said
                elif what == "os.environ":
                    fine = "FLAGS" in said
                elif what in ("sys.argv", "sys.modules", "sys.path"):
                    fine = module.startswith("coexec.cli.")  # a command's process is its own
                else:
                    fine = name == OF_HOOKS
                if not fine:
                    found.append(f"{name}:{line}: {what} is replaced without `tracer.hooks` being told")
    assert not found, "\n".join(found)
    assert seen >= {*MECHANISMS, "os.environ"}


def test_the_search_for_changes_finds_them():
    tree = ast.parse(
        "import keras, os, sys\nfrom tracer.private import context as c\n"
        "keras.layers.Layer.__call__ = f\nsetattr(c.Context, 'a', 1)\ndel c.put\n"
        "os.environ['A'] = '1'\nsys.setprofile(f)\nself.a = 1\nlayer.b = 2\n"
    )
    assert [what for _, what in sorted(changes(tree))] == [
        "attribute", "attribute", "attribute", "os.environ", "sys.setprofile",
    ]  # fmt: skip


def test_each_hook_says_whose_it_is_and_why():
    for each in hooks.registry:
        assert each.owner in sys.modules
        assert all((each.what, each.why, each.lifetime))
    assert type(Hooks("here", "a", "b", hooks.LASTING)) is Hooks
    hooks.registry.pop()


def test_the_readme_has_the_table():
    readme = (ROOT / "tracer" / "README.md").read_text()
    between = readme.split("<!-- hooks:begin -->\n")[1].split("\n<!-- hooks:end -->")[0]
    assert between == hooks.table()


# In a process of its own, as the hooks do not come back: what is replaced is what the registry says, and nothing is
# left behind.

WHOLE = """
import sys, types

import keras
import numpy as np
import tensorflow as tf

import coexec
from tracer import hooks

FILES = tuple({files!r})


def code_of(value):
    if type(value) in (staticmethod, classmethod, types.MethodType):
        value = value.__func__
    elif type(value) is property:
        value = value.fget
    elif "__instancecheck__" in vars(type(value)):  # stands for a class
        value = type(value).__instancecheck__
    return value.__code__ if type(value) is types.FunctionType else None


def replaced():
    found = set()
    holders = {{}}
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] in ("coexec", "tracer", "__main__"):
            continue
        holders[id(module)] = module
        for value in list(vars(module).values()):
            if isinstance(value, type) and not str(value.__module__).startswith(("coexec", "tracer")):
                holders[id(value)] = value
    for holder in holders.values():
        for name, value in list(vars(holder).items()):
            code = code_of(value)
            if code is not None and code.co_filename.startswith(FILES):
                found.add((id(holder), name, getattr(holder, "__name__", "")))
    return found


model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
x, y = tf.ones((8, 3)), tf.ones((8, 1))
kept = []


@coexec.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    kept.append(loss * 2.0)
    return loss


for _ in range(6):
    step()
assert step.stats().followed, step.stats()
tf.distribute.MirroredStrategy(["CPU:0"])
from coexec.training.loop.replicas import Replicas
Replicas(tf.distribute.MirroredStrategy(["CPU:0"]))

declared = {{(id(target), name) for each in hooks.registry for target, name in each.entries()}}
found = replaced()
assert len(found) > 100, len(found)
# Functions with other names elsewhere are those that the module copied: none may be.
undeclared = {{entry for entry in found if entry[:2] not in declared}}
assert not undeclared, undeclared
missing = declared - {{entry[:2] for entry in found}}
assert not missing, [n for n in missing]
kept.clear()
import gc; gc.collect()
hooks.uninstall()
left = replaced()
assert not left, left
assert not any(each.entries() for each in hooks.registry)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(x) - y) ** 2)
assert all(g is not None for g in tape.gradient(loss, model.trainable_variables))
print("done")
"""


def test_a_process_is_left_as_it_was():
    program = WHOLE.format(files=[str(ROOT / "coexec") + "/", str(ROOT / "tracer") + "/"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("done")
