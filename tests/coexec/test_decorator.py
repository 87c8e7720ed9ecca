"""The decorator: takes any callable, behaves as the callable does, and says what happened in words pinned here."""

import asyncio
import copy
import functools
import gc
import inspect
import pickle
import re
import subprocess
import sys
import weakref
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both
from tests.snapshots import assert_same, snapshot

X = tf.constant([1.0, 2.0])
SPEC = tf.TensorSpec([None], tf.float32)


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def doubled(x, scale=2.0, *, shift=0.0):
    """Doubles."""
    return x * scale + shift


def both(function, *arguments, **keywords):
    """What the function and its decorated self return or raise, for one call after three good ones."""
    found = []
    for f in (function, coexec.function(function)):
        for _ in range(3):
            f(X)
        try:
            found.append(snapshot(f(*arguments, **keywords)))
        except Exception as error:
            found.append((type(error), str(error)))
    return found


# What is decorated.


class Model(tf.Module):
    """Has every kind of method."""

    def __init__(self, scale):
        super().__init__()
        self.scale = tf.Variable(scale)
        self.calls = 0

    @coexec.function
    def method(self, x):
        """The method's words."""
        self.calls += 1
        return x * self.scale

    @coexec.function
    @staticmethod
    def static(x):
        return x * 3.0

    @coexec.function
    @classmethod
    def of_class(cls, x):
        return x * float(len(cls.__name__))

    @coexec.function
    def __call__(self, x):
        return self.method(x) + 1.0


def test_methods_share_what_they_learn_and_not_their_state():
    """Each instance has its own state; a dead instance is freed; calls through the class work."""
    models = [Model(1.0), Model(2.0)]
    before = Model.method.stats()
    for _ in range(4):
        for model in models:
            expected = X.numpy() * float(model.scale)
            np.testing.assert_array_equal(model.method(X).numpy(), expected)
            np.testing.assert_array_equal(Model.method(model, X).numpy(), expected)
            np.testing.assert_array_equal(model(X).numpy(), expected + 1.0)
        np.testing.assert_array_equal(models[0].static(X).numpy(), [3.0, 6.0])
        np.testing.assert_array_equal(Model.of_class(X).numpy(), [5.0, 10.0])
    assert [m.calls for m in models] == [12, 12]
    assert [len(m.variables) for m in models] == [1, 1]
    after = Model.method.stats()
    assert after.followed - before.followed >= 15
    assert Model.static.stats().followed == Model.of_class.stats().followed == 3
    gone = weakref.ref(models[0])
    del models[0], model
    gc.collect()
    assert gone() is None


class Callable:
    def __call__(self, x):
        return x * 5.0


SOURCELESS = {}
exec("def sourceless(x):\n    return x * 7.0", SOURCELESS)

CALLABLES = {
    "function": doubled,
    "lambda": lambda x: x * 2.0,
    "partial": functools.partial(doubled, scale=3.0),
    "object": Callable(),
    "bound method": Callable().__call__,
    "exec": SOURCELESS["sourceless"],
    "library": tf.sin,
    "builtin": abs,
    "decorated": coexec.function(doubled),
    "tf.function": tf.function(doubled),
    "class": lambda x: Callable()(x),
}


@pytest.mark.parametrize("function", CALLABLES.values(), ids=CALLABLES)
def test_any_callable(function):
    """Every callable is followed after its first call, and computes what it did."""
    fn = coexec.function(function)
    for n in range(4):
        np.testing.assert_allclose(fn(X + float(n)).numpy(), np.asarray(function(X + float(n))), rtol=1e-6)
    assert (fn.stats().recorded, fn.stats().followed, fn.stats().diverged) == (1, 3, 0)


def test_recursion_and_nesting():
    """A function that calls itself, or others that are decorated, is one call."""

    def make(decorate):
        inner = decorate(lambda x: tf.sin(x))

        @decorate
        def power(x, n):
            return tf.ones_like(x) if n == 0 else inner(x) * power(x, n - 1)

        return power

    fn = run_both(make, [(X, 3)] * 5)
    assert (fn.stats().calls, fn.stats().followed) == (5, 4)


