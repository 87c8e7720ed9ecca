"""Branches on tensors: what the device decides, what stays with Python, and that nobody can tell."""

import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_control_flow import same
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]

# Scalars on both sides of 0 and 5, either first.
INPUTS = [(tf.constant(float(v)),) for v in (1, -1, 7, -3, 6, 0, 5, 2, -8, 9)]


# On the device.


def without_else(x):
    y = x * 2.0
    if y > 3.0:
        y = y - x * 0.5
    return y + 1.0


def negated(x):
    if not x > 3.0:
        x = x + 10.0
    return x * 2.0


def with_else(x):
    if x > 0.0:
        y = x * 2.0
    else:
        y = x - 1.0
    return y + x


def several_names(x):
    a, b, c = x, x + 1.0, 3
    if x > 2.0:
        a, b = b, a * 2.0
        kind = 5
    else:
        b = b - 1.0
        kind = 5
    c = c + kind
    return a, b, c


def many_ways(x):
    if x > 6.0:
        y = x * 2.0
    elif x > 4.0:
        y = x - 1.0
    elif x > 0.0:
        y = -x
    else:
        y = x * x
    return y, x


def many_ways_without_else(x):
    y = x
    if x > 6.0:
        y = x * 2.0
    elif x < -2.0:
        y = x - 1.0
    return y + 1.0


def nested(x):
    y = x + 1.0
    if x > 0.0:
        if y > 5.0:
            y = y * 3.0
        else:
            y = y - 4.0
    else:
        y = tf.abs(y)
    return y * 2.0


def chain_of_and(x):
    if x > 0.0 and x < 6.0 and x != 2.0:
        x = x + 100.0
    return x * 1.0


def chain_of_and_with_else(x):
    if x > 0.0 and x < 6.0:
        y = x + 100.0
    else:
        y = x - 100.0
    return y * 1.0


def chain_of_or(x):
    y = x
    if x < -2.0 or x > 5.0:
        y = x + 100.0
    z = y * 2.0
    return z


def of_negations(x):
    y = x
    if not x > 0.0 and not x < -2.0:
        y = x + 100.0
    return y * 2.0


def early_return(x):
    if x > 4.0:
        return x * 2.0
    y = x + 3.0
    y = y * y
    return y - 1.0


def two_returns(x):
    y = x + 1.0
    if y > 0.0:
        return y, x
    else:
        return x, y


def early_exits(x):
    h = tf.tanh(x)
    if h > 0.9:
        return h * 2.0
    h = tf.tanh(h + x)
    if h > 0.1:
        return h * 3.0
    return tf.tanh(h - x)


def in_a_python_loop(x):
    for k in range(4):
        if x > float(k):
            x = x * 0.5
    return x


def in_a_python_loop_with_else(x):
    total = x
    for k in range(4):
        if x > float(k):
            x = x * 0.5
        else:
            x = x + 2.0
        total = total + x
    return total


def helper(x):
    y = x + 1.0
    if y > 2.0:
        y = y * 0.25
    else:
        y = y - 3.0
    return y * 2.0


def in_a_helper(x):
    return helper(x) + helper(x * 2.0)


def of_a_number(x):
    n = tf.cast(x, tf.int32)
    y = x
    if n:
        y = y + 1.0
    if n % 2:
        y = y * 3.0
    return y


def loops_inside(x):
    y = x
    if x > 0.0:
        for k in range(3):
            y = y * 2.0 + float(k)
    else:
        for part in [x, x + 1.0]:
            y = y - part
    return y + 0.0


def pairs(x):
    pair = (x, x + 1.0)
    if x > 0.0:
        pair = (pair[1], x * 2.0)
    a, b = pair
    return a - b, b


def swapped(x):
    a, b = x + 1.0, x * 3.0
    if a > b:
        a, b = b, a
    return a, b, a - b


def conditional_expressions_inside(x):
    y = x
    if x > 0.0:
        y = y + 1.0 if x > 5.0 else y - 1.0
    return y * 1.0


