"""What `make test-versions` makes of tests that pass, fail and do not run."""

from pathlib import Path

import pytest

from tests.environments import versions
from tests.environments.versions import Row, counts_of, main, table

RESULTS = '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"><testcase/></testsuite></testsuites>'


def test_results_are_counted(tmp_path):
    path = tmp_path / "results.xml"
    path.write_text(RESULTS)
    assert counts_of(path) == (3, 3, 3)


def test_the_table_and_the_exit_status(monkeypatch, capsys):
    """1 if a test failed, if none was run, and if a version could not be installed."""
    rows = {
        "2.20": Row("2.20.0", "3.15.1", "2.4.6", 1000, 2, 0, 61),
        "2.19": Row("2.19.1", "3.15.1", "2.1.3", 999, 0, 1, 60),
        "2.18": Row("2.18", why="cannot be installed on Python 3.13"),
    }
    monkeypatch.setattr(versions, "run", lambda version, tests: rows[version])
    assert main(["2.20"]) == 0
    assert main(["2.19"]) == main(["2.20", "2.18"]) == 1
    assert Row("2.20.0").is_right() is False
    capsys.readouterr()
    assert table(list(rows.values())).splitlines() == [
        "tensorflow   keras  numpy  passed  skipped  failed  seconds",
        "    2.20.0  3.15.1  2.4.6    1000        2       0       61",
        "    2.19.1  3.15.1  2.1.3     999        0       1       60",
        "      2.18       -      -       0        0       0        0  cannot be installed on Python 3.13",
    ]


def test_a_version_may_name_its_numpy():
    assert versions.required("2.20") == ["tensorflow==2.20.*"]
    assert versions.required("2.18+numpy1.26") == ["tensorflow==2.18.*", "numpy==1.26.*"]


def test_what_is_run_is_there():
    assert all((versions.ROOT / path).is_file() for path in versions.TESTS)
    with pytest.raises(FileNotFoundError):
        counts_of(Path("/nowhere.xml"))
