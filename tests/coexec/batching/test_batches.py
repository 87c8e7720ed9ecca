"""Batched calls compared with eager ones: random graphs of operations, gradients, effects between, failures."""

import contextlib
import weakref

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuned
from coexec.batching import rules
from coexec.dispatch.shape_policy import Verdict

WIDTH = 5


@pytest.fixture(autouse=True)
def batching():
    with testing.always_batch():
        yield


def close(one, other, **tolerance):
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.__class__ is b.__class__, (a, b)
        if isinstance(a, tf.Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            a, b = a.numpy(), b.numpy()
        elif isinstance(a, tf.IndexedSlices):
            assert a.shape == b.shape
            a, b = tf.convert_to_tensor(a).numpy(), tf.convert_to_tensor(b).numpy()
        np.testing.assert_allclose(a, b, **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


def both(make, *calls, gradients=None, launches=None):
    """Runs what `make(decorator)` returns, eagerly and batched, with the arguments of each call; returns the batched.

    `make` returns the function and its state.
    """
    plain, state = make(lambda function: function)
    found, batched_state = make(coexec.function)
    for call in calls:
        close(plain(*call), found(*call))
        close(state(), batched_state())
    stats = found.stats()
    assert stats.batched == len(calls)
    assert stats.followed == stats.recorded == stats.imperative == 0
    if launches is not None:
        assert stats.launches <= launches
    return found


def cell(p, children):
    """One node of a tree, of any number of children."""
    x = tf.add_n(list(children)) if len(children) > 1 else children[0]
    return tf.tanh(tf.matmul(x, p["w"]) + p["b"])


def parameters(seed=3):
    rng = np.random.default_rng(seed)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "rows": (7, WIDTH), "out": (WIDTH, 3)}
    return {name: tf.Variable(rng.normal(size=shape).astype(np.float32) * 0.5) for name, shape in shapes.items()}


def tree(rng, leaves):
    if leaves == 1:
        return int(rng.integers(7))
    left = int(rng.integers(1, leaves))
    return tree(rng, left), tree(rng, leaves - left)


def encode(p, node):
    if isinstance(node, int):
        return tf.gather(p["rows"], [node])
    return cell(p, [encode(p, child) for child in node])


def forests(count=5, trees=4):
    rng = np.random.default_rng(0)
    return [([tree(rng, int(rng.integers(1, 9))) for _ in range(trees)],) for _ in range(count)]


def test_trees_that_are_new_in_every_call():
    def make(function):
        p = parameters()

        @function
        def train(trees):
            with tf.GradientTape() as tape:
                losses = [tf.reduce_sum(tf.matmul(encode(p, t), p["out"]) ** 2) for t in trees]
                loss = tf.add_n(losses) / len(losses)
            found = tape.gradient(loss, list(p.values()))
            for variable, gradient in zip(p.values(), found, strict=True):
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return loss, found

        return train, lambda: list(p.values())

    found = both(make, *forests())
    # Far fewer launches than the some hundred operations of a call.
    assert found.stats().ops_batched / found.stats().launches > 3


def test_a_value_is_read_in_each_tree():
    def make(function):
        p, seen = parameters(), []

        @function
        def train(trees):
            losses = []
            with tf.GradientTape() as tape:
                for t in trees:
                    losses.append(tf.reduce_sum(encode(p, t)))
                    seen.append(float(losses[-1]) > 0.0)
                    if seen[-1]:
                        losses.append(losses[-1] * 2.0)
                loss = tf.add_n(losses)
            return loss, tape.gradient(loss, list(p.values()))

        return train, lambda: (list(p.values()), seen)

    both(make, *forests())


UNITS = [
    lambda p, x, y: tf.tanh(tf.matmul(x, p["w"]) + p["b"]),
    lambda p, x, y: x * y,
    lambda p, x, y: tf.concat([x, y], 1)[:, 2 : 2 + WIDTH],
    lambda p, x, y: tf.nn.softmax(x) + tf.sigmoid(y),
    lambda p, x, y: tf.reduce_mean(x, 1, keepdims=True) + y,
    lambda p, x, y: tf.where(x > y, x, y * 0.5),
    lambda p, x, y: tf.stack([x[0], y[0]])[1:],
    lambda p, x, y: tf.split(tf.concat([x, y], 1), 2, 1)[1] - p["b"],
    lambda p, x, y: tf.expand_dims(tf.reduce_max(tf.stack([x[0], y[0]]), 0), 0),
    lambda p, x, y: tf.matmul(tf.matmul(x, y, transpose_a=True), x, transpose_b=True)[:, 0][None],
    lambda p, x, y: tf.stop_gradient(x) + tf.sqrt(tf.abs(y) + 1.0),
    lambda p, x, y: tf.transpose(tf.reshape(tf.tile(x, [2, 1]), [WIDTH, 2]))[:1] + y,
    lambda p, x, y: tf.math.l2_normalize(x, 1) - tf.nn.relu(y),
    lambda p, x, y: tf.pad(x, [[0, 0], [1, 0]])[:, :WIDTH] / (1.0 + y * y),
    lambda p, x, y: tf.unstack(tf.stack([x, y, x + y]), 3)[2],
    lambda p, x, y: tf.nn.l2_loss(p["w"]) * x + tf.reduce_sum(tf.transpose(p["w"]), 0) * y,
    lambda p, x, y: tf.cast(tf.argmax(x, 1), tf.float32)[:, None] + y,
    lambda p, x, y: x + tf.nn.sparse_softmax_cross_entropy_with_logits([2], tf.matmul(y, p["out"])),
]


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_of_random_units(seed):
    """Values are used many times, or never; the loss is of some of them, so parts of batches have no gradient."""

    def make(function):
        p = parameters()

        @function
        def train(number):
            rng = np.random.default_rng(1000 * seed + number)
            with tf.GradientTape() as tape:
                values = [tf.gather(p["rows"], [int(i)]) for i in rng.integers(7, size=4)]
                values.append(tf.constant(rng.normal(size=(1, WIDTH)).astype(np.float32)))
                for _ in range(int(rng.integers(5, 40))):
                    unit = UNITS[rng.integers(len(UNITS))]
                    x, y = (values[i] for i in rng.integers(len(values), size=2))
                    values.append(tf.clip_by_value(unit(p, x, y), -3.0, 3.0))
                chosen = [values[i] for i in rng.integers(len(values), size=int(rng.integers(1, 6)))]
                loss = tf.add_n([tf.reduce_sum(v) for v in chosen])
            return values[-1], loss, tape.gradient(loss, list(p.values()))

        return train, lambda: list(p.values())

    both(make, *((number,) for number in range(4)))


def test_rows_without_a_gradient_do_not_disturb_the_others():
    """Zero times infinity would be NaN: the square root's gradient at zero."""

    def make(function):
        w = tf.Variable([1.0, 2.0])

        @function
        def train(values):
            with tf.GradientTape() as tape:
                made = [tf.sqrt(tf.reduce_sum(w) * x) for x in values]
                loss = made[0] + made[2]
            return loss, tape.gradient(loss, w)

        return train, lambda: [w]

    both(make, *[([1.0, 0.0, 2.0],)] * 4)


def test_variables_without_a_path_have_no_gradient():
    def make(function):
        v, w, fixed = tf.Variable([1.0]), tf.Variable([2.0]), tf.Variable([3.0], trainable=False)

        @function
        def train(x):
            outside = v.read_value()
            with tf.GradientTape() as tape:
                made = [x * v, x * w, x * fixed, x * tf.stop_gradient(v), outside * x]
                loss = tf.reduce_sum(made[1] * made[2] * made[3] * made[4])
            return loss, tape.gradient(loss, [v, w, fixed])

        return train, lambda: [v, w]

    found = both(make, *[(tf.constant([float(i)]),) for i in range(1, 5)])
    assert found(tf.constant([2.0]))[1][0] is None


def test_variables_are_assigned_between():
    def make(function):
        v, log = tf.Variable([[1.0, 2.0]]), []

        @function
        def step(n):
            made = []
            for i in range(n):
                made.append(tf.reduce_sum(v * 2.0))
                v.assign_add([[1.0, float(i)]])
                log.append(i)
            with tf.GradientTape() as tape:
                first = tf.reduce_sum(v * v)
                v.assign(v * 0.5)
                second = tf.reduce_sum(v * v)
                loss = first + second
            return made, loss, tape.gradient(loss, v)

        return step, lambda: (v, log)

    both(make, (3,), (5,), (1,), (0,))


@pytest.mark.parametrize("persistent", [False, True])
def test_tapes_inside_of_tapes(persistent):
    def make(function):
        w = tf.Variable([0.3, -0.2])

        @function
        def step(n):
            x = tf.constant([1.0, 2.0])
            with tf.GradientTape(persistent=persistent) as outer:
                with tf.GradientTape(persistent=persistent) as inner:
                    inner.watch(x)
                    y = tf.add_n([tf.reduce_sum(tf.tanh(w * x * float(i))) for i in range(1, n + 1)])
                first = inner.gradient(y, [w, x])
                z = tf.reduce_sum(first[0] ** 2) + tf.reduce_sum(first[1])
            again = outer.gradient(z, [w]) if not persistent else [outer.gradient(z, w), outer.gradient(y, w)]
            return y, first, again

        return step, lambda: [w]

    both(make, (3,), (5,), (2,))


def test_results_kept_for_later_calls():
    def make(function):
        w, kept = tf.Variable(tf.eye(3)), []

        @function
        def step(x):
            kept.append(tf.tanh(tf.matmul(x, w)))
            return tf.add_n(kept) + kept[0], {"last": kept[-1]}

        return step, lambda: kept

    both(make, *[(tf.fill([1, 3], float(i)),) for i in range(4)])


def test_a_failure_in_the_middle_leaves_what_eager_leaves():
    def make(function):
        v, seen = tf.Variable([1.0]), []

        @function
        def step(x, index):
            y = x * v
            v.assign_add([1.0])
            try:
                seen.append(tf.gather(y, [index]))
            except tf.errors.InvalidArgumentError as error:
                seen.append(type(error).__name__)
            v.assign_add(y[:1])
            if index == 1:
                raise ValueError("the program's")
            return tf.reduce_sum(y)

        def call(x, index):
            try:
                return step(x, index)
            except ValueError as error:
                return str(error)

        call.stats = getattr(step, "stats", None)
        return call, lambda: (v, [s for s in seen if not isinstance(s, str)])

    found = both(make, (tf.ones([3]), 0), (tf.ones([3]), 7), (tf.ones([3]), 2))
    with contextlib.suppress(ValueError):
        found(tf.ones([3]), 1)


def test_an_error_names_the_line_of_the_program():
    @coexec.function
    def step(x):
        y = x * 2.0
        return tf.matmul(y, tf.ones([4, 4]))

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        step(tf.ones([2, 3]))
    assert any(entry.name == "step" for entry in raised.traceback)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_none_one_and_many_items(count):
    def make(function):
        w = tf.Variable([[0.5, -0.5], [0.25, 1.0]])

        @function
        def step():
            with tf.GradientTape() as tape:
                made = [tf.reduce_sum(tf.matmul([[float(i), 1.0]], w) ** 2) for i in range(count)]
                loss = tf.add_n(made) if made else tf.reduce_sum(w)
            return loss, tape.gradient(loss, w), made

        return step, lambda: [w]

    both(make, (), (), (), launches=40)


def test_a_chain_as_deep_as_recursion_goes():
    def make(function):
        w = tf.Variable([0.9, 1.1])

        def down(x, depth):
            return x if not depth else down(tf.sin(x * w), depth - 1)

        @function
        def step(depth):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(down(tf.ones([2]), depth))
            return loss, tape.gradient(loss, w)

        return step, lambda: [w]

    both(make, (3,), (200,), (7,))


def test_a_variable_that_holds_indices_and_weights():
    """A gradient of rows alone has rows; together with a dense one it is dense."""

    def make(function):
        table = tf.Variable(np.arange(12, dtype=np.float32).reshape(4, 3))

        @function
        def step(indices, dense):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.gather(table, [i]) ** 2) for i in indices])
                if dense:
                    loss += tf.reduce_sum(table)
            return loss, tape.gradient(loss, table)

        return step, lambda: [table]

    both(make, ([0, 1, 1], False), ([3, 2], True), ([3], False), ([1, 1, 1], True))


