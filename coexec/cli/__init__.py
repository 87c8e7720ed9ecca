"""The command line's commands, one a file: each takes arguments, prints what it found, and gives a status."""
