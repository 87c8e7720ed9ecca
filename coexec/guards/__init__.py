"""Guards: checks that Python state is still what it was when something was learnt from it.

Takes arguments, objects and the code that reads them; makes cache keys, and generated functions that check guards in
tens of nanoseconds each.
"""
