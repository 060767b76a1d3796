"""One dictionary for two Kafka clients: what reaches both, what is refused, and that no secret shows."""

from __future__ import annotations

import pickle
import socket

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.kafka import kafka_python
from dualwrite.kafka.config import KEYS as TLS_KEYS
from dualwrite.kafka.config import KafkaConfig

SERVERS = {"bootstrap.servers": "one:9092,two:9093"}
SASL = {
    **SERVERS,
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "ann",
    "sasl.password": "secret",
}
CANARY = "canary-7d1f"


def parse(more=None, /, **settings):
    return KafkaConfig.parse({**SERVERS, **(more or {}), **settings})


def refusal(settings, **how):
    with pytest.raises(ConfigurationError) as caught:
        KafkaConfig.parse(settings, **how)
    return str(caught.value)


def token(_):
    return CANARY, 2e9


@pytest.mark.parametrize("name", ["bootstrap.servers", "metadata.broker.list"])
def test_the_servers_reach_both_clients_by_either_name(name):
    config = KafkaConfig.parse({name: "one:9092, two:9093"})
    assert config.librdkafka()["bootstrap.servers"] == "one:9092, two:9093"
    assert config.connecting().servers == [("one", 9092), ("two", 9093)]


@pytest.mark.parametrize("servers", ["", " ", "one:9092,", "SSL://one:9092", "one:port", "http://one", "[::1", "a b:1"])
def test_servers_that_the_two_clients_would_read_differently_are_refused(servers):
    assert "'bootstrap.servers'" in refusal({"bootstrap.servers": servers})


@pytest.mark.parametrize("servers", ["one", "one:9092", "[::1]:9092", "10.0.0.1:1,b-2.c_d.example:65535"])
def test_servers_in_their_usual_forms_are_taken(servers):
    assert KafkaConfig.parse({"bootstrap.servers": servers}).librdkafka()["bootstrap.servers"] == servers


def test_missing_servers_are_refused():
    assert "'bootstrap.servers'" in refusal({})
    assert "'bootstrap.server'" in refusal({"bootstrap.server": "one:9092"})


def test_a_misspelt_setting_for_security_is_refused_with_the_one_that_is_meant():
    assert "did you mean 'sasl.username'?" in refusal({**SASL, "sasl.usernam": "ann"})


def test_the_same_key_by_two_names_with_two_values_is_refused():
    assert "'sasl.mechanism'" in refusal({**SASL, "sasl.mechanisms": "PLAIN"})


def test_password_login_reaches_both_clients():
    config = KafkaConfig.parse(SASL)
    ours = config.librdkafka()
    assert (ours["security.protocol"], ours["sasl.mechanism"]) == ("SASL_PLAINTEXT", "SCRAM-SHA-512")
    assert (ours["sasl.username"], ours["sasl.password"]) == ("ann", "secret")
    theirs = config.connecting()
    assert theirs.sasl.mechanism == "SCRAM-SHA-512"
    assert theirs.sasl.begin("one").auth_bytes().startswith(b"n,,n=ann,r=")
    assert theirs.tls is None
    plain = KafkaConfig.parse({**SASL, "sasl.mechanism": "PLAIN"}).connecting()
    assert plain.sasl.begin("one").auth_bytes() == b"ann\0ann\0secret"


def test_a_user_name_is_escaped_for_the_client_that_does_not_escape_it():
    settings = {**SASL, "sasl.username": "an=n,b"}
    assert KafkaConfig.parse(settings).connecting().sasl.begin("one").auth_bytes().startswith(b"n,,n=an=3Dn=2Cb,r=")
    assert KafkaConfig.parse(settings).librdkafka()["sasl.username"] == "an=n,b"
    plain = KafkaConfig.parse({**settings, "sasl.mechanism": "plain"})
    assert plain.connecting().sasl.begin("one").auth_bytes() == b"an=n,b\0an=n,b\0secret"


def test_a_token_callback_serves_both_clients_and_is_asked_once_while_fresh():
    asked = []

    def callback(argument):
        asked.append(argument)
        return "token", 4e9, "principal", {"extension": "yes"}

    settings = {**SERVERS, "security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER", "oauth_cb": callback}
    config = KafkaConfig.parse({**settings, "sasl.oauthbearer.config": "scope=a"})
    assert config.librdkafka()["oauth_cb"] is callback
    sasl = config.connecting().sasl
    for _ in range(2):
        assert sasl.begin("one").auth_bytes() == b"n,,\1auth=Bearer token\1extension=yes\1\1"
    assert asked == ["scope=a"]


