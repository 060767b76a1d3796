"""Types of columns that mean the same in every database: texts that are compared byte by byte.

MariaDB and MySQL compare texts by a collation that ignores case, accents and spaces at the end, unless the column says
otherwise; and what PostgreSQL calls ``text`` holds 64 KiB there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import String, Text
from sqlalchemy.types import TypeDecorator, TypeEngine

if TYPE_CHECKING:
    from sqlalchemy import Dialect
    from sqlalchemy.dialects.mysql.base import MySQLDialect

MYSQL: Final = frozenset({"mysql", "mariadb"})
"""SQLAlchemy's names for MariaDB and MySQL: which of the two a ``mysql`` URL leads to shows when it connects."""
TABLE_OPTIONS: Final[Mapping[str, Any]] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}


def exact_collation(dialect: Dialect) -> str:
    """The collation that compares code points and pads nothing: its name differs between MariaDB and MySQL."""
    return "utf8mb4_nopad_bin" if cast("MySQLDialect", dialect).is_mariadb else "utf8mb4_0900_bin"


class ExactString(TypeDecorator[str]):
    """A text of that many characters at most."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """With its collation, where the database would choose one that takes different texts for equal."""
        if dialect.name not in MYSQL:
            return dialect.type_descriptor(self.impl_instance)
        from sqlalchemy.dialects.mysql import VARCHAR  # noqa: PLC0415 - large, and only for those that use it

        length = cast("String", self.impl_instance).length
        return dialect.type_descriptor(VARCHAR(length, charset="utf8mb4", collation=exact_collation(dialect)))


class ExactText(TypeDecorator[str]):
    """A text of any length."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """As :meth:`ExactString.load_dialect_impl`."""
        if dialect.name not in MYSQL:
            return dialect.type_descriptor(self.impl_instance)
        from sqlalchemy.dialects.mysql import LONGTEXT  # noqa: PLC0415 - as above

        return dialect.type_descriptor(LONGTEXT(charset="utf8mb4", collation=exact_collation(dialect)))
