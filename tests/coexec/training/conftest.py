"""What tests of training ask for by name."""

import pytest


@pytest.fixture
def impatient(tune):
    """Groups of steps grow as soon as their steps are known."""
    tune(together_patience=1)
