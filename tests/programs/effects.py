"""What Python does besides computing tensors: each effect happens once a call, in order."""

import contextlib
import contextvars
import functools
import io
import logging
import os
import pathlib
import random
import sys
import tempfile
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, signed, vector, whole

TOTAL = 0.0


@program()
def globals_written(function):
    "A module global and a nonlocal are written between operations."
    count = 0

    @function
    def step(x):
        global TOTAL
        nonlocal count
        count += 1
        y = x * count
        TOTAL = TOTAL + float(tf.reduce_sum(y))
        return y

    def arguments(i):
        global TOTAL
        if i == 0:
            TOTAL = 0.0
        return args(integers(i, dtype="float32"))

    return Instance(step, each(arguments), lambda: (TOTAL, count))


@program()
def logged(function):
    "The `logging` module gets records with tensors and numbers, in order."
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append((record.levelname, record.getMessage()))

    logger = logging.Logger("program")
    logger.addHandler(Keep())

    @function
    def step(x):
        logger.info("before %s", x)
        y = tf.reduce_sum(x)
        if y > 0:
            logger.warning("sum %.1f", y)
        logger.debug("after %r", y)
        return y

    return Instance(step, each(lambda i: args(signed(i))), lambda: records)


@program()
def warned(function):
    "Warnings are raised, caught and counted."

    @function
    def step(x):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = x * 2.0
            warnings.warn(f"sum is {float(tf.reduce_sum(y))}", stacklevel=2)
        return y, [str(item.message) for item in caught]

    return Instance(step, each(lambda i: args(integers(i, dtype="float32"))))


@program()
def context_managers(function):
    "Context managers of the user's own: entered, left, nested, suppressing."
    log = []

    @contextlib.contextmanager
    def scope(name):
        log.append(("enter", name))
        try:
            yield name
        except KeyError:
            log.append(("suppressed", name))
        finally:
            log.append(("exit", name))

    @function
    def step(x):
        with scope("a") as a, scope("b"):
            y = x * 2.0
            if tf.reduce_sum(y) > 0:
                raise KeyError(a)
            log.append(float(tf.reduce_sum(y)))
        with contextlib.ExitStack() as stack:
            stack.callback(log.append, "last")
            z = y + 1.0
        return z

    return Instance(step, each(lambda i: args(signed(i))), lambda: log)


@program()
def files(function):
    "A file is written and read within a step."
    path = os.path.join(tempfile.mkdtemp(), "log")

    @function
    def step(x):
        y = tf.reduce_sum(x * 2.0)
        with open(path, "a") as file:
            file.write(f"{float(y)}\n")
        with open(path) as file:
            lines = file.read().split()
        return y + len(lines), lines[-1]

    return Instance(step, each(lambda i: args(integers(i, dtype="float32"))), lambda: pathlib.Path(path).read_text())


@program()
def captured_output(function):
    "A step captures what is printed, and writes to the error stream."
    errors = io.StringIO()

    @function
    def step(x):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(errors):
            print(x + 1.0)
            print("error", file=sys.stderr)
        print("outer", len(out.getvalue()))
        return out.getvalue()

    return Instance(step, each(lambda i: args(integers(i, dtype="float32"))), errors.getvalue)


@program()
def objects_with_hooks(function):
    "`__setattr__`, `__getattr__`, properties and descriptors see each access."
    log = []

    class Watched:
        def __init__(self):
            super().__setattr__("values", {})

        def __setattr__(self, name, value):
            log.append(("set", name))
            self.values[name] = value

        def __getattr__(self, name):
            log.append(("get", name))
            return self.values[name]

        @property
        def doubled(self):
            log.append("doubled")
            return self.x * 2.0

    watched = Watched()

    @function
    def step(x):
        watched.x = x
        watched.y = watched.doubled + 1.0
        return watched.y * watched.x

    return Instance(step, each(lambda i: args(vector(i))), lambda: (log, watched.values))


@program()
def remembered(function):
    "`functools.lru_cache` on Python numbers, `cached_property`, and a dict of results."
    computed = []

    @functools.lru_cache
    def table(n):
        computed.append(n)
        return tf.constant([float(n)] * 4)

    class Lazy:
        @functools.cached_property
        def weights(self):
            computed.append("weights")
            return tf.ones(4) * 2.0

    lazy = Lazy()

    @function
    def step(x, number):
        return x * table(number % 3) + lazy.weights

    return Instance(step, each(lambda i: args(vector(i), i), 12), lambda: computed)


@program()
def weak_references(function):
    "Objects made in a step die when the step lets go of them, and their finalizers run in order."
    log = []

    class Temporary:
        def __init__(self, value):
            self.value = value

    @function
    def step(x):
        first = Temporary(x * 2.0)
        weakref.finalize(first, log.append, "first is gone")
        alive = weakref.ref(first)
        y = first.value + 1.0
        log.append(alive() is first)
        del first
        log.append(alive() is None)
        return y

    return Instance(step, each(lambda i: args(vector(i))), lambda: log)


