"""The simulator's requests, sent to a real broker: Kafka's own messages, at the versions that a client sends.

Producer ids are the broker's affair: a `Names` translates those of the simulator into the real ones and back, as they are
given out. So the answers of both can be compared for equality.
"""

from __future__ import annotations

import time

from kafka.protocol.admin.topics import DeleteRecordsRequest
from kafka.protocol.admin.transactions import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetFetchRequest
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
    WriteTxnMarkersRequest,
)
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder
from simulator import requests as sim
from simulator.requests import ErrorCode
from simulator.state import OFFSETS_TOPIC

from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.messages import Group, Offset, TxnOffsetCommit

NOT_YET = {6, 14, 15, 16}  # the leader or coordinator is elsewhere, loading, or not there yet
UNKNOWN_IDS = 1_000_000_000  # real producer ids are far below
NEWEST = {"init": 5, "add": 3, "offsets": 3, "end": 4, "produce": 10}
LIBRDKAFKA = {"init": 4, "add": 0, "offsets": 0, "end": 1, "produce": 10}
V2 = {
    "init": 6,
    "produce": 12,
    "end": 5,
    "markers": 2,
}  # of transactions of version 2; consumed offsets: what is offered


class Names:
    """Maps the names that one sequence uses to those on the real broker."""

    def __init__(self, prefix, topic, topic_id, partitions):
        self.prefix = prefix
        self.topic = topic
        self.topic_id = topic_id
        self.partitions = partitions  # real numbers, by those of the sequence
        self.real_ids = {}
        self.simulated_ids = {}
        self.unnamed = None  # the real producer id that was given out last
        self.described = {}  # the real producer id that was shown last, by transactional id

    def kafka_id(self, name):
        return name and f"{self.prefix}.{name}"

    def learned(self, simulated, real):
        """The real answer with a producer id, with a new one named as the simulator names its own."""
        if real.producer_id != UNKNOWN_IDS or simulated.producer_id in self.real_ids:
            return real
        self.real_ids[simulated.producer_id] = self.unnamed
        self.simulated_ids[self.unnamed] = simulated.producer_id
        return real._replace(producer_id=simulated.producer_id)

    def shown(self, transactional_id, simulated):
        """Name the producer id of a transactional id, if it is a new one that no answer gave out."""
        real = self.described[transactional_id]
        if simulated not in self.real_ids and real not in self.simulated_ids:
            self.real_ids[simulated] = real
            self.simulated_ids[real] = simulated

    def producer_id(self, simulated):
        return simulated if simulated < 0 else self.real_ids.get(simulated, UNKNOWN_IDS + simulated)

    def simulated_id(self, real):
        return real if real < 0 else self.simulated_ids.get(real, UNKNOWN_IDS)

    def place(self, topic_partition):
        topic, number = topic_partition
        if topic == "t":
            return self.topic, self.partitions[number]
        return f"{self.prefix}-{topic}", number

    def simulated_place(self, topic, number):
        if topic == self.topic:
            return "t", self.partitions.index(number)
        if topic == OFFSETS_TOPIC:  # depends on the group's real name
            return OFFSETS_TOPIC, 0
        return topic.removeprefix(f"{self.prefix}-"), number


class RawBroker:
    """One real broker, asked with requests as they are."""

    def __init__(self, config, versions=NEWEST):
        self._brokers = Brokers(KafkaConfig.parse(config))
        self._versions = versions
        self._node = self._brokers.nodes(Deadline(60))[0]

    def close(self):
        self._brokers.close()

    def send(self, asked):
        """Send (names, request) pairs side by side, each until it is answered, and return the simulator's answers."""
        deadline = Deadline(120)
        answers = [None] * len(asked)
        pending = list(range(len(asked)))
        while pending:
            assert not deadline.expired, [asked[index] for index in pending]
            messages = [(self._node, self._message(*asked[index])) for index in pending]
            for index, response in zip(pending, self._brokers.exchange(messages, deadline, spread=True), strict=True):
                if isinstance(response, Exception):
                    raise response
                names, request = asked[index]
                answers[index] = _READ[type(request)](names, request, response, self._versions)
            again = [index for index in pending if answers[index] is None]
            if again:
                self._find_coordinators([asked[index] for index in again])
                time.sleep(0.05)
            pending = again
        return answers

    def _find_coordinators(self, asked):
        # Makes the broker create and load what its coordinators need.
        for names, request in asked:
            key, kind = getattr(request, "group_id", None), 0
            if key is None or isinstance(request, sim.AddOffsetsToTxn):
                key, kind = getattr(request, "transactional_id", None), 1
            if key is None:
                continue
            self._brokers.lookup(
                lambda key=key, kind=kind, names=names: FindCoordinatorRequest(
                    key_type=kind, coordinator_keys=[names.kafka_id(key)], min_version=4
                ),
                Deadline(60),
            )

    def delete_records(self, names, place, before):
        """Delete what lies before an offset."""
        topic, number = names.place(place)
        kind = DeleteRecordsRequest.DeleteRecordsTopic
        partition = kind.DeleteRecordsPartition(partition_index=number, offset=before)
        request = DeleteRecordsRequest(topics=[kind(name=topic, partitions=[partition])], timeout_ms=30_000)
        [response] = self._brokers.exchange([(self._node, request)], Deadline(60))
        assert response.topics[0].partitions[0].error_code == 0, response

    def metadata(self, topic):
        return self._brokers.metadata((topic,), Deadline(60)).topics[0]

    def _message(self, names, request):
        return _WRITE[type(request)](names, request, self._versions)


