"""Training programs, each a plain TensorFlow program but for the two lines with `coexec` in them."""
