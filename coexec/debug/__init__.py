"""Takes the operations of a call that runs under `debug_nans`.

Gives an error at the first operation that makes a NaN or an infinity, and a script that runs this operation again.
"""
