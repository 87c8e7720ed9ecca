"""Tests of calls of graph functions on the launching thread: what TensorFlow holds of them, and lets go of."""

import gc
import threading
import time

import pytest
import tensorflow as tf

import coexec
from coexec.base.tuning import tuned
from coexec.compile import inline_call
from tracer.private import context

NAME = "__wrapped__StatefulPartitionedCall_Tin_{}_Tout_{}_device_/job:localhost/replica:0/task:0/device:CPU:0"


def made(length: int, jit: bool | str = False) -> coexec.Function:
    """A function of `length` operations that is launched as a graph; its wrapper goes by how many it is given."""

    @coexec.function(jit_compile=jit)
    def step(*given: tf.Tensor) -> tf.Tensor:
        x = tf.add_n(given)
        for k in range(length):
            x = tf.tanh(x) if k % 2 else x * 1.01
        return x

    return step


def is_held(inputs: int) -> bool:
    return context.context().has_function(NAME.format(inputs, 1))


@pytest.fixture(autouse=True)
def nothing_held():
    """Begins and ends without anything of other tests, and calls graphs inline from their first launch on."""
    coexec.clear()
    gc.collect()
    with tuned(launches_by_name=0):
        yield
    coexec.clear()


def test_a_graph_is_launched_by_name_at_first():
    """A call is not prepared before so many launches that it can pay, and values are the same before and after."""
    step, given = made(20), [tf.fill((2, 2), float(k)) for k in range(11)]
    expected = step.python_function(*given)
    with tuned(launches_by_name=5):
        while step.stats().launches < 5:
            assert (step(*given) == expected).numpy().all()
        assert not is_held(11)
        assert (step(*given) == expected).numpy().all()
    assert is_held(11)
    step.clear()
    gc.collect()
    assert not is_held(11)


def test_a_graph_that_was_never_called_inline_leaves_the_others_calls():
    """What is only launched by name counts neither as held nor, once it is removed, as gone."""
    small, large, given = made(10), made(60), [tf.fill((2, 2), float(k)) for k in range(12)]
    for _ in range(4):
        small(*given)
    with tuned(launches_by_name=100):
        for _ in range(4):
            large(*given)
        large.clear()
        gc.collect()
    assert is_held(12)


def test_a_graph_that_races_is_called_inline():
    """Against XLA's code it is timed as it is at its best."""
    step, given = made(20, jit="auto"), [tf.fill((2, 2), float(k)) for k in range(13)]
    expected = step.python_function(*given)
    with tuned(launches_by_name=1000, xla_price=0.0):
        over = time.monotonic() + 60
        while not is_held(13) and time.monotonic() < over:
            assert (abs(step(*given) - expected) < 1e-5).numpy().all()
            time.sleep(0.01)  # XLA compiles in the background
    assert is_held(13)
    assert step.stats().launches < 1000


def test_small_graphs_are_called_through_the_wrapper_that_is_relied_on():
    """TensorFlow wraps the call of a small graph in a function of the name that is removed later."""
    step, given = made(20), [tf.fill((2, 2), float(k)) for k in range(7)]
    expected = step.python_function(*given)
    for _ in range(4):
        assert (step(*given) == expected).numpy().all()
    assert step.stats().launches
    assert is_held(7)


def test_nothing_is_held_of_a_function_that_is_cleared():
    """Clearing removes the wrapper, and with it what TensorFlow keeps of the call."""
    step, given = made(20), [tf.fill((2, 2), float(k)) for k in range(9)]
    for _ in range(4):
        step(*given)
    assert is_held(9)
    step.clear()
    gc.collect()
    assert not is_held(9)


def test_functions_share_a_wrapper_and_outlive_each_other():
    """One whose wrapper was removed with another's call is called again, with the same values."""
    small, large, given = made(10), made(60), [tf.fill((2, 2), float(k)) for k in range(8)]
    expected = small.python_function(*given)
    for _ in range(4):
        small(*given), large(*given)
    large.clear()
    gc.collect()
    assert not is_held(8)
    launches = small.stats().launches
    for _ in range(3):
        assert (small(*given) == expected).numpy().all()
    assert small.stats().launches > launches
    assert is_held(8)


