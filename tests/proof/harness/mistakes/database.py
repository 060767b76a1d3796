"""Mistakes about the database: which rows are read when, what is conditional, what COMMIT's answer means."""

from dataclasses import replace

import pytest
from sqlalchemy import bindparam, exc, literal_column, null, update

from dualwrite.protocol.process import DoubtStep
from dualwrite.recovery import in_doubt
from dualwrite.stores.sql import commit_with_decision, postgresql, store
from dualwrite.stores.sql.dialect import Standing
from dualwrite.stores.sql.mariadb import MariaDB
from dualwrite.stores.sql.postgresql import PostgreSQL, Session
from dualwrite.stores.sql.sqlite import SQLite
from dualwrite.stores.sql.store import Records, SqlStateStore
from dualwrite.stores.sql.tables import check_decidable, database_now
from harness.mistakes.registry import Check, mistake, performed


@mistake(performed("paused_owner_cannot_decide", "not Fenced"))
def unconditional_update(patch: pytest.MonkeyPatch) -> None:
    """An owner writes its state into the row even if another process owns the id by now."""

    def decide(self, connection, decision):
        text = check_decidable(decision)
        table = self._tables.state
        statement = (
            update(table)
            .where(table.c.transactional_id == decision.transactional_id)
            .values(prepared_transaction_state=text, completed=null(), updated_at=database_now())
            .returning(*self._dialect.end_columns())
        )
        return True, self._dialect.check_end(connection, tuple(connection.execute(statement).one()))

    patch.setattr(SqlStateStore, "with_commit", None)
    patch.setattr(SqlStateStore, "decide", decide)


@mistake(
    Check(
        "conformance/test_store.py::test_a_statement_that_stands_alone_decides_nothing[postgresql with schema-decide]",
        "DID NOT RAISE",
    ),
    Check(
        "conformance/test_store.py::test_a_statement_that_stands_alone_decides_nothing[sqlite-decide]",
        "DID NOT RAISE",
    ),
    Check("conformance/test_store.py::test_a_statement_that_stands_alone_decides_nothing[mariadb-decide]", "assert"),
)
def decides_in_any_transaction(patch: pytest.MonkeyPatch) -> None:
    """An owner writes its state into the row although its transaction was ended unseen: the statement stands alone, and commits."""
    for dialect in (PostgreSQL, MariaDB, SQLite):
        patch.setattr(dialect, "is_begun", lambda _: ())
        patch.setattr(dialect, "begun", lambda *_: {})


@mistake(
    Check(
        "conformance/test_commit_with_decision.py"
        "::test_of_an_id_that_another_has_claimed_nothing_is_committed[READ COMMITTED]",
        "Decided.COMMITTED",
    ),
    Check(
        "conformance/test_commit_with_decision.py::test_the_wait_for_the_lock_counts_for_the_age", "Decided.COMMITTED"
    ),
)
def decision_with_commit_never_fails(patch: pytest.MonkeyPatch) -> None:
    """A decision that matches no row, or comes too late, does not fail: the COMMIT that is sent with it is executed."""
    patch.setattr(commit_with_decision, "_failing", lambda update: update.returning(literal_column("1")))


@mistake(
    Check(
        "conformance/test_commit_with_decision.py"
        "::test_a_connection_lost_in_it_leaves_a_doubt_that_the_row_resolves[reset_answer]",
        "TransactionAborted",
    )
)
def lost_decision_with_commit_taken_for_no(patch: pytest.MonkeyPatch) -> None:
    """An owner that loses its connection in the exchange of the decision takes it that COMMIT was not reached."""
    patch.setattr(PostgreSQL, "certainly_rolled_back", lambda *_: True)


_LATE = "integration/test_counterexamples.py::test_a_decision_that_is_late_with_its_commit_is_what_its_caller_was_told"


@mistake(Check(f"{_LATE}[after the claim-postgresql]", "DatabaseWentBack"))
def no_claim_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """An owner whose decision went with its COMMIT takes it for rolled back although it may still arrive, and find the row."""
    real = in_doubt.resolve_commit
    patch.setattr(in_doubt, "resolve_commit", lambda *known: real(*known[:-1]))


@mistake(Check(f"{_LATE}[before the claim-postgresql]", "TransactionAborted"))
def claim_in_doubt_taken_for_the_answer(patch: pytest.MonkeyPatch) -> None:
    """The same owner claims the row, and does not ask once more what arrived before its claim."""

    def verdict(asked, fence):
        step = asked()
        if step is DoubtStep.ABORTED and fence is not None:
            fence()
        return step

    patch.setattr(in_doubt, "_verdict", verdict)


@mistake(
    Check(
        "conformance/test_store_postgresql.py::test_a_commit_that_finds_no_transaction_is_in_doubt",
        "DID NOT RAISE",
    )
)
def commit_of_nothing_taken_for_committed(patch: pytest.MonkeyPatch) -> None:
    """An owner takes the answer to its COMMIT for a decision, although the server had no transaction any more to commit."""
    patch.setattr(PostgreSQL, "commit_found_none", lambda *_: False)


