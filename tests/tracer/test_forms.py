"""What the source of a function shows that it may do: near misses beside what is refused."""

import math

import pytest

from tracer.errors import Refused
from tracer.forms import forms_of, has_source

kept: list = []


def computes(self, x, *rest):
    """All that a function may be made of that only computes."""
    parts = [p * 2 for p in rest if p is not None]
    found = {"x": x}
    found["y"] = math.pow(x, 2.0)
    for number, part in enumerate(parts):
        found[number] = part
        parts = [*parts]
    taken: list[int] = []
    taken.append(self.rate if x else -self.units[0])
    while not taken:
        break
    if not x:
        raise ValueError(f"{x}")
    return found, taken, sum(p for p in parts)


def takes(self, x, **options):
    """What it is given by name is in a dict of its own, as is a copy of that; a list times a number is a new one."""
    rest = options.copy()
    rest.pop("first", None)
    options.setdefault("second", x)
    found = [()] * len(rest)
    found[0] = x
    return found


def makes(x):
    """Several bound at once, and what Python's own functions return, are new."""
    boxes, by_name = [], {}
    rest = list(x)
    boxes.append(x)
    by_name.update(x=x)
    rest.pop()
    return boxes, by_name, rest


def of(function):
    return forms_of(function.__code__, function.__globals__)


def test_what_it_looks_at_is_named():
    """Names from outside with the attributes asked of them, and all attributes."""
    forms = of(computes)
    assert ("math", "pow") in forms.chains
    assert {chain[0] for chain in forms.chains} == {"math", "enumerate", "sum", "ValueError"}
    assert forms.attributes >= {"pow", "append", "rate", "units"}
    assert forms.codes[0] is computes.__code__


def test_dicts_of_keywords_are_its_own():
    assert of(takes).attributes >= {"copy", "pop", "setdefault"}


def test_containers_that_it_makes_are_its_own():
    forms = of(makes)
    assert forms.makers == {"list"}


def swapped(x, own):
    mine, own = own, []
    mine.append(x)


def spread(x, own):
    _, *own = [], own
    own.append(x)


def one_of_both(x, own):
    mine, own = [], own
    mine = own
    mine.append(x)


def given_to_write(x, own):
    own.clip(0, 1, own)


def named_to_write(x, own):
    math.clip(x, 0, 1, out=own)


def copied(x, own):
    mine = own.copy()
    mine.pop(x)


def keywords_rebound(x, own, **options):
    options = own
    options.pop(x)


def keywords_of_another(x, own, **options):
    return [lambda options: options.pop(x) for _ in own]


def times(x, own):
    mine = own * 2
    mine[0] = x


def taken_over(x, own):
    own.append(x)


def stored(x, own):
    own[0] = x


def rebound(x, own):
    mine = []
    mine = own
    mine.append(x)


def of_another(x, own):
    mine = [own]
    mine[0].append(x)


def attribute(x, own):
    own.x = x


def of_a_global(x, own):
    kept.append(x)


def deleted(x, own):
    del own[0]


def iterated(x, own):
    for own[0] in x:
        pass


def bound_by_a_comprehension(x, own):
    return [mine.append(x) for mine in own]


def bound_by_a_loop(x, own):
    mine = []
    for mine in own:
        mine.append(x)


def walrus(x, own):
    mine = []
    if mine := own:
        mine.append(x)


def yields(x, own):
    yield x


def within(x, own):
    with own:
        return x


def imports(x, own):
    import os

    return os


def inner(x, own):
    return lambda: x


def sets(x, own):
    return {x, own}


def matches(x, own):
    match x:
        case 1:
            return own
    return x


@pytest.mark.parametrize(
    "function",
    [copied, keywords_rebound, keywords_of_another, times,
     swapped, spread, one_of_both, given_to_write, named_to_write,
     taken_over, stored, rebound, of_another, attribute, of_a_global, deleted, iterated, bound_by_a_comprehension,
     bound_by_a_loop, walrus, yields, within, imports, inner, sets, matches],
)  # fmt: skip
def test_what_may_do_more_is_refused(function):
    """With the line."""
    with pytest.raises(Refused, match=r"line \d+: "):
        of(function)


def test_source_counts_only_if_it_is_that_of_the_code():
    """Code of a string has none."""
    namespace: dict = {}
    exec("def f(x):\n    return x", namespace)
    assert not has_source(namespace["f"].__code__, namespace)
    assert has_source(computes.__code__, globals())
    with pytest.raises(Refused, match="source of f is not known"):
        of(namespace["f"])
