"""The list of all transactional ids: complete, whatever partitions of the coordinators' topic do meanwhile."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kafka.protocol.admin.transactions import ListTransactionsRequest

from dualwrite import clock as deadlines
from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka import coordinator, listing
from dualwrite.kafka.cluster import Leader, internal_partition
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.error_codes import Code
from dualwrite.kafka.opening_messages import DescribedTopic, DescribeTransactions

NODES, PARTITIONS = (1, 2), 3
TOPIC = "__transaction_state"


@dataclasses.dataclass
class Broker:
    """One broker: what it knows of the leaders, and the transactional ids of the partitions that it has loaded."""

    leaders: dict
    loaded: dict
    is_loading: bool = False


class Cluster:
    """Brokers with the coordinators' topic; stands in for :class:`~dualwrite.kafka.brokers.Brokers`.

    Before each request one of the events happens, in turn.
    """

    def __init__(self, events=(), *, error=Code.NONE, probe_error=None):
        self.epoch = 5
        self.leaders = {number: Leader(NODES[number % len(NODES)], self.epoch) for number in range(PARTITIONS)}
        self.log = {number: {f"p{number}"} for number in self.leaders}
        self.brokers = {node: Broker(dict(self.leaders), {}) for node in NODES}
        for number, leader in self.leaders.items():
            self.load(leader.node, number)
        self.events = list(events)
        self.topic_error, self.probe_error = error, probe_error
        self.asked = []

    # ---- events

    def elect(self, node, number):
        """The controller gives a partition another leader, or none."""
        self.epoch += 1
        self.leaders[number] = node and Leader(node, self.epoch)

    def learn(self, node, _number=None):
        """A broker learns the leaders, and drops what it does not lead; it begins to load later."""
        broker = self.brokers[node]
        broker.leaders = dict(self.leaders)
        broker.loaded = {number: ids for number, ids in broker.loaded.items() if self.leads(node, number)}

    def leads(self, node, number):
        leader = self.brokers[node].leaders[number]
        return leader is not None and leader.node == node

    def load(self, node, number):
        """A broker loads a partition of which it knows that it is the leader."""
        if self.leads(node, number) and self.brokers[node].leaders[number] == self.leaders[number]:
            self.brokers[node].loaded[number] = self.log[number]

    def begin(self, node, number):
        """An application begins a transaction under a new id."""
        if number in self.brokers[node].loaded and self.brokers[node].leaders[number] == self.leaders[number]:
            self.log[number] = self.brokers[node].loaded[number] = {
                *self.log[number],
                f"p{number}.{len(self.log[number])}",
            }

    def settle(self):
        """Everything comes to rest."""
        for number, leader in list(self.leaders.items()):
            if leader is None:
                self.elect(1, number)
        for node in NODES:
            self.learn(node)
            for number in self.leaders:
                self.load(node, number)

    # ---- the brokers' answers

    def __call__(self, *_, **__):
        return self

    def nodes(self, _deadline):
        return list(NODES)

    def metadata(self, topics, _deadline):
        self.resume()
        return self.described(NODES[-1], topics)

    def exchange(self, requests, _deadline):
        return [self.answer(node, request) for node, request in requests]

    def answer(self, node, request):
        self.asked.append((node, type(request)))
        self.resume()
        if isinstance(request, ListTransactionsRequest):
            return self.listed(node)
        if isinstance(request, DescribeTransactions):
            return [self.probed(node, one) for one in request.transactional_ids]
        return self.described(node, [TOPIC])

    def resume(self):
        if self.events:
            self.events.pop(0)(self)

    def listed(self, node):
        broker = self.brokers[node]
        ids = [one for number in broker.loaded for one in broker.loaded[number]]
        states = [SimpleNamespace(transactional_id=one, producer_id=hash(one)) for one in ids]
        error = Code.COORDINATOR_LOAD_IN_PROGRESS if broker.is_loading else Code.NONE
        return SimpleNamespace(error_code=error, transaction_states=[] if broker.is_loading else states)

    def probed(self, node, kafka_id):
        known = internal_partition(kafka_id, PARTITIONS) in self.brokers[node].loaded
        found = Code.TRANSACTIONAL_ID_NOT_FOUND if known else Code.NOT_COORDINATOR
        return SimpleNamespace(transactional_id=kafka_id, error_code=self.probe_error or found)

    def described(self, node, topics):
        partitions = [
            SimpleNamespace(
                partition_index=number,
                leader_id=-1 if leader is None else leader.node,
                leader_epoch=-1 if leader is None else leader.epoch,
            )
            for number, leader in self.brokers[node].leaders.items()
        ]
        topic = DescribedTopic(int(self.topic_error), TOPIC, bytes(16), partitions, 0)
        return SimpleNamespace(
            topics=[topic] if topics else [], brokers=[SimpleNamespace(node_id=each) for each in NODES], cluster_id="c"
        )


@pytest.fixture
def ids_in(monkeypatch):
    def list_ids(cluster, timeout_s=30.0):
        with monkeypatch.context() as patch:
            patch.setattr(coordinator, "Brokers", cluster)
            return KafkaCoordinator(KafkaConfig.parse({"bootstrap.servers": "any:1"})).list_ids(
                "p", Deadline(timeout_s)
            )

    return list_ids


def no_event(_cluster):
    """Nothing happens before this request."""


def test_all_ids_are_listed_with_one_look_at_the_leaders_and_four_requests_to_each_broker(ids_in, caplog):
    cluster = Cluster()
    assert ids_in(cluster) == ["p0", "p1", "p2"]
    assert len(cluster.asked) == 4 * len(NODES)
    assert not caplog.records


@pytest.mark.parametrize("moment", [*range(11), 20])
def test_a_partition_that_its_leader_has_not_begun_to_load_is_waited_for(ids_in, moment):
    cluster = Cluster([no_event] * moment + [lambda cluster: cluster.load(2, 1)])
    del cluster.brokers[2].loaded[1]
    assert ids_in(cluster) == ["p0", "p1", "p2"]


@pytest.mark.parametrize("moment", range(11))
def test_a_partition_that_its_leader_drops_before_any_broker_names_another_is_waited_for(ids_in, moment):
    """So with ZooKeeper: a broker gets the order to resign apart from the names of the leaders."""

    def order(cluster):
        del cluster.brokers[2].loaded[1]

    def move(cluster):
        cluster.elect(1, 1)
        for node in NODES:
            cluster.learn(node)
        cluster.load(1, 1)

    assert ids_in(Cluster([no_event] * moment + [order] + [no_event] * 10 + [move])) == ["p0", "p1", "p2"]


def test_a_partition_that_is_being_loaded_is_waited_for(ids_in):
    cluster = Cluster([no_event] * 20 + [lambda cluster: setattr(cluster.brokers[1], "is_loading", False)])
    cluster.brokers[1].is_loading = True
    assert ids_in(cluster) == ["p0", "p1", "p2"]


@pytest.mark.parametrize("moment", range(11))
def test_a_partition_that_moves_to_a_broker_which_was_listed_before_is_listed(ids_in, moment):
    def move(cluster):
        cluster.elect(1, 1)
        for node in NODES:
            cluster.learn(node)
        cluster.load(1, 1)

    assert ids_in(Cluster([no_event] * (moment + 1) + [move])) == ["p0", "p1", "p2"]


@pytest.mark.parametrize("moment", range(11))
def test_a_partition_that_is_away_while_its_leader_is_listed_is_listed(ids_in, moment):
    def away(cluster):
        cluster.elect(1, 1)
        for node in NODES:
            cluster.learn(node)

    def back(cluster):
        cluster.elect(2, 1)
        for node in NODES:
            cluster.learn(node)
        cluster.load(2, 1)

    assert ids_in(Cluster([no_event] * (moment + 1) + [away, back])) == ["p0", "p1", "p2"]


def test_a_broker_that_does_not_know_yet_that_it_leads_no_more_is_not_believed(ids_in):
    cluster = Cluster([no_event] * 20 + [lambda cluster: cluster.learn(2)])
    cluster.elect(1, 1)
    cluster.learn(1)
    cluster.load(1, 1)
    cluster.begin(1, 1)
    assert ids_in(cluster) == ["p0", "p1", "p1.1", "p2"]


def test_ids_without_a_leader_are_unavailable(ids_in):
    cluster = Cluster()
    cluster.elect(None, 1)
    for node in NODES:
        cluster.learn(node)
    with pytest.raises(Unavailable, match="partition 1 of __transaction_state has no leader"):
        ids_in(cluster, 0.05)


def test_a_cluster_that_never_had_a_transaction_has_no_ids(ids_in, caplog):
    cluster = Cluster(error=Code.UNKNOWN_TOPIC_OR_PARTITION)
    for broker in cluster.brokers.values():
        broker.loaded.clear()
    assert ids_in(cluster) == []
    assert not caplog.records


@pytest.mark.parametrize(
    "refused",
    [
        {"error": Code.TOPIC_AUTHORIZATION_FAILED},
        {"probe_error": Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED},
        {"error": Code.UNKNOWN_TOPIC_OR_PARTITION},
    ],
    ids=["the topic", "the probes", "a service that hides the topic"],
)
def test_without_evidence_the_list_is_taken_as_it_is_and_a_warning_names_the_rights(ids_in, caplog, refused):
    cluster = Cluster(**refused)
    del cluster.brokers[2].loaded[1]
    assert ids_in(cluster) == ["p0", "p2"]
    [warning] = caplog.messages
    assert TOPIC in warning
    assert listing.PROBES in warning


def happening(cluster, events):
    for name, node, number in events:
        getattr(cluster, name)(node, number)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("elect"), st.sampled_from([*NODES, None]), st.integers(0, PARTITIONS - 1)),
        st.tuples(st.sampled_from(["learn", "load", "begin"]), st.sampled_from(NODES), st.integers(0, PARTITIONS - 1)),
    ),
    max_size=4,
)
AWAY_AND_BACK = [
    [("elect", 1, 1), ("learn", 2, 1), ("learn", 1, 1), ("load", 1, 1)],
    [("elect", 2, 1), ("learn", 1, 1), ("learn", 2, 1), ("load", 2, 1)],
]


@given(earlier=st.lists(EVENTS, max_size=5), during=st.lists(EVENTS, max_size=20))
@example(earlier=[], during=AWAY_AND_BACK)
@example(earlier=[], during=[[], *AWAY_AND_BACK])
def test_no_id_is_missing_however_partitions_move(earlier, during):
    cluster = Cluster()
    for events in earlier:
        happening(cluster, events)
    known = {one for ids in cluster.log.values() for one in ids}
    cluster.events = [lambda cluster, events=events: happening(cluster, events) for events in during]
    cluster.events += [no_event] * 8 + [Cluster.settle]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlines, "_sleep", lambda _: None)
        patch.setattr(coordinator, "Brokers", cluster)
        found = KafkaCoordinator(KafkaConfig.parse({"bootstrap.servers": "any:1"})).list_ids("p", Deadline(30))
    assert known <= set(found)


def test_the_ids_of_producers_come_from_a_complete_list():
    cluster = Cluster([no_event] * 20 + [lambda cluster: cluster.load(2, 1)])
    del cluster.brokers[2].loaded[1]
    assert listing.ids_of(cluster, [hash("p1")], Deadline(30))[hash("p1")] == "p1"


@pytest.mark.parametrize("count", [1, 50, 200])
def test_each_partition_has_a_probe(count):
    probes = listing._probe_ids(count)
    assert [internal_partition(probe, count) for probe in probes] == list(range(count))
    assert all(probe.startswith(listing.PROBES) for probe in probes)
