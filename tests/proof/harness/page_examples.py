"""The examples of the documentation's pages, run as they stand, and the table that they write to."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from harness.places import ROOT


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


def example(page: str, heading: str) -> list[str]:
    """The blocks of code under a heading of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text.partition(f"# {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def run_example(code: str, topic: str, *, page_topic: str = "orders", **names: Any) -> dict[str, Any]:
    """Run an example with this topic, and the table of items in the place of the page's. Returns its names."""
    ours = code.replace(f'"{page_topic}"', f'"{topic}"').replace("INTO orders", "INTO items")
    exec(compile(ours, "an example", "exec"), names)
    return names
