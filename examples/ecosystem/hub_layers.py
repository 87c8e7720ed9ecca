"""KerasHub: layers and a backbone with random weights, trained by a loop."""

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


@example(rtol=1e-2, atol=1e-3)
def keras_hub_encoder():
    """Token and position embeddings and two encoders, as in KerasHub's guide to transformer pretraining."""
    rng = np.random.default_rng(0)
    embedding = keras_hub.layers.TokenAndPositionEmbedding(200, 32, 48)
    encoders = [keras_hub.layers.TransformerEncoder(intermediate_dim=96, num_heads=4) for _ in range(2)]
    head = keras_hub.layers.MaskedLMHead(vocabulary_size=200, token_embedding=embedding.token_embedding)
    optimizer = keras.optimizers.AdamW(1e-3)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def batch():
        tokens = rng.integers(1, 200, (8, 32))
        positions = np.sort(rng.permuted(np.tile(np.arange(32), (8, 1)), axis=1)[:, :5])
        labels = np.take_along_axis(tokens, positions, 1)
        return tf.constant(tokens), tf.constant(positions), tf.constant(labels)

    def model(tokens, positions):
        x = embedding(tokens)
        for encoder in encoders:
            x = encoder(x, training=True)
        return head(x, mask_positions=positions)

    arguments = [batch() for _ in range(4)]
    model(*arguments[0][:2])
    variables = [v for layer in [embedding, *encoders, head] for v in layer.trainable_variables]
    variables = list({id(v): v for v in variables}.values())

    def step(tokens, positions, labels):
        with tf.GradientTape() as tape:
            loss = objective(labels, model(tokens, positions))
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    return Example(step, lambda: ([v.value for v in variables], optimizer.variables), arguments)


@example(rtol=1e-2, atol=1e-3)
def keras_hub_gpt2():
    """A small GPT-2 backbone that predicts the next token."""
    rng = np.random.default_rng(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=200, num_layers=2, num_heads=4, hidden_dim=48, intermediate_dim=96, max_sequence_length=32
    )
    optimizer = keras.optimizers.Adam(1e-3)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = [(tf.constant(rng.integers(0, 200, (4, 25)), tf.int32),) for _ in range(4)]

    def step(tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with tf.GradientTape() as tape:
            hidden = backbone({"token_ids": inputs, "padding_mask": tf.ones_like(inputs)}, training=True)
            loss = objective(targets, backbone.token_embedding(hidden, reverse=True))
        gradients = tape.gradient(loss, backbone.trainable_variables)
        optimizer.apply_gradients(zip(gradients, backbone.trainable_variables))
        return loss

    return Example(step, lambda: (backbone.variables, optimizer.variables), arguments)
