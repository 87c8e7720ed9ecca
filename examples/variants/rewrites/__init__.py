"""The rewrites: each changes how a program is written, and not what it does."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable

from examples.variants.source import NotApplicable, Source

REWRITES: dict[str, Callable[[Source], None]] = {}

# Of these an eager call takes longer, too: what is added is TensorFlow's own.
DEARER = frozenset({"inputs as arrays", "inputs as lists"})


def rewrite(name: str) -> Callable[[Callable[[Source], None]], Callable[[Source], None]]:
    """Registers a function that rewrites a source in place, or raises `NotApplicable`."""

    def register(change: Callable[[Source], None]) -> Callable[[Source], None]:
        assert name not in REWRITES, name
        REWRITES[name] = change
        return change

    return register


def rewritten(source: Source, names: Iterable[str]) -> Source:
    """A source with these rewrites, one after the other.

    Raises:
      NotApplicable: if one of them finds nothing to change.
    """
    text = source.text()
    for name in names:
        REWRITES[name](source)
        before, text = text, source.text()
        if text == before:
            raise NotApplicable("nothing is another")
    return source


def load() -> dict[str, Callable[[Source], None]]:
    """Every rewrite by name; imports their modules."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}")
    return REWRITES
