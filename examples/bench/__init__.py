"""Measures co-execution against eager TensorFlow and `tf.function` in one run: `python -m examples.bench`."""
