"""The statements that give the application's role the rights it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.stores.sql.tables import (
    BATCH_VIEW,
    CONSUMED_TABLE,
    INCIDENT_TABLE,
    LEASE_TABLE,
    LEDGER_TABLE,
    RUN_TABLE,
    SLOT_TABLE,
    STATE_TABLE,
    VERSION_TABLE,
)
from dualwrite.stores.sql.tables__stores_sql_tables_column_types import MYSQL

if TYPE_CHECKING:
    from sqlalchemy import URL


def grants_to_delete(url: URL, schema: str | None) -> str:
    """The GRANTs for deleting rows."""
    deleted = (STATE_TABLE, INCIDENT_TABLE, SLOT_TABLE, RUN_TABLE, LEASE_TABLE)
    return _said(url, schema, [("SELECT, DELETE", deleted), ("UPDATE", (RUN_TABLE,))], "the role")


def grants_to_work(url: URL | None, schema: str | None) -> str:
    """The GRANTs for everything but deleting."""
    written = (STATE_TABLE, INCIDENT_TABLE, SLOT_TABLE, LEDGER_TABLE, RUN_TABLE, CONSUMED_TABLE, LEASE_TABLE)
    rights = [("SELECT, INSERT, UPDATE", written), ("SELECT", (VERSION_TABLE, BATCH_VIEW))]
    return _said(url, schema, rights, '"the application"', works=True)


def _said(
    url: URL | None,
    schema: str | None,
    rights: list[tuple[str, tuple[str, ...]]],
    nobody: str,
    *,
    works: bool = False,
) -> str:
    if url is not None and url.get_backend_name() in MYSQL:
        return "as the owner of the tables: " + "; ".join(_on_mysql(url, schema, rights, works=works))
    role = nobody if url is None or url.username is None else f'"{url.username}"'
    prefix = f'"{schema}".' if schema is not None else ""
    usage = f'GRANT USAGE ON SCHEMA "{schema}" TO {role}; ' if schema is not None and works else ""
    granted = [f"GRANT {what} ON {', '.join(f'{prefix}{name}' for name in names)} TO {role}" for what, names in rights]
    return f"as the owner of the tables: {usage}{'; '.join(granted)}"


def _on_mysql(url: URL, schema: str | None, rights: list[tuple[str, tuple[str, ...]]], *, works: bool) -> list[str]:
    """One statement for each table: there, GRANT takes only one. Witnesses of savepoints need a temporary table."""
    prefix = f"`{schema}`." if schema is not None else ""
    user = f"'{url.username or 'app'}'@'%'"
    database = f"`{url.database}`" if url.database else "*"
    granted = [f"GRANT {what} ON {prefix}{name} TO {user}" for what, names in rights for name in names]
    return [*granted, f"GRANT CREATE TEMPORARY TABLES ON {database}.* TO {user}"] if works else granted
