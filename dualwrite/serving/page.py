"""What the page of ``dualwrite serve`` says, as values made of snapshots: what blocks readers first, and what becomes of it.

The template only lays them out. It is for a person at night with a telephone: words before codes, no JavaScript.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, PackageLoader, select_autoescape

from dualwrite.cli.report import row_word, will_do
from dualwrite.protocol.by_hand import number_ranges
from dualwrite.protocol.supervision import UNTRIED, Action, Reason
from dualwrite.recovery.recover import settled_with

if TYPE_CHECKING:
    from dualwrite.protocol.supervision import Planned, Tries
    from dualwrite.recovery.recover import IdStatus
    from dualwrite.serving.supervisor import Snapshot

_MINUTE_S: Final = 60
_NEED_A_PERSON: Final = frozenset({Reason.WENT_BACK, Reason.CLOCK, Reason.FAILED})
_TEMPLATES: Final = Environment(
    loader=PackageLoader("dualwrite.serving", "."), autoescape=select_autoescape(default=True), trim_blocks=True
)


@dataclass(frozen=True)
class OpenRow:
    """One unsettled id. All fields are text to show, but for ``alarming``."""

    name: str
    blocks: str
    age: str
    time_left: str
    decision: str
    owner: str
    action: str
    because: str
    tries: str
    alarming: bool


@dataclass(frozen=True)
class WaitingRow:
    """What waits of one writer. All fields are text to show, but for ``alarming``."""

    name: str
    messages: str
    size: str
    oldest: str
    aside: str
    action: str
    because: str
    tries: str
    alarming: bool


@dataclass(frozen=True)
class LossRow:
    """One loss that nobody has acknowledged. All fields are text to show."""

    name: str
    outcome: str
    detected: str
    detail: str
    partitions: str


@dataclass(frozen=True)
class TargetView:
    """One target.

    Attributes:
        name: Its name.
        summary: One line that says whether a person is needed.
        alarming: Whether one is.
        role: Who leads.
        age: For how long ago it shows the state; empty before the first round.
        error: Why the last round failed.
        open: What is unsettled, what blocks most first.
        waiting: What waits.
        losses: What is lost, or may be.
        findings: Conditions that a person should mend, in words.
        events: What this replica did last.
    """

    name: str
    summary: str
    alarming: bool
    role: str
    age: str
    error: str | None
    open: Sequence[OpenRow]
    waiting: Sequence[WaitingRow]
    losses: Sequence[LossRow]
    findings: Sequence[str]
    events: Sequence[str]


def render(snapshots: Iterable[Snapshot], now_s: float, *, refresh_s: float) -> str:
    """The page. ``now_s`` is the time by the supervisors' clock, ``refresh_s`` how often a browser loads it again."""
    targets = [view(snapshot, now_s) for snapshot in snapshots]
    return _TEMPLATES.get_template("page.html").render(
        targets=targets, alarming=any(target.alarming for target in targets), refresh_s=max(2, round(refresh_s))
    )


def view(snapshot: Snapshot, now_s: float) -> TargetView:
    """One target as the page shows it."""
    found = snapshot.round
    if found is None:
        return TargetView(
            name=snapshot.target,
            summary="no answer yet" if snapshot.error else "looking for the first time",
            alarming=snapshot.error is not None,
            role="",
            age="",
            error=snapshot.error,
            open=(),
            waiting=(),
            losses=(),
            findings=(),
            events=(),
        )
    plans = {planned.writer: planned for planned in snapshot.plans}
    losses = [
        LossRow(
            incident.transactional_id,
            incident.outcome.value,
            f"{incident.detected_at:%Y-%m-%d %H:%M:%S}",
            incident.detail,
            _places(incident.state.partitions),
        )
        for incident in found.incidents
    ]
    people = sum(planned.reason in _NEED_A_PERSON for planned in snapshot.plans)
    aside = sum(one.aside for one in found.waiting)
    alarming = bool(snapshot.error or losses or people or aside)
    return TargetView(
        name=snapshot.target,
        summary=_summary(snapshot, losses=len(losses), people=people, aside=aside),
        alarming=alarming,
        role=_role(snapshot),
        age=duration(now_s - snapshot.round_s),
        error=snapshot.error,
        open=_open(snapshot, plans),
        waiting=_waiting(snapshot, plans),
        losses=losses,
        findings=[*(f"{one.status.value}: {one}. {one.remedy}" for one in snapshot.findings), *found.warnings],
        events=[f"{at:%H:%M:%S} {what}" for at, what in snapshot.events],
    )


