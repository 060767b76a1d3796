"""Fixtures that all tests share. The servers themselves come from the library's own pytest plugin."""

from __future__ import annotations

import gc
import os
import secrets
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from harness import cheap_brokers, last_words
from harness.collected import COLLECTED
from harness.databases import administer, close_administrators, copy_postgres, prepare_mariadb
from harness.patience import patient
from harness.planting import plant_from_environment
from harness.shared_servers import KAFKA, MARIADB, STEADY, Shared, plugin, shared_kafka, shared_mariadb
from harness.spent import Spent
from harness.temporary import use_memory
from harness.topics import Topics
from harness.users import USERS
from hypothesis import settings
from sqlalchemy import create_engine, make_url

from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.migrations import upgrade
from dualwrite.testing import EmbeddedKafka, EmbeddedMariaDB, EmbeddedPostgres
from dualwrite.testing.servers.databases import MARIADB_SERVER_VARIABLE, installed_mariadb, is_fetched

MARKS = {
    "dualwrite_kafka": pytest.mark.kafka,
    "dualwrite_postgres": pytest.mark.postgresql,
    "dualwrite_mariadb": pytest.mark.mariadb,
    "spark": pytest.mark.spark,
}
TESTS = Path(__file__).parent
COMPUTING = (TESTS / "unit", TESTS / "proof" / "model", TESTS / "proof" / "search")
"""Folders of tests that need no server, or little of it."""
BROKERS = ["mortal_kafka", "guarded_kafka", "hasty_kafka", "two_phase_kafka", "cluster"]
"""Fixtures of servers that the tests of several modules share, which come one after the other."""
SERVERS = [*BROKERS, "dualwrite_zookeeper"]
SHARED = pytest.StashKey[dict[str, Shared]]()
THOROUGH = pytest.StashKey[int]()
"""How many tests this run leaves to `--thorough`."""
NOTES = pytest.StashKey[str | None]()
"""Where this run notes its last words."""
BEGUN = pytest.StashKey[bool]()
"""Whether this worker has begun its first test."""


# A busy machine is no failure.
settings.register_profile("untimed", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)  # of `make quick`


