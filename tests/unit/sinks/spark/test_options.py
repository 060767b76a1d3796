"""A sink's settings: what is refused, and that no secret shows."""

import pickle
import traceback

import pytest
from harness.places import ROOT

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.options import REGISTRY_NAMES, SinkOptions, SinkSettings, SourceOptions, settings_of

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
    by_the_driver = {"tables_revision"}
    assert set(SinkSettings.__annotations__) == set(SinkOptions.__dataclass_fields__) - by_the_driver


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
        ({"sink": 5}, "sink must be text, not int"),
        ({"kafka": "broker:9092"}, "kafka must be a mapping, not str"),
        ({"timeout_s": "60"}, "timeout_s must be a number, not str"),
        ({"max_slots": 2.5}, "max_slots must be a whole number, not float"),
        ({"max_slots": True}, "max_slots must be a whole number, not bool"),
        ({"keep_slots": "false"}, "keep_slots must be True or False, not str"),
        ({"columns": 1}, "columns must be a mapping or a list of names, not int"),
        ({"lease_s": 0}, "lease_s is 0 s"),
        ({"max_slots": -1}, "max_slots must be greater than 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan s"),
        ({"url": f"sqlite:///{CANARY}"}, "not the URL of a PostgreSQL database"),
        ({"url": f"postgresql+pg8000://app:{CANARY}@db/shop"}, "not the URL of a PostgreSQL database"),
        ({"url": f"nonsense {CANARY}"}, "not the URL of a PostgreSQL database"),
        ({"url": f"nosuchdatabase://{CANARY}"}, "not the URL of a PostgreSQL database"),
        ({"url": f"postgresql+psycopg://app:p@host:{CANARY}@db/shop"}, "not the URL of a PostgreSQL database"),
    ],
)
def test_what_cannot_work_is_refused_without_showing_a_secret(changes, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        options(**changes)
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_a_whole_number_is_a_number_too():
    assert options(timeout_s=60).timeout_s == 60


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"keys": "id"}, r"there is no setting 'keys' \(did you mean 'key'\?\)"),
        ({"dbtable": "orders"}, r"there is no setting 'dbtable' \(did you mean 'table'\?\)"),
        ({"zzz": 1}, r"there is no setting 'zzz' \(the settings are sink, kafka, "),
        ({"sink": None}, "the setting sink is missing"),
    ],
)
def test_a_misspelt_or_missing_setting_is_named(changes, says):
    given = {name: value for name, value in {**SETTINGS, **changes}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=says):
        settings_of(given)


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


def test_a_reference_may_stand_in_the_query_of_the_url(monkeypatch):
    monkeypatch.setenv("KEY_PASSWORD", CANARY)
    referring = options(
        url="postgresql+psycopg://db/shop?sslpassword=${env:KEY_PASSWORD}&host=a:5432&host=${env:KEY_PASSWORD}"
    )
    assert dict(referring.database_url().query) == {"sslpassword": CANARY, "host": ("a:5432", CANARY)}
    secret = options(url=f"postgresql+psycopg://db/shop?sslpassword={CANARY}")
    assert CANARY not in repr(secret)


@pytest.mark.parametrize("port", ["", ":5433"])
def test_references_may_stand_for_user_password_host_and_database(monkeypatch, port):
    for name in ("WHO", "WORD", "WHERE", "WHAT"):
        monkeypatch.setenv(name, f"{name}@/:")
    url = f"postgresql+psycopg://${{env:WHO}}:${{env:WORD}}@${{env:WHERE}}{port}/${{env:WHAT}}"
    found = options(url=url).database_url()
    assert (found.username, found.password, found.host, found.database) == ("WHO@/:", "WORD@/:", "WHERE@/:", "WHAT@/:")
    assert found.port == (5433 if port else None)
    assert "WORD" not in repr(options(url=url))
    given = {"sink": "s", "url": url, "dbtable": "t", "topic": "t", "kafka.bootstrap.servers": "b:9092"}
    again = SourceOptions.parse({**given, "password": "${env:WHAT}"}).sink.database_url()
    assert (again.username, again.password, again.host, again.database) == ("WHO@/:", "WHAT@/:", "WHERE@/:", "WHAT@/:")


def test_an_option_url_with_a_bad_port_is_refused_without_showing_it():
    given = {
        "sink": "s", "url": f"postgresql+psycopg://app:p@host:{CANARY}@db/shop", "dbtable": "t", "topic": "t",
        "kafka.bootstrap.servers": "b:9092", "password": "p",
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="url is not a database URL") as caught:
        SourceOptions.parse(given)
    assert CANARY not in "".join(traceback.format_exception(caught.value))


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


REGISTRY = {"url": "https://registry:8081", "basic.auth.user.info": f"app:{CANARY}-registry"}


def formatted(**changes):
    return options(**{"value_format": "avro", "schema_registry": REGISTRY, **changes})


def test_the_registrys_secrets_show_in_no_repr_and_no_pickle():
    found = formatted()
    assert CANARY not in repr(found)
    assert CANARY not in repr(found.registry_settings())
    assert CANARY.encode() not in pickle.dumps(found)
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert again.registry_settings().client["basic.auth.user.info"] == f"app:{CANARY}-registry"


