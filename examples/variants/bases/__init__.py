"""Programs that are rewritten: the steps of `make bench` in small, each in the plainest way to write it."""
