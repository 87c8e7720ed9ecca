"""What READMEs and docs/ name in backticks exists (files, functions, make targets, names), and links lead somewhere.

docs/ lists what there is in whole: every public name, and every cause that `explain()` may tell, in its words.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "coexec/README.md", "tracer/README.md", *PAGES]

# Functions and modules of other programs, by what calls them so.
ELSEWHERE = {
    "bucket_by_sequence_length",  # tf.data
    *("jax_debug_nans", "jax.disable_jit"),
    *("torch.compiler.disable", "torch._dynamo.explain", "TORCH_LOGS"),
    "on_exit",  # C
}


@functools.cache
def sources():
    found = [path for folder in ("coexec", "tracer", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in [*found, ROOT / "Makefile"])


def file_of(name, document):
    """The file or folder that a document names, from the root, its own folder or a package's."""
    for base in (ROOT, (ROOT / document).parent, ROOT / "coexec", ROOT / "tracer", ROOT / "coexec" / "control_flow"):
        for path in (base / name, base / f"{name}.py"):
            if path.exists():
                return path
    return None


def defines(file, name):
    """Whether a file has a function, class, method or variable of this dotted name."""
    body = ast.parse(file.read_text()).body
    *outer, last = name.split(".")
    for part in outer:
        inside = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part]
        if not inside:
            return False
        body = inside[-1].body
    names = {n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    targets = [n.targets if isinstance(n, ast.Assign) else [n.target] for n in body
               if isinstance(n, (ast.Assign, ast.AnnAssign))]  # fmt: skip
    names |= {x.id for each in targets for t in each for x in ast.walk(t) if isinstance(x, ast.Name)}
    return last in names


def exists(text, document):
    """Whether what stands in backticks is there; what is neither path nor name is taken for code, and for granted."""
    function = re.fullmatch(r"([\w/]+\.py):([\w.]+)", text)
    if function:
        file = file_of(function[1], document)
        return file is not None and defines(file, function[2])
    if re.fullmatch(r"[\w/]+/[\w/]+(\.\w+)?/?", text):
        return file_of(text.rstrip("/"), document) is not None
    if text.startswith("make "):
        target = next(word for word in text.split()[1:] if "=" not in word)
        return re.search(rf"^{re.escape(target)}:", sources(), re.M) is not None
    if re.fullmatch(r"[\w.]+", text) and text not in ELSEWHERE:
        return file_of(text, document) is not None or all(re.search(rf"\b{p}\b", sources()) for p in text.split("."))
    return True


def anchors(document):
    heads = re.findall(r"^#+ (.*)", document.read_text(), re.M)
    return {"#" + re.sub(r"[^\w\- ]", "", head.strip()).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_named_exists(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.S)
    named = {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", text)}
    assert len(named) > 10 or document in PAGES
    assert not [name for name in sorted(named) if not exists(name, document)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    here = ROOT / document
    broken, text = [], here.read_text()
    pictures = [(name, "") for name in re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    for target, anchor in [*pictures, *re.findall(r"\]\(([^)#\s]*)(#[\w-]+)?\)", text)]:
        path = (here.parent / target) if target else here
        if target.startswith("http"):
            continue
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(target + anchor)
    assert not broken


GONE = ["coexec/nothing", "follow/follower.py:Follower.nothing", "make nothing", "_".join(["not", "there"])]


@pytest.mark.parametrize("gone", GONE)
def test_what_is_gone_is_found(gone):
    assert not exists(gone, "coexec/README.md")


# docs/


def sections(page):
    """The text below each heading of a page, by the heading."""
    parts = re.split(r"^#{1,6} (.*)$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def meanings():
    """What `Kind` says of each cause: label and meaning, by id; read from the source."""
    for node in ast.walk(ast.parse((ROOT / "coexec" / "base" / "causes.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Meaning":
            name, label, meaning, *_ = [ast.literal_eval(argument) for argument in node.args]
            yield name, label, meaning


def told():
    """What `explain()` says in the test of each cause, by id."""
    for node in ast.parse((ROOT / "tests" / "coexec" / "base" / "test_explanation.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("cx_"):
            message = re.sub(r"\n *\| return called\(.*", "", ast.get_docstring(node))  # a line of the tests' own
            yield node.name.upper().replace("_", "-"), message


def test_each_cause_is_explained():
    """Under its id, so that `why-not-fast.md#cx-read` leads there; with its meaning, and what `explain()` says."""
    found = {name: text for name, text in sections("why-not-fast.md").items() if name.startswith("CX-")}
    causes = {name: (label, meaning) for name, label, meaning in meanings()}
    messages = dict(told())
    assert len(causes) > 10
    assert sorted(found) == sorted(causes) == sorted(messages)
    for name, text in found.items():
        label, meaning = causes[name]
        assert f"*{label}*. {meaning[0].upper()}{meaning[1:]}." in text, name
        example = re.search(r"^```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)[1]
        example = re.sub(r"train\.py:\d+", "FILE", example)
        example = re.sub(r"[\d.]+ ms a launch against [\d.]+ ms", "T a launch against T", example)
        assert example == messages[name], name
        assert text.rpartition("```")[2].strip(), f"{name}: nothing says what to do"


def test_each_promise_has_its_test():
    """In each row of the contract's tables: a link to a file of tests, or to programs that they run."""
    rows = [row for row in (ROOT / "docs" / "contract.md").read_text().splitlines() if row.startswith("|")]
    promises = [row.split("|")[1:-1] for row in rows if not row.startswith(("| guaranteed", "| ---"))]
    assert len(promises) > 20
    assert not [promise for promise, tests, _ in promises if "](../tests/" not in tests]


def test_each_public_name_is_in_the_reference():
    tree = ast.parse((ROOT / "coexec" / "__init__.py").read_text())
    public = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    found = re.findall(r"^::: coexec\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(public)


def test_each_page_is_in_the_menu():
    menu = re.search(r"^nav:\n(.*?)\n\n", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert sorted(f"docs/{page}" for page in re.findall(r": (\S+\.md)$", menu, re.MULTILINE)) == PAGES