def test_an_expired_token_is_fetched_again():
    given = iter([("old", 1.0), ("new", 4e9)])
    settings = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", "oauth_cb": lambda _: next(given)}
    sasl = parse(settings).connecting().sasl
    shown = [
        sasl.begin("one").auth_bytes() for _ in range(2)
    ]  # each asks twice: for the token, and for what comes with it
    assert shown == [b"n,,\1auth=Bearer old\1\1", b"n,,\1auth=Bearer new\1\1"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"security.protocol": "tls"}, "security.protocol"),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "DIGEST-MD5"}, "sasl.mechanism"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "AWS_MSK_IAM"}, "sasl.mechanism"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "a"}, "sasl.password"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}, "oauth_cb"),
        ({"sasl.username": "a"}, "sasl.username"),
        ({"security.protocol": "SASL_PLAINTEXT", "ssl.ca.location": "/ca"}, "ssl.ca.location"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/ca", "ssl.ca.pem": "x"}, "ssl.ca.pem"),
        ({"security.protocol": "SSL", "ssl.certificate.location": "/c"}, "ssl.key.location"),
        ({"security.protocol": "SSL", "ssl.key.pem": "k"}, "ssl.certificate.location"),
        (
            {"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": ""},
            "ssl.endpoint.identification.algorithm",
        ),
        (
            {"security.protocol": "SSL", "enable.ssl.certificate.verification": "maybe"},
            "enable.ssl.certificate.verification",
        ),
        ({"client.dns.lookup": "default"}, "client.dns.lookup"),
        ({"socket.timeout.ms": "soon"}, "socket.timeout.ms"),
        ({"retry.backoff.ms": 0}, "retry.backoff.ms"),
        ({"transaction.timeout.ms": 999}, "transaction.timeout.ms"),
        ({"transaction.timeout.ms": -1}, "transaction.timeout.ms"),
        ({"client.id": None}, "client.id"),
        ({"client.id": ["a"]}, "client.id"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings, key):
    assert f"'{key}'" in refusal({**SERVERS, **settings})


def test_a_name_that_is_not_text_is_refused():
    assert "int" in refusal({**SERVERS, 7: "x"})


@pytest.mark.parametrize(
    "key",
    [
        "ssl.keystore.location",
        "ssl.keystore.password",
        "ssl.ca.certificate.stores",
        "ssl.engine.location",
        "ssl.engine.id",
        "ssl.providers",
        "ssl.curves.list",
        "ssl.sigalgs.list",
        "ssl.certificate.verify_cb",
        "ssl_key",
        "sasl.jaas.config",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.token.endpoint.url",
        "enable.sasl.oauthbearer.unsecure.jwt",
        "https.ca.location",
        "sasl.passwort",
        "ssl.ca.locations",
        "security.protocols",
        "enable.ssl.certificate.verifications",
    ],
)
def test_a_security_key_that_one_client_would_not_get_is_refused_with_a_way_out(key):
    message = refusal({**SASL, "security.protocol": "SASL_SSL", key: CANARY})
    assert f"'{key}'" in message
    assert "(" in message, "says what to do"


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("ssl.keystore.location", "convert it to PEM"),
        ("sasl.oauthbearer.method", "oauth_cb"),
        ("sasl.jaas.config", "sasl.username"),
        ("ssl.providers", "leave it out"),
    ],
)
def test_a_refused_key_comes_with_what_to_use_instead(key, way_out):
    assert way_out in refusal({**SASL, "security.protocol": "SASL_SSL", key: CANARY})


@pytest.mark.parametrize("settings", [{}, {"retry.backoff.ms": 5000}, {"retry.backoff.max.ms": 200}])
def test_what_the_user_leaves_open_of_the_back_off_fits_the_rest(settings):
    ours = parse(settings).librdkafka()
    assert ours["retry.backoff.ms"] <= ours["retry.backoff.max.ms"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transactional.id", "mine"),
        ("enable.idempotence", False),
        ("enable.idempotence", "false"),
        ("acks", 1),
        ("acks", "0"),
        ("request.required.acks", 1),
        ("enable.gapless.guarantee", True),
        ("delivery.report.only.error", True),
        ("on_delivery", print),
        ("default.topic.config", "acks=0"),
        ("test.mock.num.brokers", 3),
    ],
)
def test_what_the_protocol_decides_cannot_be_set_otherwise(key, value):
    assert "this library's own" in refusal({**SERVERS, key: value})


