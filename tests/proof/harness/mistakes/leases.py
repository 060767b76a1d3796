"""Mistakes about leases: taking an id, renewing it by heartbeats, giving it back, and settling for dead members."""

from dataclasses import replace
from itertools import count

import psutil
import pytest
from sqlalchemy import Connection, null, select, true, update

from dualwrite.protocol.members import Lease, LeaseEvent, LeaseState, place_of
from dualwrite.recovery import operator
from dualwrite.stores.sql import leases
from dualwrite.stores.sql.leases import Leases
from dualwrite.writing import leased
from dualwrite.writing.leased import LeasedWriter, LeaseKeeper
from harness.mistakes.registry import Check, mistake

_LEASES = "conformance/test_leases.py::"
_LEASED = "unit/writing/test_leased.py::"
_KEEPER = "unit/writing/test_leased_lease_keeper.py::"


@mistake(
    Check(
        f"{_LEASES}test_members_take_the_lowest_numbers_and_one_that_is_given_back_is_the_next_one_taken[sqlite]",
        "assert .*orders-0.*orders-0",
    )
)
def leased_while_its_holder_lives(patch: pytest.MonkeyPatch) -> None:
    """A newcomer takes the lowest id even if a live member holds its lease, and fences it."""
    patch.setattr(leases, "numbers_to_try", lambda *_: count())
    patch.setattr(Leases, "_is_over", lambda _: true())
    patch.setattr(Lease, "state", LeaseState.EXPIRED)


@mistake(
    Check(
        f"{_LEASES}test_a_lease_that_another_member_has_taken_is_neither_renewed_nor_given_back_by_its_former_owner[sqlite]",
        "assert ",
    )
)
def lease_given_back_whoever_holds_it(patch: pytest.MonkeyPatch) -> None:
    """A member that has lost its lease still gives it back, so that a third one takes the id of a live member."""

    def give_back(self: Leases, transactional_id: str, owner: str, *, settled: bool) -> None:
        del owner, settled
        changed = update(self._lease).where(self._lease.c.transactional_id == transactional_id)
        self._own.run(lambda connection: connection.execute(changed.values(owner=null(), lease_until=null())))

    patch.setattr(Leases, "give_back", give_back)


@mistake(
    Check(
        f"{_LEASED}test_a_heartbeat_finds_that_the_lease_is_taken_before_any_dual_write_does",
        r"assert \(True, False\) == \(False, True\)",
    )
)
def lost_lease_taken_for_renewed(patch: pytest.MonkeyPatch) -> None:
    """A heartbeat that has renewed nothing counts as one that has: the member does not notice that its id was taken."""
    patch.setattr(leased, "heard", lambda **_: LeaseEvent.RENEW)


@mistake(
    Check(
        f"{_LEASED}test_an_id_is_given_back_only_after_it_is_settled_and_not_free_if_something_is_left",
        "its transaction is open in Kafka",
    )
)
def lease_given_back_as_if_settled(patch: pytest.MonkeyPatch) -> None:
    """A member that closes with something left open gives its id back as free: nobody settles it until a newcomer takes it."""
    real = LeaseKeeper.give_back
    patch.setattr(LeaseKeeper, "give_back", lambda self, *, settled: real(self, settled=settled or True))


@mistake(
    Check(
        f"{_LEASED}test_what_a_dead_member_has_left_is_settled_by_a_living_one_though_nobody_takes_its_id",
        "expired|held back",
    )
)
def dead_members_left_to_newcomers(patch: pytest.MonkeyPatch) -> None:
    """Live members do not settle what a dead one has left: readers wait until a newcomer takes its id."""
    patch.setattr(LeasedWriter, "_help_dead", lambda *_: None)


@mistake(
    Check(
        f"{_LEASED}test_a_member_taken_for_dead_with_nothing_open_can_begin_nothing_under_its_former_id",
        "DID NOT RAISE",
    )
)
def dead_members_id_left_unclaimed(patch: pytest.MonkeyPatch) -> None:
    """A member claims the id of a dead one only if something is left there; one that was only paused goes on under a free id."""
    real = operator.recover_rows
    patch.setattr(operator, "recover_rows", lambda *given, **more: real(*given, **{**more, "claims_all": False}))


@mistake(
    Check(
        f"{_LEASED}test_a_member_paused_before_its_claim_does_not_stay_under_an_id_that_was_given_back",
        "'free' == 'held'",
    )
)
def lease_not_asked_for_after_the_claim(patch: pytest.MonkeyPatch) -> None:
    """A member that was paused between its lease and its claim stays under an id that others have settled and given back."""
    patch.setattr(LeaseKeeper, "still_held", lambda _: True)


@mistake(
    Check(
        f"{_KEEPER}test_a_member_that_dies_beside_this_one_is_reported_before_its_lease_expires",
        "not enough values to unpack",
    )
)
def member_that_died_beside_left_to_its_lease(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the processes beside its own: readers wait until the lease of a killed worker expires."""
    patch.setattr(leased, "has_ended", lambda _: False)


@mistake(Check(f"{_KEEPER}test_a_member_that_is_suspended_beside_this_one_keeps_its_lease", "'orders-0' == 'orders-1'"))
def suspended_member_taken_for_dead(patch: pytest.MonkeyPatch) -> None:
    """A process that is stopped for a moment loses its id to those beside it."""
    patch.setattr(leased, "has_ended", lambda pid: psutil.Process(pid).status() in {psutil.STATUS_STOPPED, "zombie"})


@mistake(
    Check(
        f"{_KEEPER}test_a_member_of_another_place_is_judged_by_its_lease_alone",
        "'orders-0' == 'orders-1'",
    )
)
def process_of_another_container_looked_for_here(patch: pytest.MonkeyPatch) -> None:
    """A member looks for the process of a holder in another container among its own processes, and does not find it."""
    patch.setattr(
        leased,
        "holder_has_died",
        lambda lease, _, has_ended: (place := place_of(lease.owner)) is not None and has_ended(place.pid),
    )


@mistake(
    Check(
        f"{_LEASES}test_nobody_adopts_the_lease_of_a_dead_holder_that_another_has_taken_over[sqlite]",
        "assert not True",
    )
)
def lease_of_a_dead_holder_taken_from_its_successor(patch: pytest.MonkeyPatch) -> None:
    """A member adopts what a dead one held, though another has taken it over since: two believe that they hold it."""
    real = Leases._take_over

    def take_over(self: Leases, connection: Connection, found: Lease, owner: str, timeout_s: float) -> bool:
        held = select(self._lease.c.owner).where(self._lease.c.transactional_id == found.transactional_id)
        return real(self, connection, replace(found, owner=connection.scalar(held)), owner, timeout_s)

    patch.setattr(Leases, "_take_over", take_over)
