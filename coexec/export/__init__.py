"""Takes a decorated step that should do nothing but issue operations.

Gives a `tf.function` that does the same, or an `ExportError` that names the Python effect it would lose.
"""
