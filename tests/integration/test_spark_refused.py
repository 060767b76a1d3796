"""Batches that would tear or lose rows in silence are refused, before anything of them is written."""

import pytest
from harness.spark import ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import nothing_is_left, write_by

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize(
    "way",
    [
        "write_batch",
        "staging",
        *(pytest.param(way, marks=pytest.mark.thorough) for way in ("foreach_partition", "prepared")),
    ],
)
def test_rows_that_a_trigger_leaves_out_are_not_told_as_written(spark, numbers, way):
    """Its message would be there, and its row would not."""
    numbers.execute(
        "CREATE FUNCTION skip_one() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.id = 700 THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    numbers.execute("CREATE TRIGGER skip_one BEFORE INSERT ON numbers FOR EACH ROW EXECUTE FUNCTION skip_one()")
    df = numbered(spark, ROWS, 1)
    with pytest.raises(SPARKS_ERRORS, match="'numbers' took 999 of 1000 rows: a trigger or a rule"):
        write_by(numbers, df, way)
    assert numbers.rows() == numbers.messages() == []
    numbers.execute("DROP TRIGGER skip_one ON numbers")
    write_by(numbers, df, way)
    numbers.verify()
    nothing_is_left(numbers)
