"""Slots: transactional ids of a pool, leased for a time, so that each of many short-lived workers has its own.

A lease says which worker *should* use a slot now. It protects nothing by itself: a worker that gets a slot claims its
transactional id, which fences the slot's previous holder, even one that was paused past the end of its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Float,
    Update,
    and_,
    bindparam,
    case,
    exc,
    func,
    literal,
    null,
    or_,
    select,
    update,
)

from dualwrite import failpoints
from dualwrite.errors import ConfigurationError, Fenced, Unavailable
from dualwrite.stores.sql.access import engine_of, map_database_error
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import (
    MAX_ID_LENGTH,
    check_name,
    database_now,
    database_now_plus,
    declare_tables,
    in_chunks,
)

_ROOM_FOR_NUMBER: Final = 11
_ATTEMPTS_TO_ADD: Final = 1000
KEPT_S: Final = 60.0
"""How long a kept slot is reserved for its worker. Spark ends workers that are idle for a minute."""


@dataclass(frozen=True)
class Lease:
    """One slot, leased to its owner until a moment by the database's clock; ``transactional_id`` is ``pool#number``."""

    transactional_id: str
    pool: str
    owner: str
    until: datetime


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
        tables = declare_tables(schema)
        self._own = ShortTransactions(self._engine, self._dialect, tables)
        self._slot = slot = tables.slot
        self._is_free = and_(
            slot.c.pool == pool, or_(slot.c.lease_until.is_(None), slot.c.lease_until <= database_now())
        )
        self._is_nobodys = or_(slot.c.kept_until.is_(None), slot.c.kept_until <= database_now())
        self._take = (
            update(slot)
            .where(slot.c.transactional_id == bindparam("id_"))
            .values(
                lease_owner=bindparam("owner_"),
                lease_until=database_now_plus(bindparam("ttl_", type_=Float)),
                kept_until=null(),
            )
        )
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
    ) -> Lease:
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

        def work(connection: Connection) -> Lease | None:
            require(connection)
            return self._take_free_or_new(connection, owner, ttl_s, preferred(connection), ended)

        for _ in range(_ATTEMPTS_TO_ADD):
            taken = self._own.run(work)
            if taken is not None:
                failpoints.hit("slot.leased")
                return taken
        raise Unavailable(f"could not get a slot of pool {self.pool!r}: too many workers are asking at once")

    def _take_free_or_new(
        self,
        connection: Connection,
        owner: str,
        ttl_s: float,
        preferred: Sequence[str],
        ended: Callable[[str], None],
    ) -> Lease | None:
        """A lease; None if another worker was faster to make the next slot."""
        slot = self._slot
        place = [_place(slot.c.transactional_id, preferred)] if preferred else []
        free = (
            select(slot.c.transactional_id, slot.c.lease_owner, slot.c.kept_until)
            .where(self._is_free)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        mine_or_nobodys = or_(slot.c.transactional_id.in_(preferred), self._is_nobodys)
        found = connection.execute(free.where(mine_or_nobodys).order_by(*place, slot.c.number)).first()
        if found is None:
            number = (connection.scalar(select(func.max(slot.c.number)).where(slot.c.pool == self.pool)) or 0) + 1
            if number <= self.max_slots:
                transactional_id = self._add(connection, number)
                if transactional_id is None:
                    return None
                return self._change(connection, self._take, {"id_": transactional_id, "owner_": owner, "ttl_": ttl_s})
            found = connection.execute(free.order_by(slot.c.kept_until)).first()
            if found is None:
                raise self._all_leased()
        transactional_id, former, kept_until = found
        if former is not None and kept_until is not None:
            ended(former)
        return self._change(connection, self._take, {"id_": transactional_id, "owner_": owner, "ttl_": ttl_s})

    def _change(self, connection: Connection, statement: Update, bound: Mapping[str, object]) -> Lease | None:
        if connection.dialect.update_returning:
            row = connection.execute(statement.returning(*self._found.selected_columns), bound).one_or_none()
        elif connection.execute(statement, bound).rowcount == 1:
            row = connection.execute(self._found, bound).one()  # locked by the change
        else:
            row = None
        return None if row is None else Lease(row[0], self.pool, row[1], row[2])

    def _all_leased(self) -> Unavailable:
        return Unavailable(
            f"all {self.max_slots} slots of pool {self.pool!r} are leased",
            next_step="wait for workers to end, or raise max_slots",
        )

    def _add(self, connection: Connection, number: int) -> str | None:
        slot = self._slot
        transactional_id = f"{self.pool}#{number}"
        row = {"transactional_id": transactional_id, "pool": self.pool, "number": number}
        made = connection.execute(self._dialect.insert_if_missing(slot), row).rowcount == 1
        return transactional_id if made else None

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        """Extend a lease to ``ttl_s`` from now, even an expired one; ``Fenced`` if another worker has taken the slot."""
        slot = self._slot
        statement = self._take.where(slot.c.pool == self.pool, slot.c.lease_owner == literal(lease.owner))
        bound = {"id_": lease.transactional_id, "owner_": lease.owner, "ttl_": ttl_s}
        return self._changed(lease, statement, bound)

    def take_over(self, leases: Collection[Lease], owner: str, ttl_s: float) -> Sequence[Lease]:
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

        def work(connection: Connection) -> Sequence[Lease]:
            taken = [self._change(connection, statement, values) for values in bound]
            return [one for one in taken if one is not None]

        return self._own.run(work) if bound else []

    def keep(self, lease: Lease, until: datetime, connection: Connection | None = None) -> Lease:
        """Let a lease end at a given time by the database's clock. If that time has passed, it ends at once.

        The slot then shows that its holder has left something in it for another process; see :meth:`lease`. ``Fenced`` as
        :meth:`renew`. With a connection, in the caller's transaction.
        """
        slot = self._slot
        ends = bindparam("until_", type_=slot.c.lease_until.type)
        statement = (
            update(slot)
            .where(slot.c.transactional_id == bindparam("id_"), slot.c.lease_owner == bindparam("owner_"))
            .values(lease_until=ends, kept_until=ends)  # both times: the lease was kept
        )
        bound = {"id_": lease.transactional_id, "owner_": lease.owner, "until_": until}
        return self._changed(lease, statement, bound, connection)

    def _changed(
        self, lease: Lease, statement: Update, bound: Mapping[str, object], connection: Connection | None = None
    ) -> Lease:
        if connection is None:
            changed = self._own.run(lambda own: self._change(own, statement, bound))
        else:
            try:
                changed = self._change(connection, statement, bound)
            except exc.SQLAlchemyError as error:
                raise map_database_error(error, self._engine) from error
        if changed is None:
            raise Fenced(f"{lease.owner} no longer holds the slot", transactional_id=lease.transactional_id)
        return changed

    def release(self, owners: Mapping[str, str], *, kept: bool = False, connection: Connection | None = None) -> None:
        """Give back slots, given with their holders. Does nothing for a slot whose holder has changed.

        ``kept`` reserves them for a while for their workers, which could continue with them; see :meth:`lease`. With a
        connection, in the caller's transaction.
        """
        slot = self._slot
        statement = (
            update(slot)
            .where(slot.c.transactional_id == bindparam("id_"), slot.c.lease_owner == bindparam("owner_"))
            .values(
                lease_owner=null(),
                lease_until=null(),
                kept_until=database_now_plus(literal(KEPT_S, Float)) if kept else null(),
            )
        )
        bound = [{"id_": name, "owner_": owners[name]} for name in sorted(owners)]
        if not bound:
            return
        if connection is not None:
            connection.execute(statement, bound)
            return
        self._own.run(lambda own: own.execute(statement, bound))
        failpoints.hit("slot.released")

    def expired(self) -> Sequence[Lease]:
        """Expired leases that were not released: their workers died, or were paused."""
        return self._list(self._slot.c.lease_until <= database_now())

    def to_settle(self, owner_prefix: str, connection: Connection | None = None) -> Sequence[Lease]:
        """The leases of :meth:`expired` and of :meth:`held_by`, in one request; perhaps in the caller's transaction."""
        has_ended = self._slot.c.lease_until <= database_now()
        return self._list(has_ended | self._dialect.begins_with(self._slot.c.lease_owner, owner_prefix), connection)

    def held_by(self, owner_prefix: str) -> Sequence[Lease]:
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

    def _list(self, condition: ColumnElement[bool], connection: Connection | None = None) -> Sequence[Lease]:
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
        return [Lease(name, self.pool, owner, until) for name, owner, until in rows]


def living_leases(engine: Engine, names: Collection[str], *, schema: str | None = None) -> set[str]:
    """Those of the transactional ids that are slots with an unexpired lease: their workers may be alive."""
    slot = declare_tables(schema).slot
    found: set[str] = set()
    try:
        with engine.connect() as connection:
            for chunk in in_chunks(sorted(names)):
                statement = select(slot.c.transactional_id).where(
                    slot.c.transactional_id.in_(chunk), slot.c.lease_until > database_now()
                )
                found.update(connection.scalars(statement))
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error
    return found


def _place(name: ColumnElement[str], preferred: Sequence[str]) -> ColumnElement[int]:
    return case({one: place for place, one in enumerate(preferred)}, value=name, else_=len(preferred))
