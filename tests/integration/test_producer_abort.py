"""An abort while messages are on their way. In a process of its own: what went wrong here ended the process."""

import json
import subprocess
import sys

from harness.patience import PATIENCE_S

from dualwrite.testing import Api, KafkaProxy, read_committed

ABORTS = """
import json, sys
from dualwrite.errors import Unavailable
from dualwrite.kafka.producer import TransactionalProducer

kafka, transactional_id, topic = json.loads(sys.argv[1])
kafka["dualwrite.engine"] = "librdkafka"
patient = {"retry.backoff.ms": 20000, "retry.backoff.max.ms": 20000}
# Asked again, and not sent again yet, when librdkafka has aborted.
hasty = {"retry.backoff.ms": 3000, "retry.backoff.max.ms": 3000, "socket.timeout.ms": 700}
with TransactionalProducer({**kafka, **hasty}, transactional_id) as producer:
    producer.init_transactions()
    print("ready", flush=True)
    sys.stdin.readline()
    producer.begin_transaction()
    producer.produce(topic, b"aborted", partition=0)
    try:
        producer.abort_transaction()
    except Unavailable:
        print("discarded", flush=True)
with TransactionalProducer({**kafka, **patient}, transactional_id) as producer:
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b"committed", partition=0)
    producer.prepare_transaction()
    producer.commit_transaction()
"""


def test_a_producer_whose_partition_was_not_answered_for_is_thrown_away_without_harm(
    dualwrite_kafka, dualwrite_topic, kafka_id
):
    """librdkafka ends the process (``txn_req_cnt > 0``) when the answer to AddPartitionsToTxn fails after an abort."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        arguments = json.dumps([proxy.client_config(), kafka_id, dualwrite_topic])
        command = [sys.executable, "-c", ABORTS, arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            assert process.stdout.readline() == "ready\n"
            unanswered = proxy.on(Api.ADD_PARTITIONS_TO_TXN).drop_answer()
            said, failed_with = process.communicate("go\n", timeout=PATIENCE_S)
    assert process.returncode == 0, failed_with
    assert said == "discarded\n"
    assert len(unanswered.taken) == 1
    assert [message.value for message in read_committed(dualwrite_kafka.client_config(), dualwrite_topic)] == [
        b"committed"
    ]
