"""KIP-939's producer, call by call, on both engines and a real broker.

The tables list each call in each state of a producer: what the KIP says, and what happens here. "same" where both agree; where a
broker without the KIP cannot do what it says, the row has what happens instead, and why. The broker is a stock one, except
where a test asks for two-phase commit.

The KIP's words: ``refused`` is ``IllegalStateException`` or ``INVALID_TXN_STATE``, an `IllegalStateError` here, and changes nothing.
"""

import secrets
from functools import cache

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.engines import answered

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Fenced, IllegalStateError, TransactionAborted
from dualwrite.kafka.abandoned import Completion
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.operations import terminate
from dualwrite.protocol.lives import ProducerState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import NEVER_MS, TransactionStatus
from dualwrite.testing import EmbeddedKafka, read_committed

TWO_PHASE = "transaction.two.phase.commit.enable"
OTHER = PreparedTxnState.from_string("4711:0")
EMPTY = PreparedTxnState()

# state          call                           KIP-939   here      why
REFUSED = """
  created      | begin_transaction            | refused | same    |
  created      | produce                      | refused | same    |
  created      | send_offsets_to_transaction  | refused | same    |
  created      | prepare_transaction          | refused | same    |
  created      | commit_transaction           | refused | same    |
  created      | abort_transaction            | refused | same    |
  created      | complete_transaction(its)    | refused | same    |
  created      | complete_transaction(other)  | refused | same    |
  created      | complete_transaction(empty)  | refused | same    |
  kept         | init_transactions            | refused | same    |
  kept         | init_transactions(keep)      | refused | same    |
  kept         | begin_transaction            | refused | same    |
  kept         | produce                      | refused | same    |
  kept         | send_offsets_to_transaction  | refused | same    |
  kept         | prepare_transaction          | refused | same    |
  kept nothing | init_transactions            | refused | same    |
  kept nothing | begin_transaction            | refused | same    |
  kept nothing | init_transactions(keep)      | refused | same    |
  kept nothing | produce                      | refused | same    |
  kept nothing | send_offsets_to_transaction  | refused | same    |
  kept nothing | prepare_transaction          | refused | same    |
  kept nothing | commit_transaction           | no-op   | refused | nothing shows whether it was committed: the caller must not believe so
  ready        | init_transactions            | refused | same    |
  ready        | init_transactions(keep)      | refused | same    |
  ready        | produce                      | refused | same    |
  ready        | send_offsets_to_transaction  | refused | same    |
  ready        | prepare_transaction          | refused | same    |
  ready        | commit_transaction           | refused | same    |
  ready        | abort_transaction            | refused | same    |
  ready        | complete_transaction(its)    | refused | same    |
  ready        | complete_transaction(other)  | refused | same    |
  ready        | complete_transaction(empty)  | refused | same    |
  begun        | init_transactions            | refused | same    |
  begun        | init_transactions(keep)      | refused | same    |
  begun        | begin_transaction            | refused | same    |
  begun        | complete_transaction(its)    | refused | same    |
  begun        | complete_transaction(other)  | refused | same    |
  begun        | complete_transaction(empty)  | refused | same    |
  prepared     | init_transactions            | refused | same    |
  prepared     | init_transactions(keep)      | refused | same    |
  prepared     | begin_transaction            | refused | same    |
  prepared     | produce                      | refused | same    |
  prepared     | send_offsets_to_transaction  | refused | same    |
  prepared     | prepare_transaction          | refused | same    |
  closed       | init_transactions            | refused | same    |
  closed       | init_transactions(keep)      | refused | same    |
  closed       | begin_transaction            | refused | same    |
  closed       | produce                      | refused | same    |
  closed       | send_offsets_to_transaction  | refused | same    |
  closed       | prepare_transaction          | refused | same    |
  closed       | commit_transaction           | refused | same    |
  closed       | abort_transaction            | refused | same    |
  closed       | complete_transaction(its)    | refused | same    |
  closed       | complete_transaction(other)  | refused | same    |
  closed       | complete_transaction(empty)  | refused | same    |
"""
ALLOWED = """
  created      | init_transactions            | ready    | same   |
  created      | init_transactions(keep)      | kept     | same   |
  kept         | commit_transaction           | commits  | same   |
  kept         | abort_transaction            | aborts   | same   |
  kept         | complete_transaction(its)    | commits  | same   |
  kept         | complete_transaction(other)  | aborts   | same   |
  kept         | complete_transaction(empty)  | aborts   | same   |
  kept nothing | abort_transaction            | no-op    | same   |
  kept nothing | complete_transaction(its)    | no-op    | same   |
  kept nothing | complete_transaction(other)  | no-op    | same   |
  kept nothing | complete_transaction(empty)  | no-op    | same   |
  ready        | begin_transaction            | begun    | same   |
  begun        | produce                      | begun    | same   |
  begun        | send_offsets_to_transaction  | begun    | same   |
  begun        | prepare_transaction          | prepared | same   |
  begun        | commit_transaction           | commits  | same   |
  begun        | abort_transaction            | aborts   | same   |
  prepared     | commit_transaction           | commits  | same   |
  prepared     | abort_transaction            | aborts   | same   |
  prepared     | complete_transaction(its)    | commits  | same   |
  prepared     | complete_transaction(other)  | aborts   | same   |
  prepared     | complete_transaction(empty)  | aborts   | same   |
"""


