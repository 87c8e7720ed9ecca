"""The half that nobody tuned for: programs written after the runtime, all of them before any of them was measured."""
