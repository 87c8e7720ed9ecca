"""Embeddings and representations: words, faces, students and teachers."""

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


class Word2Vec(keras.Model):
    """Skip-grams, as in TensorFlow's tutorial."""

    def __init__(self, vocab_size, embedding_dim):
        super().__init__()
        self.target_embedding = keras.layers.Embedding(vocab_size, embedding_dim, name="w2v_embedding")
        self.context_embedding = keras.layers.Embedding(vocab_size, embedding_dim)

    def call(self, pair):
        target, context = pair
        if len(target.shape) == 2:
            target = tf.squeeze(target, axis=1)
        word_emb = self.target_embedding(target)
        context_emb = self.context_embedding(context)
        return tf.einsum("be,bce->bc", word_emb, context_emb)


@example()
def word2vec_negative_sampling():
    """Skip-grams of a window, with negatives from a log-uniform sampler that are drawn in the step."""
    vocab_size, num_ns, rng = 200, 4, np.random.default_rng(0)
    sentences = [rng.zipf(1.5, 30).clip(1, vocab_size - 1) for _ in range(6)]
    model = Word2Vec(vocab_size, 32)
    optimizer = keras.optimizers.Adam(0.01)
    bce = keras.losses.CategoricalCrossentropy(from_logits=True)
    history = {"loss": [], "accuracy": []}

    def pairs(sequence, window=2):
        for i, target in enumerate(sequence):
            for j in range(max(0, i - window), min(len(sequence), i + window + 1)):
                if i != j:
                    yield target, sequence[j]

    def step(sentence):
        chosen = np.array(list(pairs(sentence)))[:48]
        targets, positives = chosen[:, :1], tf.constant(chosen[:, 1:], tf.int64)
        negatives, _, _ = tf.random.log_uniform_candidate_sampler(
            true_classes=positives, num_true=1, num_sampled=num_ns, unique=True, range_max=vocab_size, seed=42
        )
        negatives = tf.tile(negatives[tf.newaxis], [len(chosen), 1])
        context = tf.concat([positives, negatives], 1)
        label = tf.tile(tf.constant([[1.0] + [0.0] * num_ns]), [len(chosen), 1])
        with tf.GradientTape() as tape:
            dots = model((tf.constant(targets), context))
            loss = bce(label, dots)
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights))
        history["loss"].append(loss.numpy())
        history["accuracy"].append(np.mean(np.argmax(dots.numpy(), 1) == 0))
        return loss

    return Example(step, lambda: (model.variables, history["accuracy"]), [(s,) for s in sentences])


def pairwise_distances(embeddings, squared=False):
    dot_product = tf.matmul(embeddings, tf.transpose(embeddings))
    square_norm = tf.linalg.diag_part(dot_product)
    distances = tf.expand_dims(square_norm, 1) - 2.0 * dot_product + tf.expand_dims(square_norm, 0)
    distances = tf.maximum(distances, 0.0)
    if not squared:
        mask = tf.cast(tf.equal(distances, 0.0), tf.float32)
        distances = distances + mask * 1e-16
        distances = tf.sqrt(distances)
        distances = distances * (1.0 - mask)
    return distances


@example()
def triplets_hard_mining():
    """A Siamese network by the hardest positive and the hardest negative of each anchor in the batch."""
    rng = np.random.default_rng(1)
    net = keras.Sequential(
        [keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.MaxPool2D(), keras.layers.Flatten(),
         keras.layers.Dense(16), keras.layers.Lambda(lambda x: tf.math.l2_normalize(x, axis=1))]
    )  # fmt: skip
    optimizer = keras.optimizers.Adam(1e-3)
    arguments = [(rng.normal(size=(32, 12, 12, 1)).astype(np.float32), rng.integers(0, 6, 32)) for _ in range(4)]
    net(arguments[0][0])
    margin = 0.5

    def batch_hard_triplet_loss(labels, embeddings):
        distance = pairwise_distances(embeddings)
        equal = tf.equal(tf.expand_dims(labels, 0), tf.expand_dims(labels, 1))
        positive = tf.cast(tf.logical_and(equal, tf.logical_not(tf.eye(len(labels), dtype=tf.bool))), tf.float32)
        hardest_positive = tf.reduce_max(positive * distance, axis=1, keepdims=True)
        largest = tf.reduce_max(distance, axis=1, keepdims=True)
        hardest_negative = tf.reduce_min(distance + largest * tf.cast(equal, tf.float32), axis=1, keepdims=True)
        triplet_loss = tf.maximum(hardest_positive - hardest_negative + margin, 0.0)
        active = tf.reduce_sum(tf.cast(triplet_loss > 0, tf.int32))
        return tf.reduce_mean(triplet_loss), active

    actives = []

    def step(images, labels):
        labels = tf.convert_to_tensor(labels)
        with tf.GradientTape() as tape:
            loss, active = batch_hard_triplet_loss(labels, net(images, training=True))
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables))
        actives.append(int(active))
        return loss

    return Example(step, lambda: (net.variables, optimizer.variables), arguments)