def _records(request, producer_id):
    builder = MemoryRecordsBuilder(
        magic=2,
        compression_type=0,
        batch_size=1_000_000,
        transactional=request.transactional_id is not None,
        producer_id=producer_id,
        producer_epoch=request.producer_epoch,
        base_sequence=request.base_sequence,
    )
    for value in request.values:
        # An old timestamp would make the broker begin a new segment with each batch.
        builder.append(timestamp=int(time.time() * 1000), key=None, value=str(value).encode())
    builder.close()
    return bytes(builder.buffer())


def _by_topic(places):
    grouped = {}
    for topic, number in places:
        grouped.setdefault(topic, []).append(number)
    return grouped.items()


def _version(request, key, otherwise):
    return _exactly(V2[key]) if request.transaction_version > 1 else {"max_version": otherwise}


def _exactly(version):
    return {"min_version": version, "max_version": version}


def _init(names, request, versions):
    two_phase = {"enable2_pc": True, "keep_prepared_txn": False, **_exactly(V2["init"])} if request.enable_2pc else {}
    return InitProducerIdRequest(
        **(two_phase or {"max_version": versions["init"]}),
        transactional_id=names.kafka_id(request.transactional_id),
        transaction_timeout_ms=request.transaction_timeout_ms,
        producer_id=names.producer_id(request.producer_id),
        producer_epoch=request.producer_epoch,
    )


def _add(names, request, versions):
    topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=names.kafka_id(request.transactional_id),
        v3_and_below_producer_id=names.producer_id(request.producer_id),
        v3_and_below_producer_epoch=request.producer_epoch,
        v3_and_below_topics=[
            topic(name=name, partitions=numbers) for name, numbers in _by_topic(map(names.place, request.partitions))
        ],
        max_version=versions["add"],
    )


def _add_offsets(names, request, versions):
    return AddOffsetsToTxnRequest(
        transactional_id=names.kafka_id(request.transactional_id),
        producer_id=names.producer_id(request.producer_id),
        producer_epoch=request.producer_epoch,
        group_id=names.kafka_id(request.group_id),
        max_version=versions["offsets"],
    )


def _offset_commit(names, request, _):
    if request.transaction_version > 1:
        # kafka-python knows no offsets by topic id, which newer brokers take.
        return TxnOffsetCommit(
            names.kafka_id(request.transactional_id),
            (names.producer_id(request.producer_id), request.producer_epoch),
            Group(names.kafka_id(request.group_id)),
            {names.place(place): Offset(offset) for place, offset in request.offsets},
            {names.topic: names.topic_id},
        )
    topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    topics = {}
    for place, offset in request.offsets:
        name, number = names.place(place)
        partition = topic.TxnOffsetCommitRequestPartition(
            partition_index=number, committed_offset=offset, committed_leader_epoch=-1, committed_metadata=None
        )
        topics.setdefault(name, []).append(partition)
    return TxnOffsetCommitRequest(
        transactional_id=names.kafka_id(request.transactional_id),
        group_id=names.kafka_id(request.group_id),
        producer_id=names.producer_id(request.producer_id),
        producer_epoch=request.producer_epoch,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=[topic(name=name, partitions=partitions) for name, partitions in topics.items()],
        max_version=3,
    )


def _produce(names, request, versions):
    topic, number = names.place(request.partition)
    data = ProduceRequest.TopicProduceData
    return ProduceRequest(
        transactional_id=names.kafka_id(request.transactional_id),
        acks=-1,
        timeout_ms=30_000,
        topic_data=[
            data(
                name=topic,
                partition_data=[
                    data.PartitionProduceData(
                        index=number, records=_records(request, names.producer_id(request.producer_id))
                    )
                ],
            )
        ],
        **_version(request, "produce", versions["produce"]),
    )


def _end(names, request, versions):
    return EndTxnRequest(
        transactional_id=names.kafka_id(request.transactional_id),
        producer_id=names.producer_id(request.producer_id),
        producer_epoch=request.producer_epoch,
        committed=request.committed,
        **_version(request, "end", versions["end"]),
    )


