"""The command line's commands, one a file: each takes arguments, prints its findings, and returns an exit status."""