def test_what_the_protocol_decides_may_be_said_again():
    ours = parse({"enable.idempotence": True, "acks": "all", "enable.gapless.guarantee": False}).librdkafka()
    assert (ours["enable.idempotence"], ours["acks"], ours["enable.gapless.guarantee"]) == ("true", "all", "false")


def test_settings_of_the_producer_alone_reach_it_unchanged():
    given = {"linger.ms": 5, "compression.type": "zstd", "queue.buffering.max.kbytes": "1048576", "debug": "eos"}
    config = parse(given)
    assert given.items() <= config.librdkafka().items()


def test_connection_settings_reach_both_clients():
    config = parse(
        {
            "client.id": "app",
            "client.dns.lookup": "resolve_canonical_bootstrap_servers_only",
            "socket.timeout.ms": "4000",
            "socket.connection.setup.timeout.ms": 2000,
            "connections.max.idle.ms": 60000,
            "reconnect.backoff.ms": 7,
            "reconnect.backoff.max.ms": 70,
            "socket.keepalive.enable": False,
            "socket.send.buffer.bytes": 1000,
        }
    )
    theirs = config.connecting()
    assert theirs.client.name == "app"
    assert theirs.canonical_names
    assert (theirs.request_s, theirs.opening_s, theirs.longest_opening_s, theirs.idle_s) == (4, 2, 30, 60)
    assert (theirs.pause_s, theirs.longest_pause_s) == (0.007, 0.07)
    assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0) in theirs.socket_options
    assert (socket.SOL_SOCKET, socket.SO_SNDBUF, 1000) in theirs.socket_options
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1) in theirs.socket_options
    assert config.librdkafka()["socket.keepalive.enable"] == "false"


@pytest.mark.parametrize(
    ("settings", "after_s"),
    [
        ({}, 0.8),
        ({"retry.backoff.ms": 500}, 0.4),
        ({"retry.backoff.ms": 5000}, 4.0),
        ({"retry.backoff.max.ms": 200}, 0.16),
        ({"retry.backoff.ms": 2000, "retry.backoff.max.ms": 1500}, 1.2),
    ],
)
def test_the_earliest_silent_retry_follows_from_what_librdkafka_is_given(settings, after_s):
    config = parse(settings)
    ours = config.librdkafka()
    assert config.silent_retry_after_s == pytest.approx(after_s)
    assert min(int(ours["retry.backoff.ms"]), int(ours["retry.backoff.max.ms"])) * 0.0008 == pytest.approx(after_s)


def test_the_callers_own_keys_are_added_and_never_overrule_the_users():
    config = parse({"linger.ms": 5, "transaction.timeout.ms": 20000})
    assert config.transaction_timeout_ms == 20000
    ours = config.librdkafka(**{"transactional.id": "t", "enable.idempotence": True, "transaction.timeout.ms": 10000})
    assert (ours["transactional.id"], ours["enable.idempotence"], ours["transaction.timeout.ms"]) == (
        "t",
        "true",
        10000,
    )
    with pytest.raises(ConfigurationError, match="linger"):
        config.librdkafka(**{"linger.ms": 0})


def test_no_timeout_of_the_users_is_none():
    assert parse().transaction_timeout_ms is None


