"""The options of the Data Source: what is missing, unknown or wrong is named."""

import pytest

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.options import SourceOptions

GIVEN = {
    "sink": "s",
    "url": "postgresql+psycopg://h/d",
    "dbtable": "t",
    "topic": "t",
    "keyColumn": "k",
    "kafka.bootstrap.servers": "b:9092",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sink": None}, "option sink is missing"),
        ({"kafka.bootstrap.servers": None}, "option kafka.bootstrap.servers is missing"),
        ({"topik": "x"}, "no option 'topik'.*did you mean 'topic'"),
        ({"url": "jdbc:postgresql://h/d"}, "JDBC URL"),
        ({"timeoutSeconds": "soon"}, "must be a number"),
        ({"keepSlots": "perhaps"}, "must be true or false"),
        ({"databaseLeg": "other"}, "cannot be 'other'"),
        ({"truncate": "perhaps"}, "must be true or false"),
        ({"columns": '{"a": "b", "a": "c"}'}, "option columns has 'a' twice"),
        (dict.fromkeys(GIVEN), "Spark passes those of a table of its catalog on to nobody"),
    ],
)
def test_an_option_that_is_missing_unknown_or_wrong_is_named(changes, says):
    given = {name: value for name, value in {**GIVEN, **changes}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=says):
        SourceOptions.parse(given)


def test_a_stream_has_no_batch_id_of_its_own():
    assert SourceOptions.parse(GIVEN).batch_id is None