def test_generators_and_coroutines():
    """Generator, coroutine and asynchronous generator functions are what they were."""

    @coexec.function
    def generator(x):
        yield x * 2.0
        yield x * 3.0

    @coexec.function
    async def coroutine(x):
        await asyncio.sleep(0)
        return x * 2.0

    @coexec.function
    async def stream(x):
        yield x * 2.0

    async def collected():
        return [t.numpy().tolist() async for t in stream(X)]

    for _ in range(3):
        assert [t.numpy().tolist() for t in generator(X)] == [[2.0, 4.0], [3.0, 6.0]]
        assert asyncio.run(coroutine(X)).numpy().tolist() == [2.0, 4.0]
        assert asyncio.run(collected()) == [[2.0, 4.0]]


@pytest.mark.parametrize("thing", [3, "f", None, property(lambda self: 1)], ids=["int", "str", "None", "property"])
def test_not_a_callable(thing):
    """Decorating what cannot be called is a TypeError, as soon as it is seen."""
    with pytest.raises(TypeError, match=r"coexec\.function takes a callable, not "):
        coexec.function()(thing)


# What the decorated function looks like.


def test_metadata():
    """Name, documentation, signature and module are those of the function; `repr` names it."""
    fn = coexec.function(doubled)
    assert (fn.__name__, fn.__doc__, fn.__module__, fn.__qualname__) == ("doubled", "Doubles.", __name__, "doubled")
    assert inspect.signature(fn) == inspect.signature(doubled)
    assert fn.python_function is fn.__wrapped__ is doubled
    assert repr(fn) == "<coexec.function doubled>"
    assert repr(coexec.function(doubled, name="other")) == "<coexec.function other>"
    assert coexec.function()(doubled)(X).numpy().tolist() == [2.0, 4.0]
    model = Model(1.0)
    assert model.method.__name__ == "method"
    assert model.method.__self__ is model
    assert repr(model.method).startswith("<bound method Model.method of <")


def plain_method(function):
    return type("Plain", (), {"method": function.python_function})().method


@pytest.mark.parametrize(
    "of", [lambda m: m.__doc__, lambda m: str(inspect.signature(m)), lambda m: m == m.__self__.method],
    ids=["documentation", "signature", "equality"],
)  # fmt: skip
def test_metadata_of_a_bound_method(of):
    """A decorated method looks like a method: documentation, signature without `self`, equality."""
    assert of(Model(1.0).method) == of(plain_method(Model.method))


def test_attributes_of_the_function():
    """Attributes of a function are those of its decorated self, as with `functools.wraps` and `tf.function`."""

    def tagged(x):
        return x

    tagged.tag = "one"
    assert coexec.function(tagged).tag == tf.function(tagged).tag == "one"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))], ids=["deepcopy", "pickle"])
def test_copies(copied):
    """A decorated function can be deep-copied and pickled, as a plain one and `tf.function`'s."""
    fn = coexec.function(doubled)
    assert copied({"step": fn})["step"](X).numpy().tolist() == [2.0, 4.0]


# Arguments.

WRONG = {
    "missing": ((), {}),
    "too many": ((X, 1.0, 2.0), {}),
    "unknown": ((X,), {"other": 1}),
    "twice": ((X,), {"x": X}),
    "refused by the operation": (("text",), {}),
    "incompatible": ((X, tf.ones([3])), {}),
}


