"""Diagrams of the transition tables, in Mermaid's text form. ``python -m dualwrite.protocol.lives__protocol_tables_diagram`` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from dualwrite.protocol.lives__protocol_tables_batch_life import BATCH_LIFE, BatchState
from dualwrite.protocol.lives__protocol_tables_lane_life import LANE_LIFE, LaneState
from dualwrite.protocol.lives__protocol_tables_lease_life import LEASE_LIFE, LeaseState
from dualwrite.protocol.lives__protocol_tables_producer_life import PRODUCER_LIFE, ProducerState
from dualwrite.protocol.lives__protocol_tables_unit_life import UNIT_LIFE, UNIT_WRITER_LIFE, UnitState, UnitWriterState
from dualwrite.protocol.lives__protocol_tables_write_life import WRITE_LIFE, WriteState

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def draw(table: Mapping[State, Mapping[Event, State]], initial: State) -> str:
    """The table as a Mermaid state diagram: one arrow for each pair of states, with all its events."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for state, moves in table.items():
        for event, target in moves.items():
            arrows.setdefault((state, target), []).append(str(event.value))
    lines = ["stateDiagram-v2", f"    [*] --> {_name(initial)}"]
    lines += [
        f"    {_name(state)} --> {_name(target)}: {', '.join(events)}" for (state, target), events in arrows.items()
    ]
    lines += [f"    {_name(state)} --> [*]" for state, moves in table.items() if not moves]
    return "\n".join(lines)


def _name(state: Enum) -> str:
    return str(state.value).replace(" ", "_")


def page() -> str:
    """The documentation page that shows all tables."""
    return "\n".join(
        [
            "# State diagrams",
            "",
            "Drawn from the tables by `python -m dualwrite.protocol.lives__protocol_tables_diagram`; a test compares this page with them.",
            "",
            "## One dual write",
            "",
            "```mermaid",
            draw(WRITE_LIFE, WriteState.BEGUN),
            "```",
            "",
            "## One producer",
            "",
            "```mermaid",
            draw(PRODUCER_LIFE, ProducerState.CREATED),
            "```",
            "",
            "## One lane",
            "",
            "```mermaid",
            draw(LANE_LIFE, LaneState.UNCLAIMED),
            "```",
            "",
            "## One lease of a numbered id, as its holder knows it",
            "",
            "```mermaid",
            draw(LEASE_LIFE, LeaseState.FREE),
            "```",
            "",
            "## One batch that many participants write, and that is decided at once",
            "",
            "```mermaid",
            draw(BATCH_LIFE, BatchState.PREPARED),
            "```",
            "",
            "## Units, as a reader of their partition sees them",
            "",
            "```mermaid",
            draw(UNIT_LIFE, UnitState.START),
            "```",
            "",
            "## Units, as the writer of their partition sees them",
            "",
            "```mermaid",
            draw(UNIT_WRITER_LIFE, UnitWriterState.CLAIMED),
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 - this is what the command is for
