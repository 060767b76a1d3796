"""Rules: a test's instructions for some of the requests that go through a proxy."""

from __future__ import annotations

import asyncio
import enum
import threading
from typing import TYPE_CHECKING, Generic

from dualwrite.errors import Unavailable
from dualwrite.testing.proxy__testing_proxy_units import RequestT, Unit

if TYPE_CHECKING:
    from collections.abc import Callable


class Action(enum.Enum):
    """The treatment of a request that a rule takes."""

    WATCH = "forward it and its answer, and record it"
    DROP_REQUEST = "do not forward it; leave the connection open"
    RESET_REQUEST = "do not forward it; reset the client's connection"
    HOLD_REQUEST = "forward it, and all that follows on its connection, when released"
    DUPLICATE = "forward it, and a second copy when released, whose answer the client does not see"
    DROP_ANSWER = "forward it; withhold its answer from the client; leave the connection open"
    RESET_ANSWER = "forward it; when its answer arrives, reset the client's connection instead"
    HOLD_ANSWER = "forward it; forward its answer, and all that follows on its connection, when released"


class Rule(Generic[RequestT]):
    """One rule of a proxy, made by `Choice`. Thread-safe.

    Args:
        action: The treatment of the requests taken.
        matches: Whether a request counts.
        nth: The number of the matching request to take, from 1; all if None.
        loop: The proxy's event loop.
    """

    def __init__(
        self,
        action: Action,
        matches: Callable[[Unit[RequestT]], bool],
        nth: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.action = action
        self.discarded = False
        self.gate = asyncio.Event()
        self._matches = matches
        self._nth = nth
        self._loop = loop
        self._withdrawn = False
        self._seen = 0
        self._taken: list[RequestT] = []
        self._resets: list[Callable[[], None]] = []
        self._answers = 0
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Rule({self.action.name}, seen={self._seen}, taken={len(self._taken)}, answers={self._answers})"

    def counts(self, unit: Unit[RequestT]) -> bool:
        """Count the request if it matches, and return whether to take it. Called by the proxy."""
        if self._withdrawn or unit.request is None or not self._matches(unit):
            return False
        self._seen += 1
        return self._nth is None or self._seen == self._nth

    def take(self, request: RequestT, reset_client: Callable[[], None]) -> None:
        """Record a request that this rule takes. Called by the proxy."""
        with self._changed:
            self._taken.append(request)
            self._resets.append(reset_client)
            self._changed.notify_all()

    def answered(self) -> None:
        """Record an answer of the server. Called by the proxy."""
        with self._changed:
            self._answers += 1
            self._changed.notify_all()

    @property
    def taken(self) -> list[RequestT]:
        """The requests that this rule has taken so far."""
        with self._changed:
            return list(self._taken)

    def wait(self, timeout_s: float = 120.0) -> RequestT:
        """Wait until this rule has taken a request, and return the first one taken.

        Raises:
            Unavailable: It took none in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._taken), timeout_s):
                raise Unavailable(f"no request came in {timeout_s} s for {self!r}")
            return self._taken[0]

    def wait_answered(self, count: int = 1, timeout_s: float = 120.0) -> None:
        """Wait until the server has given ``count`` answers to requests taken, copies included.

        Answers count whether or not they reach the client.

        Raises:
            Unavailable: The server did not answer in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._answers >= count, timeout_s):
                raise Unavailable(f"the server did not give {count} answers in {timeout_s} s: {self!r}")

    def release(self) -> None:
        """Release everything held, and hold nothing more.

        A held request reaches the server even if its client closed the connection long ago.
        """
        self._loop.call_soon_threadsafe(self.gate.set)

    def withdraw(self) -> None:
        """Take no more requests. Those already taken are not affected."""
        self._withdrawn = True

    def discard(self) -> None:
        """Discard everything held, and everything that this rule would hold from now on."""
        self.discarded = True
        self.release()

    def cut(self) -> None:
        """Reset the connections of the clients whose requests were taken. Held requests stay held."""
        with self._changed:
            for reset in self._resets:
                self._loop.call_soon_threadsafe(reset)


class Choice(Generic[RequestT]):
    """Requests chosen by the proxy's ``on``. Each method makes a rule for them, which counts from then on.

    Args:
        add: Adds the rule of an action to the proxy.
    """

    def __init__(self, add: Callable[[Action], Rule[RequestT]]) -> None:
        self._add = add

    def watch(self) -> Rule[RequestT]:
        """Forward it and its answer, and record it."""
        return self._add(Action.WATCH)

    def drop_request(self) -> Rule[RequestT]:
        """Do not forward it, and leave the connection open: the client waits without an answer."""
        return self._add(Action.DROP_REQUEST)

    def reset_request(self) -> Rule[RequestT]:
        """Do not forward it, and reset the client's connection."""
        return self._add(Action.RESET_REQUEST)

    def hold_request(self) -> Rule[RequestT]:
        """Forward it, and all that follows on its connection, when the rule is released."""
        return self._add(Action.HOLD_REQUEST)

    def duplicate(self) -> Rule[RequestT]:
        """Forward it, and a second copy when the rule is released; the client does not see that copy's answer."""
        return self._add(Action.DUPLICATE)

    def drop_answer(self) -> Rule[RequestT]:
        """Forward it, withhold its answer, and leave the connection open: the client waits without an answer."""
        return self._add(Action.DROP_ANSWER)

    def reset_answer(self) -> Rule[RequestT]:
        """Forward it, and when its answer arrives, reset the client's connection instead of passing it on."""
        return self._add(Action.RESET_ANSWER)

    def hold_answer(self) -> Rule[RequestT]:
        """Forward it, and its answer, with all that follows on its connection, when the rule is released."""
        return self._add(Action.HOLD_ANSWER)
