"""The metrics of ``dualwrite serve``, in Prometheus' text format: read from the supervisors' snapshots at each scrape.

Names follow Prometheus' conventions: a unit at the end of each gauge that has one, ``_total`` at the end of each counter. What
all replicas see alike has no word of the service in its name: alert on the greatest value of the replicas. What a replica did
itself begins with ``dualwrite_serve_``: add the replicas up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dualwrite.protocol.blocking import late_partitions, standing_groups, withheld
from dualwrite.protocol.findings import Status
from dualwrite.protocol.supervision import Action

if TYPE_CHECKING:
    from dualwrite.serving.rounds import Round
    from dualwrite.serving.supervisor import Snapshot, Supervisor

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS: Final = {
    "dualwrite_serve_rounds": ("rounds", "Rounds that have ended."),
    "dualwrite_serve_failed_rounds": (
        "failed rounds",
        "Rounds in which a server did not answer, or another error came.",
    ),
    "dualwrite_serve_settled_ids": ("settled", "Transactional ids that this replica has settled."),
    "dualwrite_serve_rolled_forward_transactions": (
        "rolled forward",
        "Decided transactions that this replica has committed in Kafka.",
    ),
    "dualwrite_serve_lost_transactions": (
        "losses",
        "Decided transactions that this replica found lost or unverifiable. Each is an incident.",
    ),
    "dualwrite_serve_sent_messages": ("sent", "Messages of dead writers that this replica has sent."),
    "dualwrite_serve_failed_attempts": ("failures", "Attempts of this replica to settle a writer that failed."),
}


def exposition(supervisors: Iterable[Supervisor]) -> bytes:
    """All metrics as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots([supervisor.snapshot for supervisor in supervisors]))
    return generate_latest(registry)


