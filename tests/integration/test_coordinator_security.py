"""TLS, SASL and ACLs from one dictionary: both Kafka clients get in where one does, and are refused where one is."""

import base64
import json
import logging
import shutil
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from confluent_kafka import Producer
from harness.patience import wait_until
from harness.tls import Authority, HandshakeServer
from harness.transactions import PlainProducer, fresh_id
from harness.users import USERS

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.listing import list_transactions
from dualwrite.protocol.values import LogProof, TransactionStatus
from dualwrite.testing import EmbeddedKafka

PASSWORD = USERS["ann"]  # as short as it is, it must show nowhere
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")


def soon():
    return Deadline(30)


def coordinator_of(config):
    return KafkaCoordinator(KafkaConfig.parse(config))


@pytest.fixture
def kafka(guarded_kafka):
    return guarded_kafka


@pytest.fixture
def admin(kafka):
    with coordinator_of(kafka.admin_config()) as coordinator:
        yield coordinator


@pytest.fixture
def ann(kafka):
    with coordinator_of(kafka.client_config("ann")) as coordinator:
        yield coordinator


@pytest.fixture
def topic(kafka):
    return kafka.create_topic(fresh_id("secured"), 2)


@pytest.fixture
def prepared(kafka, admin, topic):
    """A transaction that the administrator has prepared, and its state."""
    producer = PlainProducer(kafka.admin_config())
    producer.write(topic, (0, 1))
    return producer, producer.state(admin)