@program()
def threads(function):
    "Threads started in a step compute parts of it; the step waits for them."

    @function
    def step(x):
        y = x * 2.0

        def part(n):
            return tf.reduce_sum(y * float(n))

        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(part, range(3)))
        box = []
        thread = threading.Thread(target=lambda: box.append(tf.sin(y)))
        thread.start()
        thread.join()
        return tf.add_n(parts) + box[0]

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def context_variables(function):
    "Context variables are set and reset, and read in a called function."
    current = contextvars.ContextVar("current", default=0)

    def helper(x):
        return x + current.get()

    @function
    def step(x, number):
        token = current.set(number)
        y = helper(x)
        copied = contextvars.copy_context().run(helper, x)
        current.reset(token)
        return y, copied, helper(x)

    return Instance(step, each(lambda i: args(vector(i), i)), current.get)


@program()
def classes_made_inside(function):
    "A class, a decorator and a closure are made anew on each call."

    @function
    def step(x):
        class Layer:
            made = 0

            def __init__(self, scale):
                Layer.made += 1
                self.scale = scale

            def __call__(self, value):
                return value * self.scale

        def twice(call):
            return lambda value: call(call(value))

        layers = [Layer(2.0), Layer(tf.reduce_max(x))]
        return twice(layers[0])(x) + layers[1](x), Layer.made

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def patched(function):
    "A function that the step calls is replaced between calls, and within one."

    class Library:
        @staticmethod
        def activate(x):
            return tf.tanh(x)

    original = Library.activate

    @function
    def step(x):
        y = Library.activate(x)
        saved, Library.activate = Library.activate, tf.nn.relu
        z = Library.activate(x)
        Library.activate = saved
        return y, z

    def arguments(i):
        Library.activate = original if i % 4 < 2 else tf.sigmoid
        return args(vector(i))

    return Instance(step, each(arguments, 12))


@program()
def callbacks(function):
    "Callbacks see tensors at each point, may read them, and may ask to stop."
    log = []

    def on_loss(value, number):
        log.append(round(float(value), 3))
        return number % 4 == 3

    @function
    def step(x, number, hooks):
        y = tf.reduce_sum(x)
        stop = any(hook(y, number) for hook in hooks)
        return y * 100.0 if stop else y + 1.0

    calls = each(lambda i: args(integers(i, dtype="float32"), i, [on_loss, lambda *_: False]), 10)
    return Instance(step, calls, lambda: log)


@program()
def iterator_consumed(function):
    "An iterator of the caller's is advanced by each step, and a generator keeps its place."
    taken = []

    def numbers():
        n = 0.0
        while True:
            taken.append(n)
            yield n
            n += 1.0

    source = numbers()

    @function
    def step(x):
        return x * next(source) + next(source)

    return Instance(step, each(lambda i: args(vector(i))), lambda: taken)


@program()
def generator_kept_across_calls(function):
    "A generator that computes with tensors is suspended in one call and resumed in the next."

    def running():
        total = tf.zeros(4)
        while True:
            x = yield total
            total = total * 0.5 + x

    states = running()
    next(states)

    @function
    def step(x):
        return states.send(x * 2.0)

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def early_exit_of_training(function):
    "Patience: the step raises a flag when the loss has not fallen for a while."
    state = {"best": float("inf"), "waited": 0, "stopped": None, "losses": []}

    @function
    def step(loss, number):
        value = float(loss * 1.0)
        state["losses"].append(value)
        if value < state["best"]:
            state["best"], state["waited"] = value, 0
        else:
            state["waited"] += 1
            if state["waited"] >= 2 and state["stopped"] is None:
                state["stopped"] = number
        return loss * 2.0, state["stopped"] is not None

    losses = [5.0, 4.0, 4.5, 3.0, 3.5, 2.0, 1.0, 1.5, 1.25, 1.0]
    return Instance(step, each(lambda i: args(tf.constant(losses[i]), i), len(losses)), lambda: state)


@program()
def environment(function):
    "Environment variables, the recursion limit and the module table are read and changed."

    @function
    def step(x, number):
        os.environ["PROGRAM_SCALE"] = str(number % 2 + 1)
        y = x * float(os.environ["PROGRAM_SCALE"])
        del os.environ["PROGRAM_SCALE"]
        import math  # noqa: PLC0415

        return y + math.pi, sys.getrecursionlimit() > 0, "PROGRAM_SCALE" in os.environ

    return Instance(step, each(lambda i: args(vector(i), i), 10))


@program()
def sampled_replay(function):
    "Reinforcement learning in small: a reward from Python, an action that was read, a sampled memory."
    memory, dice = [], random.Random(3)
    weight = tf.Variable([[0.1, 0.2], [0.3, -0.1]])

    @function
    def step(state):
        action = int(tf.argmax(state @ weight, axis=1)[0])
        reward = [1.0, -0.5][action]
        memory.append((state, action, reward))
        batch = [dice.choice(memory) for _ in range(2)]
        with tf.GradientTape() as tape:
            values = tf.concat([state @ weight for state, _, _ in batch], 0)
            chosen = tf.gather(values, [action for _, action, _ in batch], axis=1, batch_dims=1)
            loss = tf.reduce_mean((chosen - [reward for _, _, reward in batch]) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return Instance(step, each(lambda i: args(vector(i, 1, 2)), 10), lambda: (weight, memory))


@program()
def order_of_everything(function):
    "Prints, reads, writes and appends keep their order among each other."
    v, log = tf.Variable(0.0), []

    @function
    def step(x):
        log.append("begin")
        v.assign_add(x)
        print("v is", float(v))
        log.append(v.numpy())
        y = v * 2.0
        v.assign(0.5)
        log.append((float(y), float(v)))
        return y

    return Instance(step, each(lambda i: args(whole(i))), lambda: (log, v))