@pytest.mark.parametrize(
    "key",
    [
        "plugin.library.paths",
        "sasl.kerberos.kinit.cmd",
        "sasl.kerberos.principal",
        "sasl.kerberos.keytab",
        "sasl.kerberos.service.name",
    ],
)
def test_what_runs_code_is_refused_from_untrusted_places_only(key):
    settings = {**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI", key: CANARY}
    message = refusal(settings, trusted=False)
    assert f"'{key}'" in message
    assert CANARY not in message
    assert KafkaConfig.parse(settings).get(key) == CANARY


def test_functions_are_refused_from_untrusted_places():
    assert "'error_cb'" in refusal({**SERVERS, "error_cb": print}, trusted=False)
    assert parse(error_cb=print).get("error_cb") is print


SECRETS = {
    "sasl.password": CANARY,
    "ssl.key.password": CANARY,
    "ssl.key.pem": CANARY,
    "ssl.certificate.pem": CANARY,
    "sasl.oauthbearer.config": CANARY,
    "some.plugin.credential": CANARY,
}


def test_no_secret_shows_in_any_text_of_a_configuration():
    config = KafkaConfig.parse({**SASL, "security.protocol": "SASL_SSL", **SECRETS})
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.librdkafka() == config.librdkafka()
    for text in (repr(config), str(config), f"{config}", repr([config]), repr(copy)):
        assert CANARY not in text
    assert "sasl.password=***" in repr(config)
    assert "one:9092" in repr(config)


@pytest.mark.parametrize("key", sorted({*TLS_KEYS, *SECRETS, "sasl.username", "sasl.mechanism", "security.protocol"}))
def test_no_value_shows_in_a_refusal(key):
    for settings in ({**SERVERS, key: [CANARY]}, {**SASL, f"ssl.{key}": CANARY}, {**SERVERS, key: CANARY, "acks": 0}):
        with pytest.raises(ConfigurationError) as caught:
            KafkaConfig.parse(settings)
        assert CANARY not in str(caught.value) + repr(caught.value) + repr(caught.value.__cause__)
        assert CANARY.encode() not in pickle.dumps(caught.value)


def test_a_configuration_with_a_token_callback_pickles():
    settings = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", "oauth_cb": token}
    config = pickle.loads(pickle.dumps(parse(settings)))
    assert CANARY in config.connecting().sasl.begin("one").auth_bytes().decode()
    assert CANARY not in repr(config)
    assert CANARY not in repr(config.connecting())


def test_a_missing_kerberos_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = parse({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"})
    with pytest.raises(ConfigurationError, match="gssapi"):
        config.connecting()


def test_kerberos_reaches_both_clients(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    settings = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI", "sasl.kerberos.service.name": "k"}
    config = parse(settings)
    assert config.librdkafka()["sasl.kerberos.service.name"] == "k"
    asked = {}
    monkeypatch.setattr(kafka_python, "get_sasl_mechanism", lambda name: lambda **given: asked.update(given, name=name))
    config.connecting().sasl.begin("one")
    assert asked == {"name": "GSSAPI", "sasl_mechanism": "GSSAPI", "sasl_kerberos_service_name": "k", "host": "one"}


def test_an_unreadable_certificate_is_named():
    config = parse({"security.protocol": "SSL", "ssl.ca.location": "/does/not/exist.pem"})
    with pytest.raises(ConfigurationError, match=r"'ssl\.ca\.location'"):
        config.connecting()


@pytest.mark.parametrize(
    ("family", "kept_to"), [("any", socket.AF_UNSPEC), ("v4", socket.AF_INET), ("v6", socket.AF_INET6)]
)
def test_the_address_family_is_kept_to_by_both_clients(family, kept_to):
    config = parse({"broker.address.family": family})
    assert config.librdkafka()["broker.address.family"] == family
    assert config.connecting().family == kept_to


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("one", ("one", 9092)),
        ("one:1", ("one", 1)),
        (" [::1]:2 ", ("::1", 2)),
        ("[::1]", ("::1", 9092)),
        ("10.0.0.1:3", ("10.0.0.1", 3)),
    ],
)
def test_a_server_is_a_host_and_a_port(server, found):
    assert parse({"bootstrap.servers": server}).connecting().servers == [found]


def test_an_unknown_address_family_is_refused():
    assert "'broker.address.family'" in refusal({**SERVERS, "broker.address.family": "v5"})


def test_two_phase_commit_has_kips_name_and_excludes_a_time_limit():
    key = "transaction.two.phase.commit.enable"
    assert [parse({key: value}).two_phase_commit for value in (True, "true", "false", False)] == [
        True,
        True,
        False,
        False,
    ]
    assert parse({}).two_phase_commit is None
    assert key not in parse({key: "false"}).librdkafka(), "librdkafka does not know it"
    with pytest.raises(ConfigurationError, match="is not true or false"):
        parse({key: "yes"})
    with pytest.raises(ConfigurationError, match="no effect together with"):
        parse({key: "true", "transaction.timeout.ms": 60_000})


def test_the_two_settings_of_this_library_go_to_no_client():
    config = parse({"dualwrite.engine": "native", "dualwrite.bulk": "TRUE"})
    assert (config.engine, config.bulk) == ("native", True)
    assert (config.names, config.librdkafka()) == (parse().names, parse().librdkafka())
    assert "dualwrite.engine='native'" in repr(config)
    assert "dualwrite.bulk=True" in repr(config)
    assert [(one.engine, one.bulk) for one in (parse(), parse({"dualwrite.bulk": False}))] == [("auto", False)] * 2
    assert "'dualwrite.bulk' is not true or false" in refusal({**SERVERS, "dualwrite.bulk": "yes"})
    assert "no producer engine 'java'" in refusal({**SERVERS, "dualwrite.engine": "java"})
