"""The web side of ``dualwrite serve``: probes, metrics for Prometheus, the status as JSON, and the page.

The metrics' names follow Prometheus' conventions: a unit at the end of each gauge that has one, ``_total`` at the end of each
counter. A metric that all replicas see alike does not name the service: alert on the greatest value of the replicas. One of
what a replica did itself begins with ``dualwrite_serve_``: add the replicas up.

What is here only shows the supervisors' snapshots. No request asks a server, so none waits for one, and any number of browsers
cost the database nothing. What acts is in :mod:`dualwrite.serving.actions`, and is there only where it is enabled.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from anyio import to_thread
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dualwrite.cli.recovery import finding_json
from dualwrite.cli.report import status_document
from dualwrite.clock import now_s
from dualwrite.protocol.blocking import late_partitions, standing_groups, withheld
from dualwrite.protocol.findings import Status
from dualwrite.protocol.supervision import Action
from dualwrite.serving.actions import ActionPages
from dualwrite.serving.page import HEADERS, render
from dualwrite.serving.supervisor import Snapshot, Supervisor

if TYPE_CHECKING:
    from dualwrite.protocol.blocking import ActionRecord, Deed
    from dualwrite.serving.configuration import ActionRules
    from dualwrite.serving.supervisor import Round


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


logger = logging.getLogger(__name__)

_GRACE_S: Final = 10.0
_UNAVAILABLE: Final = 503
_REFRESH_S: Final = 10.0


def make_app(supervisors: Sequence[Supervisor], actions: ActionRules | None = None) -> Starlette:
    """The application. It starts the supervisors when it starts, and stops them when it ends."""
    pages = _Pages(supervisors, frozenset() if actions is None else actions.enabled)
    acting = () if actions is None else ActionPages([one.target for one in supervisors], actions).routes
    return Starlette(
        routes=[
            Route("/", pages.page),
            Route("/healthz", pages.healthz),
            Route("/readyz", pages.readyz),
            Route("/metrics", pages.metrics),
            Route("/api/status", pages.status),
            *acting,
        ],
        lifespan=pages.lifespan,
    )


class _Pages:
    def __init__(self, supervisors: Sequence[Supervisor], enabled: frozenset[Deed]) -> None:
        self._supervisors = supervisors
        self._enabled = enabled

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        del app
        for supervisor in self._supervisors:
            supervisor.start()
        try:
            yield
        finally:
            logger.info("stopping when the present rounds have ended")
            for supervisor in self._supervisors:
                supervisor.stop()
            await to_thread.run_sync(self._join)

    def _join(self) -> None:
        for supervisor in self._supervisors:
            target = supervisor.target
            if not supervisor.join(target.timeout_s + _GRACE_S):
                logger.warning(
                    "%s: ends in the middle of a settlement, which the next leader goes on with", target.name
                )

    async def page(self, request: Request) -> Response:
        """The page for people."""
        del request
        refresh_s = max((one.interval_s for one in self._supervisors), default=_REFRESH_S)
        return HTMLResponse(
            render(self._snapshots(), now_s(), refresh_s=refresh_s, enabled=self._enabled), headers=HEADERS
        )

    async def healthz(self, request: Request) -> Response:
        """Whether the process works. It fails only if a restart would help: not while a server is away."""
        del request
        now = now_s()
        wrong = [
            f"{one.target.name}: {'a round has stalled' if one.is_running else 'its thread has ended'}"
            for one in self._supervisors
            if not one.is_running or now - one.alive_s > one.stalled_after_s
        ]
        return PlainTextResponse("\n".join(wrong) or "ok", _UNAVAILABLE if wrong else 200)

    async def readyz(self, request: Request) -> Response:
        """Whether what it shows is true now: both servers of every target have answered the last round."""
        del request
        wrong = [
            f"{snapshot.target}: {snapshot.error or 'no round has ended yet'}"
            for snapshot in self._snapshots()
            if snapshot.error is not None or snapshot.round is None
        ]
        return PlainTextResponse("\n".join(wrong) or "ok", _UNAVAILABLE if wrong else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        del request
        return Response(exposition(self._supervisors), media_type=CONTENT_TYPE)

    async def status(self, request: Request) -> Response:
        """By target, the document of ``dualwrite status --json``, with the plan."""
        del request
        return JSONResponse({"targets": {one.target: target_json(one) for one in self._snapshots()}})

    def _snapshots(self) -> list[Snapshot]:
        return [supervisor.snapshot for supervisor in self._supervisors]


def target_json(snapshot: Snapshot) -> dict[str, object]:
    """One target: the document of ``dualwrite status --json``, and what the supervisor makes of it."""
    found = snapshot.round
    shown: dict[str, object] = {"leads": snapshot.leads, "error": snapshot.error, "at": None, "plan": []}
    if found is None:
        return shown
    return {
        **shown,
        "at": found.at.isoformat(),
        "findings": [finding_json(one) for one in snapshot.findings],
        "history": [_history_json(one) for one in found.history],
        "plan": [
            {
                "writer": planned.writer,
                "action": planned.action.value,
                "reason": planned.reason.value,
                "because": planned.because,
                "due_in_s": planned.due_in_s,
                "attempts_failed": tries.failures if tries is not None else 0,
                "last_error": tries.error if tries is not None else None,
                "next_try_in_s": max(0.0, tries.next_s - snapshot.now_s)
                if tries is not None and tries.failures
                else None,
            }
            for planned in snapshot.plans
            for tries in [snapshot.tries.get(planned.writer)]
        ],
        **status_document(
            found.items,
            found.longest_s,
            found.incidents,
            leases=found.leases,
            blockers=found.blockers,
            batches=found.batches,
            waiting=found.waiting,
            warnings=found.warnings,
        ),
    }


def _history_json(record: ActionRecord) -> dict[str, object]:
    intent = record.intent
    return {
        "action_id": intent.action_id,
        "action": intent.deed.value,
        "id": intent.subject,
        "detail": intent.detail,
        "reason": intent.reason,
        "user": intent.actor,
        "program": intent.program,
        "begun_at": record.begun_at.isoformat(),
        "ended_at": None if record.ended_at is None else record.ended_at.isoformat(),
        "outcome": None if record.outcome is None else record.outcome.value,
        "result": record.result,
    }
