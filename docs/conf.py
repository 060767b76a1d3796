"""Sphinx configuration. Build with ``make docs``; warnings are errors."""

from importlib.metadata import version as installed

from sphinx.application import Sphinx

project = "dualwrite"
author = "The dualwrite authors"
project_copyright = "The dualwrite authors, Apache-2.0"
version = release = installed("dualwrite")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"dualwrite {release}"

myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]  # the same pictures show on a code host and here

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


def setup(app: Sphinx) -> None:
    """Register the hook; Sphinx calls this."""
    app.connect("autodoc-process-docstring", _keep_first_colon, priority=400)