def costly(x):
    m = tf.eye(8) * x
    if x > 0.0:
        m = tf.matmul(m, m) + tf.matmul(m, m + 1.0)
        m = tf.matmul(tf.tanh(m), m) + tf.matmul(m, m - 1.0)
        m = tf.matmul(m, m) + 1.0
    return tf.reduce_sum(m)


def costly_exits(x):
    m = tf.eye(8) * x
    for _ in range(3):
        m = tf.tanh(tf.matmul(m, m) - 0.125)
    if m[0, 0] > 0.5:
        return tf.reduce_sum(m)
    m = tf.tanh(tf.matmul(m, m) + x)
    if m[0, 0] > 0.25:
        return tf.reduce_sum(m) * 2.0
    m = tf.tanh(tf.matmul(m, m) - x)
    if m[0, 0] > 0.125:
        return tf.reduce_sum(m) * 3.0
    m = tf.tanh(tf.matmul(m, m) * x)
    if m[0, 0] > 0.0:
        return tf.reduce_sum(m) * 4.0
    m = tf.tanh(tf.matmul(m, m) + 1.0)
    if m[0, 0] > -0.5:
        return tf.reduce_sum(tf.matmul(m, m)) * 5.0
    return tf.reduce_sum(m) * 6.0


def unbound_behind(x):
    """What is unbound where a frame goes on stays so, and nothing warns."""
    gone = x
    del gone
    with warnings.catch_warnings(record=True) as warned:
        if x > 0.0:
            y = x * 2.0
        else:
            y = x - 1.0
        counts = [2 * n for n in range(3)]

    def inner():
        return shared

    found = []
    for read in (lambda: counts[n], inner):
        try:
            read()
        except NameError as error:
            found.append(str(error))
    try:
        found.append(later)  # noqa: F821 - bound below
    except UnboundLocalError as error:
        found.append(str(error))
    try:
        found.append(gone)  # noqa: F821 - deleted above
    except UnboundLocalError as error:
        found.append(str(error))
    n = shared = later = 1
    return y, found, counts, n + shared + later, [str(warning.message) for warning in warned]


ON_DEVICE = [
    without_else, negated, with_else, several_names, many_ways, many_ways_without_else, nested, chain_of_and,
    chain_of_and_with_else, chain_of_or, of_negations, early_return, two_returns, early_exits, in_a_python_loop,
    in_a_python_loop_with_else, in_a_helper, of_a_number, loops_inside, pairs, swapped, conditional_expressions_inside,
    costly, costly_exits, unbound_behind,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_DEVICE, ids=lambda f: f.__name__)
def test_branches_are_decided_on_the_device(function, backend):
    """Either way, and Python does not wait: a call is one launch."""
    fn = same(function, INPUTS, backend)
    before = fn.stats()
    with testing.compile_everything():
        for args in INPUTS:
            fn(*args)
    after = fn.stats()
    assert after.launches - before.launches == len(INPUTS), fn.explain()
    assert after.diverged == before.diverged
    assert after.decisions_on_device - before.decisions_on_device == after.decisions - before.decisions
    assert "is decided on the device" in fn.explain()


def test_what_is_cheap_is_selected_and_what_is_costly_runs_alone(backend):
    """`explain()` says which."""
    fn = same(costly, INPUTS, backend)
    assert "only the way taken is run" in fn.explain()
    fn = same(with_else, INPUTS, backend)
    assert "both ways are computed, and one is selected" in fn.explain()


# With Python.


def defined_in_one_way(x):
    if x > 0.0:
        extra = x + 1.0
    try:
        return extra
    except UnboundLocalError:
        return "nothing"


def other_shapes(x):
    if x > 0.0:
        y = tf.ones([2]) * x
    else:
        y = tf.ones([3]) * x
    return y + 1.0


def other_dtypes(x):
    y = x
    if x > 0.0:
        y = tf.cast(x, tf.int32)
    return y + 1


def other_structures(x):
    y = x
    if x > 0.0:
        y = [x, x]
    return y


def none_in_one_way(x):
    y = None
    if x > 0.0:
        y = x * 2.0
    return y


def python_numbers(x):
    n = 0
    if x > 0.0:
        n = 1
    return x + float(n), n