def test_tensors_die_when_the_program_lets_go():
    @coexec.function
    def step(x):
        y = tf.tanh(x)
        return tf.reduce_sum(y) + 1.0

    results = [step(tf.ones([3])) for _ in range(3)]
    gone = [weakref.ref(result) for result in results]
    del results
    assert all(reference() is None for reference in gone)


def test_constants_of_every_sign_and_type():
    def make(function):
        @function
        def step(x):
            return [x * 0.0, x * -0.0, 1 / (x * 0.0 + 1.0), x + 1, x + True if False else x, x**2, 2.0 - x, x > 1]

        return step, list

    both(make, (tf.constant([1.0, -2.0]),), (tf.constant([3.0, 0.0]),))


def test_structures_that_depend_on_values():
    def make(function):
        @function
        def step(x):
            kept = tf.boolean_mask(x, x > 0.5)
            where = tf.where(x > 0.5)
            return kept * 2.0, where, tf.reduce_sum(kept), tf.range(tf.size(kept)), tf.zeros(tf.shape(kept))

        return step, list

    both(make, (tf.constant([1.0, 0.2, 3.0]),), (tf.constant([0.1, 0.2, 3.0]),), (tf.constant([0.1, 0.2]),))


def test_positions_that_keep_changing_are_data():
    """Of rows, of single items, from the end, beyond it: no new kind of operation for each."""

    def make(function):
        scale = tf.constant([0.5])  # from outside, as a row: what is shared by all has no positions
        w = tf.Variable(np.arange(8 * WIDTH, dtype=np.float32).reshape(8, WIDTH) / 20.0)

        @function
        def step(positions):
            with tf.GradientTape() as tape:
                nodes = tf.tanh(w * scale)
                made = [nodes[i] for i in positions] + [nodes[i : i + 1][0] for i in positions if i >= 0]
                loss = tf.add_n([tf.reduce_sum(v * v) for v in made])
            return made, loss, tape.gradient(loss, w)

        return step, lambda: [w]

    found = both(make, ([0, 1, 2],), ([2, 2, 3],), ([3, 1, 0],), ([1, 2, 4],), ([0, 2, 3],))
    knowledge = found._controller.batching.knowledge
    kinds = len(knowledge.kinds)
    found([5, 7, 6])
    assert len(knowledge.kinds) == kinds
    with pytest.raises(tf.errors.InvalidArgumentError):
        found([8])
    with pytest.raises(tf.errors.InvalidArgumentError):
        found([-9])


