"""What can be decorated (methods, partials, lambdas, objects, text) and with what it can be called."""

import asyncio
import collections
import dataclasses
import functools
import gc
import inspect
import weakref

import numpy as np
import tensorflow as tf

from tests.programs import Instance, args, each, program, signed, vector, whole


@program()
def method(function):
    "A method that changes its object."

    class Learner:
        def __init__(self):
            self.weight, self.losses = tf.Variable([1.0, 2.0, 3.0, 4.0]), []

        @function
        def step(self, x, rate=0.1):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(self.weight * x))
            self.weight.assign_sub(rate * tape.gradient(loss, self.weight))
            self.losses.append(loss)
            return loss

    learner = Learner()
    return Instance(learner.step, each(lambda i: args(vector(i))), lambda: vars(learner))


@program(follows=3)
def methods_of_two_objects(function):
    "One method, two instances with weights of their own, one of another class that overrides half of it."

    class Base:
        def __init__(self, scale):
            self.weight, self.calls = tf.Variable(scale), 0

        @function
        def step(self, x):
            self.calls += 1
            return self.head(x * self.weight.assign_add(1.0))

        def head(self, x):
            return x + 1.0

    class Derived(Base):
        def head(self, x):
            return super().head(x) * 10.0

    objects = [Base(1.0), Derived(2.0), Base(3.0)]
    return Instance(
        lambda x, number: objects[number % 3].step(x),
        each(lambda i: args(vector(i), i), 15),
        lambda: [vars(item) for item in objects],
        function=Base.step,
    )


@program()
def static_and_class_methods(function):
    "A static method and a class method, by class and by instance."

    class Library:
        calls = 0

        @staticmethod
        @function
        def double(x):
            return x * 2.0

        @classmethod
        @function
        def counted(cls, x):
            cls.calls += 1
            return cls.double(x) + cls.calls

    return Instance(
        lambda x: (Library.double(x), Library().counted(x)),
        each(lambda i: args(vector(i))),
        lambda: Library.calls,
        function=Library.__dict__["counted"].__func__,
    )


@program()
def partial(function):
    "A partial is decorated, and a partial is made of what is decorated."

    def scaled(x, scale, shift=0.0):
        return x * scale + shift

    inner = function(functools.partial(scaled, scale=2.0))
    outer = functools.partial(inner, shift=1.0)
    return Instance(outer, each(lambda i: args(vector(i))), function=inner)


@program()
def lambda_function(function):
    "A lambda is decorated."
    return Instance(function(lambda x, y=2.0: x * y if x[0] > 0 else x - y), each(lambda i: args(signed(i))))


@program()
def callable_object(function):
    "An object with `__call__` is decorated, state and all."

    class Counter:
        def __init__(self):
            self.count = 0

        def __call__(self, x):
            self.count += 1
            return x * self.count

    counter = Counter()
    return Instance(function(counter), each(lambda i: args(vector(i))), lambda: counter.count)


@program()
def compiled_text(function):
    "A cell of a notebook: text that is compiled and executed, with the decorator in it."
    namespace = {"function": function, "tf": tf, "history": []}
    cell = """
@function
def step(x):
    history.append(len(history))
    helper = lambda value: value * 2.0 if tf.reduce_sum(value) > 0 else -value
    return helper(x)
"""
    exec(compile(cell, "<cell 1>", "exec"), namespace)
    return Instance(namespace["step"], each(lambda i: args(signed(i))), lambda: namespace["history"])


@program()
def builtin_and_library_functions(function):
    "A function of TensorFlow's own is decorated."
    return Instance(function(tf.nn.softmax), each(lambda i: args(vector(i), axis=-1)))


@program()
def nested_decorated(function):
    "Decorated functions call each other, with an exception passing through."
    log = []

    @function
    def inner(x):
        log.append("inner")
        if x[0] < 0:
            raise ValueError("negative")
        return tf.sqrt(x)

    @function
    def middle(x):
        return inner(x) + 1.0

    @function
    def step(x):
        try:
            return middle(x) * 2.0
        except ValueError as error:
            log.append(str(error))
            return x

    return Instance(step, each(lambda i: args(signed(i))), lambda: log)


@program()
def inner_used_alone_too(function):
    "A decorated function is called from a decorated one and by itself."

    @function
    def inner(x):
        return tf.tanh(x) * 2.0

    @function
    def step(x):
        return inner(x) + inner(x + 1.0)

    return Instance(step, each(lambda i: args(vector(i))), after=inner)


