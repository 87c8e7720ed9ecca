"""Plain TensorFlow, generative models: an adversarial pair, an autoencoder, a flow, all of them by hand."""

import math

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


class Dense(tf.Module):
    """A layer."""

    def __init__(self, inputs, outputs, activation=None, name=None):
        super().__init__(name=name)
        limit = math.sqrt(6 / (inputs + outputs))
        self.w = tf.Variable(tf.random.uniform([inputs, outputs], -limit, limit), name="w")
        self.b = tf.Variable(tf.zeros([outputs]), name="b")
        self.activation = activation

    @tf.Module.with_name_scope
    def __call__(self, x):
        x = x @ self.w + self.b
        return x if self.activation is None else self.activation(x)


class Stack(tf.Module):
    """Layers one after the other."""

    def __init__(self, sizes, name=None):
        super().__init__(name=name)
        ends = [tf.nn.leaky_relu] * (len(sizes) - 2) + [None]
        self.layers = [Dense(a, b, end) for a, b, end in zip(sizes, sizes[1:], ends)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@example(rtol=1e-2, atol=1e-3)
def wgan_gp():
    """A Wasserstein GAN whose critic, trained twice a step, has its gradient's norm held near one."""
    rng = np.random.default_rng(0)
    generator, critic = Stack([16, 64, 64, 32]), Stack([32, 64, 64, 1])
    g_optimizer = keras.optimizers.Adam(1e-4, beta_1=0.0, beta_2=0.9)
    c_optimizer = keras.optimizers.Adam(1e-4, beta_1=0.0, beta_2=0.9)
    arguments = [(tf.constant(rng.normal(1.0, 0.3, (64, 32)), tf.float32),) for _ in range(4)]

    def gradient_penalty(real, fake):
        alpha = tf.random.uniform([tf.shape(real)[0], 1])
        mixed = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            scores = critic(mixed)
        slopes = tf.sqrt(tf.reduce_sum(tape.gradient(scores, mixed) ** 2, axis=1) + 1e-12)
        return tf.reduce_mean((slopes - 1.0) ** 2)

    def step(real):
        for _ in range(2):
            noise = tf.random.normal([64, 16])
            with tf.GradientTape() as tape:
                fake = generator(noise)
                distance = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(real))
                c_loss = distance + 10.0 * gradient_penalty(real, fake)
            gradients = tape.gradient(c_loss, critic.trainable_variables)
            c_optimizer.apply_gradients(zip(gradients, critic.trainable_variables))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(critic(generator(tf.random.normal([64, 16]))))
        gradients = tape.gradient(g_loss, generator.trainable_variables)
        g_optimizer.apply_gradients(zip(gradients, generator.trainable_variables))
        return c_loss, g_loss

    state = lambda: (generator.variables, critic.variables, g_optimizer.variables, c_optimizer.variables)  # noqa: E731
    return Example(step, state, arguments)


@example()
def variational_autoencoder():
    """The convolutional autoencoder of TensorFlow's tutorial, with Keras' layers."""
    rng, latent = np.random.default_rng(0), 2
    encoder = keras.Sequential([
        keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
        keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(2 * latent),
    ])  # fmt: skip
    decoder = keras.Sequential([
        keras.layers.Dense(7 * 7 * 16, activation="relu"),
        keras.layers.Reshape((7, 7, 16)),
        keras.layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
    ])  # fmt: skip
    optimizer = keras.optimizers.Adam(1e-4)
    arguments = [(tf.constant((rng.random((16, 28, 28, 1)) > 0.8), tf.float32),) for _ in range(4)]
    decoder(encoder(arguments[0][0])[:, :latent])

    def log_normal_pdf(sample, mean, logvar):
        log2pi = tf.math.log(2.0 * np.pi)
        return tf.reduce_sum(-0.5 * ((sample - mean) ** 2.0 * tf.exp(-logvar) + logvar + log2pi), axis=1)

    def compute_loss(x):
        mean, logvar = tf.split(encoder(x), num_or_size_splits=2, axis=1)
        z = tf.random.normal(shape=mean.shape) * tf.exp(logvar * 0.5) + mean
        x_logit = decoder(z)
        cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=x)
        logpx_z = -tf.reduce_sum(cross_ent, axis=[1, 2, 3])
        logpz = log_normal_pdf(z, 0.0, 0.0)
        logqz_x = log_normal_pdf(z, mean, logvar)
        return -tf.reduce_mean(logpx_z + logpz - logqz_x)

    def step(x):
        with tf.GradientTape() as tape:
            loss = compute_loss(x)
        variables = encoder.trainable_variables + decoder.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    return Example(step, lambda: (encoder.variables, decoder.variables, optimizer.variables), arguments)


