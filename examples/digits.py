"""Trains an image classifier with a step that only plain Python can run, then again under `coexec.function`.

The step reads its loss, appends to lists, moves a schedule, asks scikit-learn for a metric and returns early
when the batch is already learned. The second run starts from the same seeds; only the decorator is added.

    python examples/digits.py --steps=600 --batch=32 --seed=0

Exits with 1 if the two loss curves differ by more than 1e-3, or the test accuracy is not above 95 %.
"""

import math
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if __package__:  # imported by the benchmark
    from examples.quiet_start import quiet_start
else:
    from quiet_start import quiet_start

with quiet_start():
    import keras
    import numpy as np
    import tensorflow as tf
    from absl import app, flags
    from sklearn.datasets import load_digits
    from sklearn.metrics import accuracy_score
    from sklearn.model_selection import train_test_split

    import coexec

STEPS = flags.DEFINE_integer("steps", 600, "The most training steps of a run.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch", 32, "Images per step.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seeds the weights and the order of the images.")

LEARNED = 0.02  # a batch with a loss below this teaches nothing: the step returns early
LARGEST_DIFFERENCE = 1e-3
LOWEST_ACCURACY = 0.95


class Schedule:
    """A warm-up and a cosine decay, kept as a Python object that each step moves on."""

    def __init__(self, peak: float, warmup: int, total: int) -> None:
        self.peak, self.warmup, self.total = peak, warmup, total
        self.step = 0

    def advance(self) -> float:
        """The learning rate of the next step."""
        self.step += 1
        if self.step <= self.warmup:
            return self.peak * self.step / self.warmup
        progress = min(1.0, (self.step - self.warmup) / (self.total - self.warmup))
        return self.peak * 0.5 * (1.02 + 0.98 * math.cos(math.pi * progress))


class Trainer:
    """A model, its optimizer, and one imperative training step over them."""

    def __init__(self, seed: int, total_steps: int = 600) -> None:
        keras.utils.set_random_seed(seed)
        self.model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        self.objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.Adam()
        self.optimizer.build(self.model.trainable_variables)
        self.schedule = Schedule(peak=3e-3, warmup=20, total=max(total_steps, 21))
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.skipped = 0

    def step(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        """Learns from one batch, unless there is nothing to learn from it, and returns its loss."""
        self.optimizer.learning_rate = self.schedule.advance()
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss = self.objective(labels, logits)

        guesses = logits.numpy().argmax(axis=1)
        self.accuracies.append(accuracy_score(labels.numpy(), guesses))
        self.losses.append(float(loss))
        if not math.isfinite(self.losses[-1]) or self.losses[-1] < LEARNED:
            self.skipped += 1
            return self.losses[-1]

        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.losses[-1]

    def has_learned(self) -> bool:
        """Whether the last 50 batches were almost free of errors."""
        recent = self.accuracies[-50:]
        return len(recent) == 50 and sum(recent) / 50 >= 0.996

    def test_accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """The share of `images` that the model names rightly."""
        return float(accuracy_score(labels, self.model(images).numpy().argmax(axis=1)))


def digits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images, test images, training labels, test labels: 8x8 pixels in [0, 1], flat."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16.0).astype("float32"), labels.astype("int32")
    return train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)


def batches(images: np.ndarray, labels: np.ndarray, size: int, steps: int, seed: int):
    """Yields `steps` random batches of tensors."""
    order = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = order.integers(len(images), size=size)
        yield tf.constant(images[chosen]), tf.constant(labels[chosen])


def train(name: str, wrap, data) -> tuple[Trainer, object, list[float]]:
    """Trains anew with `wrap(step)`; returns the trainer, the wrapped step and the seconds of each step."""
    images, _, labels, _ = data
    trainer = Trainer(SEED.value, STEPS.value)
    step = wrap(trainer.step)
    seconds: list[float] = []
    for batch in batches(images, labels, BATCH.value, STEPS.value, SEED.value):
        start = time.perf_counter()
        loss = step(*batch)
        seconds.append(time.perf_counter() - start)
        progress(f"{name:<8} step {len(seconds):4d}/{STEPS.value}  loss {loss:.4f}")
        if trainer.has_learned():
            break
    progress("")
    print(
        f"{name:<8} {len(seconds)} steps ({trainer.skipped} returned early) in {sum(seconds):.1f} s, "
        f"median {1000 * statistics.median(seconds):.2f} ms, "
        f"test accuracy {trainer.test_accuracy(data[1], data[3]):.1%}"
    )
    return trainer, step, seconds


def progress(line: str) -> None:
    """Rewrites the last line of a terminal; says nothing to a file or a pipe."""
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="", flush=True)


def try_tf_function(data) -> str:
    """What `tf.function` makes of the same step: why it fails, or what it does to the Python state."""
    trainer = Trainer(SEED.value, STEPS.value)
    step = tf.function(trainer.step)
    for batch in batches(data[0], data[2], BATCH.value, 3, SEED.value):
        try:
            step(*batch)
        except Exception as error:  # any error is the answer here
            reason = str(error).strip().splitlines()[-1].strip()
            return f"cannot run this step: {reason}"
    losses, moves = len(trainer.losses), trainer.schedule.step
    return f"runs it, but 3 steps appended {losses} losses and moved the schedule {moves} times"


def main(_: list[str]) -> int:
    """Trains eagerly, trains co-executed, compares, and reports."""
    data = digits(SEED.value)
    eager, _, eager_seconds = train("eager", lambda step: step, data)
    coexecuted, step, coexec_seconds = train("coexec", coexec.function, data)

    shared = min(len(eager.losses), len(coexecuted.losses))
    difference = np.abs(np.subtract(eager.losses[:shared], coexecuted.losses[:shared])).max()
    accuracy = coexecuted.test_accuracy(data[1], data[3])
    stats = step.stats()
    speedup = statistics.median(eager_seconds) / statistics.median(coexec_seconds)

    print(f"\nloss curves differ by at most {difference:.1e} over {shared} steps")
    print(f"test accuracy        {accuracy:.1%}")
    print(f"ops followed         {stats.share_followed:.1%} ({stats.followed} of {stats.calls} calls whole)")
    print(f"speed against eager  {speedup:.2f} times (median step)")
    print(f"tf.function          {try_tf_function(data)}")

    if len(eager.losses) != len(coexecuted.losses) or not difference <= LARGEST_DIFFERENCE:  # not <=: NaN too
        print("FAILED: the two runs did not learn the same", file=sys.stderr)
        return 1
    if accuracy <= LOWEST_ACCURACY:
        print(f"FAILED: the test accuracy is not above {LOWEST_ACCURACY:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
