"""Hook of MkDocs: files outside of docs/ to which pages link become pages, and the links lead there.

Pages can so link to tests, READMEs and sources by their paths in the repository, and work in both: in the repository,
and on the site.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "outside"  # of the site
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)((?:#[\w-]*)?\))")
PICTURE = re.compile(r'(\b(?:src|srcset)=)"([^":]+)"')
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
IMAGES = {".svg", ".png"}


def target_of(page, link):
    """The file that a link in the file `page` leads to; None if there is none, or it is outside of the repository."""
    path = Path(os.path.normpath(page.parent / link))
    if path.is_dir() and (path / "README.md").exists():
        path /= "README.md"
    return path if path.exists() and path.is_relative_to(ROOT) else None


def address_of(path, docs):
    """Where a file of the repository is on the site, as MkDocs counts: the path of its source under docs/."""
    if path.is_relative_to(docs):
        return path.relative_to(docs).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{FOLDER}/{name}" if path.suffix in {".md", *IMAGES} else f"{FOLDER}/{name}.md"


def page_about(path):
    """A page with the text of a file, or with the names in a folder."""
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        return title + "\n".join(f"* {each.name}" for each in sorted(path.iterdir()) if each.name[0] not in "._") + "\n"
    return f"{title}~~~~~~ {LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n~~~~~~\n"


def on_files(files, config):
    """Adds all files that can be reached from the pages by links."""
    docs = Path(config.docs_dir)
    waiting = [Path(file.abs_src_path) for file in files if file.src_uri.endswith(".md")]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for link, _ in LINK.findall(page.read_text()):
            path = target_of(page, link)
            if path is None or path in seen or path.is_relative_to(docs):
                continue
            seen.add(path)
            address = address_of(path, docs)
            if path.suffix in {".md", *IMAGES}:
                files.append(File.generated(config, address, abs_src_path=str(path)))
            else:
                files.append(File.generated(config, address, content=page_about(path)))
            if path.suffix == ".md":
                waiting.append(path)
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links at the pages that `on_files` has made, and keeps those out of the search."""
    docs = Path(config.docs_dir)
    address = page.file.src_uri
    if address.startswith(f"{FOLDER}/"):
        page.meta["search"] = {"exclude": True}
        page.meta["hide"] = ["navigation"]
        here = ROOT / address.removeprefix(f"{FOLDER}/")
        if not here.exists():  # made of a file that is no page: its text has no links
            return markdown
    else:
        here = docs / address

    def pointed(found):
        path = target_of(here, found[1])
        if path is None:
            return found[0]  # MkDocs warns, unless it is none
        there = os.path.relpath(address_of(path, docs), os.path.dirname(address))
        return there + found[2]

    def seen_from_here(found):  # MkDocs leaves HTML as it is
        path = target_of(here, found[2])
        return found[0] if path is None else f'{found[1]}"{os.path.relpath(address_of(path, docs), page.file.url)}"'

    if address.startswith(FOLDER):  # `state[0][1]` in a table of BENCHMARKS.md is no link
        markdown = re.sub(r"\]\[(?=\d+\])", r"]\\[", markdown)
    return PICTURE.sub(seen_from_here, LINK.sub(pointed, markdown))