def raises_in_one_way(x):
    if x > 6.0:
        raise ValueError(f"too much: {float(x)}")
    return x


def breaks_a_loop(x):
    for k in range(6):
        if x < float(k):
            break
        x = x - 1.0
    return x, k


def fails_in_one_way(x):
    y = x
    if x > 6.0:
        y = tf.gather(tf.range(4.0), tf.cast(x, tf.int32))
    return y + 1.0


def random_in_one_way(x):
    y = x
    if x > 0.0:
        y = x + tf.random.stateless_uniform([], [1, 2])
    return y


def looks_at_its_variables(x):
    y = x
    if x > 0.0:
        y = x + 1.0
    return y, sorted(locals())


def shared_with_a_closure(x):
    def show():
        return x * 1.0

    if x > 0.0:
        x = x + 1.0
    return show()


def identity(x):
    y = x * 1.0
    best = y
    if x > 0.0:
        best = x
    return best is x, best is y, best


def identity_of_a_pair(x):
    pair = (x, x)
    same = pair
    if x > 0.0:
        pair = (x, x)
    return pair is same


def deletes(x):
    y = x + 1.0
    if x > 0.0:
        del y
        y = x * 2.0
    return y


def tries(x):
    try:
        if x > 0.0:
            return x * 2.0
        return x
    finally:
        x = None


ON_HOST = [
    defined_in_one_way, other_shapes, other_dtypes, other_structures, none_in_one_way, python_numbers,
    raises_in_one_way, breaks_a_loop, fails_in_one_way, random_in_one_way, looks_at_its_variables,
    shared_with_a_closure, identity, identity_of_a_pair, deletes, tries,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_HOST, ids=lambda f: f.__name__)
def test_what_differs_by_more_than_values_is_pythons(function, backend):
    """As ever, and with a reason."""
    fn = same(function, INPUTS, backend, on_device=False)
    assert "by Python" in fn.explain() or "in Python" in fn.explain()


def test_effects_stay_with_python(backend):
    """In either way; what is beside them in the function goes to the device."""
    log = []

    def function(x):
        y = x
        if x > 4.0:
            log.append(float(x))
            y = y + 1.0
        if y < 0.0:
            y = y - 1.0
        return y

    fn = same(function, INPUTS, backend, lambda: list(log), reset=log.clear)
    assert "by Python" in fn.explain() or "in Python" in fn.explain()
    assert "is decided on the device" in fn.explain()


def test_effects_around_a_branch_come_once_and_in_order(backend):
    """Variables, attributes and lists before and behind it."""
    log, weight = [], tf.Variable(1.0)

    class Counter:
        n = 0

    counter = Counter()

    def function(x):
        counter.n += 1
        weight.assign_add(x)
        y = x
        if weight > 3.0:
            y = y * weight
        else:
            y = y + weight
        weight.assign_sub(y * 0.125)
        log.append(counter.n)
        return y

    def reset():
        log.clear()
        counter.n = 0
        weight.assign(1.0)

    same(function, INPUTS, backend, lambda: (list(log), counter.n, weight), reset=reset)


def test_what_is_read_may_change(backend):
    """Globals, attributes, closures, items: looked up again each time."""

    class Settings:
        scale = 2.0
        shift = tf.constant(0.5)

    settings, table, by = Settings(), {"a": 1.0}, 1.0

    def function(x):
        if x > settings.scale * by:
            x = x * settings.scale + settings.shift
        else:
            x = x - table["a"]
        y = x * 1.0
        settings.scale = settings.scale % 3 + 1
        settings.shift = settings.shift * 0.75
        table["a"] = table["a"] + 0.5
        return y

    def reset():
        nonlocal by
        by = 1.0
        settings.scale, settings.shift = 2.0, tf.constant(0.5)
        table["a"] = 1.0

    same(function, INPUTS, backend, lambda: (settings.scale, settings.shift, dict(table)), reset=reset)