def test_positions_under_tapes_that_are_used_one_by_one():
    def make(function):
        scale = tf.constant([0.5])
        w = tf.Variable(np.arange(8, dtype=np.float32).reshape(4, 2))

        @function
        def step(positions):
            with tf.GradientTape() as outer:
                with tf.GradientTape(persistent=True) as inner:
                    nodes = tf.sin(w * scale)
                    loss = tf.add_n([tf.reduce_sum(nodes[i] ** 3) for i in positions])
                first = inner.gradient(loss, [w, nodes])
                total = tf.reduce_sum(first[0] ** 2)
            return first, outer.gradient(total, w)

        return step, lambda: [w]

    both(make, ([0, 1],), ([2, 3],), ([3, 0, 1],), ([1, 1],))


def test_arrays_among_what_is_concatenated():
    """They are taken as they are when the operation is issued, and need no tape of TensorFlow's."""

    def make(function):
        w = tf.Variable(np.full((2 * WIDTH, WIDTH), 0.1, np.float32))

        @function
        def step(lengths):
            row = np.zeros((1, WIDTH), np.float32)
            with tf.GradientTape() as tape:
                last = []
                for length in lengths:
                    h = tf.zeros([1, WIDTH])
                    for i in range(length):
                        row[:] = i + length
                        h = tf.tanh(tf.matmul(tf.concat([row, h], 1), w))
                    last.append(tf.reduce_sum(h))
                loss = tf.add_n(last)
            return loss, tape.gradient(loss, w)

        return step, lambda: [w]

    found = both(make, ([3, 1, 4],), ([2, 5],), ([1],), ([4, 4, 2],))
    assert found.stats().launches <= 60


