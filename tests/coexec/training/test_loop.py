"""The loop: what batches come, that nothing is done ahead or twice, checkpoints, progress, signals."""

import io
import math
import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec

ROOT = Path(__file__).resolve().parents[3]
X, Y = np.arange(20, dtype="float32").reshape(10, 2), np.arange(10)


def go(training, body):
    """Runs a loop, for where it is to raise."""
    for batch in training:
        body(batch)


def rows(batch):
    return np.asarray(batch[1]).tolist()


def test_arrays():
    """Tuples and dicts of arrays, cut into batches, shuffled in another way in each epoch."""
    plain = [rows(b) for b in coexec.loop((X, Y), batch_size=4, epochs=2)]
    assert plain == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    (batch, *_) = coexec.loop({"x": X, "y": Y}, batch_size=4)
    assert isinstance(batch["x"], tf.Tensor)
    assert batch["x"].dtype == tf.float32
    np.testing.assert_array_equal(batch["x"], X[:4])
    (alone,) = coexec.loop(X, batch_size=10)
    np.testing.assert_array_equal(alone, X)
    once = [rows(b) for b in coexec.loop((X, Y), batch_size=5, epochs=2, shuffle=True, seed=1)]
    again = [rows(b) for b in coexec.loop((X, Y), batch_size=5, epochs=2, shuffle=True, seed=1)]
    assert once == again
    assert sorted(once[0] + once[1]) == list(range(10))
    assert once[:2] != once[2:]
    with pytest.raises(ValueError, match="rows"):
        coexec.loop((X, Y[:5]), batch_size=4)
    with pytest.raises(TypeError, match="arrays"):
        coexec.loop(3)


def test_datasets_and_pages():
    """A tf.data.Dataset, and a PyDataset, which hears of its epochs."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    assert [rows(b) for b in coexec.loop(dataset.batch(4), prefetch=1)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [rows(b) for b in coexec.loop(dataset, batch_size=8, epochs=2)] == [list(range(8)), [8, 9]] * 2

    class Pages(keras.utils.PyDataset):
        heard = ()

        def __len__(self):
            return 2

        def __getitem__(self, i):
            self.heard += (i,)
            return X[i], Y[i]

        def on_epoch_end(self):
            self.heard += ("end",)

    pages = Pages()
    assert [int(b[1]) for b in coexec.loop(pages, epochs=2)] == [0, 1, 0, 1]
    assert pages.heard == (0, 1, "end", 0, 1, "end")


def test_iterables_and_iterators():
    """An iterable starts anew in each epoch, a generator goes on; neither is asked ahead of the loop's body."""
    log = []

    def numbers():
        for i in range(5):
            log.append(("made", i))
            yield i

    for i in coexec.loop(numbers(), epochs=2, steps_per_epoch=2):
        log.append(("used", i))
    assert log == [(what, i) for i in range(4) for what in ("made", "used")]
    assert list(coexec.loop([1, 2], epochs=3)) == [1, 2] * 3
    assert list(coexec.loop(iter([1, 2, 3]), epochs=3)) == [1, 2, 3]


def test_prefetching_threads():
    """Batches are made ahead, in order, on one thread, which is gone after the last, a break, or an error."""
    made = []

    def numbers(stop):
        for i in range(stop):
            made.append(threading.current_thread().name)
            yield i
        if stop == 3:
            raise KeyError("no more")

    def threads():
        return [t for t in threading.enumerate() if t.name == "coexec-prefetch"]

    assert list(coexec.loop(numbers(50), prefetch=4)) == list(range(50))
    assert set(made) == {"coexec-prefetch"}
    assert not threads()
    for i in coexec.loop(numbers(50), prefetch=4):
        if i == 3:
            time.sleep(0.05)
            assert len(made) - 50 in range(7, 10)
            break
    assert not threads()
    found = []
    with pytest.raises(KeyError, match="no more"):
        go(coexec.loop(numbers(3), prefetch=2), found.append)
    assert found == [0, 1, 2]
    assert not threads()


def test_a_thread_that_does_not_end_is_left_with_a_word(tune):
    """Data that block do not keep the program from going on."""
    tune(data_patience=0.1)
    waiting, free = threading.Event(), threading.Event()

    def numbers():
        yield 1
        waiting.set()
        free.wait(20)
        yield 2

    training = iter(coexec.loop(numbers(), prefetch=1))
    assert next(training) == 1
    assert waiting.wait(20)
    with pytest.warns(UserWarning, match="the data keep the thread coexec-prefetch busy"):
        training.close()
    free.set()


def test_counts_and_limits():
    """`step` counts what is done; `steps_per_epoch` cuts epochs short."""
    training = coexec.loop((X, Y), batch_size=2, epochs=3, steps_per_epoch=2)
    assert training.total == 6
    assert [(training.epoch, training.step) for _ in training] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert (training.epoch, training.step) == (3, 6)


