"""What tests of training ask for by name."""

import pytest

from coexec.training import executions


@pytest.fixture
def impatient(monkeypatch):
    """Groups of steps grow as soon as their steps are known."""
    monkeypatch.setattr(executions, "PATIENCE", 1)