def _summary(snapshot: Snapshot, *, losses: int, people: int, aside: int) -> str:
    if snapshot.error:
        return "a server does not answer: this is what was seen last"
    words = [f"{losses} losses to acknowledge"] if losses else []
    words += [f"{people} writers that cannot be settled"] if people else []
    words += [f"{aside:,} messages refused by Kafka"] if aside else []
    if words:
        return ", ".join(words)
    settling = sum(planned.action is Action.SETTLE for planned in snapshot.plans)
    return f"{settling} writers are being settled" if settling else "nobody is needed"


def _role(snapshot: Snapshot) -> str:
    assert snapshot.round is not None
    leader = snapshot.round.leader
    if snapshot.leads:
        return "this replica settles"
    if leader is None or leader.owner is None:
        return "no replica settles yet"
    return f"this replica stands by; {leader.owner.partition(' on ')[0]} settles"


def _open(snapshot: Snapshot, plans: dict[str, Planned]) -> list[OpenRow]:
    assert snapshot.round is not None
    names = {item.row.transactional_id for item in snapshot.round.items} | plans.keys()
    items = [item for item in snapshot.round.items if item.needs_recovery]
    items.sort(key=lambda item: (-len(item.partitions), -(item.waits_for_s or 0.0), item.row.transactional_id))
    return [_open_row(item, plans.get(settled_with(item.row.transactional_id, names)), snapshot) for item in items]


def _open_row(item: IdStatus, planned: Planned | None, snapshot: Snapshot) -> OpenRow:
    decision = {"decided": "decided: will be committed", "-": "undecided: would be aborted"}.get(row_word(item))
    is_open = item.open_for_s is not None
    return OpenRow(
        name=item.row.transactional_id,
        blocks=_places(item.partitions) or "-",
        age=duration(item.waits_for_s),
        time_left="no limit" if is_open and item.aborted_in_s is None else duration(item.aborted_in_s),
        decision=decision or row_word(item),
        owner=item.row.owner,
        action="-" if planned is None else f"{planned.action.value}: {will_do(item)}" if _settles(planned) else "leave",
        because="" if planned is None else planned.because,
        tries="" if planned is None else _tries(snapshot.tries.get(planned.writer, UNTRIED), snapshot.now_s),
        alarming=planned is not None and planned.reason in _NEED_A_PERSON,
    )


def _waiting(snapshot: Snapshot, plans: dict[str, Planned]) -> list[WaitingRow]:
    assert snapshot.round is not None
    shown = []
    for one in sorted(snapshot.round.waiting, key=lambda one: (-one.waiting.rows, one.writer)):
        planned = plans.get(one.writer)
        about = "" if one.waiting.exact else "about "
        shown.append(
            WaitingRow(
                name=one.writer,
                messages=f"{about}{one.waiting.rows:,}",
                size=f"{about}{one.waiting.size:,} bytes",
                oldest=duration(one.waiting.oldest_s),
                aside=f"{one.aside:,}",
                action="-" if planned is None else planned.action.value,
                because="" if planned is None else planned.because,
                tries="" if planned is None else _tries(snapshot.tries.get(one.writer, UNTRIED), snapshot.now_s),
                alarming=one.aside > 0,
            )
        )
    return shown


def _settles(planned: Planned) -> bool:
    return planned.action is Action.SETTLE


def _tries(tries: Tries, now_s: float) -> str:
    if tries.last_s is None:
        return "none"
    last = f"last {duration(now_s - tries.last_s)} ago"
    return f"{last}, next in {duration(max(0.0, tries.next_s - now_s))}" if tries.failures else last


def _places(partitions: Iterable[tuple[str, int]]) -> str:
    """Partitions by topic: ``orders 0-2, 5; payments 1``."""
    of_topic: dict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(partitions):
        of_topic[topic].append(number)
    return "; ".join(f"{topic} {number_ranges(numbers)}" for topic, numbers in of_topic.items())


def duration(seconds: float | None) -> str:
    """A time for people: ``12 s``, ``3 min 20 s``, ``5 h 10 min``, ``2 d 3 h``; ``-`` for none."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", _MINUTE_S, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"