def test_an_array_of_another_dtype_is_converted_as_eagerly():
    def make(function):
        @function
        def step(x):
            return tf.concat([np.full((1, 2), 0.1), x * 2.0], 1)

        return step, list

    both(make, (tf.ones([1, 2]),), (tf.zeros([1, 2]),))


def test_whole_numbers_worked_out_from_outside_are_indices():
    def make(function):
        table = tf.Variable(np.arange(12, dtype=np.float32).reshape(4, 3))

        @function
        def step(words):
            with tf.GradientTape() as tape:
                rows = []
                for word in words:
                    index = tf.constant([word])
                    rows.append(tf.gather(table, tf.where(index < 0, index + 4, index)) * 2.0)
                loss = tf.reduce_sum(tf.concat(rows, 0) ** 2)
            return loss, tape.gradient(loss, table)

        return step, lambda: [table]

    found = both(make, ([0, -1, 2],), ([3, -4],), ([1],))
    assert found.stats().launches <= 12


def test_what_runs_alone_between_is_differentiated():
    """An operation without a rule, on what a variable goes into: the gradient passes it."""

    def make(function):
        w = tf.Variable([[2.0, 1.0], [0.5, 3.0]])

        @function
        def step(n):
            with tf.GradientTape() as tape:
                noise = tf.random.stateless_uniform([2, 2], [n, 1])
                inner = tf.linalg.inv(w * float(n) + tf.eye(2)) + noise
                loss = tf.add_n([tf.reduce_sum(tf.tanh(inner * float(i))) for i in range(1, n + 1)])
                loss += tf.reduce_sum(tf.concat([noise, tf.ones([2, 2])], 0)) * tf.reduce_sum(w)
            return loss, tape.gradient(loss, w)

        return step, lambda: [w]

    both(make, (2,), (3,), (1,))


