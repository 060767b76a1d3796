"""Settles what dead members left open: their open transactions block their successors, and Kafka does not say so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from dualwrite.errors import Fenced, TransactionAborted, Unavailable
from dualwrite.kafka.coordinator__kafka_connecting import connection_settings
from dualwrite.protocol.consuming import left_behind, member_prefix
from dualwrite.recovery.recover import recover, status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dualwrite.interfaces__ports_database import Database
    from dualwrite.recovery.recover import RecoveryReport
    from dualwrite.recovery.recover__recovery_plan import IdStatus

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 30.0


class Peers:
    """The other members of a group.

    Args:
        group: The ``group.id``.
        ours: Our own transactional id and client id.
        kafka: The settings by which the members reach Kafka.
        database: The writers' database.
    """

    def __init__(self, group: str, ours: str, *, kafka: Mapping[str, object], database: Database) -> None:
        self._group = group
        self._ours = ours
        self._kafka = kafka
        self._database = database

    def settle(self) -> list[str]:
        """Settle the transactions left open by members that are no longer in the group.

        If a server does not answer, that is logged, and the rest is left to the next call.

        Returns:
            The transactional ids that were settled.

        Raises:
            DecidedTransactionLost, OutcomeUnverifiable, DatabaseWentBack, ConfigurationError: A person must look.
        """
        try:
            return self._settle()
        except (KafkaException, TimeoutError, Unavailable, Fenced, TransactionAborted) as error:
            logger.warning("%s: cannot settle peers' transactions yet; retrying later: %s", self._ours, error)
        return []

    def _settle(self) -> list[str]:
        unsettled = {one.row.transactional_id for one in self._status() if one.needs_recovery}
        if not unsettled:
            return []
        # Only now: the rule of left_behind() needs a list of members that is younger than the transactions.
        gone = left_behind(self._group, unsettled, self._members(), self._ours)
        settled = []
        for name in gone:
            report = self._recover(name)
            settled += report.settled
            logger.warning("%s: settled the open transactions of %s, which left the group", self._ours, name)
            if report.losses:
                raise report.losses[0].as_error()
        return settled

    def _status(self) -> list[IdStatus]:
        return status(
            prefix=member_prefix(self._group), kafka=self._kafka, database=self._database, timeout_s=_ANSWER_S
        )

    def _recover(self, name: str) -> RecoveryReport:
        return recover(
            name, kafka={**self._kafka, "client.id": self._ours}, database=self._database, timeout_s=_ANSWER_S
        )

    def _members(self) -> set[str]:
        """The client ids of the group's members, whichever protocol the group uses."""
        admin = AdminClient(connection_settings(self._kafka))  # type: ignore[arg-type] # callbacks, too
        answer = admin.describe_consumer_groups([self._group], request_timeout=_ANSWER_S)[self._group]
        return {member.client_id for member in answer.result(_ANSWER_S).members}