def rows(table):
    """The rows of a table: state, call, the KIP's word, ours, the reason for a difference."""
    found = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return [(state, call, kip if here == "same" else here, why) for state, call, kip, here, why in found]


def by_state(table):
    states = dict.fromkeys(state for state, *_ in rows(table))
    return [(state, [call for one, call, *_ in rows(table) if one == state]) for state in states]


@pytest.fixture
def in_state(make_producer, dualwrite_topic):
    """Makes a producer that is in a state of the tables, and the state of its transaction."""

    def prepared(value):
        producer = make_producer()
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce(dualwrite_topic, value, partition=0)
        return producer, producer.prepare_transaction()

    def keeping():
        producer = make_producer()
        producer.init_transactions(keep_prepared_txn=True)
        return producer

    def make(state):
        if state == "prepared":
            return prepared(b"its")
        if state == "kept":
            former, its = prepared(b"its")
            former.close()
            return keeping(), its
        if state == "kept nothing":
            former, its = prepared(b"before")
            former.abort_transaction()
            former.close()
            return keeping(), its
        producer = make_producer()
        if state != "created":
            producer.init_transactions()
        if state == "begun":
            producer.begin_transaction()
            producer.produce(dualwrite_topic, b"its", partition=0)
        if state == "closed":
            producer.close()
        return producer, EMPTY

    return make


@cache
def group_of(topic):
    """The metadata of a group of which no member has joined."""
    consumer = Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": f"{topic}-group", "log_level": 0})
    found = consumer.consumer_group_metadata()
    consumer.close()
    return found


def make_call(call, producer, its, topic):
    name, _, argument = call.rstrip(")").partition("(")
    arguments = {
        "": {
            "produce": [topic, b"more"],
            "send_offsets_to_transaction": [[TopicPartition(topic, 0, 1)], group_of(topic)],
        }.get(name, []),
        "keep": [True],
        "its": [its],
        "other": [OTHER],
        "empty": [EMPTY],
    }
    return getattr(producer, name)(*arguments[argument])


def test_every_call_in_every_state_has_one_row():
    cells = [(state, call) for table in (REFUSED, ALLOWED) for state, call, *_ in rows(table)]
    states, calls = ({cell[part] for cell in cells} for part in (0, 1))
    assert (len(states), len(calls)) == (7, 11)
    assert sorted(cells) == sorted((state, call) for state in states for call in calls)


def test_every_row_that_differs_from_the_kip_says_why():
    for table in (REFUSED, ALLOWED):
        for line in table.strip().splitlines():
            *_, here, why = (cell.strip() for cell in line.split("|"))
            assert bool(why) is (here != "same"), line


@pytest.mark.parametrize(
    ("state", "calls"), by_state(REFUSED), ids=lambda found: found if isinstance(found, str) else ""
)
def test_refused(state, calls, in_state, dualwrite_topic):
    producer, its = in_state(state)
    before = producer.state, producer.prepared_state
    for call in calls:
        with pytest.raises(IllegalStateError):
            make_call(call, producer, its, dualwrite_topic)
        assert (producer.state, producer.prepared_state) == before, call


SHOWN = {
    "commits": (ProducerState.READY, [b"its"]),
    "aborts": (ProducerState.READY, []),
    "no-op": (ProducerState.READY, []),
    **{name: (ProducerState(name), None) for name in ("ready", "kept", "begun", "prepared")},
}
RESULT = {"commits": Completion.COMMITTED, "aborts": Completion.ABORTED, "no-op": Completion.NOTHING_ONGOING}