class MeanTeacher:
    """A student, and a teacher that is its moving average."""

    def __init__(self, build, decay=0.99):
        self.student, self.teacher = build(), build()
        self.decay = decay
        self._steps = 0
        self.teacher.set_weights(self.student.get_weights())

    @property
    def alpha(self):
        return min(1 - 1 / (self._steps + 1), self.decay)

    def update(self):
        self._steps += 1
        for t, s in zip(self.teacher.weights, self.student.weights):
            t.assign(self.alpha * t + (1 - self.alpha) * s)


@example(rtol=1e-2, atol=1e-3)
def mean_teacher():
    """Semi-supervised: images augmented at random by tf.image, consistency with a teacher whose weight ramps up."""
    rng = np.random.default_rng(2)

    def build():
        net = keras.Sequential(
            [keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.BatchNormalization(),
             keras.layers.GlobalAveragePooling2D(), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
        )  # fmt: skip
        net.build((None, 16, 16, 3))
        return net

    pair, optimizer = MeanTeacher(build), keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    arguments = [
        (tf.constant(rng.uniform(size=(16, 16, 16, 3)), tf.float32), tf.constant(rng.integers(0, 4, 8)))
        for _ in range(4)
    ]

    def augment(images):
        images = tf.image.random_flip_left_right(images)
        images = tf.image.random_brightness(images, 0.2)
        images = tf.image.random_contrast(images, 0.8, 1.2)
        images = tf.image.resize_with_crop_or_pad(images, 20, 20)
        return tf.image.random_crop(images, [tf.shape(images)[0], 16, 16, 3])

    def ramp_up(epoch, length=50.0):
        return float(np.exp(-5.0 * (1.0 - np.clip(epoch / length, 0, 1)) ** 2))

    def step(images, labels):
        weight = ramp_up(pair._steps)
        targets = tf.nn.softmax(pair.teacher(augment(images), training=False))
        with tf.GradientTape() as tape:
            logits = pair.student(augment(images), training=True)
            supervised = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(labels, logits[:8], from_logits=True)
            )
            consistency = tf.reduce_mean(tf.square(tf.nn.softmax(logits) - targets))
            loss = supervised + weight * consistency
        grads = tape.gradient(loss, pair.student.trainable_variables)
        optimizer.apply_gradients(zip(grads, pair.student.trainable_variables))
        pair.update()
        return loss, consistency

    return Example(step, lambda: (pair.student.weights, pair.teacher.weights), arguments)


class SmoothedAccuracy(keras.metrics.Metric):
    """Accuracy against the larger share of mixed labels."""

    def __init__(self, name="smoothed_accuracy", **kwargs):
        super().__init__(name=name, **kwargs)
        self.correct = self.add_weight(name="correct", initializer="zeros")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = tf.cast(tf.equal(tf.argmax(y_true, -1), tf.argmax(y_pred, -1)), tf.float32)
        self.correct.assign_add(tf.reduce_sum(hits))
        self.total.assign_add(tf.cast(tf.size(hits), tf.float32))

    def result(self):
        return self.correct / self.total

    def reset_state(self):
        self.correct.assign(0.0)
        self.total.assign(0.0)


@example()
def mixup_and_cutmix():
    """A coin decides between mixup and cutmix, NumPy draws both; smoothed labels, a metric of one's own."""
    rng = np.random.default_rng(3)
    first = keras.layers.Conv2D(8, 3, activation="relu")
    second = keras.layers.Conv2D(8, 3, strides=2, activation="relu")
    model = keras.Sequential([first, second, keras.layers.Flatten(), keras.layers.Dense(5)])
    arguments = [(rng.uniform(size=(16, 14, 14, 3)).astype("float32"), rng.integers(0, 5, 16)) for _ in range(4)]
    model(arguments[0][0])
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01)
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    metric = SmoothedAccuracy()
    counter = {"mixup": 0, "cutmix": 0, "seen": 0}

    def mixup(x, y, alpha=0.2):
        lam = np.random.beta(alpha, alpha)
        index = np.random.permutation(len(x))
        return lam * x + (1 - lam) * x[index], lam * y + (1 - lam) * y[index]

    def cutmix(x, y, alpha=1.0):
        lam = np.random.beta(alpha, alpha)
        index = np.random.permutation(len(x))
        h, w = x.shape[1:3]
        cut_h, cut_w = int(h * np.sqrt(1 - lam)), int(w * np.sqrt(1 - lam))
        cy, cx = np.random.randint(h), np.random.randint(w)
        y1, y2 = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, h)
        x1, x2 = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, w)
        x = x.copy()
        x[:, y1:y2, x1:x2] = x[index, y1:y2, x1:x2]
        lam = 1 - (y2 - y1) * (x2 - x1) / (h * w)
        return x, lam * y + (1 - lam) * y[index]

    def step(x, y):
        y = np.eye(5, dtype="float32")[y]
        chosen = mixup if np.random.rand() < 0.5 else cutmix
        counter[chosen.__name__] += 1
        x, y = chosen(x, y)
        x, y = tf.cast(x, tf.float32), tf.cast(y, tf.float32)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_fn(y, logits)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        metric.update_state(y, logits)
        counter["seen"] += len(x)
        if counter["seen"] % 160 == 0:
            result = metric.result().numpy()
            metric.reset_state()
            return loss, result
        return loss, None

    return Example(step, lambda: (model.variables, metric.variables, counter), arguments)