class Coupling(tf.Module):
    """An affine coupling: half of the numbers say how the others are scaled and moved."""

    def __init__(self, size, flip):
        super().__init__()
        self.net, self.flip = Stack([size // 2, 64, size]), flip

    def __call__(self, x):
        a, b = tf.split(x, 2, axis=-1)
        if self.flip:
            a, b = b, a
        shift, scale = tf.split(self.net(a), 2, axis=-1)
        scale = tf.tanh(scale)
        b = b * tf.exp(scale) + shift
        return tf.concat([b, a] if self.flip else [a, b], axis=-1), tf.reduce_sum(scale, axis=-1)


@example()
def real_nvp():
    """A normalizing flow of six couplings by hand, with gradient descent by hand."""
    rng = np.random.default_rng(0)
    couplings = [Coupling(8, flip=bool(n % 2)) for n in range(6)]
    variables = [v for coupling in couplings for v in coupling.trainable_variables]
    arguments = [(tf.constant(rng.normal(2.0, 0.5, (128, 8)), tf.float32),) for _ in range(4)]
    history = []

    def step(x):
        with tf.GradientTape() as tape:
            z, log_det = x, 0.0
            for coupling in couplings:
                z, change = coupling(z)
                log_det += change
            log_prob = -0.5 * tf.reduce_sum(z**2 + math.log(2 * math.pi), axis=-1) + log_det
            loss = -tf.reduce_mean(log_prob)
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(1e-3 * tf.clip_by_norm(gradient, 1.0))
        history.append(round(float(loss), 2))
        return loss

    return Example(step, lambda: (variables, len(history)), arguments)


@example(rtol=1e-2, atol=1e-3)
def style_transfer():
    """Neural style on a small network: Gram matrices, total variation, and an image that is the variable."""
    rng = np.random.default_rng(0)
    layers = [keras.layers.Conv2D(c, 3, strides=s, activation="relu") for c, s in [(16, 1), (32, 2), (32, 2)]]

    def features(image):
        found = []
        for layer in layers:
            image = layer(image)
            found.append(image)
        return found

    def gram(x):
        result = tf.linalg.einsum("bijc,bijd->bcd", x, x)
        shape = tf.shape(x)
        return result / tf.cast(shape[1] * shape[2], tf.float32)

    content, style = (tf.constant(rng.random((1, 32, 32, 3)), tf.float32) for _ in range(2))
    style_targets, content_target = [gram(f) for f in features(style)], features(content)[-1]
    image = tf.Variable(content)
    optimizer = keras.optimizers.Adam(learning_rate=0.02, beta_1=0.99, epsilon=1e-1)

    def step():
        with tf.GradientTape() as tape:
            jittered = tf.image.random_flip_left_right(tf.image.resize(image, [36, 36])[0])[None]
            outputs = features(tf.image.adjust_brightness(jittered, 0.05))
            style_loss = tf.add_n([tf.reduce_mean((gram(f) - t) ** 2)
                                   for f, t in zip(outputs, style_targets)])  # fmt: skip
            content_loss = tf.reduce_mean((features(image)[-1] - content_target) ** 2)
            loss = style_loss + 1e2 * content_loss + 1e-3 * tf.reduce_sum(tf.image.total_variation(image))
        gradient = tape.gradient(loss, image)
        optimizer.apply_gradients([(gradient, image)])
        image.assign(tf.clip_by_value(image, 0.0, 1.0))
        return loss

    return Example(step, lambda: (image, optimizer.variables), [()])
