"""The SQL of leases: a member of a fleet takes a numbered id, renews its lease and gives it back.

A lease says which member *should* try to own an id now. It protects nothing: the member that takes it claims the id, which
fences the former owner, even one that was paused past the end of its lease. Leases have a table of their own, so that no
heartbeat waits for a decision. The database's clock alone measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, and_, exc, null, or_, select, update

from dualwrite import failpoints
from dualwrite.errors import Unavailable
from dualwrite.protocol.lives import LeaseState
from dualwrite.protocol.process import Lease, check_fleet, numbers_to_try, place_of
from dualwrite.protocol.values import member_id, writer_of
from dualwrite.stores.sql.access import map_database_error
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import Tables, database_now, database_now_plus, declare_tables, in_chunks

Result = TypeVar("Result")
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
        yet: claim the id next. Give a new ``owner`` to each call: a name that holds a lease already gets that one again.
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
            mine = select(lease.c.transactional_id).where(self._of_fleet, lease.c.owner == owner)
            if (earlier := connection.scalar(mine)) is not None:  # the answer to an earlier attempt was lost
                return str(earlier)
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
        lease = self._lease
        mine = select(lease.c.transactional_id).where(self._of_fleet, lease.c.owner == owner)
        if (earlier := connection.scalar(mine)) is not None:  # the answer to an earlier attempt was lost
            return str(earlier)
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

    def renew(self, owner: str, timeout_s: float, *, wait_s: float) -> tuple[Collection[str], Sequence[Lease]]:
        """Renew what the owner holds, even if it has expired, unless another member has taken it.

        ``timeout_s`` counts from now on; ``wait_s`` limits the wait for a lock. Returns the ids that were renewed; and of the
        fleet's leases, those that have expired, as their holders died or were paused, and those whose holders run where the
        owner runs, so that it can see whether they have died.
        """
        lease = self._lease
        renewed = (
            update(lease).where(self._of_fleet, lease.c.owner == owner).values(lease_until=database_now_plus(timeout_s))
        )
        ours = select(lease.c.transactional_id).where(self._of_fleet, lease.c.owner == owner)
        seen = lease.c.lease_until <= database_now()
        if (place := place_of(owner)) is not None:
            seen = or_(seen, lease.c.owner.contains(place.mark))

        def work(connection: Connection) -> tuple[Collection[str], Sequence[Lease]]:
            connection.execute(renewed)
            names = frozenset(connection.scalars(ours))
            found = _read(connection, self._tables, and_(self._of_fleet, seen))
            failpoints.hit("lease.heartbeat")
            return names, found

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
    return _reading(engine, schema, lambda connection: _read(connection, tables, chosen))


def living_members(engine: Engine, names: Collection[str], *, schema: str | None = None) -> set[str]:
    """Those of the transactional ids whose writer holds a lease that has not expired: it is alive."""
    lease = declare_tables(schema).lease
    writers = sorted({writer_of(name) for name in names})

    def read(connection: Connection) -> set[str]:
        found: set[str] = set()
        for chunk in in_chunks(writers):
            chosen = lease.c.transactional_id.in_(chunk)
            found.update(
                connection.scalars(select(lease.c.transactional_id).where(chosen, lease.c.lease_until > database_now()))
            )
        return found

    alive = _reading(engine, schema, read)
    return {name for name in names if writer_of(name) in alive}


def _reading(engine: Engine, schema: str | None, read: Callable[[Connection], Result]) -> Result:
    try:
        with engine.connect() as connection:
            return read(connection)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error


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