def pytest_configure(config: pytest.Config) -> None:
    # Taken from the environment: runs of pytest that tests start have nothing to note there.
    config.stash[NOTES] = os.environ.pop(last_words.VARIABLE, None)
    use_memory()
    # All servers are on this machine, and no certificate of theirs comes from an authority. PyMySQL and others would read those of
    # the machine for each connection: 18 ms.
    ssl.SSLContext.load_default_certs = lambda *_: None  # type: ignore[method-assign]
    gc.disable()  # until all is collected: next to nothing of it is garbage
    if file := config.getoption("--spent"):
        config.pluginmanager.register(Spent(file), "spent")
    cheap_brokers.use()
    told = getattr(config, "workerinput", {})
    if MARIADB in told:
        # Registered after the library's own plugin, so that its fixtures take the place of that plugin's.
        config.pluginmanager.register(plugin(told), "the servers of all workers")
    profile = "thorough" if config.getoption("--thorough") else "untimed"
    settings.load_profile(config.getoption("--hypothesis-profile") or profile)
    # Any test can be run on a mistaken product: DUALWRITE_MISTAKE=name python -m pytest ...
    plant_from_environment()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker, before it starts, where it finds the servers that all workers share."""
    stash = node.config.stash
    if SHARED not in stash:
        stash[SHARED] = {MARIADB: shared_mariadb()}
        if not os.environ.get("DUALWRITE_TEST_KAFKA"):
            stash[SHARED][KAFKA] = shared_kafka(len(node.config.getoption("tx")))
    node.workerinput.update({name: shared.place for name, shared in stash[SHARED].items()})


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """Escape lone surrogates, which tests log on purpose: a worker could not send its report, and the whole run would end."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(data, dict):
        return {key: _encodable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(map(_encodable, data))
    return data


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear from a worker what it has left out: all of them collect the same."""
    node.config.stash[THOROUGH] = getattr(node, "workeroutput", {}).get("thorough", 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["thorough"] = session.config.stash.get(THOROUGH, 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    notes = config.stash[NOTES]
    if notes:
        found = terminalreporter.stats
        failed = [report.nodeid for report in (*found.get("failed", ()), *found.get("error", ()))]
        left_out = Counter(map(last_words.reason, found.get("skipped", ())))
        run = last_words.Run(len(found.get("passed", ())), sorted(set(failed)), left_out, config.stash.get(THOROUGH, 0))
        last_words.note(run, Path(notes))


def pytest_unconfigure(config: pytest.Config) -> None:
    close_administrators()
    for shared in config.stash.get(SHARED, {}).values():
        shared.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run what `make test` leaves out for its time")
    parser.addoption("--spent", type=Path, metavar="FILE", help="keep there where the processor time goes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[THOROUGH] = len(left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    # A test that uses a server says so by its fixture, and needs no second mark.
    for item in items:
        for fixture, mark in MARKS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
    items[:] = _shared_out(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_collection_finish() -> None:
    # What was imported and collected stays: no collection of garbage need look through it. To look through it once, for the little
    # that is garbage, would take 0.7 s of each worker.
    gc.freeze()
    # Of what tests make, little is garbage that only a collection finds: to look for it at every 700th object takes up to a tenth of
    # the time of a test that only computes.
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


@pytest.fixture
def engine_of():
    """Makes engines that are disposed of after the test."""
    with ExitStack() as later:

        def make(url, **options):
            made = create_engine(url, **options)
            later.callback(made.dispose)
            return made

        yield make


@pytest.fixture
def collects_itself() -> Iterator[None]:
    """Only the test collects garbage. If another thread was collecting just then, its own call would do nothing."""
    gc.disable()
    yield
    gc.enable()


def _shared_out(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Put the tests in the order in which ``--dist worksteal`` shares them out: each worker begins with as many of the list.

    Two workers begin with the tests that share Spark's session, so that no third must start one at the end (one would still be
    at them when all others are done); another with the longest ones and those that share a broker: so few workers start these
    servers, and none begins a long test when all others are done. The last one begins with what only computes, and fills the
    pauses of the others, which begin with tests that wait for servers. What only computes also comes last for all of them, and
    is what they steal.
    """
    in_session, longest, waiting, computing = [], [], [], []
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            in_session.append(item)
        elif item.get_closest_marker("longest") is not None or not all(_shared_servers(item)):
            longest.append(item)
        elif _only_computes(item.path):
            computing.append(item)
        else:
            waiting.append(item)
    longest.sort(key=lambda item: (item.get_closest_marker("longest") is None, *_shared_servers(item)))
    begins = [
        *_dealt(in_session, 2 if workers > 3 else 1),
        longest,
        *_dealt(waiting, max(1, workers - (4 if workers > 4 else 3))),
    ]
    found: list[pytest.Item] = []
    end = 0
    for number, begin in enumerate(begins):
        # As xdist divides them: off by one, a worker would begin with the last module's first test, and its servers.
        end += (len(items) - end) // max(1, workers - number)
        taken = max(0, end - len(found) - len(begin))
        found += begin + computing[:taken]
        del computing[:taken]
    return found + computing


@cache
def _only_computes(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in COMPUTING)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    is_first = BEGUN not in item.config.stash
    item.config.stash[BEGUN] = True
    if is_first and _only_computes(item.path) and hasattr(item.config, "workerinput"):
        os.nice(5)  # takes what the others leave: their tests have time limits


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Stop a broker that the next test does not share: an idle one takes processor time, too."""
    yield
    if nextitem is None:
        return  # the session's fixtures have ended
    spent = item.config.pluginmanager.get_plugin("spent")
    for name in set(BROKERS) - set(getattr(nextitem, "fixturenames", ())):
        for broker in item.session._fixturemanager.getfixturedefs(name, item) or ():
            if broker.scope == "session" and broker.cached_result is not None:
                with spent.apart(name) if spent else nullcontext():
                    broker.finish(item._request)  # type: ignore[attr-defined]


def _dealt(items: list[pytest.Item], hands: int) -> list[list[pytest.Item]]:
    """Give the modules out by turns."""
    found: list[list[pytest.Item]] = [[] for _ in range(hands)]
    for number, (_, module) in enumerate(groupby(items, key=lambda item: item.path)):
        found[number % hands] += module
    return found


def _shared_servers(item: pytest.Item) -> list[bool]:
    fixtures = getattr(item, "fixturenames", ())
    return [server not in fixtures for server in SERVERS]


@pytest.fixture(scope="session")
def dualwrite_mariadb(request: pytest.FixtureRequest) -> Iterator[EmbeddedMariaDB]:
    """The server that all workers share; tests that need one of their own make it."""
    if not (is_fetched() or installed_mariadb("mariadbd") or os.environ.get(MARIADB_SERVER_VARIABLE)):
        pytest.skip("MariaDB is not installed, and Maven serves it for Linux on x86-64 only")
    if hasattr(request.config, "workerinput"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARIADB_SERVER_VARIABLE, request.getfixturevalue("shared_mariadb_url"))
            server = EmbeddedMariaDB()
    else:
        server = EmbeddedMariaDB()
    with server:
        yield server


@pytest.fixture(scope="session")
def topics(dualwrite_kafka: EmbeddedKafka) -> Iterator[Topics]:
    with closing(Topics(dualwrite_kafka)) as topics:
        yield topics


@pytest.fixture
def dualwrite_topic(topics: Topics) -> Iterator[str]:
    """As the library's own plugin has it, but made and deleted with the topics of other tests."""
    name = topics.take()
    yield name
    topics.give_back(name)


@pytest.fixture
def coordinator(kafka):
    with closing(KafkaCoordinator(KafkaConfig.parse(kafka))) as coordinator:
        yield coordinator


@pytest.fixture
def kafka_id():
    """A new transactional id."""
    return f"producer-{secrets.token_hex(6)}"


@pytest.fixture
def through_librdkafka(monkeypatch):
    """Writers and producers of this test use librdkafka unless they choose another engine."""
    monkeypatch.setenv("DUALWRITE_PRODUCER_ENGINE", "librdkafka")


@pytest.fixture
def producer_engine():
    """The engine of the producers that a test makes."""
    return "auto"


@pytest.fixture
def kafka(dualwrite_kafka, producer_engine):
    return patient(dualwrite_kafka.client_config(), None if producer_engine == "auto" else producer_engine)


@pytest.fixture
def make_producer(kafka, kafka_id, coordinator, producer_engine):
    """Makes producers of ``kafka_id``, which are closed after the test."""
    with ExitStack() as closed_later:

        def make(settings=None, **options):
            options.setdefault("coordinator", coordinator)
            options.setdefault("engine", producer_engine)
            return closed_later.enter_context(LaneProducer({**kafka, **(settings or {})}, kafka_id, **options))

        yield make


@pytest.fixture
def ready(make_producer):
    """Makes producers of ``kafka_id`` that are initialised."""

    def make(settings=None, **options):
        producer = make_producer(settings, **options)
        producer.init_transactions()
        return producer

    return make


@pytest.fixture(scope="session")
def mortal_kafka() -> Iterator[EmbeddedKafka]:
    """A broker that a test may stop, kill or suspend, if it starts it again. It allows any time-out, and compacts at once."""
    properties = {"transaction.max.timeout.ms": "2147483647", "log.cleaner.backoff.ms": "100"}
    with EmbeddedKafka(properties) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def guarded_kafka() -> Iterator[EmbeddedKafka]:
    """A broker with users, who may do what a test allows them. Each module has users of its own."""
    with EmbeddedKafka(STEADY, users=USERS) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def two_phase_kafka() -> Iterator[EmbeddedKafka]:
    """A broker with KIP-939's two-phase commit, with users, and with its default ``transaction.max.timeout.ms`` of 15 minutes."""
    properties = {**STEADY, "unstable.api.versions.enable": "true", "transaction.two.phase.commit.enable": "true"}
    with EmbeddedKafka(properties, users=USERS) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def hasty_kafka() -> Iterator[EmbeddedKafka]:
    """A broker that looks for timed-out transactions and forgotten ids all the time."""
    properties = {
        **STEADY,
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "50",
        "transactional.id.expiration.ms": "4000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
        "producer.id.expiration.ms": "4000",
        "producer.id.expiration.check.interval.ms": "100",
    }
    with EmbeddedKafka(properties) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def spark():
    """One Spark session for all tests; a task may fail twice in it."""
    from harness.spark import session

    found = session()
    yield found
    found.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """One driver on a cluster of two executors, a process of its own, for all tests."""
    from harness.spark_cluster import Cluster

    with Cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="session")