def test_layers_in_a_branch(backend):
    """A block that a gate skips: Keras' layers, one way or the other."""
    keras.utils.set_random_seed(0)
    blocks = [keras.layers.Dense(4, activation="relu") for _ in range(3)]
    gates = [keras.layers.Dense(1) for _ in range(3)]
    for part in (*blocks, *gates):
        part.build((1, 4))

    def function(x):
        h = tf.reshape(tf.linspace(-1.0, 1.0, 4), [1, 4]) * x
        for block, gate in zip(blocks, gates, strict=True):
            if gate(h)[0, 0] > 0.0:
                h = h + block(h)
        return h

    fn = same(function, INPUTS * 2, backend)
    assert fn.stats().decisions_on_device >= 12


def test_objects_that_are_called(backend):
    """Of classes of the user's, whose `__call__` only computes."""

    class Scale:
        def __init__(self, by):
            self.by = tf.constant(by)

        def __call__(self, x):
            if x > 3.0:
                return x - self.by
            return x * self.by

    parts = [Scale(0.5), Scale(3.0)]

    def function(x):
        y = x
        if x > 0.0:
            y = parts[0](parts[1](x))
        return y + 1.0

    same(function, INPUTS, backend)


def test_a_tape_is_told_of_every_operation(backend):
    """Where somebody records, Python decides."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * 2.0
            if y > 3.0:
                y = y * x
        return y, tape.gradient(y, x)

    same(function, INPUTS, backend, on_device=False)


def test_errors_behind_a_branch_tell_their_line(backend):
    """Tracebacks are the program's own."""

    def function(x):
        if x > 0.0:
            y = x * 2.0
        else:
            y = x
        if float(y) > 17.0:
            raise ValueError("here")
        return tf.debugging.assert_less(y, 13.0)

    same(function, [*INPUTS, (tf.constant(20.0),)], backend)


def test_the_option_leaves_all_to_python():
    """Each decision is then a read."""
    fn = coexec.function(nested, control_flow=False)
    for args in INPUTS:
        np.testing.assert_allclose(fn(*args), nested(*args))
    assert fn.stats().decisions_on_device == 0


def test_shapes_that_a_branch_decides(backend):
    """A number of the device's becomes a shape: it is read."""

    def function(x):
        n = tf.constant(2)
        if x > 3.0:
            n = n + 3
        return tf.zeros([n]) + x, tf.range(n)

    same(function, INPUTS, backend)


def test_an_identity_that_a_caller_asks(backend):
    """A helper that returns what it was given on one way."""

    def doubled(x):
        if x > 3.0:
            x = x * 2.0
        return x

    def function(x):
        y = doubled(x)
        return y is x, y

    fn = same(function, INPUTS, backend, on_device=False)
    assert "one object" in fn.explain()


def test_an_interrupt_behind_a_branch(backend):
    """The program's own handlers see the variables as they are."""

    def function(x):
        y = x
        try:
            if x > 3.0:
                y = y + 1.0
            else:
                y = y - 1.0
            if float(y) > 7.0:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            return y, "interrupted"
        return y, "whole"

    same(function, INPUTS, backend)
    assert sys.gettrace() is None


def test_layers_that_were_never_called():
    """Each gate is the device's at once, though its layer was never called, and some stay shut for ever."""
    layers = [keras.layers.Dense(3) for _ in range(5)]
    for layer in layers:
        layer.build((None, 3))

    def step(x, gates):
        for layer, gate in zip(layers, gates, strict=True):
            if tf.reduce_sum(x) * gate > 0.0:
                x = x + layer(x)
        return x

    fn = coexec.function(step, control_flow=True)
    rows = [tf.ones((2, 3)), -tf.ones((2, 3))]
    shut = [tf.constant(0.0) for _ in layers]
    taken = []
    for n in range(6):
        before = fn.stats().decisions_on_device
        assert (fn(rows[n % 2], shut).numpy() == rows[n % 2].numpy()).all()
        taken.append(fn.stats().decisions_on_device - before)
    assert taken[2:] == [5, 5, 5, 5], fn.explain()
    assert "does more than compute" not in fn.explain()
    opened = [tf.constant(1.0), *shut[1:3], tf.constant(-1.0), tf.constant(1.0)]
    for n in range(6):
        np.testing.assert_allclose(fn(rows[n % 2], opened).numpy(), step(rows[n % 2], opened).numpy(), rtol=1e-5)
    assert fn.stats().decisions_on_device == sum(taken) + 30, fn.explain()