def refusal(call, *arguments, **named):
    with pytest.raises(ConfigurationError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def once_allowed(call):
    """The call's result, once the broker knows a right that was granted just now."""
    deadline = soon()
    while True:
        try:
            return call()
        except ConfigurationError:
            if deadline.expired:
                raise


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_the_same_dictionary_serves_both_clients(kafka, admin, topic, mechanism):
    config = kafka.client_config("admin", mechanism=mechanism)
    producer = PlainProducer(KafkaConfig.parse(config).librdkafka())
    producer.write(topic, (0, 1))
    with coordinator_of(config) as coordinator:
        state = producer.state(coordinator)
        assert coordinator.open_offsets([state], soon()) == [producer.first_offsets]
        assert coordinator.prove([state], soon()) == [LogProof.OPEN]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password_is_a_matter_of_configuration(kafka, mechanism):
    config = {**kafka.client_config("ann", mechanism=mechanism), "sasl.password": "canary-wrong"}
    with coordinator_of(config) as coordinator:
        message = refusal(coordinator.cluster_id, soon())
    assert "authentication" in message
    assert "canary-wrong" not in message


def test_an_unknown_mechanism_is_a_matter_of_configuration(kafka):
    config = kafka.client_config("ann", mechanism="SCRAM-SHA-256")
    with coordinator_of(config) as coordinator:
        assert "UnsupportedSaslMechanism" in refusal(coordinator.cluster_id, soon())


def test_no_login_where_one_is_asked_for_gets_no_answer(kafka):
    with (
        coordinator_of({"bootstrap.servers": kafka.bootstrap_servers}) as coordinator,
        pytest.raises(Unavailable) as caught,
    ):
        coordinator.cluster_id(Deadline(0.5))
    assert "security.protocol" in str(caught.value)


def test_the_missing_right_is_named_with_the_id(kafka, ann, prepared):
    producer, state = prepared
    kafka_id = producer.kafka_id
    for call in (
        lambda: ann.describe([kafka_id], soon()),
        lambda: ann.end({kafka_id: state}, committed=True, deadline=soon()),
        lambda: ann.retire([kafka_id], soon()),
    ):
        message = refusal(call)
        assert f"Describe on the transactional id '{kafka_id}'" in message
        assert (
            "to produce or recover Write" in message
        )  # the broker asks for Describe first: two rounds for an administrator

    kafka.allow("ann", "describe", "transactional_id", kafka_id)
    seen = once_allowed(lambda: ann.describe([kafka_id], soon()))
    assert seen[kafka_id].status is TransactionStatus.ONGOING
    for call in (
        lambda: ann.end({kafka_id: state}, committed=True, deadline=soon()),
        lambda: ann.retire([kafka_id], soon()),
    ):
        message = refusal(call)
        assert f"Write on the transactional id '{kafka_id}'" in message

    kafka.allow("ann", "write", "transactional_id", kafka_id[:4], prefixed=True)
    once_allowed(lambda: ann.end({kafka_id: state}, committed=True, deadline=soon()))
    ann.retire([kafka_id], soon())


def test_the_missing_right_is_named_with_the_topic(kafka, ann, prepared, topic):
    _, state = prepared
    for call in (
        lambda: ann.open_offsets([state], soon()),
        lambda: ann.prove([state], soon()),
        lambda: ann.topic_ids([topic], soon()),
    ):
        assert f"Describe on the topic '{topic}'" in refusal(call)

    kafka.allow("ann", "describe", "topic", topic)
    assert list(once_allowed(lambda: ann.topic_ids([topic], soon()))) == [topic]
    for call in (lambda: ann.open_offsets([state], soon()), lambda: ann.prove([state], soon())):
        assert f"Read on the topic '{topic}'" in refusal(call)

    kafka.allow("ann", "read", "topic", topic)
    assert None not in once_allowed(lambda: ann.open_offsets([state], soon()))[0].values()
    assert ann.prove([state], soon()) == [LogProof.OPEN]


def test_what_may_not_be_read_of_the_cluster_is_left_out(kafka, ann, prepared, caplog):
    with coordinator_of(kafka.client_config("bob")) as bob:
        assert bob.list_ids("", soon()) == []
        for right in ("__transaction_state", "dualwrite-probe."):
            assert right in caplog.text
        kafka.allow("bob", "describe", "topic", "__transaction_state")
        assert not list_transactions(bob.brokers, (), soon()).is_complete
        kafka.allow("bob", "describe", "transactional_id", "dualwrite-probe.", prefixed=True)
        wait_until(lambda: list_transactions(bob.brokers, (), soon()).is_complete)
        assert bob.list_ids("", soon()) == []
        assert bob.max_transaction_timeout_ms(soon()) is None
        kafka.allow("bob", "describe_configs", "broker", "kafka-cluster")
        wait_until(lambda: bob.max_transaction_timeout_ms(soon()) is not None)
        assert bob.max_transaction_timeout_ms(soon()) == 900_000


def test_the_oldest_open_transaction_is_one_of_the_ids_that_we_may_describe(kafka, admin, prepared):
    producer, state = prepared
    with coordinator_of(kafka.client_config("bob")) as bob:  # who may describe no id of another test
        assert bob.longest_open_s(soon()) == 0
        kafka.allow("bob", "describe", "transactional_id", producer.kafka_id)
        shown_since = time.time()
        wait_until(lambda: bob.longest_open_s(soon()) > 0)
        begun = admin.describe([producer.kafka_id], soon())[producer.kafka_id].started_ms / 1000
        assert shown_since - begun <= bob.longest_open_s(soon()) <= time.time() - begun
        assert admin.longest_open_s(soon()) >= shown_since - begun
        admin.end({producer.kafka_id: state}, committed=False, deadline=soon())
        wait_until(lambda: bob.longest_open_s(soon()) == 0)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_no_password_shows_in_any_log(kafka, caplog, mechanism):
    caplog.set_level(logging.DEBUG, logger="kafka")
    with caplog.at_level(logging.DEBUG), coordinator_of(kafka.client_config("ann", mechanism=mechanism)) as coordinator:
        coordinator.cluster_id(soon())
        repeated = repr(coordinator) + repr(vars(coordinator))
    assert "Authenticated as ann" in caplog.text
    encoded = base64.b64encode(PASSWORD.encode()).decode().rstrip("=")
    for secret in (PASSWORD, encoded[:-1], PASSWORD.encode().hex()):
        assert secret not in caplog.text
        assert secret not in repeated


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "own")


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """Paths by name: authorities, certificates and keys, and a list of revocations."""
    found = {"ca": authority.certificate, "stranger": Authority(tmp_path_factory.mktemp("tls") / "other").certificate}
    for name, kind, password in (
        ("loopback", "loopback", None),
        ("localhost", "localhost", None),
        ("revoked", "loopback", None),
        ("client", "client", None),
        ("locked", "client", PASSWORD),
    ):
        found[f"{name}.pem"], found[f"{name}.key"] = authority.issue(name, kind, password=password)
    found["crl"] = authority.revocations(found["revoked.pem"])
    return found


