"""A sink's settings: what is refused, and that no secret shows."""

import pickle
import traceback

import pytest

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.settings import SinkOptions, SinkSettings

CANARY = "canary-7f3a91"
KAFKA = {
    "bootstrap.servers": "broker:9092",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "app",
    "sasl.password": f"{CANARY}-kafka",
}
URL = f"postgresql+psycopg://app:{CANARY}-database@db.example/shop?options=-c%20{CANARY}"
SETTINGS = {"sink": "orders", "kafka": KAFKA, "url": URL, "table": "orders", "topic": "orders"}


def options(**changes):
    return SinkOptions(**{**SETTINGS, **changes})


def test_the_keyword_arguments_are_those_of_the_options():
    assert set(SinkSettings.__annotations__) == set(SinkOptions.__dataclass_fields__)


def test_a_pickle_brings_everything_back():
    again = pickle.loads(pickle.dumps(options()))
    assert again == options()
    assert again.database_url().password == f"{CANARY}-database"
    assert again.kafka_config() == options().kafka_config()


def test_no_secret_shows_in_repr_str_or_pickle():
    found = options()
    for shown in (repr(found), str(found), f"{found}", repr(found.kafka_config())):
        assert CANARY not in shown
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(found, protocol)
        assert CANARY.encode() not in pickled
        assert CANARY not in repr(pickled)
    assert "orders" in repr(found)
    assert "db.example" in repr(found)


def test_two_pickles_of_the_same_settings_mask_differently():
    assert pickle.dumps(options()) != pickle.dumps(options())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sink": ""}, "name of a sink"),
        ({"sink": "x" * 201}, "name of a sink"),
        ({"sink": "a#1"}, "name of a sink"),
        ({"topic": None}, "either topic or topic_column"),
        ({"topic_column": "topic"}, "either topic or topic_column"),
        ({"lease_s": 0}, "lease_s must be greater than 0"),
        ({"max_slots": -1}, "max_slots must be greater than 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be greater than 0"),
        ({"url": f"sqlite:///{CANARY}"}, "not the URL of a PostgreSQL database"),
        ({"url": f"postgresql+pg8000://app:{CANARY}@db/shop"}, "not the URL of a PostgreSQL database"),
        ({"url": f"nonsense {CANARY}"}, "not the URL of a PostgreSQL database"),
        ({"url": f"nosuchdatabase://{CANARY}"}, "not the URL of a PostgreSQL database"),
    ],
)
def test_what_cannot_work_is_refused_without_showing_a_secret(changes, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        options(**changes)
    assert CANARY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("plugin.library.paths", f"/lib/{CANARY}.so"),
        ("sasl.kerberos.kinit.cmd", f"echo {CANARY}"),
        ("ssl.engine.location", f"/lib/{CANARY}.so"),
        ("oauth_cb", print),
    ],
)
def test_kafka_settings_that_run_code_are_refused(key, value):
    with pytest.raises(ConfigurationError, match=key) as caught:
        options(kafka={**KAFKA, key: value}).kafka_config()
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_a_reference_is_replaced_where_it_is_used_and_nowhere_else(monkeypatch):
    referring = options(
        kafka={**KAFKA, "sasl.password": "${env:KAFKA_PASSWORD}"},
        url="postgresql+psycopg://app:${env:DATABASE_PASSWORD}@db.example/shop",
    )
    shipped = pickle.loads(pickle.dumps(referring))
    monkeypatch.setenv("KAFKA_PASSWORD", f"{CANARY}-1")
    monkeypatch.setenv("DATABASE_PASSWORD", f"{CANARY}-@/2")
    assert shipped.kafka_config().get("sasl.password") == f"{CANARY}-1"
    assert shipped.database_url().password == f"{CANARY}-@/2"
    assert CANARY not in repr(shipped)
    assert shipped == referring


def test_a_reference_to_a_variable_that_is_not_set_names_it(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigurationError, match="sasl.password refers to the environment variable NOT_SET"):
        options(kafka={**KAFKA, "sasl.password": "${env:NOT_SET}"}).kafka_config()
    with pytest.raises(ConfigurationError, match="url refers to the environment variable NOT_SET"):
        options(url="postgresql+psycopg://app:${env:NOT_SET}@db/shop").database_url()


def test_a_task_buffers_little_unless_told_otherwise():
    assert options().kafka_config().get("queue.buffering.max.kbytes") == 65536
    chosen = options(kafka={**KAFKA, "queue.buffering.max.kbytes": 1024})
    assert chosen.kafka_config().get("queue.buffering.max.kbytes") == 1024