def test_variables_that_take_each_others_places():
    """What a variable holds is known by its handle: another one of another shape or dtype is looked at anew."""

    class Holder:
        """Two variables that a branch reads."""

    holder = Holder()
    holder.a, holder.b = tf.Variable([1.0, 2.0]), tf.Variable([[1.0], [2.0], [3.0]])

    def step(x):
        y = x
        if x > 0.0:
            y = x * tf.reduce_sum(holder.a) - tf.reduce_sum(holder.b)
        return y

    fn = coexec.function(step, control_flow=True)
    others = [
        (holder.a, holder.b), (holder.b, holder.a), (tf.Variable([[5.0]]), holder.a), (holder.a, holder.b),
        (tf.Variable(2.0, dtype=tf.float32), tf.Variable([7.0, 7.0])), (holder.b, holder.b),
    ]  # fmt: skip
    for holder.a, holder.b in others * 2:
        for v in (3.0, -2.0, 5.0):
            assert float(fn(tf.constant(v))) == float(step(tf.constant(v)))
    assert fn.stats().decisions_on_device > 30, fn.explain()


def same_at_each(function, wanted=None, calls=12):
    """A function does the same co-executed, in calls that take its branches in turn; `wanted`: if on the device."""
    step = coexec.function(function, control_flow=True)
    for n in range(calls):
        x, t = tf.constant([1.0 + n % 3, 2.0]), tf.constant(n % 2 * 40.0 - 1.0)
        assert_same(snapshot(function(x, t)), snapshot(step(x, t)))
    assert step.stats().followed >= calls // 2, step.explain()
    assert wanted in (None, step.stats().decisions_on_device > 0), step.explain()


def test_returns_that_share_a_line():
    """A frame goes on at the beginning of a line, so they are no way to leave a function."""

    # fmt: off
    def behind_another(x, t):
        y = x * 2.0
        if t > 0.0:
            y = y + 1.0; return y  # noqa: E702
        y = y - 1.0; return y  # noqa: E702

    def behind_the_test(x, t):
        if t > 0.0: return x  # noqa: E701
        x = x * 0.5
        if t > 20.0: return x  # noqa: E701
        else: return t  # noqa: E701

    def plain(x, t):
        if t > 0.0:
            y = x + 1.0
        else:
            y = x * 0.5
        return y
    # fmt: on

    for gate, wanted in ((behind_another, False), (behind_the_test, False), (plain, True)):

        def function(x, t, gate=gate):
            for k in range(10):
                x = gate(x + 0.0, t - k) * 0.5 + x
            return x

        same_at_each(function, wanted)


def test_a_finally_has_several_copies():
    """Its branches are Python's: a frame would go on in the copy for another way out of the `try`."""

    def leaves(x, t):
        n = 0
        for k in range(8):
            try:
                if k == 100:
                    break
                x = x * 0.9
            finally:
                if t > k:
                    x = x + 1.0
                else:
                    x = x - 1.0
                n = n + 1
        return x, n

    def returns(x, t):
        for k in range(8):
            try:
                if k == 100:
                    return x
                x = x * 0.9
            finally:
                if t > k:
                    x = x + 1.0
                else:
                    x = x - 1.0
                x = x + 0.5
        return x, k

    def goes_through(x, t):
        n = 0
        try:
            if t > 1e6:
                return x
            x = x * 0.5
        finally:
            for _ in range(20):
                x = x + 1.0
                if tf.reduce_sum(x) > t:
                    break
            else:
                n += 1
            n += 10
        return x, n

    for function in (leaves, returns, goes_through):
        same_at_each(function)


def test_one_tensor_in_two_variables():
    """A tape that begins to watch one of them finds what was computed of the other."""

    def function(x, t):
        if t > 0.0:
            y = x + 1.0
            z = y
        else:
            y, z = x * 2.0, x * 3.0
        with tf.GradientTape() as tape:
            tape.watch(z)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, z)

    same_at_each(function)
