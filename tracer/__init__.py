"""tracer: what an imperative TensorFlow program did. Facts only: no policy, no threads."""
