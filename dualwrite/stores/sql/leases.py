"""The SQL of leases: numbered ids of a fleet's members, and *slots*, transactional ids for each of many short-lived workers.

A lease says which member *should* try to own an id now. It protects nothing: the member that takes it claims the id, which
fences the former owner, even one that was paused past the end of its lease. Leases have a table of their own, so that no
heartbeat waits for a decision. The database's clock alone measures them.

Slots: transactional ids of a pool, leased for a time, so that each of many short-lived workers has its own.

A lease says which worker *should* use a slot now. It protects nothing by itself: a worker that gets a slot claims its
transactional id, which fences the slot's previous holder, even one that was paused past the end of its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    ARRAY,
    CTE,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Insert,
    Select,
    String,
    Table,
    Update,
    and_,
    bindparam,
    case,
    exc,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    true,
    tuple_,
    update,
)

from dualwrite import failpoints
from dualwrite.errors import ConfigurationError, Fenced, Unavailable
from dualwrite.protocol.members import Lease, LeaseState, check_fleet, numbers_to_try, place_of
from dualwrite.protocol.values import member_id, writer_of
from dualwrite.stores.sql.access import engine_of, map_database_error, reading
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import (
    MAX_ID_LENGTH,
    Tables,
    check_name,
    database_now,
    database_now_plus,
    declare_tables,
    in_chunks,
    parse_rows,
    row_columns,
)

if TYPE_CHECKING:
    from dualwrite.protocol.values import StateRow

_MORE: Final = 1000
"""How many times, number after number, another newcomer may be faster before a member gives up."""


class Leases:
    """The leases of one fleet. Thread-safe; every call is a short transaction of its own, durable on return.

    Every call raises ``Unavailable`` if the database does not answer, and ``ConfigurationError`` if the table or a right is
    missing, or the database is read-only.
    """

    def __init__(self, engine: Engine, fleet: str, *, schema: str | None = None) -> None:
        check_fleet(fleet)
        self.fleet = fleet
        self._dialect = dialect_of(engine)
        self._tables = declare_tables(schema)
        self._own = ShortTransactions(engine, self._dialect, self._tables)
        self._lease = self._tables.lease
        self._of_fleet = self._lease.c.fleet == fleet

    def take(self, owner: str, timeout_s: float, *, has_died: Callable[[Lease], bool] = lambda _: False) -> str:
        """Take the lowest number that nobody holds, or whose holder has died, and return its id.

        No other member takes it within ``timeout_s``, unless it is given back. What its former holder has left is not settled
        yet: claim the id next. Give a new ``owner`` to each call, except to one after a call that has raised: a name that holds
        a lease already gets that one again.
        """
        taken = self._own.run(lambda connection: self._take(connection, owner, timeout_s, has_died))
        failpoints.hit("lease.taken")
        return taken

    def take_number(
        self, number: int, owner: str, timeout_s: float, *, has_died: Callable[[Lease], bool] = lambda _: False
    ) -> str | None:
        """Take that number, and return its id; None if a member holds it that has not died. Otherwise as :meth:`take`."""
        lease = self._lease

        def work(connection: Connection) -> str | None:
            if (earlier := self._taken_earlier(connection, owner, timeout_s)) is not None:
                return earlier
            for found in _read(connection, self._tables, and_(self._of_fleet, lease.c.number == number)):
                if found.state is LeaseState.HELD and not has_died(found):
                    return None
                taken = self._take_over(connection, found, owner, timeout_s)
                break
            else:
                taken = self._add(connection, number, owner, timeout_s)
            return member_id(self.fleet, number) if taken else None

        taken = self._own.run(work)
        if taken is not None:
            failpoints.hit("lease.taken")
        return taken

    def _take(self, connection: Connection, owner: str, timeout_s: float, has_died: Callable[[Lease], bool]) -> str:
        if (earlier := self._taken_earlier(connection, owner, timeout_s)) is not None:
            return earlier
        there = {found.number: found for found in _read(connection, self._tables, self._of_fleet)}
        for tried, number in enumerate(numbers_to_try(there.values(), has_died)):
            if tried > len(there) + _MORE:
                break
            if number in there:
                taken = self._take_over(connection, there[number], owner, timeout_s)
            else:
                taken = self._add(connection, number, owner, timeout_s)
            if taken:
                return member_id(self.fleet, number)
        raise Unavailable(f"could not get a lease of fleet {self.fleet!r}: too many members are asking at once")

    def _taken_earlier(self, connection: Connection, owner: str, timeout_s: float) -> str | None:
        """The id that the owner took in an earlier attempt, whose answer was lost: its time starts again."""
        lease = self._lease
        mine = select(lease.c.transactional_id).where(self._of_fleet, lease.c.owner == owner)
        name: str | None = connection.scalar(mine.order_by(lease.c.number).limit(1))
        # Another member may be taking it now, if it has expired.
        return name if name is not None and self._renew(connection, name, owner, timeout_s) else None

    def _renew(self, connection: Connection, transactional_id: str, owner: str, timeout_s: float) -> bool:
        lease = self._lease
        ours = and_(lease.c.transactional_id == transactional_id, lease.c.owner == owner)
        renewed = update(lease).where(ours).values(lease_until=database_now_plus(timeout_s))
        return connection.execute(renewed).rowcount == 1

    def _add(self, connection: Connection, number: int, owner: str, timeout_s: float) -> bool:
        insert = self._dialect.insert_if_missing(self._lease).values(
            transactional_id=member_id(self.fleet, number),
            fleet=self.fleet,
            number=number,
            owner=owner,
            lease_until=database_now_plus(timeout_s),
        )
        return connection.execute(insert).rowcount == 1

    def _take_over(self, connection: Connection, found: Lease, owner: str, timeout_s: float) -> bool:
        """Take a lease that is over. One that is still held is over only while its row names the holder that has died."""
        lease = self._lease
        is_over = lease.c.owner == found.owner if found.state is LeaseState.HELD else self._is_over()
        this = and_(lease.c.transactional_id == found.transactional_id, is_over)
        # Another member may be taking it: skip it, where the database can.
        if connection.scalar(select(lease.c.number).where(this).with_for_update(skip_locked=True)) is None:
            return False
        changed = update(lease).where(this).values(owner=owner, lease_until=database_now_plus(timeout_s))
        return connection.execute(changed).rowcount == 1

    def _is_over(self) -> ColumnElement[bool]:
        return or_(self._lease.c.owner.is_(None), self._lease.c.lease_until <= database_now())

    def renew(
        self, transactional_id: str, owner: str, timeout_s: float, *, wait_s: float
    ) -> tuple[bool, Sequence[Lease]]:
        """Renew the owner's lease, even if it has expired, unless another member has taken it.

        It renews no other: a call to take one may be committed long after its connection broke, when the owner has asked again
        and got another number. Nobody uses that lease, so it must expire.

        ``timeout_s`` counts from now on; ``wait_s`` limits the wait for a lock. Returns whether the lease was renewed; and of
        the fleet's leases, those that have expired, as their holders died or were paused, and those whose holders run where the
        owner runs, so that it can see whether they have died.
        """
        lease = self._lease
        seen = lease.c.lease_until <= database_now()
        if (place := place_of(owner)) is not None:
            seen = or_(seen, lease.c.owner.contains(place.mark))

        def work(connection: Connection) -> tuple[bool, Sequence[Lease]]:
            is_ours = self._renew(connection, transactional_id, owner, timeout_s)
            found = _read(connection, self._tables, and_(self._of_fleet, seen))
            failpoints.hit("lease.heartbeat")
            return is_ours, found

        return self._own.run(work, lock_timeout_s=wait_s)

    def adopt(self, dead: Lease, owner: str, timeout_s: float) -> bool:
        """Take the lease of a dead holder, to settle what it has left. False if another member has been faster.

        ``dead`` is the lease as it was read: expired, or held by an owner that is known to have died. ``owner`` is a new name.
        """
        lease = self._lease

        def work(connection: Connection) -> bool:
            held = select(lease.c.owner).where(lease.c.transactional_id == dead.transactional_id)
            if connection.scalar(held) == owner:
                return True  # the answer to an earlier attempt was lost
            return self._take_over(connection, dead, owner, timeout_s)

        return self._own.run(work)

    def give_back(self, transactional_id: str, owner: str, *, settled: bool) -> None:
        """Give a lease back. Does nothing if another member has taken it.

        If something of ours is left to settle under it, it is not free but expires now, so that the next member settles it.
        """
        lease = self._lease
        changed = update(lease).where(lease.c.transactional_id == transactional_id, lease.c.owner == owner)
        values: dict[str, Any] = (
            {"owner": null(), "lease_until": null()} if settled else {"lease_until": database_now()}
        )
        self._own.run(lambda connection: connection.execute(changed.values(values)))
        failpoints.hit("lease.given_back")


def read_leases(
    engine: Engine, transactional_id: str | None = None, *, prefix: str = "", schema: str | None = None
) -> Sequence[Lease]:
    """The leases of an id, or of all ids with a prefix, in order. Changes nothing."""
    tables, dialect = declare_tables(schema), dialect_of(engine)
    name = tables.lease.c.transactional_id
    chosen = dialect.begins_with(name, prefix) if transactional_id is None else name == transactional_id
    with reading(engine, schema) as connection:
        return _read(connection, tables, chosen)


def living_members(engine: Engine, names: Collection[str], *, schema: str | None = None) -> set[str]:
    """Those of the transactional ids whose writer holds a lease that has not expired: it is alive."""
    lease = declare_tables(schema).lease
    writers = sorted({writer_of(name) for name in names})
    alive: set[str] = set()
    with reading(engine, schema) as connection:
        for chunk in in_chunks(writers):
            chosen = lease.c.transactional_id.in_(chunk)
            alive.update(
                connection.scalars(select(lease.c.transactional_id).where(chosen, lease.c.lease_until > database_now()))
            )
    return {name for name in names if writer_of(name) in alive}


def _read(connection: Connection, tables: Tables, chosen: ColumnElement[bool]) -> Sequence[Lease]:
    lease = tables.lease
    columns = (lease.c.transactional_id, lease.c.fleet, lease.c.number, lease.c.owner, lease.c.lease_until)
    rows = connection.execute(
        select(*columns, database_now().label("now")).where(chosen).order_by(lease.c.fleet, lease.c.number)
    )
    return [
        Lease(name, fleet, number, owner, None if until is None else (until - now).total_seconds())
        for name, fleet, number, owner, until, now in rows
    ]


_ROOM_FOR_NUMBER: Final = 11
_ATTEMPTS_TO_ADD: Final = 1000
_MOST_MADE: Final = 16
KEPT_S: Final = 60.0
"""How long a kept slot is reserved for its worker. Spark ends workers that are idle for a minute."""


@dataclass(frozen=True)
class SlotLease:
    """One slot, leased to its owner until a moment by the database's clock; ``transactional_id`` is ``pool#number``."""

    transactional_id: str
    pool: str
    owner: str
    until: datetime


