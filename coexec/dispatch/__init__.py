"""Dispatch: decides how each call of a decorated function runs.

Takes calls, returns their results. Whether a call is recorded, followed or run imperatively depends on what is known of
the function and on measured times.
"""
