"""Reporting: shows what is known of a function. In: its trace graph, executables, events. Out: text, pages, traces.

It only reads; nothing below it knows that it is there.
"""