def test_a_step_is_followed():
    """The loop changes nothing in what a step does; its calls are followed from the second on."""
    weights = tf.Variable([1.0, 2.0])

    @coexec.function
    def step(x, _):
        weights.assign_sub(0.1 * tf.reduce_mean(x * weights, axis=0))
        return tf.reduce_sum(weights)

    eager = [float(step.python_function(*b)) for b in coexec.loop((X, Y), batch_size=2, epochs=2)]
    weights.assign([1.0, 2.0])
    assert [float(step(*b)) for b in coexec.loop((X, Y), batch_size=2, epochs=2)] == pytest.approx(eager, rel=1e-5)
    assert step.stats().followed == 9


# Checkpoints.


class Interrupted(Exception):
    pass


def run(directory, stop=None, **options):
    """Counts with a variable and a list; ends in the middle of a step where it is told to."""
    total, seen, chosen = tf.Variable(0.0), [], random.Random(1)
    kept = coexec.Checkpoint(directory, total=total, seen=seen, chosen=chosen, **{"every": 2, **options})
    for x, _ in coexec.loop((X, Y), batch_size=3, epochs=2, shuffle=True, checkpoint=kept):
        if stop is not None and len(seen) == stop:
            raise Interrupted
        total.assign_add(tf.reduce_sum(x) * chosen.random())
        seen.append((float(total), np.random.random(), random.random(), float(tf.random.normal(()))))
    return seen


def seeded(*args, **options):
    keras.utils.set_random_seed(5)
    return run(*args, **options)


def test_going_on(tmp_path):
    """A loop that an exception ended goes on behind the last checkpoint; one that is complete has nothing to do."""
    whole = seeded(tmp_path / "whole")
    assert len(whole) == 8
    for stop in (1, 3, 4, 7):
        with pytest.raises(Interrupted):
            seeded(tmp_path / "parts", stop)
        np.random.random()
    assert run(tmp_path / "parts") == whole
    assert run(tmp_path / "parts") == whole
    assert len(tf.train.get_checkpoint_state(tmp_path / "parts").all_model_checkpoint_paths) == 3


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["ckpt-8.data-00000-of-00001", "ckpt-8.index"])
@pytest.mark.parametrize("how", [damage, cut, Path.unlink])
def test_damaged_checkpoints_are_passed_over(name, how, tmp_path):
    """The one before is used, with a warning that says which file was damaged; without one, an error does."""
    whole = seeded(tmp_path)
    how(tmp_path / name)
    with pytest.warns(UserWarning, match=r"passed over.*ckpt-8: it is damaged or incomplete"):
        assert run(tmp_path) == whole
    for path in tmp_path.glob("ckpt-*.index"):
        cut(path)
    with pytest.raises(coexec.CheckpointError, match="no checkpoint can be used"):
        run(tmp_path)


def test_foreign_checkpoints_are_refused(tmp_path):
    """Another program's files, other names, other shapes, a model that is not built: each error says what is wrong."""
    tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path / "other", 1).save()
    with pytest.raises(coexec.CheckpointError, match="was not written by coexec"):
        run(tmp_path / "other")
    kept = coexec.Checkpoint(tmp_path / "mine", v=tf.Variable([1.0, 2.0]), log=[])
    kept.save(1)
    kept.wait()
    for objects, message in (
        ({"w": tf.Variable(1.0), "log": []}, r"holds \['log', 'v'\]"),
        ({"v": tf.Variable([1.0]), "log": []}, "a variable of v"),
        ({"v": keras.Sequential([keras.layers.Dense(1)]), "log": []}, "build it before"),
        ({"v": [], "log": []}, "v has variables or had some"),
        ({"v": tf.Variable([1.0, 2.0]), "log": tf.Variable(1.0)}, "log has variables or had some"),
    ):
        with pytest.raises(coexec.CheckpointError, match=message):
            coexec.Checkpoint(tmp_path / "mine", **objects).find()
    with pytest.raises(TypeError, match="step is a function"):
        coexec.Checkpoint(tmp_path, step=run)
    with pytest.raises(ValueError, match="every"):
        coexec.Checkpoint(tmp_path, every=0)