def _describe_producers(names, request, _):
    topic, number = names.place(request.partition)
    return DescribeProducersRequest(
        topics=[DescribeProducersRequest.TopicRequest(name=topic, partition_indexes=[number])]
    )


def _list_offsets(names, request, _):
    topic, number = names.place(request.partition)
    kind = ListOffsetsRequest.ListOffsetsTopic
    partition = kind.ListOffsetsPartition(partition_index=number, current_leader_epoch=-1, timestamp=request.timestamp)
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=request.isolation_level,
        topics=[kind(name=topic, partitions=[partition])],
        timeout_ms=30_000,
        max_version=9,
    )


def _fetch(names, request, _):
    topic, number = names.place(request.partition)
    kind = FetchRequest.FetchTopic
    partition = kind.FetchPartition(
        partition=number,
        current_leader_epoch=-1,
        fetch_offset=request.fetch_offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1_048_576,
    )
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1_048_576,
        isolation_level=request.isolation_level,
        session_id=0,
        session_epoch=-1,
        topics=[kind(topic=topic, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
        max_version=12,
    )


def _write_markers(names, request, _):
    marker = WriteTxnMarkersRequest.WritableTxnMarker
    topic = marker.WritableTxnMarkerTopic
    return WriteTxnMarkersRequest(
        markers=[
            marker(
                producer_id=names.producer_id(request.producer_id),
                producer_epoch=request.producer_epoch,
                transaction_result=request.committed,
                topics=[
                    topic(name=name, partition_indexes=numbers)
                    for name, numbers in _by_topic(map(names.place, request.partitions))
                ],
                coordinator_epoch=request.coordinator_epoch,
                transaction_version=request.transaction_version,
            )
        ],
        **_version(request, "markers", 1),
    )


def _offset_fetch(names, request, _):
    topic, number = names.place(request.partition)
    kind = OffsetFetchRequest.OffsetFetchRequestTopic
    return OffsetFetchRequest(
        group_id=names.kafka_id(request.group_id),
        topics=[kind(name=topic, partition_indexes=[number])],
        require_stable=request.require_stable,
        max_version=7,
    )


_WRITE = {
    sim.InitProducerId: _init,
    sim.AddPartitionsToTxn: _add,
    sim.AddOffsetsToTxn: _add_offsets,
    sim.TxnOffsetCommit: _offset_commit,
    sim.Produce: _produce,
    sim.EndTxn: _end,
    sim.DescribeTransactions: lambda names, request, _: DescribeTransactionsRequest(
        transactional_ids=[names.kafka_id(request.transactional_id)]
    ),
    sim.ListTransactions: lambda names, request, _: ListTransactionsRequest(
        state_filters=sorted(request.state_filters),
        producer_id_filters=sorted(map(names.producer_id, request.producer_id_filters)),
        max_version=1,
    ),
    sim.DescribeProducers: _describe_producers,
    sim.ListOffsets: _list_offsets,
    sim.Fetch: _fetch,
    sim.WriteTxnMarkers: _write_markers,
    sim.OffsetFetch: _offset_fetch,
}


def _error(code, versions, key):
    """The error; None where the coordinator is not there yet. Old versions have another word for fenced."""
    if code in NOT_YET:
        return None
    if code == ErrorCode.INVALID_PRODUCER_EPOCH and versions.get(key, 9) < 2:
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode(code)


def _read_init(names, request, response, versions):
    error = _error(response.error_code, versions, "init")
    if error is None:
        return None
    names.unnamed = response.producer_id
    return sim.InitProducerIdResponse(error, names.simulated_id(response.producer_id), response.producer_epoch)


def _partition_errors(names, request, topics, versions, key):
    found = {}
    for topic in topics:
        for partition in topic.results_by_partition:
            found[topic.name, partition.partition_index] = _error(partition.partition_error_code, versions, key)
    if None in found.values():
        return None
    return tuple(found[names.place(place)] for place in request.partitions)


def _read_add(names, request, response, versions):
    errors = _partition_errors(names, request, response.results_by_topic_v3_and_below, versions, "add")
    return None if errors is None else sim.AddPartitionsToTxnResponse(errors)


def _read_error(key):
    def read(names, request, response, versions):
        error = _error(response.error_code, versions, key)
        return None if error is None else sim.ErrorResponse(error)

    return read


def _read_end(names, request, response, versions):
    if request.transaction_version < 2:
        return _read_error("end")(names, request, response, versions)
    error = _error(response.error_code, versions, "")
    if error is None:
        return None
    names.unnamed = response.producer_id
    return sim.EndTxnResponse(error, names.simulated_id(response.producer_id), response.producer_epoch)


def _read_offset_commit(names, request, response, versions):
    codes = (
        response.values()
        if request.transaction_version > 1
        else [partition.error_code for topic in response.topics for partition in topic.partitions]
    )
    [error] = {_error(code, versions, "") for code in codes}
    return None if error is None else sim.ErrorResponse(error)


def _read_produce(names, request, response, versions):
    [partition] = response.responses[0].partition_responses
    return sim.ProduceResponse(ErrorCode(partition.error_code), partition.base_offset)


def _read_describe(names, request, response, versions):
    [state] = response.transaction_states
    error = _error(state.error_code, versions, "")
    if error is None:
        return None
    if error is not ErrorCode.NONE:
        return sim.DescribeTransactionsResponse(error)
    names.described[request.transactional_id] = state.producer_id
    places = [names.simulated_place(topic.topic, number) for topic in state.topics for number in topic.partitions]
    return sim.DescribeTransactionsResponse(
        error,
        state.transaction_state,
        names.simulated_id(state.producer_id),
        state.producer_epoch,
        state.transaction_timeout_ms,
        state.transaction_start_time_ms,
        tuple(sorted(places)),
    )


def _read_list(names, request, response, versions):
    assert response.error_code == 0
    ours = [
        sim.ListedTransaction(
            listed.transactional_id.removeprefix(f"{names.prefix}."),
            names.simulated_id(listed.producer_id),
            listed.transaction_state,
        )
        for listed in response.transaction_states
        if listed.transactional_id.startswith(f"{names.prefix}.")
    ]
    return sim.ListTransactionsResponse(tuple(sorted(ours)))


def _read_describe_producers(names, request, response, versions):
    [partition] = response.topics[0].partitions
    shown = [
        sim.ProducerView(
            names.simulated_id(producer.producer_id),
            producer.producer_epoch,
            producer.last_sequence,
            producer.coordinator_epoch,
            producer.current_txn_start_offset,
        )
        for producer in partition.active_producers
        if producer.producer_id in names.simulated_ids or producer.producer_id >= UNKNOWN_IDS
    ]
    return sim.DescribeProducersResponse(ErrorCode(partition.error_code), tuple(sorted(shown)))


def _read_list_offsets(names, request, response, versions):
    [partition] = response.topics[0].partitions
    error = _error(partition.error_code, versions, "")
    return None if error is None else sim.ListOffsetsResponse(error, partition.offset)


def _read_fetch(names, request, response, versions):
    [partition] = response.responses[0].partitions
    if partition.error_code:
        return sim.FetchResponse(ErrorCode(partition.error_code))
    aborted = partition.aborted_transactions
    if aborted is not None:
        aborted = tuple(
            sim.AbortedTransaction(names.simulated_id(entry.producer_id), entry.first_offset) for entry in aborted
        )
    batches = []
    records = MemoryRecords(partition.records or b"")
    while (batch := records.next_batch()) is not None:
        contents = list(batch)
        control = ""
        if batch.is_control_batch:
            control = sim.COMMIT if contents[0].commit else sim.ABORT
        batches.append(
            sim.Batch(
                batch.base_offset,
                batch.next_offset,
                names.simulated_id(batch.producer_id),
                batch.producer_epoch,
                batch.base_sequence,
                () if control else tuple(record.value.decode() for record in contents),
                control,
            )
        )
    return sim.FetchResponse(
        ErrorCode.NONE,
        partition.high_watermark,
        partition.last_stable_offset,
        partition.log_start_offset,
        aborted,
        tuple(batches),
    )


def _read_markers(names, request, response, versions):
    found = {
        (topic.name, partition.partition_index): ErrorCode(partition.error_code)
        for topic in response.markers[0].topics
        for partition in topic.partitions
    }
    return sim.WriteTxnMarkersResponse(tuple(found[names.place(place)] for place in request.partitions))


def _read_offset_fetch(names, request, response, versions):
    if _error(response.error_code, versions, "") is None:
        return None
    [partition] = response.topics[0].partitions
    error = _error(partition.error_code, versions, "")
    return None if error is None else sim.OffsetFetchResponse(error, partition.committed_offset)


_READ = {
    sim.InitProducerId: _read_init,
    sim.AddPartitionsToTxn: _read_add,
    sim.AddOffsetsToTxn: _read_error("offsets"),
    sim.TxnOffsetCommit: _read_offset_commit,
    sim.Produce: _read_produce,
    sim.EndTxn: _read_end,
    sim.DescribeTransactions: _read_describe,
    sim.ListTransactions: _read_list,
    sim.DescribeProducers: _read_describe_producers,
    sim.ListOffsets: _read_list_offsets,
    sim.Fetch: _read_fetch,
    sim.WriteTxnMarkers: _read_markers,
    sim.OffsetFetch: _read_offset_fetch,
}
