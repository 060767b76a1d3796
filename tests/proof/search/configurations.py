"""The configurations of the search: the long runs, and those that every test run repeats."""

from __future__ import annotations

from typing import Any, NamedTuple

from dualwrite.protocol.prepared_state import Engine
from search.values import Budgets
from search.world import Bounds


class Configuration(NamedTuple):
    """Bounds with a name.

    Attributes:
        sentence: What they are, for people.
        bounds: The bounds.
        quick: Seconds, and a part of every test run.
        compared: Searched with what is at its end too (see `ends`), to show what leaving it out saves.
    """

    sentence: str
    bounds: Bounds
    quick: bool = False
    compared: bool = False


NATIVE, LIBRDKAFKA = Engine.NATIVE, Engine.LIBRDKAFKA


def native(*transactions: int, incarnations: int = 2, **bounds: Any) -> Bounds:
    """The bounds of owners of native transactions."""
    return Bounds(transactions, incarnations, engines=(NATIVE,) * len(transactions), **bounds)


def mixed(of_native: int, of_librdkafka: int, **bounds: Any) -> Bounds:
    """The bounds of an owner of each engine, in either order."""
    return Bounds((of_native, of_librdkafka), 3, engines=(NATIVE, LIBRDKAFKA), **bounds)


EACH_ONCE = Budgets(delay=1, answer=1, abort=1, timeout=1)

