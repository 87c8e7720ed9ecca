"""Transformers' TensorFlow models, from a configuration and without weights from the net."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # its models are of Keras 2

import numpy as np
import tensorflow as tf
from transformers import BertConfig, GPT2Config, TFBertForSequenceClassification, TFGPT2LMHeadModel

from examples.ecosystem import Example, example


@example(rtol=1e-2, atol=1e-3)
def transformers_bert_finetuning():
    """Fine-tuning of a small BERT on sentence pairs with a mask."""
    rng = np.random.default_rng(0)
    config = BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=3
    )
    model = TFBertForSequenceClassification(config)
    optimizer = tf.keras.optimizers.legacy.Adam(5e-5)

    def batch():
        ids = rng.integers(0, 500, (8, 32))
        lengths = rng.integers(8, 32, (8, 1))
        return (
            {
                "input_ids": tf.constant(ids, tf.int32),
                "attention_mask": tf.constant(np.arange(32) < lengths, tf.int32),
                "labels": tf.constant(rng.integers(0, 3, 8)),
            },
        )

    arguments = [batch() for _ in range(4)]
    model(arguments[0][0])

    def step(inputs):
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            loss = tf.reduce_mean(outputs.loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return float(loss)

    return Example(step, lambda: (model.variables, optimizer.variables()), arguments)


@example()
def transformers_gpt2_sampling():
    """Greedy continuation by a small GPT-2 that keeps its keys and values."""
    rng = np.random.default_rng(0)
    model = TFGPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    arguments = [(tf.constant(rng.integers(0, 300, (2, 8)), tf.int32),) for _ in range(4)]
    model(arguments[0][0])
    said = []

    def step(ids):
        past, tokens = None, []
        for _ in range(4):
            outputs = model(ids, past_key_values=past, use_cache=True, training=False)
            past = outputs.past_key_values
            ids = tf.argmax(outputs.logits[:, -1:], axis=-1, output_type=tf.int32)
            tokens.append(ids)
        said.append(tf.concat(tokens, 1).numpy().tolist())
        return outputs.logits

    return Example(step, lambda: said, arguments)
