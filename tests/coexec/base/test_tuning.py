"""Knobs: in one place, all of them read, restored however a stretch of code ends."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import coexec
from coexec.base.tuning import Tuning, tuned, tuning

ROOT = Path(coexec.__file__).resolve().parent

# Numbers of formats and algorithms, and state: nobody would tune them.
NO_KNOBS = {"FORMAT", "VERSION", "SCRAMBLER", "WORDS", "_PORTS", "_GRAM", "_FROM_OUTSIDE", "_HEAP", "HEAP", "_ORDER",
            "PHILOX", "PYTHONS", "_SCALE", "_UNREFERENCED", "_closed", "_warned", "forked",
            "SHIFT", "CONST_KEY"}  # fmt: skip


def files():
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def is_number(node):
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(map(is_number, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def test_values_are_changed_and_restored():
    before = dataclasses.replace(tuning)
    with tuned(max_executables=3, xla_price=0.0):
        assert (tuning.max_executables, tuning.xla_price) == (3, 0.0)
        with tuned(max_executables=4):
            assert (tuning.max_executables, tuning.xla_price) == (4, 0.0)
        assert tuning.max_executables == 3
    assert tuning == before


def test_values_are_restored_behind_an_exception():
    before = dataclasses.replace(tuning)
    with pytest.raises(KeyError), tuned(max_executables=3):
        raise KeyError
    assert tuning == before


def test_a_name_that_is_none_changes_nothing():
    before = dataclasses.replace(tuning)
    with pytest.raises(AttributeError), tuned(max_executables=3, max_executable=3):
        pass
    with pytest.raises(AttributeError):
        tuning.max_executable = 3
    assert tuning == before


def test_the_values_in_use_are_the_defaults():
    # What tests set, see conftest.py.
    ours = {"audit_share", "doubt_before_timing", "sizes_at_once", "pause_timed", "validates_new"}
    default = Tuning()
    changed = {f.name for f in dataclasses.fields(Tuning) if getattr(tuning, f.name) != getattr(default, f.name)}
    assert changed <= ours


def test_each_value_is_read():
    read = set()
    for path, tree in files().items():
        if path.name != "tuning.py":
            read |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tuning"
            }
    names = {field.name for field in dataclasses.fields(Tuning)}
    assert names == read


def test_no_value_is_copied_at_import():
    """Neither to a global, nor as a default argument: a change would come too late."""
    found = []
    for path, tree in files().items():
        early = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        early += [node for kind in tree.body if isinstance(kind, ast.ClassDef) for node in kind.body
                  if not isinstance(node, ast.FunctionDef)]  # fmt: skip
        early += [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in early:
            if any(isinstance(n, ast.Lambda) for n in ast.walk(node)):
                continue
            found += [
                f"{path}:{n.lineno}"
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "tuning"
            ]
    assert not found


def test_there_are_no_knobs_elsewhere():
    found = []
    for path, tree in files().items():
        for node in tree.body:
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign):
                targets, value = [node.target], node.value
            else:
                continue
            names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            if value is not None and is_number(value) and not NO_KNOBS.intersection(names):
                found.append(f"{path}:{node.lineno}: {', '.join(names)}")
    assert not found, "\n".join(found)


def test_each_value_says_what_it_is():
    """A comment above it, or above its group, or behind it."""
    source = (ROOT / "base" / "tuning.py").read_text().splitlines()
    fields = [n for n, line in enumerate(source) if re.match(r"    \w+: [\w\[\], .]+ = ", line)]
    assert len(fields) == len(dataclasses.fields(Tuning))
    for n in fields:
        above = n
        while above in fields:
            if "#" in source[above]:
                break
            above -= 1
        assert "#" in source[above], source[n]
