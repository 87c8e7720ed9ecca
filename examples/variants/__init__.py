"""Programs rewritten without changing what they mean, to see that neither values nor speed depend on spelling.

A program is a module with one factory, as in `examples.programs`: one of `bases`, or of `examples.programs`. `source`
parses it, the modules of `rewrites` change its syntax tree, and `measure` compares what comes out with the program as
it was: values and state with eager's, the time of a call, launches and regions with the original's.
"""