def migrated_template(dualwrite_postgres: EmbeddedPostgres) -> Iterator[str]:
    """The name of a migrated database, to be copied: the migrations take longer than a copy of what they make."""
    name = f"migrated_{secrets.token_hex(6)}"
    migrated = create_engine(dualwrite_postgres.create_database(name))
    with migrated.connect() as connection:
        upgrade(connection)
    migrated.dispose()
    yield name
    dualwrite_postgres.drop_database(name)


@pytest.fixture
def migrated_database(dualwrite_postgres: EmbeddedPostgres, migrated_template: str) -> Iterator[str]:
    """The SQLAlchemy URL of a new, migrated database; dropped after the test."""
    url = dualwrite_postgres.url_of(f"dualwrite_{secrets.token_hex(6)}")
    copy_postgres(url, migrated_template)
    yield url
    administer(url, f"DROP DATABASE IF EXISTS {make_url(url).database} WITH (FORCE)")


@pytest.fixture(scope="session")
def mariadb_of_session(dualwrite_mariadb: EmbeddedMariaDB) -> Iterator[str]:
    """A database that tests use one after the other: its tables take longer to make than to empty."""
    url = dualwrite_mariadb.create_database()
    yield url
    dualwrite_mariadb.drop_database(make_url(url).database or "")


