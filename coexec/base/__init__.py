"""Base: what users set (the decorator's options, the modes of a scope, and tuning).

Provides the settings, budgets and counters that every other package reads or writes.
"""
