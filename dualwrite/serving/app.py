"""The web side of ``dualwrite serve``: probes, metrics, the status as JSON, and the page.

What is here only shows the supervisors' snapshots. No request asks a server, so none waits for one, and any number of browsers
cost the database nothing. What acts is in :mod:`dualwrite.serving.actions`, and is there only where it is enabled.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dualwrite.cli.doctor import finding_json
from dualwrite.cli.report import status_document
from dualwrite.clock import now_s
from dualwrite.serving.actions import ActionPages
from dualwrite.serving.metrics import CONTENT_TYPE, exposition
from dualwrite.serving.page import HEADERS, render
from dualwrite.serving.supervisor import Snapshot, Supervisor

if TYPE_CHECKING:
    from dualwrite.protocol.by_hand import ActionRecord, Deed
    from dualwrite.serving.configuration import ActionRules

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
