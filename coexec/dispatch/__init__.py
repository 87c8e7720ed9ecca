"""Dispatch: decides how each call of a decorated function runs.

In come calls; out go their results. A call is recorded, followed or run imperatively, by what is known of the function
and by the clock.
"""
