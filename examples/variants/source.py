"""A program's source as a syntax tree, with what rewrites ask of it and do to it."""

import ast
import copy
import textwrap
from collections.abc import Iterator
from pathlib import Path

Statements = list[ast.stmt]


class NotApplicable(Exception):
    """The program has nothing that a rewrite would rewrite."""


class Source:
    """A module with one factory, whose parameter `function` decorates the step."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.tree = ast.parse(path.read_text())
        self.factory = next(
            node for node in self.tree.body
            if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "function"
        )  # fmt: skip
        # What registers the program would register each variant.
        self.factory.decorator_list = []
        steps = [node for node in self.factory.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
        if len(steps) != 1:
            raise NotApplicable(f"{self.name} has {len(steps)} decorated functions")
        self.step = steps[0]
        self.anchor: ast.stmt = self.step  # the statement of the factory that has the step in it
        self.called = self.step.name  # what the factory calls
        self.converted = False

    def copy(self) -> "Source":
        """Another source, with a tree of its own."""
        return copy.deepcopy(self)

    def text(self) -> str:
        """The module as it is now."""
        return ast.unparse(ast.fix_missing_locations(self.tree)) + "\n"

    # What is where.

    def parameters(self) -> list[str]:
        """The names of the step's arguments, but for `self`."""
        arguments = self.step.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return [name for name in names if name != "self"]

    def shared(self) -> list[str]:
        """What the step reads of the factory's variables, and never writes itself."""
        own = bound(self.factory.body) | {a.arg for a in self.factory.args.args}
        inside = bound(self.step.body) | set(self.parameters())
        return [name for name in loaded(self.step.body) if name in own - inside - {"function"}]

    def tape(self) -> tuple[Statements, int, ast.With]:
        """The statement that enters a tape, in its list of statements."""
        for statements in blocks(self.step):
            for place, node in enumerate(statements):
                if isinstance(node, ast.With) and any(is_tape(item.context_expr) for item in node.items):
                    return statements, place, node
        raise NotApplicable("no tape")

    def updates(self) -> list[tuple[Statements, int, ast.Call]]:
        """The statements that apply `zip(tape.gradient(...), variables)`, the last one first."""
        found = []
        for statements in blocks(self.step):
            for place, node in enumerate(statements):
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and attribute(call.func) == "apply_gradients":
                    pairs = call.args[0]
                    if isinstance(pairs, ast.Call) and isinstance(pairs.func, ast.Name) and pairs.func.id == "zip":
                        found.append((statements, place, call))
        if not found:
            raise NotApplicable("no gradients are applied")
        return found[::-1]

    # What is done to it.

    def import_(self, *modules: str) -> None:
        """Imports modules where they are not imported yet."""
        for module in modules:
            line = f"import {module}"
            if not any(ast.unparse(node) == line for node in self.tree.body):
                self.tree.body.insert(self._behind_docstring(), ast.parse(line).body[0])

    def define(self, text: str) -> None:
        """Adds definitions to the module, before the factory."""
        place = self.tree.body.index(self.factory)
        self.tree.body[place:place] = parsed(text)

    def before_step(self, what: str | Statements) -> None:
        """Adds statements to the factory, before the one with the step."""
        place = self.factory.body.index(self.anchor)
        self.factory.body[place:place] = parsed(what) if isinstance(what, str) else what

    def after_step(self, text: str) -> None:
        """Adds statements to the factory, behind the one with the step."""
        place = self.factory.body.index(self.anchor) + 1
        self.factory.body[place:place] = parsed(text)

    def begin_step(self, text: str) -> None:
        """Adds statements at the beginning of the step."""
        self.step.body[0:0] = parsed(text)

    def end_step(self, text: str) -> None:
        """Adds statements before the `return` at the end of the step."""
        place = len(self.step.body) - isinstance(self.step.body[-1], ast.Return)
        self.step.body[place:place] = parsed(text)

    def wrap_step(self, text: str) -> None:
        """Replaces the step's statements by others, in which `BODY` stands for them."""
        self.step.body = filled(text, BODY=self.step.body)

    def replace_step(self, statements: Statements) -> None:
        """Puts other statements in the place of the step's definition; the last one has the step in it."""
        place = self.factory.body.index(self.anchor)
        self.factory.body[place : place + 1] = statements
        self.anchor = statements[-1]

    def redirect(self, new: str) -> None:
        """Lets the rest of the factory call another function than the step's."""
        place = self.factory.body.index(self.anchor) + 1
        rename(self.factory.body[place:], self.called, new)
        self.called = new

    def _behind_docstring(self) -> int:
        first = self.tree.body[0]
        return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))


