"""A small interpreter for transition tables, and nothing else: the tables say what the states mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from dualwrite.errors import IllegalStateError

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class Machine(Generic[State, Event]):
    """Holds one state and moves it by a table; the only place where a state is assigned.

    An event that the table does not list for the present state raises and changes nothing.

    Args:
        name: What it is, for error messages.
        table: The next state by state and event.
        initial: The first state.
        moved: Called with the new state after each event that leads to another one. It must not raise.
    """

    def __init__(
        self,
        name: str,
        table: Mapping[State, Mapping[Event, State]],
        initial: State,
        *,
        moved: Callable[[State], object] | None = None,
    ) -> None:
        self._name = name
        self._table = table
        self._state = initial
        self._moved = moved

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def allows(self, event: Event) -> bool:
        """Whether the table lists the event for the present state."""
        return event in self._table[self._state]

    def check(self, event: Event) -> None:
        """Raise unless the event is allowed now. Call it before the I/O that the event stands for.

        Raises:
            IllegalStateError: The event is not allowed in the present state.
        """
        if not self.allows(event):
            allowed = ", ".join(sorted(other.value for other in self._table[self._state])) or "nothing"
            raise IllegalStateError(
                f"{event.value} is not allowed while the {self._name} is {self._state.value}",
                next_step=f"allowed now: {allowed}",
            )

    def apply(self, event: Event) -> State:
        """Move by the table: the event has happened.

        Raises:
            IllegalStateError: The event is not allowed in the present state; the state is unchanged.
        """
        self.check(event)
        former, self._state = self._state, self._table[self._state][event]
        if self._moved is not None and self._state is not former:
            self._moved(self._state)
        return self._state

    def __repr__(self) -> str:
        return f"<{self._name} {self._state.value}>"
