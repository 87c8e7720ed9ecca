"""Tensors in Python's containers, made and changed while the step runs; tensors that outlive it there."""

import collections
import dataclasses
import functools
import weakref
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tests.programs import Instance, args, each, program, vector, whole


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    name: str
    value: Any
    history: list = dataclasses.field(default_factory=list)


@program()
def appended_in_a_loop(function):
    "A list in a closure grows by tensors, on and on."
    log = []

    @function
    def step(x):
        for turn in range(3):
            x = x * 0.5 + turn
            log.append(x)
        return x

    return Instance(step, each(lambda i: args(vector(i))), lambda: log)


@program()
def earlier_calls_used(function):
    "A tensor of the last call and one of the first are inputs of this one."
    memory = []

    @function
    def step(x):
        if not memory:
            memory.append(x * 2.0)
        y = x + memory[0] + memory[-1]
        memory.append(y * 0.5)
        return y

    return Instance(step, each(lambda i: args(vector(i))), lambda: memory)


@program()
def replay_buffer(function):
    "A bounded deque of past tensors is stacked on every call."
    buffer = collections.deque(maxlen=3)

    @function
    def step(x):
        buffer.append(tf.tanh(x))
        while len(buffer) < 3:
            buffer.append(tf.zeros_like(x))
        return tf.reduce_mean(tf.stack(list(buffer)), axis=0)

    return Instance(step, each(lambda i: args(vector(i))), lambda: buffer)


@program()
def dict_changes(function):
    "`setdefault`, `update`, `pop`, `|` and `del` on dicts that hold tensors."
    totals = {}

    @function
    def step(x, name):
        totals.setdefault(name, tf.zeros(4))
        totals[name] = totals[name] + x
        scratch = {"a": x, "b": x * 2.0}
        scratch.update(c=x * 3.0)
        gone = scratch.pop("a")
        merged = scratch | {"d": gone}
        del merged["b"]
        return merged

    return Instance(step, each(lambda i: args(vector(i), "xy"[i % 2])), lambda: totals)


@program()
def structures(function):
    "Named tuples, dataclasses, nested lists and None go in and come out."

    @function
    def step(pair, record, extra=None):
        record.history.append(pair.left)
        record.value = pair.left + pair.right["deep"][0]
        return Pair(record.value, [None, record, {"extra": extra}]), pair._replace(left=record.value * 2.0)

    def arguments(i):
        return args(Pair(vector(i), {"deep": (vector(i + 1), "text")}), Record("r", None))

    return Instance(step, each(arguments))


@program()
def tf_nest(function):
    "`tf.nest` maps, flattens and packs structures of tensors."

    @function
    def step(nest):
        doubled = tf.nest.map_structure(lambda leaf: leaf * 2.0, nest)
        flat = tf.nest.flatten(doubled)
        packed = tf.nest.pack_sequence_as(nest, [leaf + n for n, leaf in enumerate(flat)])
        tf.nest.assert_same_structure(nest, packed)
        return packed, tf.nest.is_nested(flat), tf.nest.is_nested(flat[0]), len(flat)

    return Instance(step, each(lambda i: args({"b": vector(i), "a": (vector(i + 1), [vector(i + 2)])})))


@program()
def swaps_and_slices(function):
    "Slice assignment, tuple swaps, aliases and list arithmetic."

    @function
    def step(x):
        parts = list(x)
        parts[0], parts[-1] = parts[-1], parts[0]
        parts[1:3] = [parts[2] * 2.0]
        alias = parts
        alias += [tf.reduce_sum(x)]
        row = [[parts[0]] * 2] * 2
        row[0][1] = parts[1]
        parts.insert(1, x[0])
        return parts, row, parts is alias, parts[::-1]

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def reduce_map_filter(function):
    "`functools.reduce`, `map`, `filter`, `sum` and `dict` built from pairs."

    @function
    def step(x):
        parts = tf.unstack(x)
        product = functools.reduce(lambda a, b: a * b, parts)
        positive = list(filter(lambda part: part > 0, parts))
        return product, list(map(tf.square, parts)), tf.add_n(positive), sum(parts), dict(zip("abcd", parts))

    return Instance(
        step, each(lambda i: args(tf.constant([[1.0, -2.0, 3.0, 1.0], [-1.0, 2.0, 3.0, 1.0]][i % 2])))
    )


