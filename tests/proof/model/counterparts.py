"""Planted mistakes whose place in the product is an adapter: the same mistake in the simulator's adapter.

What :func:`harness.mistakes.planted` patches above the ports (recipes, pure core, producer, evidence) holds in the simulation
as it is. What it patches below them (SQL, the wire) is planted here once more.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from harness.mistakes.handing_over import claiming_nothing_decided
from simulator import leases
from simulator.consumed import SimulatedConsumedOffsets
from simulator.database import Session
from simulator.handle import SimulatedHandle
from simulator.leases import SimulatedLeases
from simulator.outside import SimulatedCoordinator
from simulator.requests import InitProducerId
from simulator.store import SimulatedStore, _of

from model import fleet
from model import handing_over as drivers
from model.fleet import Fleet, Member

if TYPE_CHECKING:
    from collections.abc import Iterator


def unconditional_update(patch: pytest.MonkeyPatch) -> None:
    def decide(self, connection, decision):
        database = self._database

        def update(session: Session):
            row = database.lock(session, decision.transactional_id)
            database.write(session, replace(row, prepared=decision.state, completed=None))
            return True, database.name(session)

        return self._mapped(_of(connection), "UPDATE", update)

    patch.setattr(SimulatedStore, "decide", decide)


def failed_commit_taken_for_committed(patch: pytest.MonkeyPatch) -> None:
    decide = SimulatedStore.decide

    def unchecked(self, connection, *args, **kwargs):
        if _of(connection).session.failed:
            return True, None
        return decide(self, connection, *args, **kwargs)

    def commit(self, connection):
        used = _of(connection)
        used.run("COMMIT", self._database.commit)

    patch.setattr(SimulatedStore, "decide", unchecked)
    patch.setattr(SimulatedStore, "commit", commit)


def claim_returns_a_row_read_before(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedStore.claim

    def claim(self, transactional_ids, **kwargs):
        before = {row.transactional_id: row for row in self.read(transactional_ids)}
        return [
            replace(
                row, prepared=before[row.transactional_id].prepared, completed=before[row.transactional_id].completed
            )
            if row.transactional_id in before
            else row
            for row in real(self, transactional_ids, **kwargs)
        ]

    patch.setattr(SimulatedStore, "claim", claim)


def row_in_doubt_read_without_its_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedStore, "read_locked", lambda self, name, _: self.read([name])[0])


def settled_mark_may_sink(patch: pytest.MonkeyPatch) -> None:
    def mark_settled(self, incarnations):
        def work(used):
            for name in sorted(incarnations):

                def update(session, name=name):
                    row = self._database.lock(session, name)
                    self._database.write(session, replace(row, settled_incarnation=incarnations[name]))

                used.run("UPDATE", update)

        self.run(work)

    patch.setattr(SimulatedStore, "mark_settled", mark_settled)


def conditional_init_taken_for_a_compare_and_set(patch: pytest.MonkeyPatch) -> None:
    describe, seen = SimulatedCoordinator.describe, {}

    def describe_and_remember(self, kafka_ids, deadline):
        views = describe(self, kafka_ids, deadline)
        for kafka_id, view in views.items():
            seen.setdefault((id(self), kafka_id), view)
        return views

    def retire(self, kafka_ids, deadline, *, timeouts_ms=None):
        for kafka_id in kafka_ids:
            view = seen[id(self), kafka_id]
            self._one(InitProducerId(kafka_id, 1000, view.producer_id, view.epoch), deadline, lambda _: True)
        return {
            kafka_id: (seen[id(self), kafka_id].producer_id, seen[id(self), kafka_id].epoch) for kafka_id in kafka_ids
        }

    patch.setattr(SimulatedCoordinator, "describe", describe_and_remember)
    patch.setattr(SimulatedCoordinator, "retire", retire)


def kept_after_a_repeated_init(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedHandle, "init_unanswered", False)


def end_of_the_decider_repeated(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedCoordinator.end

    def end(self, transactions, *, committed, deadline, once=False):
        del once
        return real(self, transactions, committed=committed, deadline=deadline)

    patch.setattr(SimulatedCoordinator, "end", end)


def decided_by_another_completed_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drivers, "claim_rows", claiming_nothing_decided(drivers.claim_rows))


def leased_while_its_holder_lives(patch: pytest.MonkeyPatch) -> None:
    def take_over(self, found, owner, timeout_s):
        name = found.transactional_id
        if (former := self._leases.get(name, (None, 0.0))[0]) is not None:
            self._taken_over(former)
        self._leases[name] = (owner, self.simulation.now_s + timeout_s)
        return True

    patch.setattr(leases, "numbers_to_try", lambda *_: count())
    patch.setattr(SimulatedLeases, "_take_over", take_over)


def lease_given_back_whoever_holds_it(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedLeases.give_back

    def give_back(self, transactional_id, owner, *, settled):
        del owner
        if (holder := self.holder(transactional_id)) is not None:
            real(self, transactional_id, holder, settled=settled)
            self._taken_over(holder)

    patch.setattr(SimulatedLeases, "give_back", give_back)


def suspended_member_taken_for_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "has_ended", lambda *_: True)


def lease_of_a_dead_holder_taken_from_its_successor(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedLeases._take_over

    def take_over(self, found, owner, timeout_s):
        return real(self, replace(found, owner=self._leases.get(found.transactional_id, (None,))[0]), owner, timeout_s)

    patch.setattr(SimulatedLeases, "_take_over", take_over)


def dead_members_left_to_newcomers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "_note_dead", lambda *_: None)


def dead_members_id_left_unclaimed(patch: pytest.MonkeyPatch) -> None:
    real = fleet.recover_rows
    patch.setattr(fleet, "recover_rows", lambda *given, **more: real(*given, **{**more, "claims_all": False}))


def offsets_moved_by_an_upsert(patch: pytest.MonkeyPatch) -> None:
    def move(self, connection, at, claimed, to):
        def update(session: Session):
            row = self._database.lock_consumed(session, self.key(at))
            self._database.write_consumed(session, self.key(at), replace(row, next_offset=to))
            return True

        return _of(connection).run("UPDATE consumed", update)

    patch.setattr(SimulatedConsumedOffsets, "move", move)


def offset_rows_moved_after_the_commit(patch: pytest.MonkeyPatch) -> None:
    def run(self, work):
        return self._store.run(work)

    patch.setattr(
        SimulatedConsumedOffsets, "_own", property(lambda self: SimpleNamespace(run=partial(run, self))), raising=False
    )


COUNTERPARTS = {
    function.__name__: function
    for function in (
        unconditional_update,
        failed_commit_taken_for_committed,
        claim_returns_a_row_read_before,
        row_in_doubt_read_without_its_lock,
        settled_mark_may_sink,
        conditional_init_taken_for_a_compare_and_set,
        kept_after_a_repeated_init,
        end_of_the_decider_repeated,
        decided_by_another_completed_without_a_claim,
        leased_while_its_holder_lives,
        lease_given_back_whoever_holds_it,
        suspended_member_taken_for_dead,
        lease_of_a_dead_holder_taken_from_its_successor,
        dead_members_left_to_newcomers,
        dead_members_id_left_unclaimed,
        offsets_moved_by_an_upsert,
        offset_rows_moved_after_the_commit,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The mistake of that name, wherever its place is."""
    from harness import mistakes

    with mistakes.planted(name), pytest.MonkeyPatch.context() as patch:
        if name in COUNTERPARTS:
            COUNTERPARTS[name](patch)
        yield