@dataclass(frozen=True)
class Beginning:
    """How a batch begins as a slot is leased for it.

    Attributes:
        can_go_on: Whether it may be written.
        insert: What records that it has begun, unless it has; None if nothing does.
        is_begun: Whether it has.
    """

    can_go_on: ColumnElement[bool]
    insert: Insert | None = None
    is_begun: ColumnElement[bool] = field(default_factory=true)


class SlotPool:
    """The slots of one pool. Thread-safe; every call is a short transaction of its own.

    The pool's name has at most 244 characters; its slots are ``pool#1``, ``pool#2``, ... up to ``max_slots``. :meth:`close`
    disposes of an engine that was made from a URL. Every call raises ``Unavailable`` if the database does not answer, and
    ``ConfigurationError`` if a table or a right is missing, or the database is read-only.
    """

    def __init__(self, engine: Engine | str, pool: str, *, schema: str | None = None, max_slots: int = 10_000) -> None:
        check_name(pool, "the name of a pool")
        if len(pool) > MAX_ID_LENGTH - _ROOM_FOR_NUMBER:
            raise ConfigurationError(
                f"{pool!r} is too long for the name of a pool",
                next_step=f"use at most {MAX_ID_LENGTH - _ROOM_FOR_NUMBER} characters",
            )
        self.pool = pool
        self.max_slots = max_slots
        self._owns_engine = isinstance(engine, str)
        self._engine = engine_of(engine)
        self._dialect = dialect_of(self._engine)
        self._tables = tables = declare_tables(schema)
        self._own = ShortTransactions(self._engine, self._dialect, tables)
        self._leasing_again: dict[Hashable, Update] = {}
        self._has_ctes = self._engine.dialect.name == "postgresql"
        self._slot = slot = tables.slot
        self._is_free = and_(
            slot.c.pool == pool, or_(slot.c.lease_until.is_(None), slot.c.lease_until <= database_now())
        )
        self._is_nobodys = or_(slot.c.kept_until.is_(None), slot.c.kept_until <= database_now())
        self._taking = update(slot).values(
            lease_owner=bindparam("owner_"),
            lease_until=database_now_plus(bindparam("ttl_", type_=Float)),
            kept_until=null(),
        )
        self._take = self._taking.where(slot.c.transactional_id == bindparam("id_"))
        self._found = select(slot.c.transactional_id, slot.c.lease_owner, slot.c.lease_until).where(
            slot.c.transactional_id == bindparam("id_")
        )

    def close(self) -> None:
        """Dispose of the engine if the pool made it. Idempotent."""
        if self._owns_engine:
            self._engine.dispose()

    def lease(
        self,
        owner: str,
        ttl_s: float,
        *,
        preferred: Callable[[Connection], Sequence[str]] = lambda _: (),
        require: Callable[[Connection], None] = lambda _: None,
        ended: Callable[[str], None] = lambda _: None,
    ) -> SlotLease:
        """Lease a slot that is free or expired: the first preferred one, else the lowest-numbered one, or a new one.

        Slots that other workers have kept for less than a minute are taken only if the pool may not grow. ``Unavailable`` also
        if all ``max_slots`` are leased.

        No other worker gets the slot within ``ttl_s``, unless it is released. Its previous holder's transaction is not settled
        yet: claim the transactional id next.

        ``owner`` is unique to the worker and its attempt: otherwise the worker could renew a lease that it lost. All of these
        are called in the leasing transaction, and again if that is repeated; if one raises, nothing is leased: ``require``,
        called first; ``preferred``, which returns the slots to take before others; and ``ended``, called with the
        former holder of the slot, if that has let its lease end at a given time (:meth:`keep`), and nobody has settled it
        since.
        """
        slot = self._slot
        mine = select(slot.c.transactional_id).where(slot.c.pool == self.pool, slot.c.lease_owner == owner).limit(1)
        is_repeated = False

        def work(connection: Connection) -> SlotLease | None:
            nonlocal is_repeated
            require(connection)
            # The COMMIT of a run before this one may have gone unanswered: a second slot would leave the first one leased.
            again = connection.scalar(mine) if is_repeated else None
            is_repeated = True
            if again is not None:
                return self._change(connection, self._take, {"id_": again, "owner_": owner, "ttl_": ttl_s})
            return self._take_free_or_new(connection, owner, ttl_s, preferred(connection), ended)

        for _ in range(_ATTEMPTS_TO_ADD):
            taken = self._own.run(work)
            if taken is not None:
                failpoints.hit("slot.leased")
                return taken
        raise Unavailable(f"could not get a slot of pool {self.pool!r}: too many workers are asking at once")

    def lease_again(
        self,
        owner: str,
        ttl_s: float,
        resting: Sequence[StateRow],
        *,
        of: Hashable,
        run: Select[Any] | None = None,
        begins: Callable[[CTE | None], Beginning],
        bound: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[SlotLease, StateRow] | None:
        """Lease a slot that is kept for its worker (:meth:`release`), and read its row.

        That is the first of the `resting` rows, as the worker knows them, whose slot is free, and whose id nobody has claimed
        since. `run` finds the run while it may write (:meth:`Runs.holding`); `begins` says whether the batch can go on, and
        records that it has begun (:meth:`Ledger.beginning`). None, with nothing leased, if there is no such slot, the run is
        over or just being replaced, or the batch cannot go on: :meth:`lease` then does it, or says why not.

        One statement does it where a statement can stand alone and return what it has changed; else a transaction of two
        statements, or of three for the first one of a batch. The one statement is made once for all calls with the same `of`,
        which names the run and what `begins` stands for; `bound` are the values of its parameters.
        """
        if not resting:
            return None
        if not self._own.can_stand_alone:
            return self._lease_in_steps(owner, ttl_s, resting, run, beginning=begins(None), bound=bound)
        statement = self._leasing_again.get(of)
        if statement is None:
            if len(self._leasing_again) >= _MOST_MADE:
                self._leasing_again.clear()
            statement = self._leasing_again[of] = self._make_leasing_again(run, begins)
        bound = {
            **bound, "owner_": owner, "ttl_": ttl_s,
            "names_": [(row.transactional_id, row.namespace, row.incarnation) for row in resting],
            "places_": [row.transactional_id for row in resting],
        }  # fmt: skip
        row = self._own.run_one(lambda own: own.execute(statement, bound).mappings().one_or_none())
        if row is None:
            return None
        failpoints.hit("slot.leased")
        [found_row] = parse_rows(self._tables.state.fullname, [row])
        return SlotLease(found_row.transactional_id, self.pool, row["lease_owner"], row["lease_until"]), found_row

    def _make_leasing_again(self, run: Select[Any] | None, begins: Callable[[CTE | None], Beginning]) -> Update:
        slot, state = self._slot, self._tables.state
        held = None if run is None else run.cte("held")
        statement = self._taking
        name = slot.c.transactional_id
        free = (
            select(slot.c.transactional_id.label("slot_"), *row_columns(self._tables))
            .join_from(slot, state, state.c.transactional_id == slot.c.transactional_id)
            .where(
                self._is_free,
                slot.c.lease_owner.is_(None),
                tuple_(state.c.transactional_id, state.c.namespace, state.c.incarnation).in_(
                    bindparam("names_", expanding=True)
                ),
            )
            .order_by(func.array_position(bindparam("places_", type_=ARRAY(String)), name))
            .limit(1)
            .with_for_update(of=slot, skip_locked=True)
        )
        if held is not None:
            free = free.where(exists(select(held)))
        beginning = begins(held)
        if beginning.insert is not None:
            statement = statement.add_cte(beginning.insert.cte("begun"))
        found = free.where(beginning.can_go_on).cte("free")
        return statement.where(name == found.c.slot_).returning(
            slot.c.lease_owner, slot.c.lease_until, *(found.c[one.name] for one in row_columns(self._tables))
        )

    def _lease_in_steps(
        self,
        owner: str,
        ttl_s: float,
        resting: Sequence[StateRow],
        run: Select[Any] | None,
        *,
        beginning: Beginning,
        bound: Mapping[str, object],
    ) -> tuple[SlotLease, StateRow] | None:
        """First looks for all that must be so, and locks the run; last leases a slot that is still free."""
        slot, state = self._slot, self._tables.state
        names = [(row.transactional_id, row.namespace, row.incarnation) for row in resting]
        is_free = and_(self._is_free, slot.c.lease_owner.is_(None))
        checks = self._dialect.own_checks()
        columns = row_columns(self._tables)
        look = (
            select(
                *columns,
                database_now().label("now_"),
                (literal(True) if run is None else run.scalar_subquery().is_not(None)).label("may_write_"),
                beginning.can_go_on.label("can_go_on_"),
                beginning.is_begun.label("is_begun_"),
                *checks,
            )
            .join_from(slot, state, state.c.transactional_id == slot.c.transactional_id)
            .where(is_free, tuple_(state.c.transactional_id, state.c.namespace, state.c.incarnation).in_(names))
            .order_by(_place(slot.c.transactional_id, [row.transactional_id for row in resting]))
            .limit(1)
        )

        def work(connection: Connection) -> tuple[SlotLease, StateRow] | None:
            values = connection.execute(look, bound).mappings().one_or_none()
            if values is None:
                return None
            self._dialect.check_own(list(values.values())[len(values) - len(checks) :])
            if not (values["may_write_"] and values["can_go_on_"]):
                return None
            is_begun = values["is_begun_"]
            if not is_begun and beginning.insert is not None:
                # Another worker may begin the batch just now, perhaps for another destination.
                is_begun = connection.execute(beginning.insert).rowcount == 1
            [row] = parse_rows(state.fullname, [values])
            until = values["now_"] + timedelta(seconds=ttl_s)
            taking = (
                update(slot)
                .where(slot.c.transactional_id == row.transactional_id, is_free)
                .values(lease_owner=owner, lease_until=until, kept_until=null())
            )
            if not is_begun or connection.execute(taking).rowcount != 1:
                return None
            return SlotLease(row.transactional_id, self.pool, owner, until), row

        taken = self._own.run(work, light=True)
        if taken is not None:
            failpoints.hit("slot.leased")
        return taken

    def _take_free_or_new(
        self,
        connection: Connection,
        owner: str,
        ttl_s: float,
        preferred: Sequence[str],
        ended: Callable[[str], None],
    ) -> SlotLease | None:
        """A lease; None if another worker was faster to make the next slot."""
        slot = self._slot
        place = [_place(slot.c.transactional_id, preferred)] if preferred else []
        free = (
            select(slot.c.transactional_id, slot.c.lease_owner, slot.c.kept_until)
            .where(self._is_free)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        mine_or_nobodys = (
            or_(slot.c.transactional_id.in_(preferred), self._is_nobodys) if preferred else self._is_nobodys
        )
        found = connection.execute(free.where(mine_or_nobodys).order_by(*place, slot.c.number)).first()
        if found is None:
            number = (connection.scalar(select(func.max(slot.c.number)).where(slot.c.pool == self.pool)) or 0) + 1
            if number <= self.max_slots:
                return self._add(connection, number, owner, ttl_s)
            found = connection.execute(free.order_by(slot.c.kept_until)).first()
            if found is None:
                raise self._all_leased()
        transactional_id, former, kept_until = found
        if former is not None and kept_until is not None:
            ended(former)
        return self._change(connection, self._take, {"id_": transactional_id, "owner_": owner, "ttl_": ttl_s})

    def _change(
        self,
        connection: Connection,
        statement: Update,
        bound: Mapping[str, object],
        known: SlotLease | None = None,
    ) -> SlotLease | None:
        """The lease after the change, which may be `known` before; None if no row matched."""
        if known is not None:
            return known if connection.execute(statement, bound).rowcount == 1 else None
        if connection.dialect.update_returning:
            row = connection.execute(statement.returning(*self._found.selected_columns), bound).one_or_none()
        elif connection.execute(statement, bound).rowcount == 1:
            row = connection.execute(self._found, bound).one()  # locked by the change
        else:
            row = None
        return None if row is None else SlotLease(row[0], self.pool, row[1], row[2])

    def _all_leased(self) -> Unavailable:
        return Unavailable(
            f"all {self.max_slots} slots of pool {self.pool!r} are leased",
            next_step="wait for workers to end, or raise max_slots",
        )

    def _add(self, connection: Connection, number: int, owner: str, ttl_s: float) -> SlotLease | None:
        name = f"{self.pool}#{number}"
        row = {"transactional_id": name, "pool": self.pool, "number": number, "lease_owner": owner}
        insert = self._dialect.insert_if_missing(self._slot).values(**row, lease_until=database_now_plus(ttl_s))
        if connection.dialect.insert_returning:
            until = connection.scalar(insert.returning(self._slot.c.lease_until))
            return None if until is None else SlotLease(name, self.pool, owner, until)
        if connection.execute(insert).rowcount != 1:
            return None
        *_, until = connection.execute(self._found, {"id_": name}).one()
        return SlotLease(name, self.pool, owner, until)

    def renew(self, lease: SlotLease, ttl_s: float) -> SlotLease:
        """Extend a lease to ``ttl_s`` from now, even an expired one; ``Fenced`` if another worker has taken the slot."""
        slot = self._slot
        statement = self._take.where(slot.c.pool == self.pool, slot.c.lease_owner == literal(lease.owner))
        bound = {"id_": lease.transactional_id, "owner_": lease.owner, "ttl_": ttl_s}
        return self._changed(lease, statement, bound)

    def take_over(self, leases: Collection[SlotLease], owner: str, ttl_s: float) -> Sequence[SlotLease]:
        """Take over slots that others hold, to settle what their holders left. These can no longer renew or keep them.

        A slot whose holder has changed since its lease was read is left out. Call it before claiming the slots: a holder that
        claims its slot after us then finds its lease gone.
        """
        # Accept our own name too: the answer to an earlier attempt may have been lost.
        statement = self._take.where(self._slot.c.lease_owner.in_([bindparam("former_"), bindparam("owner_")]))
        bound = [
            {"id_": one.transactional_id, "owner_": owner, "ttl_": ttl_s, "former_": one.owner}
            for one in sorted(leases, key=lambda one: one.transactional_id)
        ]

        def work(connection: Connection) -> Sequence[SlotLease]:
            taken = [self._change(connection, statement, values) for values in bound]
            return [one for one in taken if one is not None]

        return self._own.run(work) if bound else []

    def keep(
        self,
        lease: SlotLease,
        until: datetime,
        connection: Connection | None = None,
        condition: Select[Any] | None = None,
    ) -> SlotLease:
        """Let a lease end at a given time by the database's clock. If that time has passed, it ends at once.

        The slot then shows that its holder has left something in it for another process; see :meth:`lease`. ``Fenced`` as
        :meth:`renew`, and if the ``condition`` finds no row: its locks are taken first. With a connection, in the caller's
        transaction.
        """
        slot = self._slot
        ends = bindparam("until_", type_=slot.c.lease_until.type)
        statement = (
            update(slot)
            .where(slot.c.transactional_id == bindparam("id_"), slot.c.lease_owner == bindparam("owner_"))
            .values(lease_until=ends, kept_until=ends)  # both times: the lease was kept
        )
        if condition is not None:
            statement = statement.where(exists(select(condition.cte("held"))) if self._has_ctes else condition.exists())
        bound = {"id_": lease.transactional_id, "owner_": lease.owner, "until_": until}
        kept = SlotLease(lease.transactional_id, self.pool, lease.owner, until)
        return self._changed(lease, statement, bound, connection, kept)

    def _changed(
        self,
        lease: SlotLease,
        statement: Update,
        bound: Mapping[str, object],
        connection: Connection | None = None,
        known: SlotLease | None = None,
    ) -> SlotLease:
        if connection is None:
            changed = self._own.run_one(lambda own: self._change(own, statement, bound, known))
        else:
            try:
                changed = self._change(connection, statement, bound, known)
            except exc.SQLAlchemyError as error:
                raise map_database_error(error, self._engine) from error
        if changed is None:
            raise Fenced(f"{lease.owner} no longer holds the slot", transactional_id=lease.transactional_id)
        return changed

    def release(
        self,
        owners: Mapping[str, str],
        *,
        kept: bool = False,
        connection: Connection | None = None,
        beside: Update | None = None,
    ) -> None:
        """Give back slots, given with their holders. Does nothing for a slot whose holder has changed.

        ``kept`` reserves them for a while for their workers, which could continue with them; see :meth:`lease`. With a
        connection, in the caller's transaction; without one, another change may go ``beside``, with it or not at all.
        """
        if not owners:
            return
        statement, bound = _releasing(self._slot, KEPT_S if kept else None), {"owners_": sorted(owners.items())}
        if connection is not None:
            connection.execute(statement, bound)
            return
        if beside is None:
            self._own.run_one(lambda own: own.execute(statement, bound))
        elif self._has_ctes:
            both = statement.add_cte(beside.cte("beside"))
            self._own.run_one(lambda own: own.execute(both, bound))
        else:
            # Nothing is checked: if it is lost, the next claim finds out what is true.
            self._own.run(lambda own: (own.execute(beside), own.execute(statement, bound)), light=True)
        failpoints.hit("slot.released")

    def expired(self) -> Sequence[SlotLease]:
        """Expired leases that were not released: their workers died, or were paused."""
        return self._list(self._slot.c.lease_until <= database_now())

    def to_settle(self, owner_prefix: str, connection: Connection | None = None) -> Sequence[SlotLease]:
        """The leases of :meth:`expired` and of :meth:`held_by`, in one request; perhaps in the caller's transaction."""
        has_ended = self._slot.c.lease_until <= database_now()
        return self._list(has_ended | self._dialect.begins_with(self._slot.c.lease_owner, owner_prefix), connection)

    def held_by(self, owner_prefix: str) -> Sequence[SlotLease]:
        """The leases, expired or not, whose owner's name has this prefix: of one worker, or of all workers of a job."""
        return self._list(self._dialect.begins_with(self._slot.c.lease_owner, owner_prefix))

    def held_in(self, connection: Connection, names: Collection[str]) -> Mapping[str, str]:
        """The holders of those of the slots whose leases have not ended, read inside the caller's transaction."""
        slot = self._slot
        held: dict[str, str] = {}
        for chunk in in_chunks(sorted(names)):
            statement = select(slot.c.transactional_id, slot.c.lease_owner).where(
                slot.c.pool == self.pool, slot.c.transactional_id.in_(chunk), slot.c.lease_until > database_now()
            )
            try:
                held.update((name, owner) for name, owner in connection.execute(statement))
            except exc.SQLAlchemyError as error:
                raise map_database_error(error, self._engine) from error
        return held

    def _list(self, condition: ColumnElement[bool], connection: Connection | None = None) -> Sequence[SlotLease]:
        slot = self._slot
        statement = (
            select(slot.c.transactional_id, slot.c.lease_owner, slot.c.lease_until)
            .where(slot.c.pool == self.pool, slot.c.lease_owner.is_not(None), condition)
            .order_by(slot.c.number)
        )
        if connection is not None:
            rows = connection.execute(statement).all()
        else:
            rows = self._own.read(lambda own: own.execute(statement).all())
        return [SlotLease(name, self.pool, owner, until) for name, owner, until in rows]


@lru_cache(maxsize=32)
def _releasing(slot: Table, kept_s: float | None) -> Update:
    held = tuple_(slot.c.transactional_id, slot.c.lease_owner).in_(bindparam("owners_", expanding=True))
    kept_until = null() if kept_s is None else database_now_plus(literal(kept_s, Float))
    return update(slot).where(held).values(lease_owner=null(), lease_until=null(), kept_until=kept_until)


def living_leases(engine: Engine, names: Collection[str], *, schema: str | None = None) -> set[str]:
    """Those of the transactional ids that are slots with an unexpired lease: their workers may be alive."""
    slot = declare_tables(schema).slot
    found: set[str] = set()
    with reading(engine, schema) as connection:
        for chunk in in_chunks(sorted(names)):
            statement = select(slot.c.transactional_id).where(
                slot.c.transactional_id.in_(chunk), slot.c.lease_until > database_now()
            )
            found.update(connection.scalars(statement))
    return found


def _place(name: ColumnElement[str], preferred: Sequence[str]) -> ColumnElement[int]:
    return case({one: place for place, one in enumerate(preferred)}, value=name, else_=len(preferred))