@pytest.fixture
def migrated_mariadb(mariadb_of_session: str) -> str:
    """The SQLAlchemy URL of a migrated database of MariaDB without rows."""
    prepare_mariadb(mariadb_of_session, own_tables=False).dispose()
    # Rows are numbered from 0: MariaDB would give such a row the next free number.
    return f"{mariadb_of_session}?init_command=SET+sql_mode%3Dconcat(@@sql_mode,%27,NO_AUTO_VALUE_ON_ZERO%27)"


@pytest.fixture
def numbers(request, dualwrite_kafka, dualwrite_topic):
    """A sink for numbered rows, in a migrated database: PostgreSQL's, unless a test asks for "mariadb".

    "librdkafka" asks for that engine of producers, "mortal" for a topic on the broker that a test may kill.
    """
    from harness.spark import SparkCase

    kind = getattr(request, "param", "postgresql")
    url = request.getfixturevalue("migrated_mariadb" if kind == "mariadb" else "migrated_database")
    engine = "librdkafka" if kind == "librdkafka" else None
    broker, topic = dualwrite_kafka, dualwrite_topic
    if kind == "mortal":
        broker = request.getfixturevalue("mortal_kafka")
        broker.create_topic(topic, 2)
    return SparkCase(patient(broker.client_config(), engine), url, topic, producer_engine=engine)
