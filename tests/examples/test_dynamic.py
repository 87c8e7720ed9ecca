"""Programs of the papers after JANUS and Terra, which take another way in every step: eager's losses and state."""

import importlib

import pytest

from examples.programs import PROGRAMS
from tests.examples import check


@pytest.mark.sample("seq2seq", "skipnet")
@pytest.mark.parametrize(
    "name",
    [
        "nasrnn",
        "seq2seq",
        "growing_attention",
        "blockdrop",
        "skipnet",
        "recursive_autoencoder",
        "early_exit_bert",
        "stack_rnn",
    ],
)
def test_is_the_eager_program(name):
    importlib.import_module(f"examples.programs.{name}")
    check(PROGRAMS[name])
