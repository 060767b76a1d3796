"""The section of the report about consumers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaos.results import Results
from chaos.tables import sum_of, table


def consumers_of(run: Results) -> dict[str, Any]:
    """The figures of a run's consumers' part."""
    return {
        "command": run.command,
        "began": run.began,
        "minutes": round(run.seconds / 60),
        "counts": run.consumers,
        "findings": run.findings,
    }


def section(consumers: Mapping[str, Any]) -> list[str]:
    if not consumers:
        return []
    killed = {offsets: consumers["counts"].get(offsets, {}) for offsets in ("kafka", "database")}
    by, servers = consumers["counts"]["by"], consumers["counts"]["servers"]
    return [
        "## Consumers",
        "",
        "Members of consumer groups, two of each group at a time, six groups at once; each copies the numbers of a topic to rows "
        "and to messages, [exactly once](consumer.md). Each member is armed with a fail point or killed at any moment; the next "
        "one comes under a new name or that of a former one. Meanwhile the broker is killed and PostgreSQL stopped, each about "
        "once a minute. At the end a member that nobody kills writes what is left; then each number must be one row and one "
        "message.",
        "",
        f"`{consumers['command']}`, {consumers['began']} (UTC), {consumers['minutes']} minutes, native engine: "
        f"**{sum_of(killed):,} members killed**, {by['threads']} whose handlers ran in threads and {by['tasks']} in tasks; "
        f"{by['eager']} with eager rebalances, {by['cooperative']} cooperative, {by['consumer']} with KIP-848; "
        f"{servers['broker']} broker kills, {servers['PostgreSQL']} stops of PostgreSQL. "
        f"**{consumers['counts']['inputs']['counted']:,} inputs**, each once on both sides; {len(consumers['findings'])} findings.",
        "",
        *table(["offsets in Kafka", "offsets as rows"], list(killed.values())),
        f"| all | {sum(killed['kafka'].values())} | {sum(killed['database'].values())} |",
        "",
        f"Not counted: {sum(consumers['counts'].get('missed', {}).values())} that ended before they came to their point: they got no partition "
        "or too few messages, found nothing to settle, or a server was away.",
        "",
    ]