@program()
def keyed_by_reference(function):
    "`tensor.ref()` and `id` are keys of dicts and sets."

    @function
    def step(x):
        y, z = x * 2.0, x * 3.0
        names = {y.ref(): "y", z.ref(): "z"}
        by_id = {id(y): y, id(z): z}
        seen = {y.ref(), z.ref(), y.ref()}
        return [names[item.ref()] for item in (y, z)], by_id[id(z)], len(seen), x.ref() in seen

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def stored_on_objects(function):
    "Attributes, class attributes and attributes of functions hold tensors across calls."

    class Holder:
        shared = None

    holder = Holder()

    def helper(x):
        helper.last = x
        return x

    @function
    def step(x):
        before = 0.0 if Holder.shared is None else Holder.shared
        holder.mine = x + before
        Holder.shared = helper(holder.mine * 0.5)
        return holder.mine

    return Instance(
        step, each(lambda i: args(vector(i))), lambda: (vars(holder), Holder.shared, vars(helper))
    )


@program()
def captured_by_a_closure(function):
    "A function returned by one call closes over its tensors and is called later, within a step and outside."
    made = []

    @function
    def step(x):
        y = tf.sin(x)
        made.append(lambda value: value * y)
        return made[0](x) + made[-1](x)

    return Instance(step, each(lambda i: args(vector(i))), after=lambda _: made[-1](tf.constant(2.0)))


@program()
def used_outside(function):
    "What a step left behind and what it returned meet all kinds of operations outside."
    kept = []

    @function
    def step(x):
        y = x * x
        kept.append(tf.reduce_sum(y))
        kept.append(y + 1.0)
        return y

    def after(result):
        total, shifted = kept[-2:]
        variable = tf.Variable(shifted)
        variable.assign_add(result)
        with tf.GradientTape() as tape:
            tape.watch(shifted)
            loss = tf.reduce_sum(shifted * total)
        dataset = list(tf.data.Dataset.from_tensors(shifted))
        compiled = tf.function(lambda a, b: a + b)
        called = tf.py_function(lambda value: value * 2.0, [shifted], tf.float32)
        return (
            variable,
            tape.gradient(loss, shifted),
            dataset,
            compiled(shifted, total),
            np.sum(shifted),
            called,
        )

    return Instance(step, each(lambda i: args(vector(i))), lambda: kept, after)


@program()
def one_object_returned_twice(function):
    "A tensor that a result holds twice is one object there; an argument that is returned is the argument."

    @function
    def step(x):
        y = x * 2.0
        return [y, x, y, (y,)]

    given = []

    def arguments(i):
        given.append(vector(i))
        return args(given[-1])

    return Instance(
        step,
        each(arguments),
        after=lambda r: (r[0] is r[2], r[0] is r[3][0], r[1] is given[-1], r[0] is r[1]),
    )


@program()
def dead_tensors_die(function):
    "A tensor nobody holds any more is gone, within the step and after it."
    references = []

    @function
    def step(x):
        y = x * 2.0
        references.append(weakref.ref(y))
        inside = references[-1]() is y
        del y
        return inside, x + 1.0

    return Instance(
        step,
        each(lambda i: args(vector(i))),
        after=lambda _: [reference() is None for reference in references[:-1]],
    )


@program()
def default_list(function):
    "A mutable default argument remembers all calls."

    @function
    def step(x, memory=[]):  # noqa: B006
        memory.append(x + len(memory))
        return list(memory)[-2:], len(memory)

    return Instance(step, each(lambda i: args(whole(i))))


@program()
def tensor_array(function):
    "`tf.TensorArray` is written in a loop, read, unstacked and stacked."

    @function
    def step(x):
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True, clear_after_read=False)
        for turn in range(3):
            array = array.write(turn, x * turn)
        array = array.write(1, array.read(2) + 1.0)
        return array.stack(), array.size(), array.gather([0, 2]), array.concat()

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def subclasses_of_containers(function):
    "A user's own list and dict, with methods that see every change."
    changes = []

    class Watched(dict):
        def __setitem__(self, key, value):
            changes.append((key, value))
            super().__setitem__(key, value)

    class Stack(list):
        def push(self, value):
            changes.append(len(self))
            self.append(value)

    @function
    def step(x):
        watched, stack = Watched(), Stack()
        watched["a"] = x + 1.0
        stack.push(watched["a"])
        stack.push(x)
        watched["a"] = stack[0] * stack[1]
        return watched, stack

    return Instance(step, each(lambda i: args(vector(i))), lambda: changes)
