"""Running: launches traced statements and moves Python past them.

Takes a tensor that a frame tests; adds operations to the segment, and has the frame resume after the statement.
"""