CONFIGURATIONS = {
    "owner_and_settler": Configuration(
        "an owner with two transactions, and a settler", Bounds((2, 0), 2, EACH_ONCE), quick=True
    ),
    "failed_message": Configuration(
        "a message fails, and the client raises its producer's epoch",
        Bounds((2, 0), 2, Budgets(delay=1, failure=1)),
        quick=True,
    ),
    "markers_one_by_one": Configuration(
        "the same, and every partition gets its marker by itself",
        Bounds((2, 0), 2, Budgets(delay=1, timeout=1), one_by_one=True),
        quick=True,
    ),
    "in_doubt_with_a_verdict": Configuration(
        "two owners, a lost answer to COMMIT, and a database that knows what became of it",
        Bounds((1, 1), 3, Budgets(answer=1, abort=1, timeout=1), verdicts=True),
        quick=True,
    ),
    "in_doubt_without_a_verdict": Configuration(
        "two owners, a lost answer to COMMIT, and a database that does not know",
        Bounds((1, 1), 3, Budgets(answer=1, abort=1, timeout=1, expire=1)),
        quick=True,
    ),
    "force_terminated": Configuration(
        "an operator force-terminates the open transaction",
        Bounds((2, 0), 2, Budgets(delay=1, terminate=1)),
        quick=True,
    ),
    "marker_past_the_coordinator": Configuration(
        "a tool writes an abort marker for an owner that died after its decision",
        Bounds((2, 0), 3, Budgets(marker=1), dies=True),
        quick=True,
    ),
    "rolled_back_unseen": Configuration(
        "the database ends an owner's transaction before its UPDATE or its COMMIT, and the owner does not notice",
        Bounds((2, 1), 3, Budgets(unseen=1, answer=1)),
        quick=True,
    ),
    "at_once": Configuration(
        "owners send their decision with its COMMIT, and have no answer",
        Bounds((2, 1), 5, Budgets(answer=1, abort=1), at_once=True),
        quick=True,
    ),
    "at_once_and_timeouts": Configuration(
        "the same twice, and a transaction times out",
        Bounds((2, 1), 6, Budgets(answer=2, timeout=1), at_once=True),
    ),
    "forgotten": Configuration(
        "the coordinator forgets ids, the log what was in it",
        Bounds((2, 0), 2, Budgets(timeout=1, expire=1, retention=2)),
        quick=True,
    ),
    "marker_skipped": Configuration(
        "a marker is skipped, as its partition has no leader",
        Bounds((2, 0), 2, Budgets(forgotten=1, abort=1)),
        quick=True,
    ),
    "marker_skipped_and_two_settlers": Configuration(
        "the same, and two settlers meet", Bounds((1, 0, 0), 3, Budgets(forgotten=1), epochs=4)
    ),
    "marker_skipped_and_delays": Configuration(
        "a marker is skipped, and a request of the owner is late",
        Bounds((2, 0), 3, Budgets(forgotten=1, delay=1), epochs=4),
    ),
    "marker_skipped_and_timeouts": Configuration(
        "a marker is skipped, a transaction times out, a message fails",
        Bounds((2, 0), 3, Budgets(forgotten=1, timeout=1, failure=1), epochs=4),
    ),
    "marker_skipped_between_owners": Configuration(
        "a marker is skipped while one owner takes over from the other",
        Bounds((1, 1), 3, Budgets(forgotten=1, abort=1, failure=1), epochs=4),
    ),
    "two_markers_skipped": Configuration(
        "two markers are skipped", Bounds((2, 0), 3, Budgets(forgotten=2, abort=1), epochs=4)
    ),
    "two_markers_skipped_and_delays": Configuration(
        "two markers are skipped, and a request of the owner is late",
        Bounds((2, 0), 3, Budgets(forgotten=2, delay=1), epochs=4),
    ),
    "claims_without_an_answer": Configuration(
        "the answer to the COMMIT of a claim is lost, twice", Bounds((2, 1), 4, Budgets(claim=2))
    ),
    "three_processes": Configuration("two owners and a settler", Bounds((2, 1, 0), 3, EACH_ONCE)),
    "three_processes_and_forgetting": Configuration(
        "two owners and a settler; ids are forgotten", Bounds((2, 1, 0), 3, Budgets(delay=1, timeout=1, expire=1))
    ),
    "two_delays": Configuration(
        "an owner and two settlers; two requests are late", Bounds((2, 0, 0), 3, Budgets(delay=2, answer=1, timeout=1))
    ),
    "four_incarnations": Configuration("two owners that begin again twice", Bounds((2, 1), 4, EACH_ONCE)),
    "one_transaction_each": Configuration(
        "three owners with one transaction each", Bounds((1, 1, 1), 3, EACH_ONCE), compared=True
    ),
    "everybody_writes": Configuration("three owners with two transactions each", Bounds((2, 2, 2), 3, EACH_ONCE)),
    # --- native transactions
    "native_rolled_back_unseen": Configuration(
        "the database ends an owner's transaction before its UPDATE or its COMMIT, and the owner does not notice",
        native(2, 1, incarnations=3, budgets=Budgets(unseen=1, answer=1)),
        quick=True,
    ),
    "native_at_once": Configuration(
        "owners send their decision with its COMMIT, and have no answer",
        native(2, 1, incarnations=5, budgets=Budgets(answer=1, abort=1), at_once=True),
    ),
    "native_at_once_and_a_settler": Configuration(
        "the same, by an owner with two transactions, and a settler",
        native(2, 0, incarnations=3, budgets=Budgets(answer=1, abort=1), at_once=True),
        quick=True,
    ),
    "native_at_once_and_the_next_owner": Configuration(
        "the same, by two owners with one transaction each",
        native(1, 1, incarnations=4, budgets=Budgets(answer=1, abort=1), at_once=True),
        quick=True,
    ),
    "native_at_once_and_delays": Configuration(
        "the same, a request is late, and the database may end a transaction unseen",
        native(2, 1, incarnations=5, budgets=Budgets(answer=1, delay=1, unseen=1), at_once=True),
    ),
    "native_aborts_and_delays": Configuration(
        "an owner with two transactions, and a settler; every request may be late, or its answer lost",
        native(2, 0, budgets=Budgets(delay=1, abort=1)),
        quick=True,
    ),
    "native_owner_and_settler": Configuration("the same, with all that goes wrong", native(2, 0, budgets=EACH_ONCE)),
    "native_three_transactions": Configuration(
        "an owner with three transactions, and a settler", native(3, 0, budgets=Budgets(delay=1, abort=1))
    ),
    "native_two_delays": Configuration(
        "an owner and two settlers; two requests are late",
        native(2, 0, 0, incarnations=3, budgets=Budgets(delay=2, answer=1, timeout=1)),
    ),
    "native_failed_message": Configuration(
        "a message is refused for good", native(2, 0, incarnations=3, budgets=Budgets(delay=1, failure=1))
    ),
    "native_markers_one_by_one": Configuration(
        "every partition gets its marker by itself",
        native(2, 0, budgets=Budgets(delay=1, abort=1, timeout=1), one_by_one=True),
    ),
    "native_in_doubt_with_a_verdict": Configuration(
        "two owners, a lost answer to COMMIT, and a database that knows what became of it",
        native(1, 1, incarnations=3, budgets=Budgets(answer=1, abort=1, timeout=1), verdicts=True),
    ),
    "native_in_doubt_without_a_verdict": Configuration(
        "two owners, a lost answer to COMMIT, and a database that does not know",
        native(1, 1, incarnations=3, budgets=Budgets(answer=1, abort=1, timeout=1, expire=1)),
    ),
    "native_claims_without_an_answer": Configuration(
        "the answer to the COMMIT of a claim is lost, twice", native(2, 1, incarnations=4, budgets=Budgets(claim=2))
    ),
    "native_force_terminated": Configuration(
        "an operator force-terminates the open transaction",
        native(2, 0, incarnations=3, budgets=Budgets(delay=1, terminate=1)),
    ),
    "native_marker_for_a_former_owner": Configuration(
        "a tool writes an abort marker into one partition of a former owner's transaction",
        native(2, 0, incarnations=3, budgets=Budgets(marker=1)),
    ),
    "native_marker_for_an_owner": Configuration(
        "a tool writes an abort marker into one partition of an owner's only transaction, at any time",
        native(1, 0, incarnations=3, budgets=Budgets(marker=1), tools_hit_owners=True),
        quick=True,
    ),
    "native_forgotten": Configuration(
        "the coordinator forgets ids, the log what was in it",
        native(2, 0, budgets=Budgets(timeout=1, expire=1, retention=2)),
    ),
    "native_marker_skipped": Configuration(
        "a marker is skipped, as its partition has no leader",
        native(2, 0, incarnations=3, budgets=Budgets(forgotten=1), epochs=6),
        quick=True,
    ),
    "native_answers_read_late": Configuration(
        "the same with two owners, and answers about ends are read some time after the leaders have given them",
        native(2, 1, incarnations=3, budgets=Budgets(forgotten=1), epochs=6, answers_late=True),
    ),
    "native_marker_skipped_and_two_settlers": Configuration(
        "the same, and two settlers meet", native(2, 0, 0, incarnations=3, budgets=Budgets(forgotten=1), epochs=6)
    ),
    "native_marker_skipped_and_delays": Configuration(
        "a marker is skipped; every request may be late, a settler's too",
        native(2, 0, incarnations=3, budgets=Budgets(forgotten=1, delay=1, abort=1), epochs=6),
    ),
    "native_marker_skipped_two_settlers_and_delays": Configuration(
        "a marker is skipped, two settlers meet, a request is late",
        native(1, 0, 0, incarnations=3, budgets=Budgets(forgotten=1, delay=1), epochs=6),
    ),
    "native_marker_skipped_and_timeouts": Configuration(
        "a marker is skipped, a transaction times out, a message is refused",
        native(2, 0, incarnations=3, budgets=Budgets(forgotten=1, timeout=1, failure=1), epochs=6),
    ),
    "native_marker_skipped_without_a_witness": Configuration(
        "the same, and the state names the offset of one partition",
        native(2, 0, incarnations=3, budgets=Budgets(forgotten=1, timeout=1, abort=1), epochs=6, witnesses=1),
    ),
    "native_marker_skipped_between_owners": Configuration(
        "a marker is skipped while one owner takes over from the other",
        native(1, 1, incarnations=3, budgets=Budgets(forgotten=1, abort=1, failure=1), epochs=6),
    ),
    "native_two_markers_skipped": Configuration(
        "two markers are skipped", native(2, 0, incarnations=3, budgets=Budgets(forgotten=2, abort=1), epochs=6)
    ),
    "native_two_markers_skipped_and_delays": Configuration(
        "two markers are skipped, and a request is late",
        native(2, 0, incarnations=3, budgets=Budgets(forgotten=2, delay=1), epochs=6),
    ),
    "native_three_processes": Configuration(
        "two owners and a settler", native(2, 1, 0, incarnations=3, budgets=EACH_ONCE)
    ),
    "native_three_processes_and_forgetting": Configuration(
        "two owners and a settler; ids are forgotten",
        native(2, 1, 0, incarnations=3, budgets=Budgets(delay=1, timeout=1, expire=1)),
    ),
    "native_four_incarnations": Configuration(
        "two owners that begin again twice", native(2, 1, incarnations=4, budgets=EACH_ONCE)
    ),
    "native_one_transaction_each": Configuration(
        "three owners with one transaction each", native(1, 1, 1, incarnations=3, budgets=EACH_ONCE)
    ),
    # --- a row of one engine, settled by the other's owner, who goes on with it
    "mixed_owners": Configuration(
        "an owner of each engine, with two transactions each, and a request is late",
        mixed(2, 2, budgets=Budgets(delay=1)),
    ),
    "mixed_owners_in_doubt": Configuration(
        "an owner of each engine, and a lost answer to COMMIT",
        mixed(1, 1, budgets=Budgets(answer=1, abort=1)),
        quick=True,
    ),
    "mixed_owners_after_a_delay": Configuration(
        "an owner of each engine, and a request is late", mixed(1, 1, budgets=Budgets(delay=1, abort=1))
    ),
    "mixed_native_first": Configuration(
        "two native transactions and one of librdkafka, with all that goes wrong", mixed(2, 1, budgets=EACH_ONCE)
    ),
    "mixed_librdkafka_first": Configuration(
        "one native transaction and two of librdkafka, with all that goes wrong", mixed(1, 2, budgets=EACH_ONCE)
    ),
    "mixed_marker_skipped": Configuration(
        "a marker is skipped while one engine takes over from the other",
        mixed(1, 1, budgets=Budgets(forgotten=1, abort=1, failure=1), epochs=6),
    ),
}
