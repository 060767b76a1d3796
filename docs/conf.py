"""Sphinx configuration. Build with ``make docs``; warnings are errors."""

import importlib
import inspect
import posixpath
import re
import shutil
from importlib.metadata import version as installed
from pathlib import Path

from sphinx.application import Sphinx

project = "dualwrite"
author = "The dualwrite authors"
project_copyright = "The dualwrite authors, Apache-2.0"
version = release = installed("dualwrite")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_templates"]

html_theme = "furo"
html_title = project
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute stands once: in its class's docstring


def _keep_first_colon(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    # Napoleon reads the text before the first colon of a property's docstring as its type. An empty comment prevents that.
    if what in {"property", "attribute"}:
        lines[:0] = ["..", ""]


AUTODOC = re.compile(
    r"^\.\. auto(?:class|exception|function|data|module):: ([\w.]+)(?:\(\))?\n((?:   :.*\n)*)", re.MULTILINE
)
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")  # a file of the repository that a page links to


def _found(path: str) -> object:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def _described(path: str, thing: object, level: str) -> str:
    try:
        signature = str(inspect.signature(thing)) if callable(thing) else ""
    except ValueError:
        signature = ""
    return f"{level} {path}\n\n```text\n{path.rpartition('.')[2]}{signature}\n\n{inspect.getdoc(thing) or ''}\n```\n"


def _in_words(found: re.Match[str]) -> str:
    path, options = found.groups()
    thing = _found(path)
    members = re.search(r":members: *(.+)", options)
    names = [name.strip() for name in members[1].split(",")] if members else []
    listed = [(name, inspect.getattr_static(thing, name, None)) for name in names]
    shown = [
        _described(f"{path}.{name}", getattr(one, "__func__", one), "####") for name, one in listed if one is not None
    ]
    return "\n".join([_described(path, thing, "###"), *shown])


def _first_sentence(text: str) -> str:
    prose = re.sub(r"^(```.*?^```|---\n.*?^---|#.*?|\|.*?|!\[.*?\)|<.*?)$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraph = " ".join(prose.strip().split("\n\n")[0].split())
    return re.sub(
        r"\[([^\]]+)\]\([^)]+\)|\*\*", lambda link: link[1] or "", re.split(r"(?<=[.?!]) (?=[A-Z`])", paragraph)[0]
    )


def _write_markdown(app: Sphinx, error: Exception | None) -> None:
    """Write each page as Markdown beside its HTML, and llms.txt, the list of them for readers that are programs."""
    if error is not None or app.builder.name != "html":
        return
    source, target = Path(app.srcdir), Path(app.outdir)
    lines = {}
    for name in sorted(app.env.found_docs):
        text = (source / f"{name}.md").read_text(encoding="utf-8")
        lines[name] = f"- [{app.env.titles[name].astext()}]({name}.md): {_first_sentence(text)}"
        for path in OUTSIDE.findall(text):
            other = posixpath.normpath(posixpath.join("docs", posixpath.dirname(name), "..", path))
            copy = target / posixpath.relpath(other, ".")
            if not other.startswith("docs/") and (source.parent / other).is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.parent / other, copy)
        if "/" not in name:  # the pages stand one directory higher than in the repository
            text = OUTSIDE.sub(r"](\1", text)
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            copy = target / posixpath.join(posixpath.dirname(name), picture)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / posixpath.dirname(name) / picture, copy)
        text = re.sub(
            r"^```{eval-rst}\n(.*?)^```$",
            lambda block: AUTODOC.sub(_in_words, block[1]),
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
        (target / f"{name}.md").write_text(text, encoding="utf-8")
    index = (source / "index.md").read_text(encoding="utf-8")
    parts = [
        f"# {project}",
        f"> {_first_sentence(index)}",
        f"Version {release}. Each page of the site is here as Markdown.",
    ]
    for caption, names in re.findall(r"```{toctree}\n:hidden:\n:caption: ([^\n]*)\n\n(.*?)```", index, re.DOTALL):
        parts.append("\n".join([f"## {caption}", "", *(lines.pop(name) for name in names.split())]))
    del lines["index"]
    parts.append("\n".join(["## Runbooks", "", *lines.values()]))
    (target / "llms.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _name_markdown(_app: Sphinx, page: str, _template: str, context: dict[str, object], doctree: object) -> None:
    if doctree is not None:
        link = f'<link rel="alternate" type="text/markdown" href="{posixpath.basename(page)}.md">'
        context["metatags"] = f"{context.get('metatags', '')}{link}"


def setup(app: Sphinx) -> None:
    """Register the hooks; Sphinx calls this."""
    app.connect("autodoc-process-docstring", _keep_first_colon, priority=400)
    app.connect("html-page-context", _name_markdown)
    app.connect("build-finished", _write_markdown)
