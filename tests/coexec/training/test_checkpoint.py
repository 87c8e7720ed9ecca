"""Checkpoints written beside the program: what is written is what was taken, one at a time, and no failure is lost."""

import os
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
from coexec import testing
from coexec.training.checkpoint.checkpoint_writer import CheckpointWriter, WriteError
from tests.snapshots import assert_same, snapshot

ROOT = Path(__file__).resolve().parents[3]

# Keras converts its variables for NumPy in a way that NumPy 2 no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def writing():
    return [t for t in threading.enumerate() if t.name == "coexec-checkpoint"]


class Held:
    """Keeps `CheckpointManager.save` from beginning until it is let go; counts how many are at it."""

    def __init__(self, monkeypatch):
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.running, self.most = 0, 0
        save = tf.train.CheckpointManager.save

        def held(manager, **options):
            self.running += 1
            self.most = max(self.most, self.running)
            self.begun.set()
            assert self.let_go.wait(60)
            path = save(manager, **options)
            self.running -= 1
            return path

        monkeypatch.setattr(tf.train.CheckpointManager, "save", held)


class Program:
    """Training whose steps write to variables in every way, on data that TensorFlow shuffles."""

    def __init__(self, directory, held=None):
        keras.utils.set_random_seed(3)
        layers = keras.layers
        hidden = [layers.Dense(4, use_bias=False), layers.BatchNormalization(), layers.Dropout(0.3)]
        self.model = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(1)])
        self.optimizer = keras.optimizers.Adam(0.1)
        self.optimizer.build(self.model.trainable_variables)
        self.table, self.count = tf.Variable(tf.zeros([5, 2])), tf.Variable(0, dtype=tf.int64)
        self.generator, self.log, self.array = tf.random.Generator.from_seed(2), [], np.zeros(3)
        self.held, self.writing_at = held, []
        objects = {name: getattr(self, name) for name in ("model", "optimizer", "table", "count", "generator", "log")}
        self.kept = coexec.Checkpoint(directory, every=4, array=self.array, **objects)

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True) - 1.0))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        rows = tf.cast(self.count % 5, tf.int32)
        self.table.scatter_nd_add([[rows]], [[1.0, 2.0]])
        self.table.scatter_update(tf.IndexedSlices(self.generator.normal([1, 2]), tf.reshape((rows + 2) % 5, [1])))
        self.table.assign_add(tf.ones([5, 2]))
        self.table[0].assign([0.5, float(tf.reduce_sum(x))])
        self.count.assign_add(1)
        return loss

    def run(self):
        step = coexec.function(self.step)
        features = np.random.default_rng(1).normal(size=(28, 3)).astype("float32")
        dataset = tf.data.Dataset.from_tensor_slices(features).shuffle(20, seed=5).batch(4)
        training = coexec.loop(dataset, checkpoint=self.kept)
        for x in training:
            self.log.append(float(step(x)))
            self.array += len(self.log)
            if self.held is not None and writing():
                self.writing_at.append(training.step)
                if training.step == 6:
                    self.held.let_go.set()
        everything = [v.numpy() for v in (*self.model.variables, *self.optimizer.variables, self.table, self.count)]
        return everything, self.log, self.array, self.generator.state.numpy()


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_go_on_while_a_checkpoint_is_written(compiled, tmp_path, monkeypatch):
    """What is written is what was there when it was taken, whatever the steps after it did to the same variables."""
    held = Held(monkeypatch)
    program = Program(tmp_path, held)
    with testing.compile_everything() if compiled else coexec.imperative():
        whole = program.run()
        assert held.begun.is_set()
        assert program.writing_at == [4, 5, 6]  # taken behind the fourth step; numbers are those of steps done before
        assert held.most == 1
        assert not writing()
        (tmp_path / "ckpt-7.index").unlink()
        with pytest.warns(UserWarning, match="passed over"):
            parts = Program(tmp_path).run()
    assert len(whole[1]) == 7
    assert_same(snapshot(whole), snapshot(parts), rtol=1e-5, atol=1e-6, path="")
    np.testing.assert_array_equal(whole[2], parts[2])


def test_one_checkpoint_is_written_at_a_time(tmp_path, monkeypatch):
    """The next one waits for the one before; so does whoever looks for the youngest."""
    held = Held(monkeypatch)
    total = tf.Variable(1.0)
    kept = coexec.Checkpoint(tmp_path, total=total)
    kept.save(1)
    assert held.begun.wait(60)
    assert len(writing()) == 1
    total.assign(2.0)
    timer = threading.Timer(0.2, held.let_go.set)
    timer.start()
    began = time.monotonic()
    kept.save(2)
    assert time.monotonic() - began > 0.1
    assert kept.find().path.endswith("ckpt-2")
    assert held.most == 1
    total.assign(3.0)
    kept.load(kept.find())
    assert float(total) == 2.0
    assert not writing()


