"""The table that the actors write to."""

from sqlalchemy import Column, Integer, MetaData, Table, Text

METADATA = MetaData()
ROWS = Table(
    "rows",
    METADATA,
    # No uniqueness on the label: a row that is written twice must be able to show.
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("label", Text, nullable=False),
)