@pytest.mark.parametrize(("state", "call", "word", "why"), rows(ALLOWED))
def test_allowed(state, call, word, why, in_state, dualwrite_topic, values):
    del why
    producer, its = in_state(state)
    answer = make_call(call, producer, its, dualwrite_topic)
    then, visible = SHOWN[word]
    assert producer.state is then
    if visible is not None:  # nothing is open that the reader would wait for
        assert values() == visible
    if call.startswith("complete_transaction"):
        assert answer is RESULT[word]
    if then is ProducerState.PREPARED:
        assert PreparedTxnState.from_string(str(answer)) == answer == producer.prepared_state


# What the KIP says of brokers, rights and settings.


def test_an_ongoing_transaction_is_aborted_by_init_transactions_and_survives_one_that_keeps_it(
    in_state, make_producer, coordinator, kafka_id, values
):
    """KIP: "InitProducerId aborts the on-going transaction"; with keepPreparedTxn it does not."""
    _, its = in_state("kept")
    view = coordinator.describe([kafka_id], Deadline(30))[kafka_id]
    assert (view.status, view.producer_id, view.epoch) == (TransactionStatus.ONGOING, its.producer_id, its.epoch)
    make_producer().init_transactions()
    assert values() == []


def test_keeping_may_be_repeated_by_a_client_in_a_crash_loop(in_state, make_producer, values):
    """KIP: "InitProducerId(true) may be issued multiple times": the ongoing transaction keeps its producer id and epoch."""
    _, its = in_state("kept")
    for _ in range(3):
        last = make_producer()
        last.init_transactions(keep_prepared_txn=True)
    assert last.complete_transaction(its) is Completion.COMMITTED
    assert values() == [b"its"]


def test_keeping_fences_the_former_producer_when_it_completes_and_not_before(
    in_state, make_producer, dualwrite_topic, values
):
    """KIP: keeping raises the epoch, so that requests of former producers are fenced.

    Here: brokers refuse ``keepPreparedTxn`` (up to 4.4.0: ``UNSUPPORTED_VERSION``), and raising the epoch otherwise aborts. So the
    former producer is fenced as soon as the transaction is completed. ``DualWriter`` fences it by its row.
    """
    former, its = in_state("prepared")
    successor = make_producer()
    successor.init_transactions(keep_prepared_txn=True)
    former.commit_transaction()
    assert successor.complete_transaction(its) is Completion.NOTHING_ONGOING
    with pytest.raises((Fenced, TransactionAborted)):
        former.begin_transaction()
        former.produce(dualwrite_topic, b"late", partition=0)
        former.commit_transaction()
    assert values() == [b"its"]


# Two recoverers of one id, as in the KIP's example of a split brain: both have kept the same transaction.
# step   instance  call                    KIP-939, without raising the epoch     here
SPLIT_BRAIN = """
  1 | instance1 | init_transactions(keep) | epoch 42                              | kept
  2 | instance2 | init_transactions(keep) | epoch 42                              | kept
  3 | instance1 | commit_transaction      | epoch 43                              | ready
  4 | instance2 | commit_transaction      | taken for a repetition: epoch 43, too | fenced
  5 | instance1 | produce(A)              | sequence 1                            | begun
  6 | instance2 | produce(B)              | taken for a duplicate                 | refused
  7 | instance2 | produce(C)              | sequence 2                            | refused
  8 | instance1 | produce(D)              | taken for a duplicate                 | begun
  9 | instance2 | commit_transaction      | a mix of both instances               | fenced
 10 | instance1 | commit_transaction      | a mix of both instances               | ready
"""


def test_two_recoverers_never_write_into_one_transaction(in_state, make_producer, dualwrite_topic, values):
    """KIP: each initialisation raises the epoch, so instance1 is fenced at step 3.

    Here nobody is fenced by keeping. The instance that ends the transaction first continues, and the other one is fenced: what
    it saw when it kept the transaction is no longer there.
    """
    former, _ = in_state("prepared")
    former.close()
    instances = {"instance1": make_producer(), "instance2": make_producer()}
    for line in SPLIT_BRAIN.strip().splitlines():
        step, name, call, _, here = (cell.strip() for cell in line.split("|"))
        producer = instances[name]
        verb, _, argument = call.rstrip(")").partition("(")
        if verb == "produce":
            if here == "begun" and producer.state is ProducerState.READY:
                producer.begin_transaction()
            arguments = [dualwrite_topic, argument.encode()]
        else:
            arguments = [True] if argument == "keep" else []
        if here in {"fenced", "refused"}:
            with pytest.raises(Fenced if here == "fenced" else IllegalStateError):
                getattr(producer, verb)(*arguments)
            continue
        getattr(producer, verb)(*arguments)
        assert producer.state is ProducerState(here), step
        if verb == "produce":
            answered(producer)
    assert sorted(values()) == [b"A", b"D", b"its"]


