"""The table is altered while a batch is written: its rows are planned by types that are no longer those of the table."""

import psycopg
import pytest
from harness.spark import ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import LEGS, nothing_is_left, write_by

from dualwrite.sinks.spark import SinkOptions
from dualwrite.sinks.spark.databases.database import open_database
from dualwrite.stores.sql.ledger import WHOLE_BATCH

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize(
    "way",
    [
        "write_batch",
        *(pytest.param(way, marks=pytest.mark.thorough) for way in ("foreach_partition", "staging", "prepared")),
    ],
)
def test_a_type_of_the_same_width_is_not_taken_for_the_planned_one(spark, numbers, tmp_path, way):
    """Binary COPY says nothing of types: eight bytes are a bigint or a double, as the table has it."""
    url = numbers.url.replace("+psycopg", "")
    drifting = tmp_path / "drifting"
    drifting.touch()

    def alter(batches):
        if drifting.exists():
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("ALTER TABLE numbers ALTER id TYPE double precision")
        yield from batches

    df = numbered(spark, ROWS, 1).mapInArrow(alter, "id bigint, name string")
    if way not in LEGS:
        # They open their COPY before they take a row. Of a shuffle, all rows are computed before that, and after the plan.
        df = df.repartition(2, "id")
    with pytest.raises(SPARKS_ERRORS, match="'id' of table 'numbers' was bigint .* double precision"):
        write_by(numbers, df, way)
    assert numbers.rows() == numbers.messages() == []
    drifting.unlink()
    numbers.execute("ALTER TABLE numbers ALTER id TYPE bigint")
    write_by(numbers, df, way)
    numbers.verify()
    nothing_is_left(numbers)


def test_a_type_that_loses_digits_refuses_what_was_staged(spark, numbers):
    numbers.execute(
        "CREATE FUNCTION alter_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "ALTER TABLE numbers ALTER id TYPE numeric(10, -1); RETURN NEW; END $$"
    )
    numbers.execute(
        "CREATE TRIGGER alter_it BEFORE INSERT ON dualwrite_ledger FOR EACH ROW "
        f"WHEN (NEW.partition_id = {WHOLE_BATCH}) EXECUTE FUNCTION alter_it()"
    )
    with pytest.raises(SPARKS_ERRORS, match=r"'id' .* was bigint .* numeric\(10,-1\)"):
        write_by(numbers, numbered(spark), "staging")
    numbers.execute("DROP TRIGGER alter_it ON dualwrite_ledger")
    assert numbers.rows() == numbers.messages() == []
    write_by(numbers, numbered(spark), "staging")
    numbers.verify()
    nothing_is_left(numbers)


def test_the_sinks_own_transactions_see_what_was_committed_before_each_statement(numbers):
    numbers.execute(
        f"ALTER DATABASE {numbers.url.rpartition('/')[2]} SET default_transaction_isolation = 'repeatable read'"
    )
    engine = open_database(SinkOptions(**numbers.settings)).engine
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
    engine.dispose()
