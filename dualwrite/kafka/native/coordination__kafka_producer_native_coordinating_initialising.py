"""Gets a producer its id under the longest time limit that the broker grants to a transaction.

A transaction that the database has decided waits for its completion, and the broker must not abort it meanwhile. The
attempts, in this order:

1. Two-phase commit (KIP-939): no time limit, whatever ``transaction.max.timeout.ms`` is. Only brokers with unstable versions
   enabled offer the request. They refuse it where ``transaction.two.phase.commit.enable`` is off, or the user lacks the right
   TwoPhaseCommit on the transactional id.
2. The timeout 2147483647 ms, which never expires (KIP-939), if ``transaction.max.timeout.ms`` allows it or cannot be read.
3. The greatest timeout that the brokers allow, with a warning.

The user's own ``transaction.timeout.ms`` overrides all of them; ``transaction.two.phase.commit.enable`` makes the first the
only one, or leaves it out. A refusal is an answer: the broker has done nothing, and the
next attempt is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.config import TWO_PHASE_COMMIT
from dualwrite.kafka.engine__kafka_producer_transaction_timeout import (
    choose_transaction_timeout_ms,
    tell_that_unlimited,
    warn_if_bounded,
)
from dualwrite.kafka.failures__kafka_producer_codes import Code
from dualwrite.protocol.values import NEVER_MS

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.kafka.native.coordination import Answered, CoordinatorRequests

_REFUSED: Final = frozenset(
    {Code.UNSUPPORTED_VERSION, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, Code.INVALID_TRANSACTION_TIMEOUT}
)
"""Answers after which the next attempt may succeed. If a right is missing altogether, the last attempt is answered so, too."""


@dataclass(frozen=True)
class Attempt:
    """One way to ask for a producer id.

    Attributes:
        timeout_ms: The time limit of each transaction; ``NEVER_MS`` for none.
        two_phase: Whether to ask for two-phase commit.
    """

    timeout_ms: int
    two_phase: bool = False


_TWO_PHASE: Final = Attempt(NEVER_MS, two_phase=True)


@dataclass(frozen=True)
class Initialised:
    """The result of the last attempt.

    Attributes:
        answered: The answer; None if none came, so that the request may still arrive.
        granted: The attempt.
    """

    answered: Answered | None
    granted: Attempt


def attempts(
    requested_ms: int | None, broker_maximum_ms: int | None, *, two_phase_commit: bool | None = None
) -> Sequence[Attempt]:
    """The attempts, in their order.

    Args:
        requested_ms: The user's ``transaction.timeout.ms``; None for the longest possible.
        broker_maximum_ms: The broker's ``transaction.max.timeout.ms``; None if it cannot be read.
        two_phase_commit: Whether the user requires two-phase commit, or forbids it; None for neither.

    Raises:
        ConfigurationError: The broker does not allow the user's value, or it is not a timeout, or it stands beside two-phase
            commit.
    """
    if two_phase_commit:
        if requested_ms is not None:
            raise ConfigurationError(
                f"a transaction timeout has no effect beside {TWO_PHASE_COMMIT}=true", next_step="leave one of them out"
            )
        return [_TWO_PHASE]
    chosen = Attempt(choose_transaction_timeout_ms(requested_ms, broker_maximum_ms, greatest_ms=NEVER_MS))
    if requested_ms is not None:
        return [chosen]
    return [*([_TWO_PHASE] if two_phase_commit is None else []), *_without_limit(broker_maximum_ms), chosen]


def _without_limit(broker_maximum_ms: int | None) -> Sequence[Attempt]:
    return [Attempt(NEVER_MS)] if broker_maximum_ms is None else []


def refusal_of_two_phase(initialised: Initialised, transactional_id: str) -> ConfigurationError | None:
    """The error if the user requires two-phase commit and the broker refuses it; None for any other answer."""
    answered = initialised.answered
    if not initialised.granted.two_phase or answered is None or answered.code not in _REFUSED:
        return None
    said = (
        "the brokers do not offer it: set unstable.api.versions.enable=true on them"
        if answered.code == Code.UNSUPPORTED_VERSION
        else f"grant Write and TwoPhaseCommit on this transactional id, and set {TWO_PHASE_COMMIT}=true on the brokers"
    )
    return ConfigurationError(
        "the brokers refuse two-phase commit, which the settings require",
        transactional_id=transactional_id,
        next_step=said,
    )


def initialise(requests: CoordinatorRequests, ways: Sequence[Attempt], deadline: Deadline) -> Initialised:
    """Get a producer id; aborts what is open under the transactional id.

    Args:
        requests: The producer's requests.
        ways: The attempts, at least one.
        deadline: Limits the wait.

    Raises:
        ConfigurationError: The broker refuses our credentials.
    """
    for way in ways:
        answered = requests.init_producer_id(way.timeout_ms, deadline, two_phase=way.two_phase)
        if answered is None or answered.code not in _REFUSED:
            break
    return Initialised(answered, way)


def tell_time_limit(
    granted: Attempt, requested_ms: int | None, broker_maximum_ms: int | None, *, cluster_id: str, transactional_id: str
) -> None:
    """Log, once per process and cluster, whether transactions have a time limit that the user has not asked for."""
    named = {"cluster_id": cluster_id, "transactional_id": transactional_id}
    if granted.timeout_ms == NEVER_MS:
        how = "two-phase commit" if granted.two_phase else f"transaction.timeout.ms={NEVER_MS}"
        tell_that_unlimited(how, **named)
    else:
        warn_if_bounded(requested_ms, broker_maximum_ms, granted.timeout_ms, **named)