def test_the_registrys_settings_may_refer_to_the_environment(monkeypatch):
    found = formatted(schema_registry={**REGISTRY, "basic.auth.user.info": "app:${env:REGISTRY_PASSWORD}"})
    monkeypatch.setenv("REGISTRY_PASSWORD", CANARY)
    assert found.registry_settings().client["basic.auth.user.info"] == f"app:{CANARY}"


def test_a_registry_is_not_waited_for_for_ever():
    assert formatted().registry_settings().client["timeout"] == 30
    given = formatted(schema_registry={**REGISTRY, "timeout": "2.5", "max.retries": "0"}).registry_settings().client
    assert (given["timeout"], given["max.retries"]) == (2.5, 0)


@pytest.mark.parametrize(
    ("registry", "says"),
    [
        ({"url": ""}, "setting url is missing"),
        ({"url": f"https://app:{CANARY}@registry"}, "url holds a password"),
        ({"url": f"mock://{CANARY}"}, "must begin with http"),
        ({"basic.auth.userinfo": CANARY}, "did you mean 'basic.auth.user.info'"),
        ({"auto.register.schema": "true"}, "did you mean 'auto.register.schemas'"),
        ({"zzz": CANARY}, "the settings are basic.auth.user.info, "),
        ({"bearer.auth.credentials.source": "CUSTOM"}, "others run code"),
        ({"ssl.key.password": 5}, "ssl.key.password is not text but int"),
        ({"timeout": "soon"}, "timeout must be a number"),
        ({"max.retries": -1}, "max.retries must be a number"),
        ({"use.latest.version": "maybe"}, "use.latest.version must be true or false"),
        ({"use.latest.version": True, "auto.register.schemas": True}, "cannot be combined"),
        ({"subject.name.strategy": "os.system"}, "must be one of topic, record, topic_record"),
        ({"topics": 7}, "topics must be a list"),
    ],
)
def test_a_registrys_setting_that_cannot_be_is_refused_without_showing_a_secret(registry, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        formatted(schema_registry={**REGISTRY, **registry})
    assert CANARY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value_format": "xml"}, "value_format must be one of json, raw, avro, jsonschema, protobuf"),
        ({"key_format": "json"}, "key_format must be one of raw, avro, jsonschema, protobuf"),
        ({"key_format": "avro"}, "key_format avro needs a column"),
        ({"value_format": "raw"}, "value_format raw needs a column"),
        ({"value_format": "json", "value": "v"}, "value_format json is for whole rows"),
        ({"value_format": "json", "value_schema": "{}"}, "value_schema is for value_format avro and jsonschema"),
        ({"key": "k", "key_schema": "{}"}, "key_schema is for key_format avro and jsonschema"),
        ({"value_message": "a.B"}, "value_message and value_format protobuf must be given together"),
        ({"value_format": "protobuf"}, "value_message and value_format protobuf must be given together"),
        ({"value_format": "protobuf", "value_message": "a.B"}, "value_format protobuf needs a descriptor"),
        ({"schema_registry": None}, "value_format avro needs schema.registry.url"),
        (
            {"topic": None, "topic_column": "t", "schema_registry": {**REGISTRY, "use.latest.version": True}},
            "needs one topic",
        ),
        (
            {"value_schema": '"long"', "schema_registry": {**REGISTRY, "use.latest.version": True}},
            "of your own cannot be combined",
        ),
    ],
)
def test_formats_that_cannot_be_are_refused(changes, says):
    with pytest.raises(ConfigurationError, match=says):
        formatted(**changes)


def test_the_data_source_has_options_of_the_same_names():
    given = {
        "sink": "s", "url": URL, "dbtable": "t", "topic": "t", "kafka.bootstrap.servers": "b:9092", "keyColumn": "k",
        "valueFormat": "protobuf", "KEYFORMAT": "avro", "keySchema": '"long"', "valueMessage": "a.B",
        "descriptorFile": "/a.desc", "schema.registry.URL": "http://r", "schema.registry.max.retries": "1",
    }  # fmt: skip
    found = SourceOptions.parse(given).sink
    assert (found.value_format, found.key_format, found.value_message, found.descriptor) == (
        "protobuf",
        "avro",
        "a.B",
        "/a.desc",
    )
    assert (found.key_schema, found.schema_registry) == ('"long"', {"url": "http://r", "max.retries": "1"})
    assert SourceOptions.parse({key: value for key, value in given.items() if "ormat" not in key.lower() and "essage" not in key
                                and "Schema" not in key and "registry" not in key}).sink.schema_registry is None  # fmt: skip
    with pytest.raises(ConfigurationError, match="did you mean 'valueFormat'"):
        SourceOptions.parse({**given, "valueFormt": "avro"})


def test_every_setting_of_the_registry_is_documented():
    text = (ROOT / "docs" / "spark-columns.md").read_text(encoding="utf-8")
    assert [name for name in REGISTRY_NAMES if f"`{name}`" not in text] == []