@program()
def recursion_of_a_decorated_function(function):
    "A decorated function calls itself, deeper or less deep, as a tensor says."

    @function
    def power(x, n):
        if n == 0:
            return tf.ones_like(x)
        return x * power(x, n - 1)

    return Instance(power, each(lambda i: args(vector(i), tf.constant(2 + i % 2)), 10))


@program()
def decorators_above_and_below(function):
    "Other decorators around and within, which count, keep names and change results."
    counts = collections.Counter()

    def counted(name):
        def decorate(target):
            @functools.wraps(target)
            def wrapper(*positional, **keywords):
                counts[name] += 1
                return target(*positional, **keywords)

            return wrapper

        return decorate

    @counted("below")
    def plain(x, scale=2.0):
        "What it does."
        return x * scale

    decorated = function(plain)
    names = decorated.__name__, decorated.__doc__, str(inspect.signature(decorated)), callable(decorated)
    step = counted("above")(decorated)
    return Instance(step, each(lambda i: args(vector(i))), lambda: (counts, names), function=decorated)


@program()
def all_kinds_of_parameters(function):
    "Positional-only, default, variadic, keyword-only and keyword parameters."

    @function
    def step(a, /, b, c=1.0, *rest, d, e=2.0, **others):
        total = a + b * c + d * e
        for item in rest:
            total = total + item
        return total, sorted(others), {name: value * 2.0 for name, value in others.items()}

    def arguments(i):
        x = vector(i)
        return [args(x, 1.0, d=x), args(x, x, 2.0, x, x, d=1.0, f=x, g=x)][i % 2]

    return Instance(step, each(arguments, 10))


@program(follows=3)
def wrong_arguments(function):
    "Too few, too many and unknown arguments raise what the plain function raises; later calls work."

    @function
    def step(x, y, *, z=1.0):
        return x * y + z

    def arguments(i):
        x = vector(i)
        return [args(x, x), args(x), args(x, x, x), args(x, x, w=x), args(x, y=2.0, z=x)][i % 5]

    return Instance(step, each(arguments, 15))


@program()
def structures_as_arguments(function):
    "Dicts, lists, named tuples, data classes and None, with tensors and numbers in them."
    Batch = collections.namedtuple("Batch", "x y")

    @dataclasses.dataclass
    class Options:
        scale: float
        bias: tf.Tensor | None = None

    @function
    def step(batch, options, extra=None, *, names=()):
        y = batch.x * options.scale + sum(batch.y["parts"])
        if options.bias is not None:
            y = y + options.bias
        return {
            "y": y,
            "extra": extra if extra is None else extra["a"] * 2.0,
            "names": [name.upper() for name in names],
        }

    def arguments(i):
        x = vector(i)
        options = Options(0.5, x if i % 2 else None)
        return args(Batch(x, {"parts": [x, x * 2.0]}), options, None if i % 2 else {"a": x}, names=("p", "q"))

    return Instance(step, each(arguments, 10))


@program()
def python_arguments(function):
    "Numbers, texts, arrays, functions, types and objects are what they are inside."

    @function
    def step(x, number, text, array, activation, kind):
        seen = [
            type(number).__name__,
            type(text).__name__,
            type(array).__name__,
            kind.__name__,
            array.flags.writeable,
        ]
        array[0] = number
        return activation(x * number + array), seen, text * number, number // 2

    def arguments(i):
        array = np.arange(4, dtype=np.float32)
        return args(vector(i), i % 2 + 1, "ab"[i % 2], array, [tf.tanh, tf.sigmoid][i % 2], dict)

    return Instance(step, each(arguments, 10))


@program()
def arguments_changed_inside(function):
    "A list, a dict and an array that were given are changed by the step, and the caller sees it."
    given = []

    @function
    def step(items, table, array):
        items.append(items[0] * 2.0)
        table["new"] = items[-1] + 1.0
        array += items[-1].numpy()
        return len(items)

    def arguments(i):
        given[:] = [[vector(i)], {"old": 1}, np.zeros(4, np.float32)]
        return args(*given)

    return Instance(step, each(arguments), lambda: given)