def our_own_connects(settings, peer):
    with coordinator_of(settings) as coordinator:
        while not peer.came(0):
            with pytest.raises((ConfigurationError, Unavailable)):
                coordinator.cluster_id(Deadline(0.3))


def librdkafka_connects(settings, peer):
    client = Producer({**KafkaConfig.parse(settings).librdkafka(), "log_level": 0})
    while not peer.came(0.1):
        client.poll(0)


NO_HOST_CHECK = {"ssl.endpoint.identification.algorithm": "none"}
NO_CHECK = {"enable.ssl.certificate.verification": False}
ENCRYPTED = {"ssl.key.password": PASSWORD}


@needs_openssl
@pytest.mark.parametrize("connect", [librdkafka_connects, our_own_connects])
@pytest.mark.parametrize(
    ("server", "from_files", "more", "accepted"),
    [
        ({}, {"ssl.ca.location": "ca"}, {}, True),
        ({}, {"ssl.ca.pem": "ca"}, {}, True),
        ({}, {"ssl.ca.location": "stranger"}, {}, False),
        ({}, {"ssl.ca.pem": "stranger"}, {}, False),
        ({}, {}, {}, False),
        ({}, {}, {"ssl.ca.location": "probe"}, False),
        ({}, {}, NO_HOST_CHECK, False),
        ({}, {}, NO_CHECK, True),
        ({"certificate": "localhost"}, {"ssl.ca.location": "ca"}, {}, False),
        ({"certificate": "localhost"}, {"ssl.ca.location": "ca"}, NO_HOST_CHECK, True),
        ({"certificate": "localhost"}, {"ssl.ca.location": "stranger"}, NO_HOST_CHECK, False),
        ({}, {"ssl.ca.location": "ca", "ssl.crl.location": "crl"}, {}, True),
        ({"certificate": "revoked"}, {"ssl.ca.location": "ca", "ssl.crl.location": "crl"}, {}, False),
        ({"certificate": "revoked"}, {"ssl.ca.location": "ca"}, {}, True),
        ({"mutual": True}, {"ssl.ca.location": "ca"}, {}, False),
        (
            {"mutual": True},
            {"ssl.ca.location": "ca", "ssl.certificate.location": "client.pem", "ssl.key.location": "client.key"},
            {},
            True,
        ),
        (
            {"mutual": True},
            {"ssl.ca.pem": "ca", "ssl.certificate.pem": "client.pem", "ssl.key.pem": "client.key"},
            {},
            True,
        ),
        (
            {"mutual": True},
            {"ssl.ca.pem": "ca", "ssl.certificate.location": "client.pem", "ssl.key.pem": "client.key"},
            {},
            True,
        ),
        (
            {"mutual": True},
            {"ssl.ca.location": "ca", "ssl.certificate.location": "locked.pem", "ssl.key.location": "locked.key"},
            ENCRYPTED,
            True,
        ),
        (
            {"mutual": True},
            {"ssl.ca.location": "ca", "ssl.certificate.pem": "locked.pem", "ssl.key.pem": "locked.key"},
            ENCRYPTED,
            True,
        ),
        ({"ciphers": "AES128-GCM-SHA256"}, {"ssl.ca.location": "ca"}, {"ssl.cipher.suites": "AES128-GCM-SHA256"}, True),
        (
            {"ciphers": "AES128-GCM-SHA256"},
            {"ssl.ca.location": "ca"},
            {"ssl.cipher.suites": "AES256-GCM-SHA384"},
            False,
        ),
    ],
)
def test_each_client_accepts_just_the_servers_that_the_settings_name(
    connect, files, server, from_files, more, accepted
):
    settings = {
        key: files[name].read_text() if key.endswith(".pem") else str(files[name]) for key, name in from_files.items()
    }
    shown = server.get("certificate", "loopback")
    with HandshakeServer(
        files[f"{shown}.pem"],
        files[f"{shown}.key"],
        client_authority=files["ca"] if server.get("mutual") else None,
        ciphers=server.get("ciphers"),
    ) as peer:
        connect({"bootstrap.servers": f"127.0.0.1:{peer.port}", "security.protocol": "ssl", **settings, **more}, peer)
        assert peer.accepted is accepted