class _Snapshots(Collector):
    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        build = InfoMetricFamily("dualwrite_build", "The version that serves.")
        build.add_metric([], {"version": version("dualwrite")})
        yield build
        yield from self._of_service()
        yield from self._of_transactions()
        yield from self._of_messages()

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=["target", *labels])

    def _of_service(self) -> Iterator[Metric]:
        up = self._gauge("dualwrite_up", "1 if both servers have answered the last round, else 0.")
        leads = self._gauge("dualwrite_serve_leader", "1 if this replica settles, 0 if it stands by.")
        success = self._gauge(
            "dualwrite_last_success_timestamp_seconds", "When both servers answered last, in seconds since 1970."
        )
        took = self._gauge("dualwrite_round_duration_seconds", "How long the last round that succeeded took to look.")
        skew = self._gauge(
            "dualwrite_clock_skew_seconds", "By how much this machine's clock is ahead of the database's."
        )
        findings = self._gauge(
            "dualwrite_findings", "What dualwrite doctor finds wrong or weak, as this replica sees it.", "status"
        )
        for one in self._snapshots:
            for status in (Status.ERROR, Status.WARNING):
                findings.add_metric([one.target, status.value], sum(found.status is status for found in one.findings))
            up.add_metric([one.target], float(one.round is not None and one.error is None))
            leads.add_metric([one.target], float(one.leads))
            if one.round is not None:
                success.add_metric([one.target], one.round.at.timestamp())
                took.add_metric([one.target], one.round.took_s)
                skew.add_metric([one.target], one.round.skew_s)
        yield from (up, leads, success, took, skew, findings)
        for name, (key, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["target"])
            for one in self._snapshots:
                counter.add_metric([one.target], one.counts.get(key, 0.0))
            yield counter

    def _of_transactions(self) -> Iterator[Metric]:
        unsettled = self._gauge(
            "dualwrite_unsettled_writers", "Writers by planned action and its reason.", "action", "reason"
        )
        opened = self._gauge("dualwrite_open_transactions", "Open transactions of writers, by decision.", "decided")
        oldest = self._gauge(
            "dualwrite_oldest_open_transaction_seconds",
            "Age of the oldest transaction that the brokers list, of any program; 0 if none is open.",
        )
        decided_age = self._gauge(
            "dualwrite_oldest_decided_transaction_seconds",
            "Age of the oldest transaction that the database has decided and Kafka has not completed; 0 if there is none.",
        )
        late = self._gauge(
            "dualwrite_partitions_with_late_transactions",
            "Partitions that a transaction of a writer (ours) or another has held back for more than five minutes.",
            "ours",
        )
        back = self._gauge("dualwrite_went_back_ids", "Transactional ids for which the database has lost commits.")
        others = self._gauge("dualwrite_other_open_transactions", "Open transactions that no row of the target names.")
        records = self._gauge(
            "dualwrite_blocked_records",
            "Records that read_committed consumers do not get, because a transaction of a writer (ours) or another is open.",
            "ours",
        )
        groups = self._gauge(
            "dualwrite_blocked_consumer_groups", "Consumer groups that stand still at such a transaction.", "ours"
        )
        left = self._gauge(
            "dualwrite_decided_transaction_time_left_seconds",
            "Until the broker aborts the next one that the database has decided; absent if it aborts none.",
        )
        incidents = self._gauge(
            "dualwrite_unacknowledged_incidents", "Losses that nobody has acknowledged, by outcome.", "outcome"
        )
        for one in self._snapshots:
            if one.round is None:
                continue
            kinds = [(planned.action, planned.reason) for planned in one.plans]
            for kind in sorted(set(kinds), key=lambda kind: (kind[0].value, kind[1].value)):
                unsettled.add_metric([one.target, kind[0].value, kind[1].value], kinds.count(kind))
            if not any(action is Action.SETTLE for action, _ in kinds):
                unsettled.add_metric([one.target, Action.SETTLE.value, "none"], 0)
            for decided in (True, False):
                count = sum(item.open_for_s is not None and item.decided_is_open is decided for item in one.round.items)
                opened.add_metric([one.target, str(decided).lower()], count)
            oldest.add_metric([one.target], one.round.longest_s or 0.0)
            decided_age.add_metric([one.target], _oldest_decided_s(one.round))
            back.add_metric([one.target], sum(item.went_back is not None for item in one.round.items))
            own = {item.row.kafka_id(item.incarnation) for item in one.round.items}
            others.add_metric([one.target], sum(each.kafka_id not in own for each in one.round.blockers))
            for ours in (True, False):
                some = [each for each in one.round.blockers if (each.kafka_id in own) is ours]
                late.add_metric([one.target, str(ours).lower()], len(late_partitions(some)))
                records.add_metric([one.target, str(ours).lower()], withheld(some))
                groups.add_metric([one.target, str(ours).lower()], len(standing_groups(some)))
            times = [seen.time_left_s for seen in one.round.seen if seen.time_left_s is not None]
            if times:
                left.add_metric([one.target], min(times))
            for outcome in ("lost", "unverifiable"):
                count = sum(incident.outcome.value == outcome for incident in one.round.incidents)
                incidents.add_metric([one.target, outcome], count)
        yield from (unsettled, opened, oldest, decided_age, late, back, others, records, groups, left, incidents)

    def _of_messages(self) -> Iterator[Metric]:
        rows = self._gauge(
            "dualwrite_waiting_messages", "Messages that wait in the database; of many an estimate.", "writer"
        )
        size = self._gauge("dualwrite_waiting_bytes", "The bytes of their keys, values and headers.", "writer")
        age = self._gauge(
            "dualwrite_waiting_oldest_seconds", "For how long the oldest has waited; 0 if none waits.", "writer"
        )
        aside = self._gauge("dualwrite_aside_messages", "Messages that Kafka refuses, moved aside.", "writer")
        for one in self._snapshots:
            for waits in one.round.waiting if one.round is not None else ():
                rows.add_metric([one.target, waits.writer], waits.waiting.rows)
                size.add_metric([one.target, waits.writer], waits.waiting.size)
                age.add_metric([one.target, waits.writer], waits.waiting.oldest_s or 0.0)
                aside.add_metric([one.target, waits.writer], waits.aside)
        yield from (rows, size, age, aside)


def _oldest_decided_s(found: Round) -> float:
    """For how long Kafka has not followed a decision. One that is not open there any more has its age from its row."""
    now = found.at.timestamp() - found.skew_s
    return max(
        (
            now - item.row.updated_at.timestamp() if item.open_for_s is None else item.open_for_s
            for item in found.items
            if item.needs_recovery and not item.is_undecided
        ),
        default=0.0,
    )
