"""The sink's database: connected the same way on the driver and in the tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import URL

    from dualwrite.sinks.spark.databases.database import SinkDatabase
    from dualwrite.sinks.spark.options import SinkOptions


def open_database(options: SinkOptions) -> SinkDatabase:
    """The sink's database. It connects at first use; the caller disposes of its engine.

    Raises:
        ConfigurationError: The URL refers to an environment variable that is not set, or its driver is not installed here.
    """
    url = options.database_url()
    try:
        return _KINDS[url.get_backend_name()](url)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the database's driver is not installed: no module named {error.name!r}",
            next_step="on the driver and on the executors: pip install 'dualwrite[spark]'; for MariaDB and MySQL, "
            "'dualwrite[spark,mariadb]'",
        ) from error


def _postgresql(url: URL) -> SinkDatabase:
    from dualwrite.sinks.spark.databases.postgresql__sinks_spark_databases_postgresql_database import PostgreSQL  # noqa: PLC0415 - each needs its own driver

    return PostgreSQL(url)


def _mariadb(url: URL) -> SinkDatabase:
    from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_database import MariaDB  # noqa: PLC0415 - as above

    return MariaDB(url)


_KINDS: Final[dict[str, Callable[[URL], SinkDatabase]]] = {
    "postgresql": _postgresql,
    "mysql": _mariadb,
    "mariadb": _mariadb,
}
