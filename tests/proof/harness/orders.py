"""The table of most integration tests, and a dual write of one row of it with its message."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import Integer, Table, Text, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite import DualWriter

on_postgresql = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
on_both = pytest.mark.parametrize("url", ["postgresql", "sqlite"], indirect=True)
"""For what a database may do in a way of its own. What says neither is tried on SQLite by ``--thorough`` alone."""
by_asyncpg_too = pytest.mark.parametrize("task_url", ["psycopg", "asyncpg"], indirect=True)
"""On PostgreSQL."""
_MARIADB = pytest.param("mariadb", marks=[pytest.mark.mariadb, pytest.mark.thorough])
on_each = pytest.mark.parametrize("url", ["postgresql", "sqlite", _MARIADB], indirect=True)
"""As ``on_both``, and on MariaDB by ``--thorough``."""


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    note: Mapped[str | None] = mapped_column(Text)


def write(writer: DualWriter, topic: str, orders: Table, number: int, partitions: Sequence[int] = (0,)) -> None:
    """One row, and its number as a message in each of the partitions."""
    with writer.transaction() as tx:
        for partition in partitions:
            tx.produce(topic, value=str(number), partition=partition)
        tx.connection.execute(insert(orders).values(id=number))
