"""Real text without a download: docstrings of Python's own library, as words and as token ids."""

import collections
import importlib
import inspect
import re
from collections.abc import Iterable

import numpy as np

MODULES = ("argparse", "collections", "datetime", "inspect", "logging", "pathlib", "random", "statistics")
WORDS = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")


def docstrings(modules: Iterable[str] = MODULES) -> list[tuple[int, list[str]]]:
    """The words of every docstring of more than ten words, with the number of the module it is from."""
    found = []
    for number, name in enumerate(modules):
        module = importlib.import_module(name)
        objects = [thing for _, thing in sorted(vars(module).items()) if callable(thing)]
        methods = [member for owner in objects if inspect.isclass(owner) for _, member in sorted(vars(owner).items())]
        # A dictionary, as a method and its alias say the same.
        texts = dict.fromkeys(thing.__doc__ for thing in [module, *objects, *methods] if isinstance(thing.__doc__, str))
        rows = [WORDS.findall(text.lower()) for text in texts]
        found += [(number, words) for words in rows if len(words) > 10]
    return found


class Vocabulary:
    """The most frequent words, after four tokens of their own."""

    PAD, UNKNOWN, START, SEPARATOR = range(4)

    def __init__(self, rows: Iterable[list[str]], size: int) -> None:
        counts = collections.Counter(word for words in rows for word in words)
        self.ids = {word: number for number, (word, _) in enumerate(counts.most_common(size - 4), start=4)}

    def encode(self, words: Iterable[str]) -> list[int]:
        return [self.ids.get(word, self.UNKNOWN) for word in words]


def padded(rows: list[list[int]], length: int) -> np.ndarray:
    """`int32[rows, length]`, cut off at the length and filled up with `PAD`."""
    table = np.full((len(rows), length), Vocabulary.PAD, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row[:length]
    return table
