"""The savepoints of a dual write's database transaction, and the messages that wait for them.

Like a row, a message belongs to the savepoint that was open when it was produced: it is sent once the outermost savepoint
around it is released, and dropped when one around it is rolled back. It has to wait, as a sent message cannot be taken back.

Savepoints are read from the statements that the database has executed. A *witness* exposes those that nothing shows: a number
that the database keeps inside the transaction, and that a rollback to a savepoint reverts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

Message = TypeVar("Message")

_LONGEST_NAME: Final = 63  # bytes: PostgreSQL truncates longer names, so two of them may become one


_ROLLED_BACK_ONCE: Final = "sa_savepoint_"
"""SQLAlchemy's savepoints: it rolls back to each once, and then leaves it open."""


class Move(Enum):
    """The effect of a statement on savepoints."""

    OPEN = "SAVEPOINT"
    RELEASE = "RELEASE SAVEPOINT"
    ROLL_BACK = "ROLLBACK TO SAVEPOINT"


class NotUnderstood(Exception):
    """It is no longer known which savepoints are open, or what happened to their messages: both sides must abort."""


# A text can affect savepoints only if it begins like this, or contains several statements.
_MAY_BEGIN: Final = re.compile(r"\s*(?:savepoint|release|rollback|--|/\*)", re.IGNORECASE)
_WORDS: Final = re.compile(r"savepoint|release|rollback", re.IGNORECASE)
_COMMENT: Final = re.compile(r"/\*|\*/")
_TOKEN: Final = re.compile(
    r"""
      (?P<skipped>\s+|--[^\n]*)
    | (?P<comment>/\*)
    | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\])
    | (?P<text>[eE]'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*')
    | (?P<dollar>\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$)
    | (?P<word>[^\W\d][\w$]*)
    | (?P<end>;)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


def moves_of(statement: str, *, quotes_keep_case: bool = True) -> Sequence[tuple[Move, str]]:
    """The effects on savepoints of a text of one or more SQL statements, once executed, in order.

    Words inside string literals, identifiers, comments and function bodies do not count. Quoted names that differ in case are
    different in PostgreSQL (``quotes_keep_case``), and the same in SQLite. Raises `NotUnderstood` if one of the statements
    affects savepoints in a way that this function cannot read.
    """
    if not may_move(statement):
        return ()
    found = (_move(tokens, quotes_keep_case=quotes_keep_case) for tokens in _statements(statement))
    return [move for move in found if move is not None]


def may_move(statement: str) -> bool:
    """Whether :func:`moves_of` may find something in the text: a quick look."""
    if ";" not in statement and _MAY_BEGIN.match(statement) is None:
        return False
    return _WORDS.search(statement) is not None


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.lower() in words


def _statements(text: str) -> Sequence[Sequence[_Token]]:
    statements: list[list[_Token]] = [[]]
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # the last alternative takes any character
        at = match.end()
        kind = match.lastgroup if match.lastgroup != "tag" else "dollar"
        if kind == "comment":
            at = _end_of_comment(text, at)
        elif kind == "end":
            statements.append([])
        elif kind not in {None, "skipped"}:
            statements[-1].append(_Token(str(kind), match.group()))
    return [tokens for tokens in statements if tokens]


def _end_of_comment(text: str, at: int) -> int:
    """Comments nest in PostgreSQL, but not in SQLite, where the witness catches a savepoint after nested ones."""
    depth = 1
    while depth and (match := _COMMENT.search(text, at)) is not None:
        depth += 1 if match.group() == "/*" else -1
        at = match.end()
    return at if not depth else len(text)


def _move(tokens: Sequence[_Token], *, quotes_keep_case: bool) -> tuple[Move, str] | None:
    if any(token.kind == "text" and "\\'" in token.text and token.text[0] == "'" for token in tokens):
        # Where the literal ends depends on PostgreSQL's standard_conforming_strings.
        raise NotUnderstood("a statement with savepoints and with a backslash before a quote")
    first, rest = tokens[0], list(tokens[1:])
    if first.is_word("savepoint"):
        move = Move.OPEN
    elif first.is_word("release"):
        move = Move.RELEASE
    elif first.is_word("rollback"):
        if rest and rest[0].is_word("work", "transaction"):
            rest.pop(0)
        if not (rest and rest[0].is_word("to")):
            return None  # rolls back the whole transaction: detected elsewhere
        rest.pop(0)
        move = Move.ROLL_BACK
    else:
        return None
    if move is not Move.OPEN and len(rest) > 1 and rest[0].is_word("savepoint"):
        rest.pop(0)
    if len(rest) != 1:
        raise NotUnderstood(f"{move.value} with a name that cannot be read")
    return move, _name(rest[0], quotes_keep_case=quotes_keep_case)


def _name(token: _Token, *, quotes_keep_case: bool) -> str:
    text = token.text
    if token.kind == "word":
        name = _lowered(text)
    elif token.kind in {"quoted", "text"} and not text[0].isalpha():
        quote = text[-1]
        name = text[1:-1].replace(quote * 2, quote)
        name = name if quotes_keep_case else _lowered(name)
    else:
        raise NotUnderstood(f"a savepoint's name that cannot be read: {text}")
    if len(name.encode()) > _LONGEST_NAME:
        raise NotUnderstood(f"a savepoint's name of more than {_LONGEST_NAME} bytes")
    return name


def _lowered(name: str) -> str:
    """Lower only ASCII letters, as databases do."""
    return name.encode().lower().decode()


@dataclass
class _Savepoint(Generic[Message]):
    name: str
    witness: int
    messages: list[Message] = field(default_factory=list)
    over: bool = False


class Savepoints(Generic[Message]):
    """The open savepoints, the messages that belong to each, and those that may be sent.

    ``witness`` is the number that the database must show now; 0 if it has none.
    """

    def __init__(self) -> None:
        self.witness = 0
        self._numbered = 0
        self._open: list[_Savepoint[Message]] = []
        self._free: list[Message] = []

    @property
    def idle(self) -> bool:
        """Whether a message may be sent at once: no savepoint is open, and no other message is queued before it."""
        return not self._open and not self._free

    @property
    def holds(self) -> bool:
        """Whether a new message would wait: a savepoint is open."""
        return bool(self._open)

    @property
    def may_roll_back(self) -> bool:
        """Whether what is done now may be rolled back to a savepoint."""
        return not all(savepoint.over for savepoint in self._open)

    @property
    def needs_witness(self) -> bool:
        """Whether an unseen rollback to the innermost savepoint would revert no witness, and so go unnoticed."""
        return bool(self._open) and self.witness == self._open[-1].witness

    @property
    def at_risk(self) -> bool:
        """Whether a message waits for a savepoint whose rollback, if it went unseen, would revert no witness."""
        return any(savepoint.messages and savepoint.witness == self.witness for savepoint in self._open)

    def new_witness(self) -> int:
        """Take the next number for the database, which becomes :attr:`witness`. No number is used twice."""
        self._numbered += 1
        self.witness = self._numbered
        return self.witness

    def add(self, message: Message) -> None:
        """Add a produced message."""
        (self._open[-1].messages if self._open else self._free).append(message)

    def apply(self, move: Move, name: str) -> None:
        """Apply a savepoint statement that the database has executed. Raises `NotUnderstood` if it was opened unseen."""
        if move is Move.OPEN:
            self._open.append(_Savepoint(name, self.witness))
            return
        at = next((n for n in reversed(range(len(self._open))) if self._open[n].name == name), None)
        if at is None:
            raise NotUnderstood(f"{move.value} {name}, which was opened unseen")
        if move is Move.RELEASE:
            self._release(at)
        else:
            # The savepoint itself stays open; those inside it are gone.
            self.witness = self._open[at].witness
            self._open[at].messages.clear()
            self._open[at].over = name.startswith(_ROLLED_BACK_ONCE)
            del self._open[at + 1 :]

    def _release(self, at: int) -> None:
        released = [message for savepoint in self._open[at:] for message in savepoint.messages]
        del self._open[at:]
        (self._open[-1].messages if self._open else self._free).extend(released)

    def take(self) -> Sequence[Message]:
        """The messages to send now, in the order in which they were produced; each is taken once."""
        taken, self._free = self._free, []
        return taken

    def end(self) -> None:
        """Release all savepoints that are still open, as the database commits."""
        if self._open:
            self._release(0)
