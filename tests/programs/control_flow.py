"""Branches and loops that depend on tensors or on Python state, both ways of each."""

import itertools

import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, signed, vector, whole


@program()
def if_on_a_tensor(function):
    "A branch on a sum, alternately taken."

    @function
    def step(x):
        if tf.reduce_sum(x) > 0:
            return x * 2.0
        return tf.exp(x) - 1.0

    return Instance(step, each(lambda i: args(signed(i))))


@program(follows=4)
def if_elif_else(function):
    "Three ways, of which the third comes late."
    ways = []

    @function
    def step(x):
        if x > 5.0:
            ways.append("large")
            y = tf.sqrt(x)
        elif x > 2.0:
            ways.append("medium")
            y = x * 3.0
        else:
            ways.append("small")
            y = x - 1.0
        return y + 0.5

    values = [0.0, 3.0, 1.0, 4.0, 0.5, 6.0, 9.0, 2.5, 7.0, 1.0]
    return Instance(step, each(lambda i: args(tf.constant(values[i])), len(values)), lambda: ways)


@program(follows=3)
def nested_ifs(function):
    "Four paths through two decisions, joined in between."

    @function
    def step(x):
        y = x * 2.0
        if y[0] > 0:
            y = y + 1.0
            if y[1] > 0:
                y = y * y
        z = tf.reduce_sum(y)
        if x[1] > 0:
            z = -z
        return y, z

    signs = [(1.0, 1.0), (1.0, -9.0), (-1.0, 1.0), (-1.0, -1.0)]
    return Instance(step, each(lambda i: args(tf.constant(signs[i % 4])), 12))


@program()
def branch_on_python_state(function):
    "A counter on the caller's side decides; no tensor does."
    state = {"calls": 0}

    @function
    def step(x):
        state["calls"] += 1
        if state["calls"] % 2:
            return tf.tanh(x)
        return tf.sigmoid(x) * 2.0

    return Instance(step, each(lambda i: args(vector(i))), lambda: state)


