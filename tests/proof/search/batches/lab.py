"""Runs recipes one call at a time, from any point that they can reach, on any state of the servers.

A recipe does nothing by itself that another process could see, so where it stands follows from the answers that it has been given:
its *history*. To go on from a history on some state of the servers, a recipe that has this history serves its next call on that
state. If no such recipe is kept, a new one is given the same answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pytest
from simulator.database import ConnectionLost, Database, MustWait, Session
from simulator.process import Call, Process, Server, Unanswered
from simulator.requests import Request
from simulator.scheduler import Simulation
from simulator.state import Broker

from dualwrite.protocol.values import Incident, StateRow

Number = int
Breaking = Callable[[pytest.MonkeyPatch], None]
"""Breaks one rule of the product."""
_EPOCH_S: Final = 1000.0
_UNANSWERED_S: Final = 1.0
"""How long a recipe waits for an answer that does not come: longer than a client does before it may send a request again."""
_MOST_AT_HAND: Final = 40
"""Recipes of one history that are kept for later."""


class Held(NamedTuple):
    """A session inside a transaction. An orphan has no client any more: ``owner`` is empty.

    ``index`` counts the sessions of a process. One that the database has ended, as its client does not know yet, is ``broken``.
    """

    owner: str
    index: int
    broken: bool = False
    failed: bool = False
    committing: bool = False
    waits_for: tuple[str, bool] | None = None
    locked: tuple[tuple[str, bool], ...] = ()
    rows: tuple[StateRow, ...] = ()
    incidents: tuple[Incident, ...] = ()
    user_rows: tuple[str, ...] = ()


class Kept(NamedTuple):
    """The database: what is committed, and the open transactions."""

    rows: tuple[StateRow, ...] = ()
    incidents: tuple[Incident, ...] = ()
    user_rows: tuple[str, ...] = ()
    sessions: tuple[Held, ...] = ()

    def without(self, owner: str) -> Kept:
        """After the server has noticed that this client is gone."""
        return self._replace(sessions=tuple(held for held in self.sessions if held.owner != owner))

    def has_cut_off(self, owner: str) -> bool:
        """Whether it has ended a session of this client, which may not know it yet."""
        return any(held.broken and held.owner == owner for held in self.sessions)


class NamelessDatabase(Database):
    """Names no transaction: their numbers would tell apart what is the same. So the server never knows what became of one."""

    def connect(self, owner: Any, *, repeatable: bool = False) -> Session:
        session = super().connect(owner, repeatable=repeatable)
        owner.sessions.append(session)
        return session

    def name(self, session: Session) -> None:
        del session


class Recipe(Process):
    """One running recipe.

    Attributes:
        sessions: Those that it has opened, in order.
        told: What it has told its caller.
        waited_s: How long it has waited for answers that did not come. Nothing else takes any time.
    """

    def __init__(self, name: str, body: Callable[[Recipe], object], simulation: Simulation) -> None:
        super().__init__(name, body, simulation)
        self.simulation = simulation
        self.sessions: list[Session] = []
        self.told: list[Hashable] = []
        self.waited_s = 0.0

    def tell(self, what: Hashable) -> None:
        """Tell the caller."""
        self.told.append(what)

    @property
    def flags(self) -> tuple[tuple[bool, bool, bool], ...]:
        """The state of each session, as far as its side knows."""
        return tuple((session.open, session.failed, session.broken) for session in self.sessions)


@dataclass
class Point:
    """Where a recipe stands.

    Attributes:
        program: Its name.
        before: The point that it came from, and the answer that it got there; None at its start.
        flags: What its sessions were like when it got that answer.
        told: All that it has told.
        server: What it asks next; None if it has ended.
        label: The name of this request or statement.
        requests: The requests to Kafka.
        request: The request to Kafka, if it can change anything there.
        in_transaction: Whether the statement belongs to a transaction.
        block: The answers since its last pause, by which a vain look is known for one.
        paused: Its last pause.
    """

    program: str
    before: tuple[Number, Any] | None
    flags: tuple[tuple[bool, bool, bool], ...] = ()
    told: tuple[Hashable, ...] = ()
    server: Server | None = None
    label: str = ""
    requests: tuple[Request, ...] = ()
    request: Request | None = None
    block: tuple[Number, ...] = ()
    paused: tuple[Number, tuple[Number, ...]] | None = None
    error: BaseException | None = field(default=None, repr=False)


class Lab:
    """The servers, and recipes at all points that they were seen at.

    Args:
        programs: The recipes by name.
        broken: Breaks a rule of the product while recipes run.
    """

    def __init__(self, programs: dict[str, Callable[[Recipe], object]], broken: Breaking | None = None) -> None:
        self._programs = programs
        self._broken = broken
        self.points: list[Point] = []
        self._numbers: dict[Hashable, Number] = {}
        self._answers: dict[Hashable, Number] = {}
        self._at_hand: defaultdict[Number, list[Recipe]] = defaultdict(list)
        self.database = NamelessDatabase()
        self.simulation = Simulation(Broker(), self.database)
        self.simulation.markers_delayed = True

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Recipes run only inside of this block."""
        with ExitStack() as stack:
            if self._broken is not None:
                self._broken(stack.enter_context(pytest.MonkeyPatch.context()))
            stack.enter_context(self.simulation.clock_and_points())
            yield

    def start(self, program: str) -> Number:
        """The point at which a recipe starts."""
        with self.running():
            recipe = self._started(program)
            return self._arrived(recipe, None)

    def serve(
        self, at: Number, kept: Kept, broker: Broker, *, lost: bool = False
    ) -> tuple[Number, Kept, Broker] | None:
        """Serve a recipe's next call, and let it run to the one after that.

        Args:
            at: Where it stands.
            kept: The database.
            broker: Kafka.
            lost: Whether the answer is lost.

        Returns:
            Where it stands then, and the servers; None if it waits, and nothing has changed.
        """
        with self.running():
            recipe = self._at(at)
            self._restore(kept, recipe)
            self.simulation.broker = broker
            call = recipe.call
            assert call is not None
            answer: Any
            try:
                answer = call.serve()
            except MustWait:
                waiting = self._kept(kept, recipe, heard=False)
                if kept.has_cut_off(recipe.name):
                    recipe.kill()  # it would stand there without a session, also where it still has it
                else:
                    self._put_back(at, recipe)
                return None if waiting == kept else (at, waiting, self.simulation.broker)
            except Exception as error:  # noqa: BLE001 - raised in the recipe
                answer = error
            if lost:
                answer = self._unheard(call)
            return self._go_on(at, recipe, answer, kept)

    def fail(self, at: Number, kept: Kept, broker: Broker, *, under_way: bool = False) -> tuple[Number, Kept, Broker]:
        """Let a recipe's next call stay without effect, for now, and without an answer.

        Args:
            at: Where it stands.
            kept: The database.
            broker: Kafka.
            under_way: Whether the database still works on it.
        """
        with self.running():
            recipe = self._at(at)
            self._restore(kept, recipe)
            self.simulation.broker = broker
            call = recipe.call
            assert call is not None
            answer = self._unheard(call, under_way=under_way)
            return self._go_on(at, recipe, answer, kept)

    def command(self, at: Number, command: Hashable, kept: Kept, broker: Broker) -> tuple[Number, Kept, Broker]:
        """Give a recipe the command that it waits for."""
        with self.running():
            recipe = self._at(at)
            self._restore(kept, recipe)
            self.simulation.broker = broker
            return self._go_on(at, recipe, command, kept)

    def is_blocked(self, at: Number, kept: Kept) -> bool:
        """Whether it waits for a lock that another holds."""
        name = self.points[at].program
        wanted = next((held.waits_for for held in kept.sessions if held.owner == name and held.waits_for), None)
        if wanted is None:
            return False
        key, exclusive = wanted
        return any(
            locked == key and (exclusive or theirs)
            for held in kept.sessions
            if held.owner != name
            for locked, theirs in held.locked
        )

    def end_orphan(self, kept: Kept, orphan: Held, *, committed: bool) -> Kept:
        """Let the database finish a COMMIT whose client has turned away."""
        self._restore(kept._replace(sessions=(orphan,)), None)
        [session] = self.database.orphans
        self.database.end_orphan(session, committed=committed)
        others = list(kept.sessions)
        others.remove(orphan)
        return self._committed(tuple(others))

    def close(self) -> None:
        """Nothing runs any more."""
        with self.running():
            for recipes in self._at_hand.values():
                for recipe in recipes:
                    recipe.kill()
        self._at_hand.clear()

    # Recipes

    def _started(self, program: str) -> Recipe:
        recipe = Recipe(program, self._programs[program], self.simulation)
        recipe.resume()
        return recipe

    def _at(self, number: Number) -> Recipe:
        """A recipe that stands there."""
        if self._at_hand[number]:
            return self._at_hand[number].pop()
        way = []
        point = self.points[number]
        while point.before is not None:
            way.append((point.before[1], point.flags))
            point = self.points[point.before[0]]
        self._restore(Kept(), None)
        recipe = self._started(point.program)
        for answer, flags in reversed(way):
            self._skip_pauses(recipe)
            for session, (open_, failed, broken) in zip(recipe.sessions, flags, strict=True):
                session.open, session.failed, session.broken = open_, failed, broken
            self._resume(recipe, answer)
        self._skip_pauses(recipe)
        return recipe

    def _put_back(self, number: Number, recipe: Recipe) -> None:
        if len(self._at_hand[number]) < _MOST_AT_HAND:
            self._at_hand[number].append(recipe)
        else:
            recipe.kill()

    def _resume(self, recipe: Recipe, answer: object) -> None:
        if isinstance(answer, (Unanswered, ConnectionLost)):
            recipe.waited_s += _UNANSWERED_S
        self.simulation.now_s = _EPOCH_S + recipe.waited_s
        if isinstance(answer, Exception):
            recipe.resume(error=answer)
        else:
            recipe.resume(answer)
        self.simulation.now_s = _EPOCH_S

    def _skip_pauses(self, recipe: Recipe) -> bool:
        """No time passes: whatever it waits for has happened, or has not."""
        paused = False
        self.simulation.now_s = _EPOCH_S + recipe.waited_s
        while recipe.call is not None and recipe.call.server is Server.CLOCK:
            recipe.resume()
            paused = True
        self.simulation.now_s = _EPOCH_S
        return paused

    def _unheard(self, call: Call, *, under_way: bool = False) -> Exception:
        if call.session is None:
            return Unanswered()
        self.database.abandon(call.session, committing=under_way)
        if not under_way and call.session.open:
            self.database.end_orphan(call.session)
        return ConnectionLost()

    def _go_on(self, at: Number, recipe: Recipe, answer: object, kept: Kept) -> tuple[Number, Kept, Broker]:
        flags = recipe.flags
        self._resume(recipe, answer)
        paused = self._skip_pauses(recipe)
        after = self._kept(kept, recipe, heard=True)  # before the recipe is put away, and perhaps ended
        # A recipe that notices in the same step that a session is gone does not stand where it stood.
        paused = paused and not kept.has_cut_off(recipe.name)
        return self._arrived(recipe, (at, answer), flags, paused=paused), after, self.simulation.broker

    def _arrived(
        self, recipe: Recipe, before: tuple[Number, Any] | None, flags: Any = (), *, paused: bool = False
    ) -> Number:
        """The point at which a recipe has arrived.

        Args:
            recipe: The recipe.
            before: Where it stood, and the answer that it got; None at its start.
            flags: What its sessions were like then.
            paused: Whether it has paused since, and so may stand where it stood before.
        """
        if before is None:
            key: Hashable = recipe.name
            block: tuple[Number, ...] = ()
            last = None
        else:
            answered = self._answer(before[1])
            key = before[0], answered, flags
            block = (*self.points[before[0]].block, answered)
            last = self.points[before[0]].paused
        if recipe.call is None:
            return self._ended(recipe.name, tuple(recipe.told), recipe.error)
        if paused and before is not None and self._asks_again(recipe.call, before):
            self._put_back(before[0], recipe)
            return before[0]
        if paused and last is not None and last[1] == block:
            recipe.kill()  # it has looked, waited, and looked again: nothing is new
            return last[0]
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.points)
            call = recipe.call
            point = Point(recipe.name, before, flags, tuple(recipe.told), call.server, call.label)
            point.requests = tuple(call.requests)
            point.request = call.requests[0] if call.changes else None
            point.block, point.paused = ((), (number, block)) if paused else (block, last)
            self.points.append(point)
        self._put_back(number, recipe)
        return number

    def _asks_again(self, call: Call, before: tuple[Number, Any]) -> bool:
        """Whether it has got an answer for which it waits, and asks the same again: it stands where it stood."""
        asked, answer = self.points[before[0]], before[1]
        return bool(call.requests) and asked.requests == tuple(call.requests) and not isinstance(answer, Exception)

    def _ended(self, program: str, told: tuple[Hashable, ...], error: BaseException | None) -> Number:
        number = self._numbers.setdefault((program, told, repr(error)), len(self.points))
        if number == len(self.points):
            self.points.append(Point(program, None, told=told, error=error))
        return number

    def died(self, at: Number) -> Number:
        """The point of a recipe that was killed there: all that is left of it is what it has told."""
        return self._ended(self.points[at].program, self.points[at].told, None)

    def _answer(self, answer: object) -> Number:
        text = (type(answer), str(answer)) if isinstance(answer, Exception) else repr(answer)
        return self._answers.setdefault(text, len(self._answers))

    # The database

    def _restore(self, kept: Kept, recipe: Recipe | None) -> None:
        database = self.database
        database.rows = {row.transactional_id: row for row in kept.rows}
        database.incidents = {(one.transactional_id, one.prepared_transaction_state): one for one in kept.incidents}
        database.user_rows = list(kept.user_rows)
        database.sessions, database._locks = [], {}
        own = [] if recipe is None else recipe.sessions
        for session in own:
            if not session.broken:
                session.open = session.failed = session.committing = False
                session.waits_for = None
                session._reset()
                database.sessions.append(session)
        for held in kept.sessions:
            if recipe is not None and held.owner == recipe.name:
                session = own[held.index]
            else:
                session = Session((held.owner, held.index) if held.owner else None, repeatable=False)
                database.sessions.append(session)
            if held.broken:
                database.disconnect(session)
                continue
            session.open, session.failed, session.committing = True, held.failed, held.committing
            session.broken = not held.owner
            session.waits_for = held.waits_for
            session.rows = {row.transactional_id: row for row in held.rows}
            session.incidents = {(one.transactional_id, one.prepared_transaction_state): one for one in held.incidents}
            session.user_rows = list(held.user_rows)
            session.locked = [key for key, _ in held.locked]
            for key, exclusive in held.locked:
                database._locks.setdefault(key, {})[session] = exclusive

    def _kept(self, before: Kept, recipe: Recipe, *, heard: bool) -> Kept:
        """The database as it is now.

        Args:
            before: As it was.
            recipe: The recipe that has just used it.
            heard: Whether it knows by now which of its sessions the database has ended.
        """
        database = self.database
        if recipe.call is None:
            database.disconnect_all(recipe)
        sessions = [held for held in before.sessions if held.broken and not (heard and held.owner == recipe.name)]
        for session in database.sessions:
            if not session.open:
                continue
            if session.owner is recipe:
                owner, index = recipe.name, recipe.sessions.index(session)
            else:
                owner, index = session.owner or ("", 0)
            sessions.append(
                Held(
                    owner,
                    index,
                    failed=session.failed,
                    committing=session.committing,
                    waits_for=session.waits_for,
                    locked=tuple(sorted((key, database._locks[key][session]) for key in session.locked)),
                    rows=tuple(session.rows[key] for key in sorted(session.rows)),
                    incidents=tuple(session.incidents[key] for key in sorted(session.incidents)),
                    user_rows=tuple(sorted(session.user_rows)),
                )
            )
        return self._committed(tuple(sorted(sessions, key=repr)))

    def _committed(self, sessions: tuple[Held, ...]) -> Kept:
        database = self.database
        return Kept(
            tuple(database.rows[key] for key in sorted(database.rows)),
            tuple(database.incidents[key] for key in sorted(database.incidents)),
            tuple(sorted(database.user_rows)),
            sessions,
        )
