"""Running: launches traced statements and moves Python past them.

In comes the truth of a tensor that a frame asks for; out go operations of the segment, and the frame resumes behind the
statement.
"""
