"""The layers of both packages, over their import statements; each finding names file and line."""

import ast
import collections
import functools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tracer.graph import Carried

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("coexec", "tracer")

# Lowest first. A module imports only those of lines above its own; those of one line are apart.
TRACER = [
    ["versions", "frame_slots"],
    ["hooks"],
    ["private"],
    ["buffer", "errors", "handler", "index", "managers", "memory", "old_generation", "naming", "random_states", "spec",
     "tensor_visits", "value_stack", "variable_ops"],
    ["guards", "faults", "keras_packages"],
    ["seeds"],
    ["location"],
    ["op", "literals", "source"],
    ["lazy"],
    ["host_ops"],
    ["slow_path", "single_kernels"],
    ["inputs", "twin"],
    ["intercept", "warning_filters"],
    ["effects"],
    ["gradients", "structures", "variables"],
    ["operators"],
    ["single_ops"],
    ["answers"],
    ["library"],
    ["nodedef", "callees", "meetings"],
    ["graph", "rebuild"],
    ["windows"],
    ["trace", "constants", "derive", "block", "sizes", "fed_numbers"],
    ["keras_variables", "merge", "recorder", "wiring", "syntax", "stage", "shape_sources", "open_sizes"],
    ["cursor", "forms", "functions"],
    ["shape_rules"],
    ["show", "check", "dynamic_paths"],
]

# The same for the parts of coexec: a package here stands for its modules, which may import each other.
COEXEC = [
    ["base"],
    ["guards"],
    ["lowering"],
    ["compile"],
    ["launch"],
    ["follow"],
    ["memoize"],
    ["batching"],
    ["control_flow"],
    ["debug"],
    ["dispatch"],
    ["export"],
    ["reporting"],
    ["api"],
    ["training"],
    ["notebook"],
    ["__init__", "testing"],
    ["cli"],
    ["__main__"],
]

# Imports against the order, each inside of a function that is called long after both modules are there.
DEFERRED = {("tracer.graph", "tracer.show")}  # `str(graph)`

# The file that imports TensorFlow's private modules; its docstring says what is relied on.
PRIVATE = {"tracer/private.py"}

MAX_LINES = 600


class Import(NamedTuple):
    """One imported module, in which module and line, and whether only when a function is called."""

    module: str
    imported: str
    path: str
    line: int
    deferred: bool

    def __str__(self):
        return f"{self.path}:{self.line}: {self.module} imports {self.imported}"


@functools.cache
def files():
    """Path, module name and syntax tree of each file of both packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
    return found


def imports_of(module, path, tree):
    """The modules that a file imports; of `from package import name` the submodule, where `name` is one."""
    deferred = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in files() else node.module for name in inside]
        for name in dict.fromkeys(names):
            yield Import(module, name, path, node.lineno, id(node) in deferred)


@functools.cache
def imports():
    """All imports of both packages."""
    return [i for module, (path, tree) in files().items() for i in imports_of(module, path, tree)]


def listing(findings):
    return "\n".join(["", *map(str, findings)])


def within(module, package):
    return module == package or module.startswith(package + ".")


def test_the_files_are_found():
    assert len(files()) > 30
    assert any(i.module == "coexec.api" and i.imported == "tracer.graph" for i in imports())
    assert any(i.module == "coexec.dispatch.controller" and i.imported == "tracer.intercept" for i in imports())


def test_the_tracer_knows_nothing_of_coexec():
    found = [i for i in imports() if within(i.module, "tracer") and within(i.imported, "coexec")]
    assert not found, listing(found)


def test_the_tracer_does_not_touch_what_steps_carry_for_others():
    """Nor does a method of the step itself: those slots are only set to nothing where they are declared."""
    found = []
    for path, tree in files().values():
        for node in tree.body if path.startswith("tracer/") else ():
            if isinstance(node, ast.ClassDef) and node.name == "Carried":
                continue
            found += [
                f"{path}:{n.lineno}: {n.attr}"
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute) and n.attr in Carried.__slots__
            ]
    assert not found, listing(found)


def test_predicates_change_nothing():
    found = []
    for path, tree in files().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith(("is_", "has_", "fits", "can_")):
                found += [
                    f"{path}:{n.lineno}: {node.name} sets {ast.unparse(n)}"
                    for n in ast.walk(node)
                    if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)
                ]
    assert not found, listing(found)


def test_neither_package_knows_tests_or_examples():
    found = [i for i in imports() if any(within(i.imported, p) for p in ("tests", "examples", "benchmarks"))]
    assert not found, listing(found)


def level_of(module, package, layers):
    """The number of a module's layer, and the part of the package that it belongs to; None if it has none."""
    part = module.removeprefix(package + ".").split(".")[0] if module != package else "__init__"
    return next(((n, part) for n, layer in enumerate(layers) if part in layer), None)