@needs_openssl
@pytest.mark.parametrize("shown", ["localhost", "loopback"], ids=["another host", "an unknown authority"])
def test_a_certificate_that_is_not_accepted_is_a_matter_of_configuration(files, shown):
    trusted = files["ca" if shown == "localhost" else "stranger"]
    with HandshakeServer(files[f"{shown}.pem"], files[f"{shown}.key"]) as peer:
        tls = {"security.protocol": "SSL", "ssl.ca.location": str(trusted)}
        with coordinator_of({"bootstrap.servers": f"127.0.0.1:{peer.port}", **tls}) as coordinator:
            assert "ssl.ca.location" in refusal(coordinator.cluster_id, soon())


@needs_openssl
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ssl.key.location": "locked.key", "ssl.certificate.location": "locked.pem"}, "ssl.key.password"),
        ({"ssl.key.location": "locked.key", "ssl.certificate.location": "client.pem", **ENCRYPTED}, "ssl.key.location"),
        ({"ssl.key.location": "client.key", "ssl.certificate.location": "client.key"}, "ssl.certificate.location"),
        ({"ssl.ca.location": "client.key"}, "ssl.ca.location"),
        ({"ssl.ca.pem": PASSWORD}, "ssl.ca.pem"),
        ({"ssl.crl.location": "client.key"}, "ssl.crl.location"),
        ({"ssl.cipher.suites": PASSWORD}, "ssl.cipher.suites"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(files, settings, named):
    settings = {key: str(files.get(value, value)) for key, value in settings.items()}
    config = KafkaConfig.parse({"bootstrap.servers": "any:1", "security.protocol": "SSL", **settings})
    message = refusal(KafkaCoordinator, config)
    assert f"'{named}'" in message
    assert PASSWORD not in message


@contextmanager
def forwarding(from_port, to_port):
    """Hand on whatever comes, encrypted or not."""
    with socket.create_server(("127.0.0.1", from_port)) as listener:

        def pump(source, sink):
            with source, sink:
                while data := _received(source):
                    sink.sendall(data)

        def serve():
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                server = socket.create_connection(("127.0.0.1", to_port))
                for pair in ((client, server), (server.dup(), client.dup())):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def _received(source):
    try:
        return source.recv(65536)
    except OSError:
        return b""


def unsigned_token(_):
    """An unsigned token that only names its bearer: Kafka's own validator for tests accepts it."""
    expiry = time.time() + 600
    parts = [{"alg": "none"}, {"sub": "ann", "iat": time.time(), "exp": expiry}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, ""]), expiry


@needs_openssl
def test_tokens_over_tls_serve_both_clients(files, tmp_path):
    key_store = tmp_path / "broker.pem"
    key_store.write_text(files["loopback.key"].read_text() + files["loopback.pem"].read_text())
    login = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
    properties = {
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,PROXIED:SASL_SSL,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "listener.name.proxied.ssl.keystore.type": "PEM",
        "listener.name.proxied.ssl.keystore.location": str(key_store),
        "listener.name.proxied.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.proxied.oauthbearer.sasl.jaas.config": f'{login} unsecuredLoginStringClaim_sub="broker";',
    }
    with EmbeddedKafka(properties) as kafka, forwarding(*reversed(kafka.proxy_ports())):
        topic = kafka.create_topic("tokens", 1)
        config = {
            "bootstrap.servers": f"127.0.0.1:{kafka.proxy_ports()[1]}",
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(files["ca"]),
            "sasl.mechanism": "OAUTHBEARER",
            "oauth_cb": unsigned_token,
        }
        producer = PlainProducer(KafkaConfig.parse(config).librdkafka())
        producer.write(topic)
        with coordinator_of(config) as coordinator:
            state = producer.state(coordinator)
            assert coordinator.open_offsets([state], soon()) == [producer.first_offsets]
        with coordinator_of({**config, "oauth_cb": lambda _: ("nonsense", time.time() + 600)}) as coordinator:
            assert "authentication" in refusal(coordinator.cluster_id, soon())
