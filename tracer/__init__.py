"""The operations, Python effects and source of an eager program, as facts: no policy, nothing compiled, no threads.

In: the calls the running program makes into TensorFlow's eager runtime and Keras, through hooks. Out: a `TraceGraph`
per function, a `Cursor` that matches later calls against it, and lazy tensors that stand for results not computed yet.
"""
