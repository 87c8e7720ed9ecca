"""Gradients: the VJPs of traced control flow.

Takes blocks and loops; returns their VJPs, which are blocks, too, and records them on tapes.
"""
