"""Real parse trees without a download: the expressions of Python's own library, parsed by Python's own parser."""

import ast
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from examples.programs.parts.texts import MODULES

KINDS = (ast.Name, ast.Attribute, ast.Call, ast.Constant)  # what a node can be, and anything else
CLASSES = len(KINDS) + 1


@dataclass(frozen=True)
class Tree:
    """A leaf has a word, an inner node has two children; each has a label, as in the Stanford Sentiment Treebank."""

    label: int
    word: str = ""
    left: "Tree | None" = None
    right: "Tree | None" = None

    def nodes(self) -> Iterator["Tree"]:
        """All nodes, children first."""
        for child in (self.left, self.right):
            if child is not None:
                yield from child.nodes()
        yield self

    def leaves(self) -> list["Tree"]:
        return [node for node in self.nodes() if node.word]


def binary(node: ast.expr) -> Tree:
    """The parse tree of one expression, folded from the left where a node has more than two children."""
    label = next((number for number, kind in enumerate(KINDS) if isinstance(node, kind)), len(KINDS))
    children = [binary(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.Attribute):
        children.append(Tree(label, node.attr))
    if not children:
        return Tree(label, node.id if isinstance(node, ast.Name) else type(getattr(node, "value", node)).__name__)
    return functools.reduce(lambda left, right: Tree(label, "", left, right), children)


def treebank(fewest: int, most: int, modules: Iterable[str] = MODULES) -> list[Tree]:
    """The outermost expressions of that many leaves, each once, in the order of the modules."""
    trees: dict[Tree, None] = {}
    for name in modules:
        for statement in ast.walk(ast.parse(inspect.getsource(importlib.import_module(name)))):
            if isinstance(statement, ast.stmt):
                expressions = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
                trees.update(dict.fromkeys(map(binary, expressions)))
    return [tree for tree in trees if fewest <= len(tree.leaves()) <= most]


def words_of(trees: Iterable[Tree]) -> dict[str, int]:
    """A number for each word of the trees."""
    words = dict.fromkeys(leaf.word for tree in trees for leaf in tree.leaves())
    return {word: number for number, word in enumerate(words)}
