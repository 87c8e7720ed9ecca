"""Every program of the corpus with all of its calls batched: values, effects, state and exceptions are eager's."""

import pytest

import coexec
from coexec import testing
from tests.programs import PROGRAMS
from tests.test_same_as_eager import PHASES, Phase, compare, eager, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("phase", [Phase(False), Phase(False, late=True), PHASES["tape"]], ids=["now", "late", "tape"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_batched_program_is_the_eager_program(name, phase):
    program = PROGRAMS[name]
    expected = eager(name, phase.tape, phase.late)
    with testing.always_batch():
        found = run(program, coexec.function, phase)
    compare(program, expected, found)
    stats = found.instance.function.stats()
    assert stats.followed == stats.recorded == 0
