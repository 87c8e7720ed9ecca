"""The commands of `python -m coexec`."""