@mistake(
    Check(
        "conformance/test_store_postgresql.py::test_what_makes_the_session_forget_prepared_statements_is_survived[ddl]",
        "does not exist",
    )
)
def session_thought_to_forget_nothing(patch: pytest.MonkeyPatch) -> None:
    """An owner takes it that what the session has prepared is still there as a dual write begins."""
    patch.setattr(Session, "is_lost", lambda *_: False)


@mistake(performed("statement_fails_and_nobody_minds", "told None, not TransactionAborted"))
def failed_commit_taken_for_committed(patch: pytest.MonkeyPatch) -> None:
    """The state is written in one go with COMMIT, and PostgreSQL's ROLLBACK in answer to it is taken for success."""
    standing = PostgreSQL.standing

    def unchecked(real, answer):
        def call(self, connection, *args, **kwargs):
            try:
                return real(self, connection, *args, **kwargs)
            except Exception as error:
                if isinstance(error.__cause__, exc.InternalError):  # "current transaction is aborted"
                    return answer
                raise

        return call

    def unchecked_standing(self, driver):
        found = standing(self, driver)
        return Standing.OPEN if found is Standing.FAILED else found

    patch.setattr(SqlStateStore, "with_commit", None)
    patch.setattr(SqlStateStore, "run_deferred", unchecked(SqlStateStore.run_deferred, None))
    patch.setattr(SqlStateStore, "decide", unchecked(SqlStateStore.decide, (True, None)))
    patch.setattr(PostgreSQL, "standing", unchecked_standing)


@mistake(performed("claim_meets_a_decision_under_way", "shows \\[\\]|told DecidedTransactionLost"))
def claim_returns_a_row_read_before(patch: pytest.MonkeyPatch) -> None:
    """A claim returns the state as it was read before the claim had the row's lock."""
    real = SqlStateStore.claim

    def claim(self, transactional_ids, **kwargs):
        before = {row.transactional_id: row for row in self.read(transactional_ids)}
        return [
            replace(
                row,
                prepared=before[row.transactional_id].prepared,
                completed=before[row.transactional_id].completed,
            )
            if row.transactional_id in before
            else row
            for row in real(self, transactional_ids, **kwargs)
        ]

    patch.setattr(SqlStateStore, "claim", claim)


@mistake(performed("commit_arrives_after_its_connection_broke", "did not have to wait"))
def row_in_doubt_read_without_its_lock(patch: pytest.MonkeyPatch) -> None:
    """An owner whose COMMIT was not answered reads the row at once, while its old session may yet commit."""

    def read(self, transactional_id, _):
        return self.read([transactional_id])[0]

    patch.setattr(SqlStateStore, "read_locked", read)


@mistake(
    performed("database_killed_after_it_decided", "database shows \\[\\]|does not exist")
)  # the tables may go, too
def commit_not_durable(patch: pytest.MonkeyPatch) -> None:
    """A decision is committed with synchronous_commit off, if the session says so."""
    patch.setattr(postgresql, "_DURABLE", "NULL")


@mistake(performed("row_deleted_under_its_owner", "told None, not Fenced"))
def namespace_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A row that was deleted and created again is taken for ours once it reaches our incarnation."""
    read = SqlStateStore.read_incarnation

    def read_any(*args, namespace, **options):
        del namespace
        return read(*args, **options)

    patch.setattr(SqlStateStore, "with_commit", None)
    patch.setattr(SqlStateStore, "read_incarnation", read_any)
    for name in ("decide", "hold"):

        def call(self, connection, decision, real=getattr(SqlStateStore, name)):  # noqa: B008 - each has its own
            return real(self, connection, decision._replace(namespace=None))

        patch.setattr(SqlStateStore, name, call)


@mistake(
    Check(
        "integration/test_faults.py::test_another_cluster_is_refused_and_nothing_is_aborted[postgresql]",
        "OutcomeUnverifiable",
    )
)
def another_cluster_accepted(patch: pytest.MonkeyPatch) -> None:
    """A claim does not ask whether the bootstrap servers lead to the cluster that the row belongs to."""
    patch.setattr(store, "check_claimed", lambda *_: None)


@mistake(
    Check(
        "conformance/test_records.py::test_the_settled_mark_only_rises[postgresql]",
        "settled_incarnation|assert",
    )
)
def settled_mark_may_sink(patch: pytest.MonkeyPatch) -> None:
    """A slow settler writes its mark over the higher one of a faster one."""
    real = Records.__init__

    def init(self, tables, dialect):
        real(self, tables, dialect)
        state = tables.state
        self._settle = (
            update(state)
            .where(state.c.transactional_id == bindparam("id_"))
            .values(settled_incarnation=bindparam("mark_"))
        )

    patch.setattr(Records, "__init__", init)


@mistake(performed("database_fails_over_under_its_owner", "told None, not DatabaseWentBack"))
def lost_commits_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """An owner does not compare the newest decision in the row with the one that it knows."""
    patch.setattr(store, "check_not_gone_back", lambda *_: None)
