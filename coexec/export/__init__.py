"""Export: turns a decorated step into a `tf.function`.

Takes a step that should only issue operations; returns a `tf.function` that does the same, or raises an `ExportError`
that names the Python effect it would lose.
"""