def test_data_that_cannot_say_where_they_are(tmp_path):
    """Generators and lists are refused for checkpoints in mid-epoch, with what to do; at epochs' ends they are fine."""
    with pytest.raises(TypeError, match="cannot say where it is"):
        coexec.loop([1, 2, 3], checkpoint=coexec.Checkpoint(tmp_path, every=1))
    seen = []
    kept = coexec.Checkpoint(tmp_path, seen=seen)

    def body(i):
        seen.append(i)
        if len(seen) == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        go(coexec.loop([1, 2, 3], epochs=3, checkpoint=kept), body)
    seen.clear()
    for i in coexec.loop([1, 2, 3], epochs=3, checkpoint=kept):
        seen.append(i)
    assert seen == [1, 2, 3] * 3

    def numbers():
        yield 1.0

    dataset = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec((), tf.float32))
    with pytest.raises(TypeError, match="Python code"):
        list(coexec.loop(dataset, checkpoint=coexec.Checkpoint(tmp_path / "generator", every=1)))


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_the_loop_behind_the_step(number, tmp_path):
    """The step comes to its end, a checkpoint is written, handlers are put back, and KeyboardInterrupt is raised."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen = []
    kept = coexec.Checkpoint(tmp_path, every=100, seen=seen)

    def body(batch):
        if len(seen) == 1:
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        seen.append(rows(batch))

    with pytest.raises(KeyboardInterrupt, match=f"{number.name} after step 2"):
        go(coexec.loop((X, Y), batch_size=2, checkpoint=kept), body)
    assert len(seen) == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    seen.clear()
    go(coexec.loop((X, Y), batch_size=2, checkpoint=kept), lambda batch: seen.append(rows(batch)))
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("second", [False, True])
def test_a_long_step_is_ended(second, tune):
    """After the time it is given, or at once by another signal, however much of that is left."""
    tune(signal_grace=1e4 if second else 0.1)
    seen = []

    def body(_):
        seen.append("begun")
        os.kill(os.getpid(), signal.SIGINT)
        if second:
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(6000):  # a minute, if nobody ends it
            time.sleep(0.01)
        seen.append("done")

    with pytest.raises(KeyboardInterrupt, match="ended before it was done"):
        go(coexec.loop([1, 2]), body)
    assert seen == ["begun"]


def test_handlers_are_put_back_on_every_way_out():
    """After the last batch, a break and an error; in another thread they are never touched."""
    before = signal.getsignal(signal.SIGINT)

    def during():
        return signal.getsignal(signal.SIGINT) is before

    inside = [during() for _ in coexec.loop([1, 2])]
    assert inside == [False, False]
    for _ in coexec.loop([1, 2]):
        break
    assert during()
    with pytest.raises(KeyError):
        go(coexec.loop([1, 2]), {}.__getitem__)
    assert during()
    thread = threading.Thread(target=lambda: inside.extend(during() for _ in coexec.loop([1])))
    thread.start()
    thread.join()
    assert inside[2:] == [True]


# Progress.

PROGRAM = """
import time, tensorflow as tf, coexec
total = tf.Variable(0.0)
@coexec.function
def step(x):
    total.assign_add(x)
    return total * 2.0
training = coexec.loop([tf.constant(1.0)] * 40, epochs=2)
for x in training:
    loss = step(x)
    training.show(loss=loss, half=tf.cast(loss, tf.bfloat16))
    time.sleep(0.01)
"""


def start(program, *arguments, **options):
    """Starts a program whose messages go to a pseudo-terminal; returns its process and the terminal's other end."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=slave, stderr=slave, env=environment, **options)
    os.close(slave)
    return process, master


def read(master, until=None):
    """What the terminal shows, up to some text or the end."""
    shown = b""
    try:
        while (until is None or until not in shown) and (chunk := os.read(master, 4096)):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    if until is None:
        os.close(master)
    return shown


def test_a_terminal_sees_a_progress_bar():
    """Steps, their rate, the loss and the share followed, on a pseudo-terminal."""
    process, master = start(PROGRAM)
    shown = read(master)
    assert process.wait(60) == 0, shown
    text = shown.decode()
    assert "80/80" in text
    assert "steps/s" in text
    assert "loss 160" in text
    assert "followed 9" in text


STOPPED = """
import fcntl, signal, sys, termios, numpy as np, tensorflow as tf, coexec
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # keys of this terminal are for this process
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started it may ignore them
total = tf.Variable(0.0)
@coexec.function
def step(x):
    return total.assign_add(tf.reduce_sum(x))
kept = coexec.Checkpoint(sys.argv[1], every=10**9, total=total)
training = coexec.loop(np.ones([10**6, 1], "float32"), batch_size=1, checkpoint=kept)
for x in training:
    if training.step and sys.argv[2] == "look":
        print(training.step, int(total))
        break
    step(x)
"""


def test_ctrl_c_in_a_terminal(tmp_path):
    """It is typed: the loop ends with a checkpoint, the cursor comes back, and a new start goes on behind that step.

    What that prints goes where it is sent, although a bar is shown.
    """
    process, master = start(STOPPED, tmp_path, "run", start_new_session=True)
    shown = read(master, b"steps/s")
    os.write(master, b"\x03")
    shown += read(master)
    assert process.wait(60) == -signal.SIGINT, shown
    text = shown.decode()
    (ended,) = re.findall(r"KeyboardInterrupt: SIGINT after step (\d+)", text)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    process, master = start(STOPPED, tmp_path, "look", start_new_session=True, stdout=subprocess.PIPE, text=True)
    shown = read(master)
    found, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert found.split() == [ended, ended]


def test_a_pipe_sees_nothing():
    """No bar, no line, no control characters."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0
    assert run.stdout == ""
    assert "steps/s" not in run.stderr


@pytest.mark.parametrize(("interval", "expected"), [(0.0, 300), (math.inf, 1)])
def test_values_are_read_only_when_they_are_shown(interval, expected, monkeypatch, tune):
    """Tensors are not waited for step by step, but as often as the line is drawn."""
    reads = []

    class Counted:
        def __array__(self, dtype=None, copy=None):
            reads.append(1)
            return np.array(0.5)

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    tune(progress_interval=interval)
    training = coexec.loop(range(300), progress=True)
    for _ in training:
        training.show(loss=Counted())
    assert len(reads) == expected