AT_WORK = ["initialised", "begun", "prepared", "committed"]
"""How far the first of two recoverers has come with its next transaction when the second one comes."""


@pytest.mark.parametrize("at_work", AT_WORK)
def test_a_late_recoverer_ends_nothing_of_the_others(
    in_state, make_producer, dualwrite_topic, values, at_work, producer_engine
):
    """KIP: the epoch of its request is an old one, whatever it asks for."""
    calls = [
        "commit_transaction",
        "abort_transaction",
        *(f"complete_transaction({one})" for one in ("its", "other", "empty")),
    ]
    if at_work == "committed":
        calls = calls[1:]  # there is nothing to commit, nor to end
    former, its = in_state("prepared")
    former.close()
    late = {call: make_producer() for call in calls}
    first = make_producer()
    for producer in (first, *late.values()):
        producer.init_transactions(keep_prepared_txn=True)
    first.complete_transaction(its)
    if at_work != "initialised":
        first.begin_transaction()
        first.produce(dualwrite_topic, b"next", partition=0)
        answered(first)
    if at_work in {"prepared", "committed"}:
        first.prepare_transaction()
    if at_work == "committed":
        first.commit_transaction()
        call, producer = next(iter(late.items()))
        if producer_engine == "native":  # its transactions have names: this one is another owner's
            with pytest.raises(Fenced, match="another producer of this id has been at work"):
                make_call(call, producer, its, dualwrite_topic)
            first.begin_transaction()
            first.produce(dualwrite_topic, b"goes on", partition=0)
            first.commit_transaction()
            assert sorted(values()) == [b"goes on", b"its", b"next"]
            return
        make_call(call, producer, its, dualwrite_topic)  # at rest: as any new producer, it takes the id over
        with pytest.raises((Fenced, TransactionAborted)):
            first.begin_transaction()
            first.produce(dualwrite_topic, b"late", partition=0)
            first.commit_transaction()
    else:
        for call, producer in late.items():
            with pytest.raises(Fenced, match="another producer of this id has been at work") as fenced:
                make_call(call, producer, its, dualwrite_topic)
            assert fenced.value.outcome == "unknown"
            assert producer.state is ProducerState.KEPT
        if at_work == "initialised":
            first.begin_transaction()
            first.produce(dualwrite_topic, b"next", partition=0)
        first.commit_transaction()
    assert sorted(values()) == [b"its", b"next"]


@pytest.mark.parametrize(
    "producer_engine", ["native"], indirect=True
)  # librdkafka's next transaction has the same name
@pytest.mark.parametrize("call", ["commit_transaction", "complete_transaction(its)", "complete_transaction(other)"])
def test_the_request_of_a_late_recoverer_names_the_transaction_that_it_kept_and_no_other(
    in_state, make_producer, dualwrite_topic, values, coordinator, monkeypatch, call
):
    """The other one completes it between the comparison and the request, and has prepared its next one."""
    former, its = in_state("prepared")
    former.close()
    first, late = make_producer(), make_producer()
    for producer in (first, late):
        producer.init_transactions(keep_prepared_txn=True)
    end_exactly = coordinator.end_exactly

    def overtaken(*arguments, **options):
        monkeypatch.undo()
        first.complete_transaction(its)
        first.begin_transaction()
        first.produce(dualwrite_topic, b"next", partition=0)
        first.prepare_transaction()
        return end_exactly(*arguments, **options)

    monkeypatch.setattr(coordinator, "end_exactly", overtaken)
    with pytest.raises(Fenced, match="another producer of this id"):
        make_call(call, late, its, dualwrite_topic)
    first.commit_transaction()
    assert sorted(values()) == [b"its", b"next"]


def test_a_state_of_an_earlier_transaction_aborts_the_present_one(in_state, make_producer, dualwrite_topic, values):
    """KIP: {producerId, epoch} names one transaction (KIP-890).

    Here: librdkafka's transactions share an epoch, so the state holds the first offsets as well ("Rejected Alternatives" there).
    """
    former, first = in_state("prepared")
    former.commit_transaction()
    former.begin_transaction()
    former.produce(dualwrite_topic, b"second", partition=0)
    former.prepare_transaction()
    former.close()
    successor = make_producer()
    successor.init_transactions(keep_prepared_txn=True)
    assert successor.complete_transaction(first) is Completion.ABORTED
    assert values() == [b"its"]


