"""Rows and incidents as JSON, and back. Columns are called as in SQL."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_rows import Incident, StateRow
from dualwrite.stores.keyed.store__stores_keyed_keys import INCIDENT, STATE, Key
from dualwrite.stores.sql.tables__stores_sql_tables_rows import digest, parse_state_row


@dataclass(frozen=True)
class Stored:
    """A row, and what SQL databases keep track of by themselves.

    Attributes:
        row: The row.
        transaction: The name of the newest transaction that was committed on it; None if there was none.
    """

    row: StateRow
    transaction: str | None = None


def state_key(transactional_id: str) -> Key:
    """The key of a row."""
    return STATE, transactional_id


def incident_key(transactional_id: str, state: PreparedTxnState) -> Key:
    """The key of an incident."""
    return INCIDENT, f"{transactional_id}/{digest(state)}"


def encode_row(stored: Stored) -> bytes:
    """The row's value. Two values are never equal, so that a value can serve as its own version."""
    row = stored.row
    return _encode(
        {
            "transactional_id": row.transactional_id,
            "prepared_transaction_state": str(row.prepared),
            "namespace": row.namespace,
            "incarnation": row.incarnation,
            "settled_incarnation": row.settled_incarnation,
            "completed": None if row.completed is None else row.completed.value,
            "cluster_id": row.cluster_id,
            "owner": row.owner,
            "updated_at": row.updated_at.isoformat(),
            "settle_fence": row.settle_fence,
            "transaction": stored.transaction,
        }
    )


def decode_row(value: bytes) -> Stored:
    """The row of a value.

    Raises:
        ConfigurationError: This library cannot have written it.
    """
    found = _decode(STATE, value)
    try:
        moment = datetime.fromisoformat(cast("str", found["updated_at"]))
        row = parse_state_row(STATE, {**found, "updated_at": moment})
        return Stored(row, cast("str | None", found["transaction"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(STATE, f"{error!r}") from error


def encode_incident(incident: Incident) -> bytes:
    """The incident's value, likewise."""
    return _encode(
        {
            "transactional_id": incident.transactional_id,
            "prepared_transaction_state": incident.prepared_transaction_state,
            "outcome": incident.outcome.value,
            "detail": incident.detail,
            "detected_at": incident.detected_at.isoformat(),
            "acknowledged_at": _text(incident.acknowledged_at),
            "told_at": _text(incident.told_at),
        }
    )


def decode_incident(value: bytes) -> Incident:
    """The incident of a value.

    Raises:
        ConfigurationError: This library cannot have written it.
    """
    found = _decode(INCIDENT, value)
    try:
        return Incident(
            cast("str", found["transactional_id"]),
            cast("str", found["prepared_transaction_state"]),
            Outcome(found["outcome"]),
            cast("str", found["detail"]),
            datetime.fromisoformat(cast("str", found["detected_at"])),
            _moment(found["acknowledged_at"]),
            _moment(found["told_at"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(INCIDENT, f"{error!r}") from error


def _encode(values: dict[str, object]) -> bytes:
    return json.dumps({**values, "written": secrets.token_hex(8)}, separators=(",", ":")).encode()


def _decode(table: str, value: bytes) -> dict[str, object]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise _bad(table, "it is not JSON") from error
    if not isinstance(found, dict):
        raise _bad(table, "it is not an object")
    return found


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _moment(text: object) -> datetime | None:
    return None if text is None else datetime.fromisoformat(cast("str", text))


def _bad(table: str, cause: str) -> ConfigurationError:
    return ConfigurationError(
        f"bad value in {table}: {cause}",
        next_step="it was not written by this library, or was edited: restore it before anything is settled",
    )
