"""Messages set aside: as they were read, with the reason in headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dualwrite.errors import encoded, text_of

if TYPE_CHECKING:
    from confluent_kafka import Message

_LONGEST_REASON: Final = 1000


def dead_letter_headers(
    message: Message, error: Exception, *, attempts: int, group: str
) -> list[tuple[str, str | bytes | None]]:
    """The headers of a dead letter: the message's own, then where it is from and why it was set aside.

    Args:
        message: The message as it was read.
        error: The error of the last attempt.
        attempts: How often the work was tried with this message.
        group: The consumer's group.
    """
    kind = type(error)
    found = message.headers() or []
    own = list(found.items() if isinstance(found, dict) else found)
    ours = {
        "dualwrite.dead_letter.topic": message.topic(),
        "dualwrite.dead_letter.partition": message.partition(),
        "dualwrite.dead_letter.offset": message.offset(),
        "dualwrite.dead_letter.group": group,
        "dualwrite.dead_letter.attempts": attempts,
        "dualwrite.dead_letter.exception": f"{kind.__module__}.{kind.__qualname__}",
        "dualwrite.dead_letter.reason": text_of(error)[:_LONGEST_REASON],
    }
    return [*own, *((key, encoded(str(value))) for key, value in ours.items())]
