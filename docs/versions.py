"""Build this version's documentation into a site, beside those of other versions: ``python docs/versions.py SITE``.

Each version is a directory with its number as its name. What the site has is written beside them: ``versions.js`` for the
menu of every page, which a browser reads from a disk too; ``versions.json`` and ``llms.txt`` for programs; and an
``index.html`` that leads to the newest. Build an older version from its tag, into the same SITE.
"""

from __future__ import annotations

import gc
import json
import sys
from importlib.metadata import version
from pathlib import Path

from packaging.version import InvalidVersion, Version
from sphinx.cmd.build import main as build

_INDEX = """<!doctype html>
<meta charset="utf-8">
<title>dualwrite {0}</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<a href="{0}/index.html">dualwrite {0}</a>
"""


def main(site: Path, options: list[str]) -> int:
    """Build, and write what the site has. ``options`` go to Sphinx."""
    gc.disable()  # next to nothing of a build is garbage, and looking for it takes a third of the time
    this = version("dualwrite")
    where = [str(Path(__file__).parent), str(site / this)]
    failed = build(["-b", "html", "-d", str(site / ".doctrees" / this), *options, *where])
    if not failed:
        list_versions(site)
    return failed


def list_versions(site: Path) -> None:
    """Write what the site has, the newest first."""
    found = sorted((one for one in site.iterdir() if _is_version(one)), key=lambda one: Version(one.name), reverse=True)
    listed = [{"version": one.name, "pages": _pages(one)} for one in found]
    text = json.dumps(listed, indent=1)
    newest = found[0].name
    written = {
        "versions.json": text + "\n",
        # A page that is opened from a disk may load a script, and no JSON.
        "versions.js": f"window.dualwriteVersions = {text};\n",
        "llms.txt": "# dualwrite\n\n"
        + "".join(f"- [Version {one.name}]({one.name}/llms.txt): each page as Markdown\n" for one in found),
        "index.html": _INDEX.format(newest),
    }
    for name, content in written.items():
        (site / name).write_text(content, encoding="utf-8")


def _is_version(directory: Path) -> bool:
    try:
        Version(directory.name)
    except InvalidVersion:
        return False
    return (directory / "index.html").is_file()


def _pages(directory: Path) -> list[str]:
    every = (path.relative_to(directory) for path in directory.rglob("*.html"))
    return sorted(path.as_posix() for path in every if path.parts[0] != "_static")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
