"""Means: what a step reports, averaged over the rows of an epoch so far."""

from __future__ import annotations

from typing import Any

import keras


class Means:
    """One running mean for each name that steps report, made when the name comes first."""

    def __init__(self) -> None:
        self._means: dict[str, keras.metrics.Mean] = {}

    def update(self, logs: dict[str, Any], rows: int) -> dict[str, Any]:
        """Takes what a step of so many rows has reported; returns the means."""
        for name, value in logs.items():
            if name not in self._means:
                self._means[name] = keras.metrics.Mean(name=name)
            self._means[name].update_state(value, sample_weight=rows)
        return {name: self._means[name].result() for name in logs}

    def result(self) -> dict[str, Any]:
        """Returns the means of all names."""
        return {name: mean.result() for name, mean in self._means.items()}

    def reset(self) -> None:
        """Begins an epoch."""
        for mean in self._means.values():
            mean.reset_state()

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the sums and counts."""
        return {name: [v.numpy() for v in mean.variables] for name, mean in self._means.items()}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Takes sums and counts, of means that are not there yet, too."""
        for name, values in state.items():
            mean = self._means.setdefault(name, keras.metrics.Mean(name=name))
            for variable, value in zip(mean.variables, values, strict=True):
                variable.assign(value)