@program()
def iterators_as_arguments(function):
    "A generator and a map object are used up by the step."

    @function
    def step(parts, pairs):
        total = tf.zeros(4)
        for part in parts:
            total = total + part
        return total, [a * b for a, b in pairs], list(parts)

    def arguments(i):
        x = vector(i)
        return args((x * n for n in range(3)), zip([x, x + 1.0], [x, x]))

    return Instance(step, each(arguments))


@program()
def variables_as_arguments(function):
    "A variable is an argument: assigned inside, in a structure and by keyword."
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]

    @function
    def step(v, others, *, extra=None):
        v.assign_add([1.0, 1.0])
        others["v"].assign(others["v"] * 0.5)
        return v * others["v"] if extra is None else extra + v

    return Instance(
        step,
        each(lambda i: args(variables[0], {"v": variables[1]}, extra=None if i % 2 else 1.0)),
        lambda: variables,
    )


@program()
def module_method(function):
    "A method of a tf.Module, whose variables are tracked as ever."

    class Network(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(vector(100, 4))
            self.calls = 0

        @function
        def __call__(self, x):
            self.calls += 1
            return self.w.assign_sub(0.1 * x) * x

    network = Network()
    return Instance(
        lambda x: network(x),
        each(lambda i: args(vector(i))),
        lambda: (network.variables, network.calls),
        function=Network.__call__,
    )


@program(follows=0, why="each call is the first of an object that dies after it")
def objects_that_die(function):
    "The decorator keeps no object alive whose method was called."
    references = []

    class Short:
        def __init__(self):
            self.scale = tf.Variable(2.0)

        @function
        def step(self, x):
            return x * self.scale

    def step(x):
        short = Short()
        references.append(weakref.ref(short))
        return short.step(x)

    def after(_):
        if len(references) == 5:  # a full collection takes a third of a second
            gc.collect()
        return [reference() is None for reference in references]

    return Instance(step, each(lambda i: args(vector(i)), 5), after=after, function=Short.step)


@program()
def object_that_only_the_call_holds(function):
    "A method of a temporary object: it must live as long as the call does."

    class Temporary:
        def __init__(self, x):
            self.x = x

        @function
        def step(self, y):
            z = self.x * y
            gc.collect(0)
            return z + self.x

    return Instance(
        lambda x: Temporary(x).step(x + 1.0), each(lambda i: args(vector(i)), 8), function=Temporary.step
    )


@program(follows=0, why="the body of a generator function runs after the call has returned")
def generator_function(function):
    "A generator function is decorated: its body runs as the caller asks for values."
    log = []

    @function
    def step(x):
        for turn in range(3):
            log.append(turn)
            yield x * float(turn)

    return Instance(step, each(lambda i: args(vector(i))), lambda: log, after=list)


@program(follows=0, why="the body of a coroutine runs after the call has returned")
def coroutine(function):
    "A coroutine function is decorated, and awaited by the caller."

    async def fetch(x):
        await asyncio.sleep(0)
        return x * 2.0

    @function
    async def decorated(x):
        return await fetch(x) + await fetch(x + 1.0)

    return Instance(
        lambda x: asyncio.run(decorated(x)), each(lambda i: args(vector(i)), 5), function=decorated
    )


@program()
def results_of_every_kind(function):
    "None, numbers, texts, nested containers, functions, arrays and objects come back as they are."

    @dataclasses.dataclass
    class Report:
        loss: tf.Tensor
        note: str

    @function
    def step(x, number):
        y = x * 2.0
        return [
            None,
            number,
            "text",
            y,
            (y[0], [y, {"k": y}]),
            {1: y},
            y.numpy(),
            Report(y, "n"),
            tf.nn.relu,
            y.shape,
            y.dtype,
        ][number % 4 :]

    return Instance(step, each(lambda i: args(vector(i), i), 12))


@program()
def called_from_c(function):
    "`map`, `sorted` and `functools.reduce` call the decorated function."

    @function
    def step(x):
        return tf.reduce_sum(x * 2.0)

    def outer(parts):
        return list(map(step, parts)), [float(part[0]) for part in sorted(parts, key=step)]

    return Instance(outer, each(lambda i: args([signed(i), signed(i + 1)])), function=step)


@program()
def nothing_to_compute(function):
    "A step without any operation, or with one on some calls only."
    seen = []

    @function
    def step(x, number):
        seen.append(number)
        if number % 3:
            return number, x
        return x + 1.0

    return Instance(step, each(lambda i: args(whole(i), i), 10), lambda: seen)