@pytest.mark.parametrize(("arguments", "keywords"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(arguments, keywords):
    """Wrong arguments raise what the plain function raises, message included."""
    eager, found = both(doubled, *arguments, **keywords)
    assert issubclass(eager[0], Exception)
    assert found == eager


def test_right_arguments():
    """Keywords, defaults, None and nested structures arrive as they were given."""

    def make(decorate):
        @decorate
        def step(x, parts=None, *rest, flag=False, **others):
            y = x if parts is None else x * parts["a"][0] + float(len(rest))
            return {"y": -y if flag else y, "others": sorted(others), "none": None, "parts": parts}

        return lambda *given: step(*given[0], **given[1])

    nested = {"a": (X, None), "b": []}
    run_both(make, [((X,), {}), ((X, nested, 1, 2), {"flag": True}), ((X,), {"z": 1, "flag": None})] * 4)


def test_a_parameter_called_self():
    """A parameter may be called `self` and be given by keyword."""
    assert coexec.function(lambda self: self * 2.0)(self=X).numpy().tolist() == [2.0, 4.0]


def test_input_signature():
    """Arguments are converted to the specs; what does not fit is a TypeError."""
    fn = coexec.function(lambda x, n: x * tf.cast(n, tf.float32), input_signature=[SPEC, tf.TensorSpec([], tf.int32)])
    for _ in range(4):
        assert fn(np.array([1.0, 2.0]), 3).numpy().tolist() == [3.0, 6.0]
    assert fn.stats().followed == 3
    for wrong in ((), (X,), (X, 1, 2), (tf.constant(1.0), 1), ("a", 1)):
        with pytest.raises(TypeError):
            fn(*wrong)


REFUSED = {
    "list": (lambda fn: fn([1.0, 2.0], 1.0), [2.0, 3.0]),
    "keyword": (lambda fn: fn(x=X, y=1.0), [2.0, 3.0]),
    "wrong dtype": (lambda fn: fn(tf.constant([1]), 1.0), TypeError),
    "None": (lambda fn: fn(None, 1.0), TypeError),
}


@pytest.mark.parametrize("decorate", [coexec.function])
@pytest.mark.parametrize(("call", "expected"), REFUSED.values(), ids=REFUSED)
def test_input_signature_as_tf_function(decorate, call, expected):
    """Lists are converted, keywords bound, and what does not fit raises TypeError, as `tf.function` has it."""
    fn = decorate(lambda x, y: x + y, input_signature=[SPEC, tf.TensorSpec([], tf.float32)])
    if expected is TypeError:
        with pytest.raises(TypeError):
            call(fn)
    else:
        assert call(fn).numpy().tolist() == expected


def test_input_signature_of_a_method():
    """The signature of a method does not count `self`."""

    class Signed:
        @coexec.function(input_signature=[SPEC])
        def method(self, x):
            return x * 2.0

    assert Signed().method(X).numpy().tolist() == [2.0, 4.0]


@pytest.mark.parametrize("value", [None, 1, 0, "no", "AUTO"])
def test_jit_compile_values(value):
    """`jit_compile` is "auto", True or False; anything else is a ValueError that names it."""
    with pytest.raises(ValueError, match=re.escape(f"jit_compile is 'auto', True or False, not {value!r}")):
        coexec.function(doubled, jit_compile=value)


# Where it is called.


def test_called_where_others_call(tmp_path):
    """In `tf.function`, `tf.map_fn`, `tf.vectorized_map`, data pipelines, under a device or a name scope."""
    fn = coexec.function(doubled)
    uses = {
        "function": lambda f: tf.function(lambda x: f(x) + 1.0)(X),
        "map_fn": lambda f: tf.map_fn(f, X),
        "vectorized_map": lambda f: tf.vectorized_map(f, X),
        "dataset": lambda f: list(tf.data.Dataset.from_tensor_slices(X).map(f)),
        "py_function": lambda f: tf.py_function(f, [X], tf.float32),
        "recompute": lambda f: tf.recompute_grad(f)(X),
    }
    for _ in range(3):
        for use in uses.values():
            assert_same(snapshot(use(doubled)), snapshot(use(fn)))
        with tf.device("CPU:0"), tf.name_scope("scope"):
            assert_same(snapshot((doubled(X), doubled(X).device)), snapshot((fn(X), fn(X).device)))
    assert fn.stats().followed >= 8


PLACED = """
import tensorflow as tf
import coexec

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

@coexec.function
def step(x):
    with tf.device("CPU:1"):
        y = x * 2.0
    return y, x + 1.0

x = tf.constant(1.0)
found = {tuple(t.device[-5:] for t in step(x)) for _ in range(4)}
with tf.device("CPU:1"):
    found |= {tuple(t.device[-5:] for t in step(x))}
print(sorted(found), step.stats().followed > 0)
"""


def test_devices_inside_the_call():
    """A device scope inside the call, and one around it, places the operations that are issued under it."""
    ran = subprocess.run([sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.strip() == "[('CPU:1', 'CPU:0'), ('CPU:1', 'CPU:1')] True", ran.stderr[-2000:]


FIRST = """
import tensorflow as tf
import coexec

@coexec.function
def step(x):
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.device("CPU:1"):
        y = tf.constant(x) * 2.0
    return y, tf.constant(x) + 1.0

print({tuple(f"{float(t)} on {t.device[-5:]}" for t in step(1.0)) for _ in range(5)}, step.stats().followed > 0)
"""


def test_the_first_operation_of_a_process():
    """A call may issue the first operation of all, before which it may still say which devices there are to be."""
    ran = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.strip() == "{('2.0 on CPU:1', '2.0 on CPU:0')} True", ran.stderr[-2000:]


def test_under_run_functions_eagerly():
    """Under `run_functions_eagerly` the results are the same."""
    fn = coexec.function(doubled)
    tf.config.run_functions_eagerly(True)
    try:
        for _ in range(3):
            assert fn(X).numpy().tolist() == [2.0, 4.0]
    finally:
        tf.config.run_functions_eagerly(False)


def test_run_functions_eagerly_is_honoured():
    """Under `run_functions_eagerly` every call runs imperatively."""
    fn = coexec.function(doubled)
    tf.config.run_functions_eagerly(True)
    try:
        for _ in range(3):
            fn(X)
    finally:
        tf.config.run_functions_eagerly(False)
    assert (fn.stats().imperative, fn.stats().followed) == (3, 0)


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "run_eagerly"])
def test_a_keras_train_step(eagerly):
    """`fit` with a decorated `train_step` trains as without, compiled and eagerly."""

    class Plain(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    class Decorated(Plain):
        train_step = coexec.function(Plain.train_step)

    losses = []
    for kind in (Plain, Decorated):
        keras.utils.set_random_seed(3)
        model = kind([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", run_eagerly=eagerly, jit_compile=False)
        data = np.arange(16.0, dtype=np.float32).reshape(8, 2) / 16.0
        losses.append(model.fit(data, data[:, :1], batch_size=2, epochs=2, verbose=0, shuffle=False).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert Decorated.train_step.stats().followed == (7 if eagerly else 0)


# What it says.


def said(fn):
    """`explain()` with the file's name made relative, lines counted from the function's, and nothing by the clock."""
    first = inspect.unwrap(fn).__code__.co_firstlineno
    text = fn.explain().replace(__file__, "FILE")
    text = re.sub(r"FILE:(\d+) in [\w.<>]+", lambda m: f"FILE+{int(m[1]) - first}", text)
    return re.sub(r"(a call: [\d.]+ x).*", r"\1", text)


def branching(x, kind):
    y = x + 1.0
    if kind == 1:
        return tf.square(y)
    return y * 2.0


def test_what_explain_says_of_a_new_operation():
    """A path that was not known is told once, with its place, what was expected and what to do."""
    fn = coexec.function(branching, name="branching")
    for kind in (0, 0, 1, 1, 0, 0, 0, 0, 0, 0):
        fn(X, kind)
    now, best, change, counts, *lines = said(fn).splitlines()
    assert now.startswith("branching: a call takes ")
    assert best.startswith("at best: ")
    assert change.startswith("to change: CX-DIVERGE at FILE:")
    assert counts.startswith("10 calls, 8 followed, 1 diverged, 1 recorded, 0 imperative; ")
    assert lines == [
        "CX-DIVERGE, divergence: the program did something new: the rest of that call was recorded",
        "  1 x new operation: expected Mul at FILE+4, saw Square",
        "    at FILE+3",
        "    | return tf.square(y)",
        "    a call: 0.1 x",
        "    what to do: nothing, if this path is one of few; each is recorded once",
    ]


def test_what_explain_says_of_an_unsupported_input():
    """A value that no tensor can be made of is told with its place, and the exception is eager's."""
    fn = coexec.function(lambda x, n: x * n, name="times")
    for n in (1.0, 2.0, "a"):
        with pytest.raises(TypeError, match="Cannot convert 'a' to EagerTensor") if n == "a" else nullcontext():
            fn(X, n)
    assert said(fn).splitlines()[4:] == [
        "CX-INPUT, segment cut: TensorFlow refuses what an operation is given",
        "  1 x Mul refuses its input: Cannot convert 'a' to EagerTensor of dtype float",
        "    at FILE+0",
        '    | fn = coexec.function(lambda x, n: x * n, name="times")',
        "    a call: 0.333 x",
        "    expected: an input that a tensor can be made of",
        "    what to do: give it a tensor, or a value that becomes one",
    ]


def test_what_explain_says_of_a_forced_divergence():
    """The divergence that a test asks for says that it was asked for."""
    fn = coexec.function(branching, name="branching")
    fn(X, 0)
    with testing.diverge_at(1):
        fn(X, 0)
    assert said(fn).splitlines()[4:] == [
        "CX-DIVERGE, divergence: the program did something new: the rest of that call was recorded",
        "  1 x forced: expected nothing, saw a test that asks for a divergence",
        "    at coexec.testing.diverge_at",
        "    a call: 0.5 x",
        "    what to do: nothing, if this path is one of few",
    ]


def test_what_explain_says_of_a_cut():
    """An operation that runs on its own is told with its reason and place, once for all calls."""
    fn = coexec.function(lambda x: tf.strings.as_string(x * 2.0), name="cut")
    for _ in range(4):
        fn(X)
    assert said(fn).splitlines()[4:] == [
        "CX-ALONE, segment cut: an operation runs on its own, between two launches",
        "  3 x AsString runs on its own: strings cannot be compiled",
        "    at FILE+0",
        '    | fn = coexec.function(lambda x: tf.strings.as_string(x * 2.0), name="cut")',
        "    a call: 0.75 x",
        "    expected: operations that can be launched together",
        "    what to do: move it to the beginning or end of the step, or out of it",
    ]


def test_what_explain_says_of_a_read():
    """A value that Python reads is told as a cut with the place of the reading, each time that it is read."""
    fn = coexec.function(lambda x: float(tf.reduce_sum(x)) + float(x[0]), name="read")
    for _ in range(4):
        fn(X)
    (found,) = (cause for cause in fn.explain().as_dict()["causes"] if cause["id"] == "CX-READ")
    assert (found["kind"], found["count"]) == ("segment cut", 6)
    assert found["source"].startswith("fn = coexec.function(lambda x: float(tf.reduce_sum(x))")


REFUSALS = {
    "MatrixInverse at FILE+0 may fail on some values, which XLA would not tell": lambda x: tf.linalg.inv(
        x[:, None, None]
    ),
    "StatelessTruncatedNormalV2 at FILE+0 draws other numbers under XLA than eagerly": lambda x: (
        x + tf.random.stateless_truncated_normal([2], tf.cast(x, tf.int32))
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_explain_says_of_a_refusal_of_xla(reason):
    """A segment that XLA would run wrongly is launched as a graph, and the operation is named with its place."""
    fn = coexec.function(REFUSALS[reason], jit_compile=True)
    for _ in range(4):
        fn(X)
    assert fn.stats().launches > 0
    text = re.sub(r"FILE\+\d", "FILE+0", said(fn))
    assert f"not compiled by XLA: a segment, or a part of it, runs as a TensorFlow graph\n  1 x {reason}\n" in text
    assert "\n    at FILE+0\n" in text


def test_what_explain_says_of_a_failed_operation():
    """An operation that fails is told with its exception."""
    fn = coexec.function(lambda x, i: tf.gather(x, i), name="picked")
    for i in (1, 1, 1, 9):
        try:
            fn(X, tf.constant(i))
        except tf.errors.InvalidArgumentError:
            continue
    text = said(fn)
    assert "failed operation: an operation raised, as it does eagerly\n  1 x InvalidArgumentError: " in text
    assert "indices = 9 is not in [0, 2)" in text
    assert "\n    at FILE+0\n" in text


def test_strict():
    """A strict function raises at the new operation, with eager's prefix as state, and goes on with what it knows."""
    v = tf.Variable(0.0)

    @coexec.function(strict=True)
    def step(x, kind):
        v.assign_add(1.0)
        return branching(x, kind)

    for _ in range(3):
        step(X, 0)
    for n in range(2):
        with pytest.raises(coexec.Divergence, match=r"new operation: .* Mul at .*, saw Square, at .* in branching"):
            step(X, 1)
        assert float(v) == 4.0 + 2 * n
        assert step(X, 0).numpy().tolist() == [4.0, 6.0]
    assert (step.stats().followed, step.stats().diverged) == (4, 2)


def test_the_trace_graph_prints():
    """`str` of the graph names every operation, its place and what follows it."""
    fn = coexec.function(branching, name="branching")
    for kind in (0, 1):
        fn(X, kind)
    text = str(fn.trace_graph)
    assert text.startswith("trace graph 'branching'\n")
    assert re.findall(r"^node \d: (\w+)", text, re.MULTILINE) == ["Entry", "AddV2", "Mul", "Square"]
    assert "  next 2, 3\n" in text


async def coroutine(x):
    return x * 2.0


def generator(x):
    yield x * 2.0


async def asynchronous_generator(x):
    yield x * 2.0


class Holder:
    @coexec.function
    async def method(self, x):
        return x * 2.0


def test_it_is_known_as_the_kind_of_function_that_it_wraps():
    """Frameworks ask `inspect` and `asyncio` whether to await what they call."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    for wrapped in (coroutine, generator, asynchronous_generator, branching):
        decorated = coexec.function(wrapped)
        assert [kind(decorated) for kind in kinds] == [kind(wrapped) for kind in kinds]
        assert inspect.signature(decorated) == inspect.signature(wrapped)
        assert decorated.__code__ is wrapped.__code__
        assert decorated.__globals__ is wrapped.__globals__
    assert inspect.iscoroutinefunction(Holder.method)
    assert inspect.iscoroutinefunction(Holder().method)
    assert asyncio.run(coexec.function(coroutine)(X)).numpy().tolist() == [2.0, 4.0]
    assert asyncio.run(Holder().method(X)).numpy().tolist() == [2.0, 4.0]


def test_its_defaults_and_code_are_the_functions():
    def scaled(x, by=2.0, *, plus=0.0):
        return x * by + plus

    def halved(x, by=2.0, *, plus=0.0):
        return x / by + plus

    step = coexec.function(scaled)
    for _ in range(3):
        assert step(X).numpy().tolist() == [2.0, 4.0]
    step.__defaults__, step.__kwdefaults__ = (3.0,), {"plus": 1.0}
    for _ in range(3):
        assert step(X).numpy().tolist() == [4.0, 7.0]
    step.__code__ = halved.__code__
    for _ in range(3):
        assert step(X).numpy().tolist() == pytest.approx([4.0 / 3.0, 5.0 / 3.0])
    assert scaled.__defaults__ == (3.0,)


def test_what_wraps_no_function_has_no_code():
    assert not hasattr(coexec.function(functools.partial(branching, kind=0)), "__code__")
