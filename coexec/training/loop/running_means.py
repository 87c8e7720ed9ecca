"""Means: running averages of what steps report, over the rows of an epoch."""

from __future__ import annotations

from typing import Any

import keras


class Means:
    """One running mean per reported name, created when the name first occurs."""

    def __init__(self) -> None:
        self._means: dict[str, keras.metrics.Mean] = {}

    def update(self, logs: dict[str, Any], rows: int) -> dict[str, Any]:
        """Adds the report of a step on so many rows; returns the means."""
        for name, value in logs.items():
            if name not in self._means:
                self._means[name] = keras.metrics.Mean(name=name)
            self._means[name].update_state(value, sample_weight=rows)
        return {name: self._means[name].result() for name in logs}

    def result(self) -> dict[str, Any]:
        """Returns the means of all names."""
        return {name: mean.result() for name, mean in self._means.items()}

    def reset(self) -> None:
        """Resets all means, for a new epoch."""
        for mean in self._means.values():
            mean.reset_state()

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the sums and counts."""
        return {name: [v.numpy() for v in mean.variables] for name, mean in self._means.items()}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Restores sums and counts; creates missing means."""
        for name, values in state.items():
            mean = self._means.setdefault(name, keras.metrics.Mean(name=name))
            for variable, value in zip(mean.variables, values, strict=True):
                variable.assign(value)
