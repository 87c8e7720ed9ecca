"""Sonnet: modules, batch normalisation with its own state, recurrent cores, vector quantisation."""

import numpy as np
import sonnet as snt
import tensorflow as tf

from examples.ecosystem import Example, example


def digits(count, batch, size=28):
    """Batches of images and their labels."""
    rng = np.random.default_rng(0)
    return [
        (
            tf.constant(rng.random((batch, size, size, 1), np.float32)),
            tf.constant(rng.integers(0, 10, batch), tf.int64),
        )
        for _ in range(count)
    ]


@example()
def sonnet_mlp():
    """The MLP on MNIST of Sonnet's README."""
    mlp = snt.Sequential([snt.Flatten(), snt.nets.MLP([256, 128, 10], activation=tf.nn.relu)])
    optimizer = snt.optimizers.Adam(0.001)
    arguments = digits(4, 64)
    mlp(arguments[0][0])

    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = mlp(images)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels)
            loss = tf.reduce_mean(loss)
        params = mlp.trainable_variables
        grads = tape.gradient(loss, params)
        optimizer.apply(grads, params)
        return loss

    return Example(step, lambda: (mlp.variables, optimizer.variables), arguments)


class Residual(snt.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels, name=None):
        super().__init__(name=name)
        self.convs = [snt.Conv2D(channels, 3, with_bias=False, name=f"conv_{n}") for n in range(2)]
        self.norms = [snt.BatchNorm(create_scale=True, create_offset=True, name=f"norm_{n}") for n in range(2)]

    def __call__(self, x, is_training):
        out = x
        for n, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            out = norm(conv(out), is_training=is_training)
            if n == 0:
                out = tf.nn.relu(out)
        return tf.nn.relu(x + out)


class ConvNet(snt.Module):
    """A small residual network."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.stem = snt.Conv2D(16, 3, stride=2)
        self.blocks = [Residual(16) for _ in range(3)]
        self.head = snt.Linear(10)

    def __call__(self, x, is_training):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, is_training)
        return self.head(tf.reduce_mean(x, axis=[1, 2]))


@example(rtol=1e-2, atol=1e-3)
def sonnet_resnet():
    """A residual network with batch normalisation, momentum and weight decay, as in Sonnet's CIFAR example."""
    net, optimizer = ConvNet(), snt.optimizers.Momentum(0.05, 0.9)
    arguments = digits(4, 16)
    net(arguments[0][0], is_training=True)

    def loss_of(images, labels):
        logits = net(images, is_training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        decay = tf.add_n([tf.nn.l2_loss(v) for v in net.trainable_variables if "offset" not in v.name])
        return loss + 1e-4 * decay, logits

    def step(images, labels):
        with tf.GradientTape() as tape:
            loss, logits = loss_of(images, labels)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply(gradients, net.trainable_variables)
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))
        return {"loss": loss, "accuracy": accuracy}

    return Example(step, lambda: (net.variables, optimizer.variables), arguments)


@example()
def sonnet_char_lstm():
    """A character model of two LSTM cores, unrolled in Python, after Sonnet's little_gan_on_mnist's neighbour."""
    rng, vocabulary, length = np.random.default_rng(1), 40, 10
    core = snt.DeepRNN([snt.Embed(vocabulary, 32), snt.LSTM(64), snt.LSTM(64), snt.Linear(vocabulary)])
    optimizer = snt.optimizers.RMSProp(1e-3)
    arguments = [(tf.constant(rng.integers(0, vocabulary, (length + 1, 16)), tf.int32),) for _ in range(4)]
    core(arguments[0][0][0], core.initial_state(16))

    def step(text):
        inputs, targets = text[:-1], text[1:]
        with tf.GradientTape() as tape:
            logits, _ = snt.static_unroll(core, inputs, core.initial_state(batch_size=16))
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
            loss = tf.reduce_mean(tf.reduce_sum(loss, axis=0))
        gradients = tape.gradient(loss, core.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 5.0)
        optimizer.apply(gradients, core.trainable_variables)
        return float(loss), norm

    return Example(step, lambda: (core.variables, optimizer.variables), arguments)


class VQVAE(snt.Module):
    """The autoencoder of Sonnet's vqvae example, on vectors."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.encoder = snt.nets.MLP([128, 16])
        self.quantizer = snt.nets.VectorQuantizerEMA(16, 64, commitment_cost=0.25, decay=0.99)
        self.decoder = snt.nets.MLP([128, 784])

    def __call__(self, inputs, is_training):
        flat = snt.flatten(inputs)
        quantized = self.quantizer(self.encoder(flat), is_training=is_training)
        reconstruction = self.decoder(quantized["quantize"])
        error = tf.reduce_mean((reconstruction - flat) ** 2) / 0.06
        return {"loss": error + quantized["loss"], "error": error, "perplexity": quantized["perplexity"]}


@example(rtol=1e-2, atol=1e-3)
def sonnet_vqvae():
    """Vector quantisation with moving averages of the codes; Python keeps the last errors."""
    model, optimizer = VQVAE(), snt.optimizers.Adam(3e-4)
    errors, perplexities = [], []
    arguments = [(images,) for images, _ in digits(4, 64)]
    model(arguments[0][0], is_training=True)

    def step(images):
        with tf.GradientTape() as tape:
            output = model(images, is_training=True)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(output["loss"], variables), variables)
        errors.append(output["error"].numpy())
        perplexities.append(output["perplexity"].numpy())
        return output["loss"]

    return Example(step, lambda: (model.variables, optimizer.variables, errors, perplexities), arguments)
