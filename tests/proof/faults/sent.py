"""The requests that went through a case's proxy, by kind and version. The native engine has versions of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dualwrite.testing import Api
from dualwrite.testing.proxy import KafkaRequest

_NAMES = {
    Api.PRODUCE: "Produce",
    Api.INIT_PRODUCER_ID: "InitProducerId",
    Api.ADD_PARTITIONS_TO_TXN: "AddPartitionsToTxn",
    Api.ADD_OFFSETS_TO_TXN: "AddOffsetsToTxn",
    Api.END_TXN: "EndTxn",
    Api.TXN_OFFSET_COMMIT: "TxnOffsetCommit",
}
_NATIVE = {
    "Produce v12",
    "Produce v13",
    "InitProducerId v5",
    "InitProducerId v6",
    "EndTxn v5",
    "TxnOffsetCommit v5",
    "TxnOffsetCommit v6",
}
"""Versions with which each transaction has an epoch of its own (KIP-890); none adds anything to a transaction by itself."""


def by_version(requests: Iterable[KafkaRequest]) -> dict[str, int]:
    """How many requests of a transaction there were, of each kind and version."""
    found = Counter(f"{_NAMES[Api(one.api_key)]} v{one.api_version}" for one in requests if one.api_key in _NAMES)
    return dict(sorted(found.items()))


def not_native(sent: Mapping[str, int]) -> list[str]:
    """Findings, if all of them came from native producers and from settlers of native transactions."""
    return [f"the native engine has sent {name}" for name in sent if name not in _NATIVE]