@pytest.mark.parametrize(("package", "layers"), [("tracer", TRACER), ("coexec", COEXEC)])
def test_every_module_has_a_place_in_the_order(package, layers):
    modules = [m for m in files() if within(m, package) and m != "tracer"]
    lost = [files()[m][0] for m in modules if level_of(m, package, layers) is None]
    assert not lost, f"say in {Path(__file__).name} what these may import, and who them:{listing(lost)}"
    parts = {level_of(m, package, layers)[1] for m in modules}
    gone = [part for layer in layers for part in layer if part not in parts]
    assert not gone, f"there are no such modules: {gone}"


@pytest.mark.parametrize(("package", "layers"), [("tracer", TRACER), ("coexec", COEXEC)])
def test_imports_go_down(package, layers):
    found = []
    for i in imports():
        if not within(i.module, package) or not within(i.imported, package):
            continue
        if i.deferred and (i.module, i.imported) in DEFERRED:
            continue
        (above, part), (below, other) = (level_of(m, package, layers) for m in (i.module, i.imported))
        same_package = part == other and (ROOT / package / part).is_dir()
        if below >= above and not same_package:
            found.append(i)
    assert not found, listing(found)


def test_deferred_imports_are_still_needed():
    there = {(i.module, i.imported) for i in imports() if i.deferred}
    assert there >= DEFERRED


def test_no_module_imports_itself_by_a_detour():
    ahead = {}
    for i in imports():
        if i.imported in files() and (i.module, i.imported) not in DEFERRED:
            ahead.setdefault(i.module, {})[i.imported] = i
    done = set()

    def visit(module, trail):
        if module in done:
            return
        names = [i.module for i in trail]
        assert module not in names, "a cycle:" + listing(trail[names.index(module) :])
        for imported, i in ahead.get(module, {}).items():
            visit(imported, [*trail, i])
        done.add(module)

    for module in files():
        visit(module, [])


def is_private(name):
    return any(within(name, f"tensorflow.{part}") for part in ("python", "core", "compiler"))


def test_only_the_listed_files_import_private_modules_of_tensorflow():
    users = {i.path: i for i in imports() if is_private(i.imported)}
    assert not users.keys() - PRIVATE, listing(users[p] for p in sorted(users.keys() - PRIVATE))
    assert not PRIVATE - users.keys(), f"not needed any more: {sorted(PRIVATE - users.keys())}"


@pytest.mark.parametrize("path", sorted(PRIVATE))
def test_a_file_that_imports_private_modules_says_what_it_relies_on(path):
    module = next((tree for p, tree in files().values() if p == path), None)
    assert module is not None, f"{path} is gone"
    docstring = ast.get_docstring(module) or ""
    assert "Relies on" in docstring, f"{path}:1: the module's docstring says what it relies on: 'Relies on ...'"


def test_no_module_is_long():
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path, _ in files().values()}
    found = [f"{path}:{MAX_LINES + 1}: {n} lines" for path, n in lengths.items() if n > MAX_LINES]
    assert not found, listing(found)


def test_no_two_files_or_public_classes_share_a_name():
    found = []
    names = [Path(path).name for path, _ in files().values()]
    found += [f"{name}: {n} files" for name, n in Counter(names).items() if n > 1 and name != "__init__.py"]
    places = collections.defaultdict(list)
    for path, tree in files().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    found += [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not found, listing(found)


def test_each_folder_says_what_comes_in_and_what_goes_out():
    found = [path for path, tree in files().values() if path.endswith("__init__.py") and not ast.get_docstring(tree)]
    assert not found, listing(found)


def undocumented():
    for path, tree in files().values():
        if tree.body and not ast.get_docstring(tree):
            yield f"{path}:1: the module has no docstring"
        for node in tree.body:
            public = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
            overload = public and any("overload" in ast.unparse(d) for d in node.decorator_list)
            if public and not overload and not ast.get_docstring(node):
                yield f"{path}:{node.lineno}: {node.name} has no docstring"


def test_every_module_class_and_function_says_what_it_promises():
    found = list(undocumented())
    assert not found, listing(found)


# The checks themselves, on files made up.

MADE_UP = """
import tensorflow.python.eager.context
from tracer import intercept
from tracer.graph import Node
def f():
    from tracer.show import show
"""


def test_the_import_statements_are_read_right():
    found = list(imports_of("tracer.made_up", "tracer/made_up.py", ast.parse(MADE_UP)))
    assert [(i.imported, i.line, i.deferred) for i in found] == [
        ("tensorflow.python.eager.context", 2, False),
        ("tracer.intercept", 3, False),
        ("tracer.graph", 4, False),
        ("tracer.show", 6, True),
    ]
    assert str(found[1]) == "tracer/made_up.py:3: tracer.made_up imports tracer.intercept"
    assert is_private(found[0].imported)
    assert level_of("tracer.graph", "tracer", TRACER) > level_of("tracer.spec", "tracer", TRACER)
    assert level_of("coexec.lowering.plan", "coexec", COEXEC) == level_of("coexec.lowering", "coexec", COEXEC)
    assert level_of("tracer.made_up", "tracer", TRACER) is None