@pytest.mark.distrusting
def test_a_rule_that_is_wrong_is_found_and_not_used(monkeypatch):
    monkeypatch.setitem(rules.RULES, "Tanh", (lambda call, values: [values[0] * 2.0], ()))

    def make(function):
        w = tf.Variable([1.0, 2.0])

        @function
        def step(n):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.add_n([tf.tanh(w * float(i)) for i in range(1, n)]))
            return loss, tape.gradient(loss, w)

        return step, lambda: [w]

    with testing.always_batch(), tuned(validates_new=True):
        found = both(make, (3,), (5,), (4,))
    assert "Tanh gave other values" in str(found.explain())


def test_a_fault_of_a_rule_costs_only_speed(monkeypatch):
    def fails(call, values):
        raise KeyError("a fault")

    monkeypatch.setenv("COEXEC_DEBUG", "0")
    monkeypatch.setitem(rules.RULES, "Tanh", (fails, ()))

    def make(function):
        w = tf.Variable([1.0, 2.0])

        @function
        def step(n):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.add_n([tf.tanh(w * float(i)) for i in range(1, n)]))
            return loss, tape.gradient(loss, w)

        return step, lambda: [w]

    plain, _ = make(lambda function: function)
    found, _ = make(coexec.function)
    for n in (3, 5):
        close(plain(n), found(n))
    assert "a fault" in str(found.explain())


def test_it_is_an_option():
    """Without it no call is batched, however little following pays."""
    x = tf.constant([1.0, 2.0])

    def step(x, count):
        for _ in range(int(count)):
            x = tf.sin(x) + 1.0
        return tf.reduce_sum(x)

    for batching in (False, True):
        function = coexec.function(step, batching=batching)
        account = function._controller.account
        account.paused, account.backs_off = 100, True
        with tuned(batches_all=False):
            for number in range(12):
                np.testing.assert_allclose(function(x, 20 + number), step(x, 20 + number), rtol=1e-5)
        assert (function.stats().batched > 0) == batching


def test_calls_of_ever_other_sizes_are_batched(monkeypatch):
    """Trees in lists are sizes to the shape policy, which runs such calls without following any."""
    w = tf.Variable(tf.eye(WIDTH))

    def encode(tree):
        if isinstance(tree, int):
            return tf.fill([1, WIDTH], float(tree))
        return tf.tanh(tf.matmul(encode(tree[0]) + encode(tree[1]), w))

    def step(trees):
        return tf.add_n([tf.reduce_sum(encode(tree)) for tree in trees])

    rng = np.random.default_rng(1)
    calls = [[tree(rng, int(rng.integers(3, 9))) for _ in range(int(rng.integers(3, 9)))] for _ in range(8)]
    function = coexec.function(step, batching=True)
    monkeypatch.setattr(function._controller.sizes, "judge", lambda *_: Verdict.PLAIN)
    with tuned(batches_all=False):
        for trees in calls:
            np.testing.assert_allclose(function(trees), step(trees), rtol=1e-5)
    assert function.stats().batched > 0
