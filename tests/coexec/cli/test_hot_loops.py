"""HotLoops: the function that a loop calls is found in a running program and followed, and nothing else is."""

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest
import tensorflow as tf

import coexec
from coexec.base.tuning import tuning
from coexec.cli.hot_loops import HotLoops, follow

# Enough turns for the search on a busy machine: it ends with the loop that is found.
WORK = """
import tensorflow as tf

W = tf.eye(8) * 0.5
TURNS = 4000

def work(x):
    for _ in range(10):
        x = tf.tanh(tf.matmul(x, W) + 0.1)
    return x
"""


@pytest.fixture
def program(tmp_path, request):
    """Runs `main` of a module of the program's while its loops are looked for; returns it, and what was found."""
    name = "program_" + request.node.name.partition("[")[0]

    def run(source):
        path = tmp_path / f"{name}.py"
        path.write_text(WORK + textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        loops = HotLoops(run.__code__)
        module.found = loops.found
        loops.start()
        try:
            module.main()
        finally:
            loops.stop()
        return module, loops.found

    yield run
    sys.modules.pop(name, None)


def line_of(module, text):
    return 1 + Path(module.__file__).read_text().splitlines().index(text)


def test_the_function_that_a_loop_calls_is_followed(program):
    """Not what it calls itself, nor the one around the loop; from the next turn on, with the same results."""
    module, found = program("""
        sums = []

        def step(x):
            y = work(work(x))
            sums.append(float(tf.reduce_sum(y)))

        def main():
            for n in range(TURNS):
                step(tf.ones([2, 8]) * (n % 3))
                if found and len(sums) % 100 == 0:
                    break
    """)
    ((loop,),) = [found]
    assert loop.place == f"step ({module.__file__}:{line_of(module, 'def step(x):')})"
    assert loop.function is module.step
    assert loop.share > 0.5
    stats = loop.function.stats()
    assert 0 < stats.calls < len(module.sums)
    assert type(module.work).__name__ == "function"
    for n in range(6):
        module.step(tf.ones([2, 8]) * (n % 3))
    assert loop.function.stats().followed > stats.followed
    assert set(module.sums[:3]) == set(module.sums[-3:])


@pytest.mark.parametrize("kind", ["", "@staticmethod", "@classmethod"])
def test_methods_are_replaced_in_their_class(program, kind):
    first = {"": "self, ", "@staticmethod": "", "@classmethod": "cls, "}[kind]
    module, (loop,) = program(f"""
        class Agent:
            class Inner:
                {kind}
                def learn({first}x):
                    return work(x)

        def main():
            agent = Agent.Inner()
            for n in range(TURNS):
                agent.learn(tf.ones([2, 8]))
                if found:
                    break
            agent.learn(tf.ones([2, 8]))
    """)
    assert loop.function is getattr(vars(module.Agent.Inner)["learn"], "__func__", vars(module.Agent.Inner)["learn"])
    assert loop.function.stats().calls == 1


def test_a_function_that_other_modules_have_by_name_is_replaced_there_too(program, request):
    copies = type(sys)("program_copies")
    copies.__file__ = "/nowhere/program_copies.py"
    sys.modules["program_copies"] = copies
    request.addfinalizer(lambda: sys.modules.pop("program_copies"))
    module, (loop,) = program("""
        import program_copies
        program_copies.mine = work

        def main():
            for n in range(TURNS):
                program_copies.mine(tf.ones([2, 8]))
                if found:
                    break
    """)
    assert loop.function is module.work is copies.mine


def test_classes_that_have_each_other(program):
    """Each is looked into once, and so is one that has itself."""
    module, (loop,) = program("""
        class Parent:
            pass

        class Child:
            parent = Parent

            def step(self, x):
                return work(work(x))

        Parent.child, Parent.itself = Child, Parent

        def main():
            child = Child()
            for n in range(TURNS):
                child.step(tf.ones([2, 8]))
                if found:
                    break
    """)
    assert loop.function is vars(module.Child)["step"]


def test_what_cannot_be_replaced_is_told(program):
    """A function that is made in another one is looked up there."""
    module, (loop,) = program("""
        def main():
            def inner(x):
                return work(x)

            for n in range(TURNS):
                inner(tf.ones([2, 8]))
                if found:
                    break
    """)
    assert loop.function is None
    assert loop.place.startswith("inner (")
    assert "decorate it" in loop.why_not
    assert type(module.work).__name__ == "function"


def test_a_loop_whose_body_is_no_function_is_told_with_its_lines(program, tune):
    """Not the layers that it calls: to follow these one by one would be little."""
    tune(search_samples=60)
    module, (loop,) = program("""
        class Model(tf.keras.Model):
            def call(self, x):
                return work(x)

        def main():
            model = Model()
            for n in range(600):
                x = tf.ones([2, 8])
                for _ in range(5):
                    x = model(x)
    """)
    first, last = line_of(module, "        x = tf.ones([2, 8])"), line_of(module, "            x = model(x)")
    assert loop.place in (f"{module.__file__}:{last}", f"{module.__file__}:{first}-{last}")
    assert loop.function is None
    assert "the body of its loop is no function" in loop.why_not
    assert not isinstance(vars(module.Model)["call"], coexec.Function)


def test_graph_functions_and_followed_ones_are_left_alone(program, tune):
    tune(search_bare=10**9)
    module, found = program("""
        import coexec
        traced, followed = tf.function(work), coexec.function(work)

        def both(x):
            return traced(x), followed(x)

        def main():
            for n in range(600):
                both(tf.ones([2, 8]))
    """)
    assert module.followed.stats().followed > 500
    assert not [loop for loop in found if loop.function is not None and loop.place.startswith("work (")]


def test_frames_are_let_go(program):
    """Locals of the program live no longer for it."""
    module, _ = program("""
        import weakref
        kept = []

        class Thing:
            pass

        def step(x):
            thing = Thing()
            kept.append(weakref.ref(thing))
            return work(x)

        def main():
            for n in range(TURNS):
                step(tf.ones([2, 8]))
                if found:
                    break
    """)
    assert len(module.kept) >= tuning.search_calls
    assert not any(ref() for ref in module.kept)


def test_what_is_no_function_is_refused():
    with pytest.raises(LookupError, match="it is no function, but 3"):
        follow(type("Owner", (), {"three": 3}), "three")
    with pytest.raises(LookupError, match="it is not there"):
        follow(type("Owner", (), {}), "three")