def failing(monkeypatch, number=1):
    """Makes the writing of one checkpoint fail."""
    save = tf.train.CheckpointManager.save

    def fail(manager, checkpoint_number):
        if checkpoint_number == number:
            raise OSError("no space left on device")
        return save(manager, checkpoint_number=checkpoint_number)

    monkeypatch.setattr(tf.train.CheckpointManager, "save", fail)


def test_a_failure_is_raised_where_the_program_next_asks(tmp_path, monkeypatch):
    """By the next checkpoint, by `wait`, and once only; the checkpoints before stay."""
    failing(monkeypatch, 2)
    kept = coexec.Checkpoint(tmp_path, total=tf.Variable(1.0))
    kept.save(1)
    kept.save(2)
    with pytest.raises(WriteError, match=r"the checkpoint of step 2 in .*: OSError: no space left") as caught:
        kept.save(3)
    assert isinstance(caught.value.__cause__, OSError)
    assert kept.find().path.endswith("ckpt-1")
    kept.save(2)
    with pytest.raises(WriteError, match="step 2"):
        kept.wait()
    kept.wait()


def test_a_loop_raises_the_failure_of_its_last_checkpoint(tmp_path, monkeypatch):
    """At its end; where it ends by an exception of the program, that one stays, and the failure is a warning."""
    failing(monkeypatch, 2)

    def run(directory, stop):
        seen = []
        kept = coexec.Checkpoint(directory, every=2, seen=seen)
        for _ in coexec.loop(np.arange(stop), batch_size=1, checkpoint=kept):
            seen.append(1)
            if len(seen) == 3:
                raise KeyError("mine")

    with pytest.raises(WriteError, match="step 2"):
        run(tmp_path / "end", 2)
    with pytest.warns(UserWarning, match="step 2"), pytest.raises(KeyError, match="mine"):
        run(tmp_path / "middle", 3)
    assert not writing()


def test_without_a_thread_the_program_waits(monkeypatch):
    """Where the system gives no more threads, it is written at once, and failures are told as ever."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    done, writer = [], CheckpointWriter()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer.write("this", lambda: done.append(1))
    assert done == [1]
    writer.wait()
    writer.write("that", lambda: 1 // 0)
    with pytest.raises(WriteError, match="that could not be written"):
        writer.wait()


def test_an_interrupt_does_not_end_the_waiting_for_good():
    """Ctrl-C ends one `wait`; the next one still waits for what is being written."""
    gate, done, writer = threading.Event(), [], CheckpointWriter()
    writer.write("this", lambda: (gate.wait(60), time.sleep(0.2), done.append(1)))
    main = threading.get_ident()
    threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        writer.wait()
    assert done == []
    gate.set()
    writer.wait()
    assert done == [1]


def test_a_writer_without_work_does_nothing():
    """Waiting for nothing returns at once."""
    with CheckpointWriter() as writer:
        writer.wait()
    assert not writing()


# Writes the number of each checkpoint into a large variable, and says when it begins to write the second.
KILLED = """
import sys, time, tensorflow as tf, coexec
directory, moment = sys.argv[1:]
total = tf.Variable(tf.ones([1 << 25]))
kept = coexec.Checkpoint(directory, total=total)
kept.save(1)
kept.wait()
save = tf.train.CheckpointManager.save
def told(manager, **options):
    if moment == "unnamed":  # all files are there, and the directory does not know of them
        manager.checkpoint.write(directory + "/ckpt-2")
    print("now", flush=True)
    return time.sleep(60) if moment == "unnamed" else save(manager, **options)
tf.train.CheckpointManager.save = told
total.assign_add(tf.ones([1 << 25]))
kept.save(2)
kept.wait()
print("done", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["unnamed", "0", "0.03", "0.09"])
def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(moment, tmp_path):
    """Whatever is there of the second one: the first can be used, and the second be written again."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), moment]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "now\n"
    if moment != "unnamed":
        time.sleep(float(moment))
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    total = tf.Variable(tf.zeros([1 << 25]))
    kept = coexec.Checkpoint(tmp_path, total=total)
    saved = kept.find()
    number = int(saved.path.rpartition("-")[2])
    assert number == (2 if said else 1) or (number == 2 and moment != "unnamed")  # named, and killed before it said so
    kept.load(saved)
    assert float(tf.reduce_min(total)) == float(tf.reduce_max(total)) == number
    total.assign(tf.fill([1 << 25], 7.0))
    kept.save(2)
    saved = kept.find()
    assert os.path.basename(saved.path) == "ckpt-2"
    total.assign(tf.zeros([1 << 25]))
    kept.load(saved)
    assert float(total[3]) == 7.0
