"""Debug: finds the origin of NaNs.

Takes the operations of a call that runs under `debug_nans`; raises an error at the first one that produces a NaN or an
infinity, and writes a script that reruns it.
"""