def test_the_smaller_part_waits():
    """What is gone is held until it is more than what is there, as that has to be made again."""
    small, large, given = made(10), made(60), [tf.fill((2, 2), float(k)) for k in range(10)]
    for _ in range(4):
        small(*given), large(*given)
    small.clear()
    gc.collect()
    assert is_held(10)
    large.clear()
    gc.collect()
    assert not is_held(10)


def test_threads_launch_while_others_clear():
    """Removing a wrapper waits for launches, and launches for the removal: nothing crashes, all values are right."""
    given = [tf.fill((2, 2), float(k)) for k in range(6)]
    expected = made(30).python_function(*given)
    wrong: list[object] = []
    over = threading.Event()

    def launching() -> None:
        step = made(30)
        while not over.is_set():
            if not (step(*given) == expected).numpy().all():
                wrong.append(step)

    def clearing() -> None:
        for _ in range(25):
            step = made(90)
            for _ in range(3):
                if step(*given).shape != (2, 2):
                    wrong.append(step)
            step.clear()
        over.set()

    threads = [threading.Thread(target=run) for run in (launching, launching, clearing)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not inline_call._under_way


def test_a_launch_in_the_midst_of_another_leaves_its_entry():
    """A finalizer may launch while its thread does: the outer launch still counts as under way afterwards."""
    outer = inline_call.enter()
    inner = inline_call.enter()
    inline_call.leave(inner)
    assert inline_call._under_way == {outer}
    inline_call.leave(outer)
    assert not inline_call._under_way


def test_a_launch_waits_while_wrappers_are_removed():
    """Nobody enters while the doors are closed, and everybody does once they are open."""
    with inline_call._lock:
        inline_call._closed = True
        entered: list[int | None] = []
        thread = threading.Thread(target=lambda: entered.append(inline_call.enter()))
        thread.start()
        thread.join(0.1)
        assert not entered
        inline_call._closed = False
    thread.join()
    assert entered == [thread.ident]
    inline_call.leave(entered[0])


TABLE = [1.0, 2.0, 3.0]


def gathers(x: tf.Tensor) -> None:
    tf.gather(tf.constant(TABLE), x)


def looks_up(x: tf.Tensor, rows: tf.Variable) -> None:
    tf.gather(rows, x)


def draws(x: tf.Tensor) -> None:
    tf.random.uniform([2], 0, tf.reduce_min(3 - x), tf.int32)


def asserts(x: tf.Tensor) -> None:
    tf.debugging.assert_less(x, 3)


def checks(x: tf.Tensor) -> None:
    tf.debugging.check_numerics(1.0 / tf.cast(3 - x, tf.float32), "here")


@pytest.mark.parametrize("risky", [gathers, looks_up, draws, asserts, checks])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("gives", [False, True])
def test_what_fails_does_so_where_nobody_uses_it(risky, writes, gives):
    """An operation whose result nothing takes raises in a small graph, too, and behind it nothing is written."""
    outcomes = []
    for decorate in (lambda step: step, coexec.function(jit_compile=False)):
        rows, total = tf.Variable(TABLE), tf.Variable(0.0)

        @decorate
        def step(x, y, rows=rows, total=total):
            risky(x, rows) if risky is looks_up else risky(x)
            for _ in range(20):
                y = tf.tanh(y)
            if writes:
                total.assign_add(tf.reduce_sum(y))
            return y if gives else None

        found = []
        for place in (0, 1, 2, 1, 0, 3, 1, 3):
            try:
                given = step(tf.constant([0, place]), tf.ones((2, 2)))
                found.append(given if given is None else round(float(given[0, 0]), 5))
            except tf.errors.InvalidArgumentError as error:
                found.append(type(error))
            found.append(round(float(total), 4))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    assert tf.errors.InvalidArgumentError in outcomes[0]
    assert step.stats().launches >= 4 or not (gives or writes)
