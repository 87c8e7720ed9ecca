"""Guards: whether Python state is still what it was when something was learnt from it.

In come arguments, objects and the code that reads them; out go keys, and functions generated to check them in tens of
nanoseconds an item.
"""