@program(follows=4)
def paths_join_again(function):
    "Two branches of different lengths lead to the same long rest."

    @function
    def step(x):
        if tf.reduce_sum(x) > 0:
            y = tf.sin(x)
            y = tf.cos(y)
            y = y + x
        else:
            y = x
        for _ in range(4):
            y = tf.tanh(y) + 0.25
        return y

    return Instance(step, each(lambda i: args(signed(i // 2))))


@program()
def conditional_expression(function):
    "`a if c else b`, `and`, `or`, `not` and a chained comparison ask tensors for their truth."

    @function
    def step(x):
        total = tf.reduce_sum(x)
        y = x if total > 0 else -x
        both = total > -100 and not (total > 100)
        first = tf.constant(0.0) or total
        between = -1000 < total < 1000
        return y, bool(both), first, bool(between)

    return Instance(step, each(lambda i: args(signed(i))))


@program(follows=2)
def while_on_a_tensor(function):
    "Collatz steps: how often the loop turns depends on the number."

    @function
    def step(n):
        turns = 0
        while n > 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            turns += 1
        return n, turns

    numbers = [6, 3, 6, 3, 6, 3, 8, 6]
    return Instance(step, each(lambda i: args(tf.constant(numbers[i]))))


@program()
def while_with_break(function):
    "A loop that never ends by its own condition."
    log = []

    @function
    def step(x):
        turns = 0
        while True:
            x = x * 2.0
            turns += 1
            if tf.reduce_max(x) > 50.0:
                break
        log.append(turns)
        return x

    return Instance(step, each(lambda i: args(tf.constant([1.0, 2.0 + 10.0 * (i % 2)]))), lambda: log)


@program()
def for_with_continue(function):
    "Rows are skipped when a tensor says so."

    @function
    def step(rows):
        total = tf.zeros(2)
        kept = []
        for number, row in enumerate(rows):
            if row[0] < 0:
                continue
            total += row
            kept.append(number)
        return total, kept

    return Instance(step, each(lambda i: args(integers(i % 2, 4, 2, low=-3, high=4, dtype="float32"))))


@program()
def loop_else(function):
    "`for ... else` and `while ... else` run the `else` only without a `break`."

    @function
    def step(x, limit):
        for value in x:
            if value > limit:
                found = value
                break
        else:
            found = tf.constant(-1.0)
        left = 3
        while left:
            left -= 1
        else:
            found = found * 10.0
        return found

    return Instance(
        step, each(lambda i: args(tf.constant([1.0, 2.0, 3.0]), tf.constant(2.5 if i % 2 else 9.0)))
    )


@program()
def for_over_a_tensor(function):
    "Iterating a tensor gives its rows."

    @function
    def step(x):
        total = tf.zeros(3)
        for row in x:
            total = total * 0.5 + row
        return total

    return Instance(step, each(lambda i: args(vector(i, 5, 3))))


@program(follows=3)
def range_of_a_tensor(function):
    "A whole-number tensor bounds a Python loop."

    @function
    def step(n, x):
        for turn in range(n):
            x = x + turn
        return x

    return Instance(step, each(lambda i: args(tf.constant([2, 3][i % 2]), vector(i))))


@program()
def early_return(function):
    "A `return` from within a loop, and the one at the end."

    @function
    def step(x):
        for turn in range(5):
            x = x * 2.0
            if tf.reduce_sum(x) > 20.0:
                return x, turn
        return -x, None

    return Instance(step, each(lambda i: args(signed(i))))


@program()
def try_finally(function):
    "`finally` runs on the way out of a `return`, a `break` and the end."
    log = []

    @function
    def step(x):
        for turn in range(3):
            try:
                x = x + 1.0
                if tf.reduce_sum(x) > 14.0:
                    break
            finally:
                log.append(turn)
        try:
            return x * 2.0
        finally:
            log.append(float(x[0]))

    return Instance(step, each(lambda i: args(signed(i % 2))), lambda: log)


@program()
def recursion_on_a_tensor(function):
    "Fibonacci numbers, each call of which looks at its tensor."

    def fibonacci(n):
        if n < 2:
            return n
        return fibonacci(n - 1) + fibonacci(n - 2)

    @function
    def step(n):
        return fibonacci(n)

    return Instance(step, each(lambda i: args(tf.constant(4 + i % 2))))


@program()
def recursion_over_a_tree(function):
    "A tree of tuples decides the shape of the computation."

    @function
    def step(tree, weight):
        def encode(node):
            if isinstance(node, tuple):
                return tf.tanh(tf.linalg.matvec(weight, encode(node[0]) + encode(node[1])))
            return node

        return encode(tree)

    def arguments(i):
        a, b, c, d = (vector(10 * i + n, 3) for n in range(4))
        return args([((a, b), (c, d)), (a, (b, (c, d)))][i % 2], vector(99, 3, 3))

    return Instance(step, each(arguments))


@program()
def match_statement(function):
    "Structural pattern matching over a shape and over a value that was read."

    @function
    def step(x):
        match x.shape.as_list():
            case [n]:
                y = x + n
            case [n, m]:
                y = tf.reshape(x, [m, n])
        match int(tf.reduce_max(x)):
            case 1:
                y = y * 10.0
            case 2 | 3:
                y = -y
        return y

    values = [[1.0, 0.0], [[2.0, 1.0]]]
    return Instance(step, each(lambda i: args(tf.constant(values[i % 2])), 10))


@program()
def comprehensions(function):
    "A list, a dict and a set comprehension, with conditions on tensors, and an assignment expression."

    @function
    def step(x):
        positive = [value * 2.0 for value in x if value > 0]
        squares = {n: value * value for n, value in enumerate(x)}
        found = {int(value) for value in x}
        if (total := tf.add_n(positive)) > 3:
            total = -total
        return positive, squares, found, total

    return Instance(step, each(lambda i: args(tf.constant([[1.0, -2.0, 3.0], [1.0, 1.0, -1.0]][i % 2]))))


@program()
def loop_of_a_changing_length(function):
    "As many turns as there are items in a Python list."

    @function
    def step(items, x):
        for item in items:
            x = tf.tanh(x) + item
        return x

    return Instance(step, each(lambda i: args([0.5] * (2 + i % 2), vector(i))))


@program()
def unrolled_recurrence(function):
    "Twenty turns of one cell."

    @function
    def step(inputs, weight):
        hidden = tf.zeros([2, 3])
        for turn in range(20):
            hidden = tf.tanh(tf.matmul(hidden, weight) + inputs[:, turn])
        return hidden

    return Instance(step, each(lambda i: args(vector(i, 2, 20, 3), vector(50, 3, 3))))


@program()
def zip_and_enumerate(function):
    "Several tensors are walked together."

    @function
    def step(a, b):
        out = []
        for number, (left, right) in enumerate(zip(a, b)):
            out.append(left * right + number)
        for one, two in itertools.pairwise(out):
            out[0] = out[0] + one - two
        return out, list(reversed(a)), sorted(float(value) for value in integers(3))

    return Instance(step, each(lambda i: args(vector(i, 3), vector(i + 1, 3))))


@program()
def generators(function):
    "A generator inside the step yields tensors and is sent some."

    @function
    def step(x):
        def halves(value):
            while value > 1.0:
                bonus = yield value
                value = value / 2.0 + (0.0 if bonus is None else bonus)
            return value

        def chained(value):
            last = yield from halves(value)
            yield last * 100.0

        first = list(chained(x))
        other = halves(x)
        out = [next(other), other.send(tf.constant(0.25))]
        other.close()
        return first, out

    return Instance(step, each(lambda i: args(tf.constant(8.0 if i % 2 else 4.0))))


@program()
def state_machine(function):
    "The next state's name is looked up from a tensor's value."

    @function
    def step(x):
        state, path = "start", []
        while state != "end":
            path.append(state)
            x = x - 1.0
            state = {True: "middle", False: "end"}[bool(x > 0)]
        return x, path

    return Instance(step, each(lambda i: args(whole(2 + i % 2))))


@program()
def beam_of_a_search(function):
    "Greedy decoding: a token that was read is the index of the next look-up, until the end token comes."

    @function
    def step(table, token):
        tokens = []
        while len(tokens) < 6:
            token = int(tf.argmax(tf.gather(table, token)))
            tokens.append(token)
            if token == 0:
                break
        return tokens, tf.one_hot(tokens, 4)

    table = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]
    return Instance(step, each(lambda i: args(tf.constant(table), 1 + i % 2), 10))