# Reading trees.


def blocks(node: ast.AST) -> Iterator[Statements]:
    """Every list of statements in a statement, that of inner functions not."""
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        if isinstance(statements, list) and statements:
            yield statements
            for statement in statements:
                if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    yield from blocks(statement)
    for handler in getattr(node, "handlers", ()):
        yield from blocks(handler)


def attribute(node: ast.AST) -> str | None:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else None


def is_tape(node: ast.AST) -> bool:
    """Whether an expression makes a tape."""
    name = node.func if isinstance(node, ast.Call) else None
    return attribute(name) == "GradientTape" or (isinstance(name, ast.Name) and name.id == "GradientTape")


def loaded(statements: Statements) -> list[str]:
    """The names that are read, in order."""
    names = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return list(dict.fromkeys(n.id for n in names))


def bound(statements: Statements) -> set[str]:
    """The names that are written in a function's own scope."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, (ast.Nonlocal, ast.Global)):
            found |= set(node.names)
        waiting.extend(ast.iter_child_nodes(node))
    return found


# Writing trees.


def parsed(text: str) -> Statements:
    """Statements from their text."""
    return ast.parse(textwrap.dedent(text)).body


def expression(text: str) -> ast.expr:
    """An expression from its text."""
    return ast.parse(text, mode="eval").body


class _Fill(ast.NodeTransformer):
    def __init__(self, parts: dict[str, Statements | ast.AST]) -> None:
        self.parts = parts

    def visit_Expr(self, node: ast.Expr) -> ast.AST | Statements:
        if isinstance(node.value, ast.Name) and isinstance(self.parts.get(node.value.id), list):
            return self.parts[node.value.id]  # type: ignore[return-value]
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        part = self.parts.get(node.id)
        return node if part is None or isinstance(part, list) else copy.deepcopy(part)


def filled(text: str, **parts: Statements | ast.AST) -> Statements:
    """Statements from their text, with statements or expressions in the place of names."""
    fill = _Fill(parts)
    made: Statements = []
    for statement in parsed(text):
        new = fill.visit(statement)
        made += new if isinstance(new, list) else [new]
    return made


class _Substitute(ast.NodeTransformer):
    """Replaces variables where they are read, outside of functions that have their own of that name."""

    def __init__(self, new: dict[str, str]) -> None:
        self.new = {name: expression(text) for name, text in new.items()}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self.new:
            return copy.deepcopy(self.new[node.id])
        return node


def substitute(statements: Statements, new: dict[str, str]) -> None:
    """Reads other expressions in the place of variables."""
    change = _Substitute(new)
    statements[:] = [change.visit(statement) for statement in statements]


def rename(statements: Statements, old: str, new: str) -> None:
    """Reads another variable."""
    substitute(statements, {old: new})


def extract(
    source: Source, statements: Statements, rest: Statements, name: str, decorators: tuple[str, ...] = ()
) -> ast.stmt:
    """Moves statements to a helper before the step; returns the statement that calls it.

    `rest` are those that come behind, of which the names tell what the helper has to return.
    """
    if any(isinstance(n, (ast.Return, ast.Nonlocal, ast.Global)) for s in statements for n in ast.walk(s)):
        raise NotApplicable("a `return` or a scope among what is moved")
    local = bound(source.step.body) | set(source.parameters()) | {"self"}
    made = bound(statements)
    given = [n for n in loaded(statements) if n in local and (n not in made or n in source.parameters())]
    results = [n for n in loaded(rest) if n in made]
    outcome = "return " + (", ".join(results) or "None")
    body = [*statements, *parsed(outcome)]
    head = "".join(f"@{d}\n" for d in decorators)
    source.before_step(filled(f"{head}def {name}({', '.join(given)}):\n    BODY", BODY=body))
    call = f"{name}({', '.join(given)})"
    return parsed(f"{', '.join(results)} = {call}" if results else call)[0]