def test_preparing_and_keeping_need_no_two_phase_commit(in_state, values):
    """KIP: keepPreparedTxn works without 2PC; prepareTransaction is refused (INVALID_TXN_STATE).

    Here: both work. The broker's timeout then limits how long a prepared transaction may wait, and a warning says so: stock
    brokers have no 2PC to ask for.
    """
    producer, its = in_state("kept")
    assert producer.complete_transaction(its) is Completion.COMMITTED
    assert producer.transaction_timeout_ms < NEVER_MS
    assert values() == [b"its"]


def test_a_prepared_state_is_text_and_the_empty_text_is_no_transaction():
    """KIP: PreparedTxnState() and PreparedTxnState(String) with toString, for the database."""
    assert str(PreparedTxnState()) == ""
    assert PreparedTxnState.from_string("") == PreparedTxnState()
    assert str(PreparedTxnState.from_string("4711:12")) == "4711:12"


def test_an_administrator_terminates_an_open_transaction_by_its_id(in_state, kafka, kafka_id, values):
    """KIP: Admin.forceTerminateTransaction, "under the covers it would just use InitProducerId"."""
    producer, _ = in_state("prepared")
    assert terminate(kafka_id, kafka=kafka).terminated == [kafka_id]
    with pytest.raises(Fenced):
        producer.commit_transaction()
    assert values() == []


@pytest.fixture
def with_two_phase(two_phase_kafka, producer_engine):
    """Makes producers that require two-phase commit, on a broker that offers it."""
    made = []

    def make(**settings):
        config = {**two_phase_kafka.admin_config(), TWO_PHASE: "true", **settings}
        made.append(
            TransactionalProducer({**config, "dualwrite.engine": producer_engine}, f"kip-{secrets.token_hex(4)}")
        )
        made[-1].init_transactions()
        return made[-1]

    yield make
    for producer in made:
        producer.close()


def test_a_transaction_with_two_phase_commit_never_expires(with_two_phase, producer_engine, two_phase_kafka):
    """KIP: "If set to true, ... transactions that this client starts never expire."

    Here: the native engine. librdkafka has no such request, and a producer that requires it is refused.
    """
    if producer_engine == "librdkafka":
        with pytest.raises(ConfigurationError, match="librdkafka cannot ask for two-phase commit"):
            with_two_phase()
        return
    producer = with_two_phase()
    assert producer.transaction_timeout_ms == NEVER_MS
    topic = two_phase_kafka.create_topic(f"kip-{secrets.token_hex(4)}", 1)
    producer.begin_transaction()
    producer.produce(topic, b"its")
    state = producer.prepare_transaction()
    assert producer.complete_transaction(state) is Completion.COMMITTED
    assert [record.value for record in read_committed(two_phase_kafka.admin_config(), topic)] == [b"its"]


def test_a_timeout_beside_two_phase_commit_is_an_error(with_two_phase):
    """KIP: "it would be an error to set transaction.timeout.ms when two.phase.commit.enable is set"."""
    with pytest.raises(ConfigurationError, match="no effect"):
        with_two_phase(**{"transaction.timeout.ms": "60000"})


def test_brokers_without_two_phase_commit_refuse_a_client_that_requires_it(make_producer, producer_engine):
    """KIP: TRANSACTIONAL_ID_AUTHORIZATION_FAILED where it is disabled. Stock brokers do not even know the request.

    The right to it is tested in ``integration/test_native_time_limit.py``.
    """
    said = "unstable.api.versions.enable=true" if producer_engine == "native" else "librdkafka cannot"
    with pytest.raises(ConfigurationError, match=said):
        make_producer({TWO_PHASE: "true"}).init_transactions()


@pytest.mark.thorough
def test_brokers_that_know_two_phase_commit_and_have_it_switched_off_refuse_it(producer_engine):
    """KIP: TRANSACTIONAL_ID_AUTHORIZATION_FAILED. A producer that does not require it goes on without."""
    said = f"{TWO_PHASE}=true on the brokers" if producer_engine == "native" else "librdkafka cannot"
    with EmbeddedKafka({"unstable.api.versions.enable": "true", TWO_PHASE: "false"}) as kafka:
        for settings, refused in ({TWO_PHASE: "true"}, said), ({}, None):
            producer = TransactionalProducer(
                {**kafka.client_config(), **settings, "dualwrite.engine": producer_engine},
                f"kip-{secrets.token_hex(4)}",
            )
            if refused is None:
                producer.init_transactions()
                assert producer.transaction_timeout_ms < NEVER_MS
            else:
                with pytest.raises(ConfigurationError, match=refused):
                    producer.init_transactions()
            producer.close()
