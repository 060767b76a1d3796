"""One connection to one broker: its socket, and the requests in flight on it.

A :class:`Connection` never waits. Its owner waits for its file (see :class:`dualwrite.kafka.brokers.Connections`), in a thread
or in a task of an event loop, and then calls :meth:`Connection.receive` or :meth:`Connection.advance`. So one owner has many
connections side by side, and none needs a thread.

It opens by itself, step by step: addresses, TCP, TLS, the versions that the broker offers, the login. Requests that come
meanwhile are sent after that. It breaks once and for all: :attr:`Connection.error` says why, and each request in flight gets
that as its answer. The owner makes another one.

A broker answers the requests of a connection in their order. So an answer belongs to the oldest request in flight, and its
correlation id must be that request's. ``KeyboardInterrupt`` may come between any two lines, for instance when an answer was
read and not yet given to its request. Whatever reads or writes therefore marks the connection first; if the mark is still
there at the next use, nobody knows what was lost, and the connection breaks.

Source: the Kafka protocol guide; KIP-35 (versions), KIP-43 and KIP-368 (logins), KIP-511 (the client's name).
"""

from __future__ import annotations

import errno
import logging
import os
import random
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from dualwrite.clock import now_s
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.messages import (
    API_VERSIONS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Client,
    Done,
    NotOffered,
    Offered,
    Request,
    Unreadable,
    Varying,
    opening_request,
    read_api_versions,
    read_sasl_authenticate,
    read_sasl_handshake,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
READABLE: Final = select.POLLIN if hasattr(select, "POLLIN") else 1
WRITABLE: Final = select.POLLOUT if hasattr(select, "POLLOUT") else 4
_LENGTH: Final = 4
_READ_BYTES: Final = 65_536
_LARGEST_ID: Final = 2**31 - 1
_PORT: Final = 9092
_OVER_WHEN: Final = (0.85, 0.95)
"""The share of a login's life after which it is made again, as in Java's client: at random, so that not all come at once."""

_UNSUPPORTED_SASL_MECHANISM, _ILLEGAL_SASL_STATE, _UNSUPPORTED_VERSION = 33, 34, 35
_NEWEST_API_VERSIONS: Final = 3
_REFUSALS: Final = {
    _UNSUPPORTED_SASL_MECHANISM: "UnsupportedSaslMechanism",
    _ILLEGAL_SASL_STATE: "IllegalSaslState",
    58: "SaslAuthenticationFailed",
}
_CONNECTING: Final = frozenset({errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK, 10_035})  # and Windows' own


class ConnectionBroken(Exception):
    """There is no connection to the broker any more, or there was never one."""


class Login(Protocol):
    """A SASL mechanism, for one login. Those of kafka-python have this form."""

    def auth_bytes(self) -> bytes:
        """The next bytes to send."""
        ...

    def receive(self, auth_bytes: bytes, /) -> object:
        """Take what the broker has sent."""
        ...

    def is_done(self) -> bool:
        """Whether nothing is left to send."""
        ...

    def is_authenticated(self) -> bool:
        """Whether the broker has accepted the login."""
        ...

    def auth_details(self) -> str:
        """A line for the log that names the user."""
        ...


@dataclass(frozen=True)
class Sasl:
    """How to log in: ``begin`` makes a login to a host."""

    mechanism: str
    begin: Callable[[str], Login] = field(repr=False)


@dataclass(frozen=True)
class ConnectionSettings:
    """How to connect; its ``repr`` shows no secret. ``tls`` and ``sasl`` are None where there is none."""

    servers: Sequence[tuple[str, int]]
    client: Client
    canonical_names: bool = False  # each bootstrap server stands for the canonical names of its addresses
    family: int = socket.AF_UNSPEC
    socket_options: Sequence[tuple[int, int, int]] = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    sasl: Sasl | None = None
    request_s: float = 30.0
    opening_s: float = 10.0  # doubles after each failure
    longest_opening_s: float = 30.0
    pause_s: float = 0.02  # before the next attempt; doubles after each failure
    longest_pause_s: float = 0.5
    idle_s: float = 540.0  # a connection that has rested for longer is replaced before it is used
    largest_answer: int = 100_000_000  # bytes; limited, as four bytes of something else would be a length


def server_of(text: str) -> tuple[str, int]:
    """Host and port of one of the ``bootstrap.servers``."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        return text.strip("[]"), _PORT
    return host.strip("[]"), int(port)


class _Socket(socket.socket):
    """Closes itself silently when nothing refers to it: an interruption may come between its making and its first name."""

    def __del__(self) -> None:
        if self.fileno() >= 0:
            self.close()


class _Select:
    """``select.poll`` for systems without it, for one file."""

    def __init__(self) -> None:
        self._file = -1

    def register(self, file: int, _events: int) -> None:
        self._file = file

    def poll(self, milliseconds: float) -> list[int]:
        return select.select([self._file], [], [], milliseconds / 1000)[0]


_make_poll: Final[Callable[[], Any]] = getattr(select, "poll", _Select)
_Step = Generator[int, None, T]
"""A part of the opening: it yields what it waits for."""


class Connection:
    """A connection to one broker. Used by one caller at a time. Begins to open with the first :meth:`advance`.

    Times are in seconds, on the clock of ``now_s``.
    """

    def __init__(self, settings: ConnectionSettings, host: str, port: int, *, opens_within_s: float) -> None:
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.error: Exception | None = None
        self.is_open = self.was_open = False  # while open, it sends requests at once
        # In their order: correlation id, request, version, what takes the answer, and when it must be there.
        self.in_flight: deque[tuple[int, Request, int, Done, float]] = deque()
        self.used_at = self.broken_at = now_s()
        self._settings = settings
        self._host, self._port = host, port
        self._client = settings.client
        self._largest = settings.largest_answer
        self.waiting: deque[tuple[Request, Done, float]] = deque()  # requests, until it is open
        self._opens_within_s = opens_within_s
        self._wants = WRITABLE
        self._opening: _Step[None] | None = None
        self._file: socket.socket | None = None
        self._poll: Any = None
        self._sock: socket.socket | None = None
        self._tls: ssl.SSLObject | None = None
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._received = bytearray()
        self.unsent = bytearray()  # what the kernel has not taken yet
        self._held = b""  # what is sent together with the next request
        self._offered = Offered({})
        self._numbers: dict[type[Request], int] = {}
        self._correlation_id = 0
        self._login_until: float | None = None
        self._is_whole = True
        self._begin(self._open())

    def _begin(self, opening: _Step[None]) -> None:
        self._open_by = self._step_by = now_s() + self._opens_within_s
        self._opening, self._wants, self.is_open = opening, WRITABLE, False

    # What the owner asks before it waits.

    @property
    def is_busy(self) -> bool:
        """Whether there is something to wait for."""
        return self.error is None and bool(self.in_flight or self.waiting or self.unsent)

    @property
    def wants(self) -> int:
        """The event that it waits for: its file becomes readable, writable, or either."""
        if self._opening is not None:
            return self._wants
        return READABLE | WRITABLE if self.unsent else READABLE

    def fileno(self) -> int:
        """The file to wait for; -1 if there is none now."""
        return -1 if self._file is None else self._file.fileno()

    def due_at(self) -> float:
        """When :meth:`expire` has something to do, if nothing comes before."""
        if self._opening is not None:
            return min(self._step_by, min((due for _, _, due in self.waiting), default=self._step_by))
        if len(self.in_flight) == 1:
            return self.in_flight[0][4]
        return min((entry[4] for entry in self.in_flight), default=float("inf"))

    # What the owner does.

    def post(self, request: Request, done: Done, due_at: float, *, more: bool = False) -> None:
        """Send a request; at once, unless the connection is not open yet, or ``more`` is about to be posted.

        ``done`` is called once, by this call or by a later one, unless the request is withdrawn. Without an answer at
        ``due_at`` (seconds, on the clock of ``now_s``) the connection breaks.
        """
        if not self.is_open or not self._is_whole or (self._login_until is not None and now_s() >= self._login_until):
            self._keep(request, done, due_at)
            return
        number = self._numbers.get(type(request))
        if number is None:
            try:
                number = request.version(self._offered)
            except NotOffered as error:
                done(error)
                if self._held and not more:
                    self._send_held()
                return
            if not isinstance(request, Varying):
                self._numbers[type(request)] = number
        correlation_id = self._correlation_id + 1 if self._correlation_id < _LARGEST_ID else 1
        frame = request.frame(number, correlation_id, self._client)
        self._is_whole = False
        self._correlation_id = correlation_id
        self.in_flight.append((correlation_id, request, number, done, due_at))
        if more or self._held:
            self._held += frame
            if not more:
                self._send_held()
        else:
            self._write(frame)
        self._is_whole = True

    def _send_held(self) -> None:
        held, self._held = self._held, b""
        self._write(held)

    def _keep(self, request: Request, done: Done, due_at: float) -> None:
        """Keep a request until the connection is open, or open again."""
        if not self._is_whole:
            self.fail(self._interrupted())
        if self.error is not None:
            done(self.error)
            return
        self.waiting.append((request, done, due_at))
        if self._opening is None and not self.in_flight:
            # A login that is about to end is made again once no answer is outstanding, before anything else is sent.
            self._begin(self._log_in_again())

    def withdraw(self, done: Done) -> None:
        """The caller no longer waits for this request's answer. What was not sent must not be sent later.

        A request that has waited in this process, and arrives much later, would meet another transaction.
        """
        self.waiting = deque(entry for entry in self.waiting if entry[1] != done)
        if self.unsent and any(entry[3] == done for entry in self.in_flight):
            self.fail(ConnectionBroken(f"{self.address}: the broker took only a part of a request in time"))

    def receive(self, seconds: float) -> None:
        """Take the answers that are there. Waits up to that long for the first bytes; not while it opens."""
        if seconds and not self._poll.poll(seconds * 1000):
            return
        if not self._is_whole:
            self.fail(self._interrupted())
            return
        self._is_whole = False
        self._take_all()
        self._is_whole = True

    def advance(self) -> None:
        """Send, receive and open as far as that goes without a wait."""
        if not self._is_whole:
            self.fail(self._interrupted())
            return
        self._is_whole = False
        if self._opening is not None:
            self._go_on(self._opening)
        else:
            if self.unsent:
                self._flush()
            if self.error is None:
                self._take_all()
        self._is_whole = True

    def _take_all(self) -> None:
        data = self._read()
        if not data:
            return
        # Most often it is one answer, and nothing else.
        if not self._received and int.from_bytes(data[:_LENGTH], "big") == len(data) - _LENGTH >= _LENGTH:
            self._take(data[_LENGTH:])
        else:
            self._received += data
            while (frame := self._next_frame()) is not None:
                self._take(frame)
        if self.waiting and not self.in_flight and self.error is None:
            self._begin(self._log_in_again())

    def _go_on(self, opening: _Step[None]) -> None:
        try:
            self._wants = next(opening)
        except StopIteration:
            self._opening = None
            self.is_open = self.was_open = True
            waiting, self.waiting = self.waiting, deque()
            for entry in waiting:
                self._is_whole = True
                self.post(*entry)
        except (ConnectionBroken, ConfigurationError) as error:
            self.fail(error)
        except ssl.SSLCertVerificationError as error:
            self.fail(_not_accepted(error))
        except OSError as error:
            self.fail(self._broken(_words(error), error))
        except Unreadable as error:
            self.fail(self._broken(f"an answer cannot be read: {error}", error))
        except Exception as error:  # noqa: BLE001 - of the user's function for tokens, or of a mechanism
            # Its text may hold a part of the login.
            self.fail(self._broken(f"the login failed: {type(error).__name__}", error))

    def expire(self, now: float) -> None:
        """Take notice of the time: what should have come by now will not be waited for."""
        if not self._is_whole:
            self.fail(self._interrupted())
        elif self._opening is not None:
            if now >= self._open_by:
                self.fail(ConnectionBroken(f"{self.address}: no connection within {self._opens_within_s:.3g} s"))
                return
            late = [entry for entry in self.waiting if now >= entry[2]]
            self.waiting = deque(entry for entry in self.waiting if now < entry[2])
            for _, done, _ in late:
                done(ConnectionBroken(f"{self.address}: no connection in time"))
            self.advance()
        elif any(now >= entry[4] for entry in self.in_flight):
            self.fail(ConnectionBroken(f"{self.address}: no answer within {self._settings.request_s:.3g} s"))

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, nothing is outstanding, and nothing has come: not its end either."""
        return self.is_open and not self.in_flight and not self._poll.poll(0)

    def rests_in_peace(self, now: float) -> bool:
        """Whether a connection that nobody waits for can be used again: the broker has not closed it meanwhile."""
        return (
            bool(self.in_flight) or not self.is_open or (now - self.used_at < self._settings.idle_s and self.is_quiet)
        )

    def fail(self, error: Exception) -> None:
        """Break the connection: each request gets the error instead of an answer."""
        self._is_whole = False
        if self.error is None:
            self.error, self.broken_at = error, now_s()
            logger.debug("%s: the connection is closed: %s", self.address, error)
        self._opening, self.is_open = None, False
        for one in (self._sock, self._file):
            if one is not None:
                one.close()
        while self.in_flight:
            self.in_flight.popleft()[3](error)
        while self.waiting:
            self.waiting.popleft()[1](error)
        self.unsent.clear()
        self._held = b""
        self._is_whole = True

    def _broken(self, why: str, cause: BaseException | None = None) -> ConnectionBroken:
        error = ConnectionBroken(f"{self.address}: {why}")
        error.__cause__ = cause
        return error

    def _interrupted(self) -> ConnectionBroken:
        return self._broken("the caller was interrupted in the middle of a request")

    # Bytes.

    def _write(self, data: bytes) -> None:
        if self._tls is not None:
            self._tls.write(data)
            data = self._leaving.read()
        if self.unsent:
            self.unsent += data
            return
        assert self._sock is not None
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            if self._opening is None:
                self._take_all()  # what was answered before the end counts
            if self.error is None:
                self.fail(self._broken(_words(error), error))
            return
        if sent < len(data):
            self.unsent += memoryview(data)[sent:]

    def _flush(self) -> None:
        assert self._sock is not None
        try:
            del self.unsent[: self._sock.send(self.unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.fail(self._broken(_words(error), error))

    def _read(self) -> bytes | None:
        """The bytes that have come; None if there are none, or if the connection is broken now."""
        assert self._sock is not None
        try:
            data = self._sock.recv(_READ_BYTES)
            if data and self._tls is not None:
                return self._decrypted(data)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:  # also those of TLS
            self.fail(self._broken(_words(error), error))
            return None
        if not data:
            self.fail(self._broken("the broker closed the connection"))
            return None
        return data

    def _decrypted(self, data: bytes) -> bytes:
        assert self._tls is not None
        self._arrived.write(data)
        parts: list[bytes] = []
        while True:
            try:
                part = self._tls.read(_READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                if not parts:  # what came before the end counts: a broker that refuses a login says why, and closes
                    raise
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)

    def _next_frame(self) -> bytes | None:
        """The next answer that has come as a whole, from its correlation id on."""
        if len(self._received) < _LENGTH or self.error is not None:
            return None
        size = int.from_bytes(self._received[:_LENGTH], "big", signed=True)
        if not _LENGTH <= size <= self._largest:
            self.fail(self._broken(f"an answer of {size} bytes is none"))
            return None
        if len(self._received) < _LENGTH + size:
            return None
        frame = bytes(memoryview(self._received)[_LENGTH : _LENGTH + size])
        del self._received[: _LENGTH + size]
        return frame

    def _take(self, frame: bytes) -> None:
        if not self.in_flight:
            self.fail(self._broken("an answer came to no request"))
            return
        number, request, version, done, _ = self.in_flight[0]
        if int.from_bytes(frame[:_LENGTH], "big") != number:
            self.fail(self._broken("an answer came to another request"))
            return
        try:
            answer = request.read(frame, version)
        except Exception as error:  # noqa: BLE001 - whatever it is, these bytes are no answer
            self.fail(self._broken(f"an answer cannot be read: {type(error).__name__}", error))
            return
        self.in_flight.popleft()
        done(answer)

    # The opening. Each step yields the event that it waits for, and continues once that may have come.

    def _open(self) -> _Step[None]:
        yield from self._connect()
        if self._settings.tls is not None:
            yield from self._shake_hands(self._settings.tls)
        self._offered = yield from self._ask_for_versions()
        if self._settings.sasl is not None:
            yield from self._log_in(self._settings.sasl)
        logger.debug("%s: connected", self.address)

    def _connect(self) -> _Step[None]:
        addresses = yield from self._addresses()
        if not addresses:
            raise ConnectionBroken(f"{self.address}: the name has no address of that family")
        error: OSError = TimeoutError("not connected in time")
        for tried, (family, kind, protocol, _, address) in enumerate(addresses):
            now = now_s()
            # An address from which nothing comes must not take the time of those behind it.
            self._step_by = now + (self._open_by - now) / (len(addresses) - tried)
            self._sock = self._file = one = _Socket(family, kind, protocol)
            try:
                one.setblocking(False)
                for option in self._settings.socket_options:
                    one.setsockopt(*option)
                code = one.connect_ex(address)
                if code not in {0, *_CONNECTING}:
                    raise OSError(code, os.strerror(code))
                if code:
                    yield from self._until_connected(one)
            except OSError as failed:
                error = failed
                one.close()
                continue
            self._step_by = self._open_by
            self._poll = _make_poll()
            self._poll.register(one.fileno(), READABLE)
            return
        raise error

    def _until_connected(self, one: socket.socket) -> _Step[None]:
        while now_s() < self._step_by:
            yield WRITABLE
            if _is_ready(one.fileno(), WRITABLE):
                code = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                return
        raise TimeoutError("not connected in time")

    def _addresses(self) -> _Step[Sequence[tuple[Any, ...]]]:
        where = (self._host, self._port, self._settings.family, socket.SOCK_STREAM, 0)
        try:
            return socket.getaddrinfo(*where, socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass  # it is a name
        try:
            return (yield from self._elsewhere(lambda: socket.getaddrinfo(*where)))
        except socket.gaierror as error:
            raise self._broken(f"the name was not found: {error.strerror}", error) from error

    def _elsewhere(self, work: Callable[[], T]) -> _Step[T]:
        """Do what may block, and what nothing can bound, in a thread that ends with it. Its end makes a file readable."""
        results: list[T | Exception] = []
        here, there = socket.socketpair()
        former = self._file

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                results.append(error)
            finally:
                there.close()

        try:
            self._file = here
            threading.Thread(target=run, name="dualwrite look-up", daemon=True).start()
            while not results:
                yield READABLE
        finally:
            self._file = former
            here.close()
        [result] = results
        if isinstance(result, Exception):
            raise result
        return result

    def _shake_hands(self, context: ssl.SSLContext) -> _Step[None]:
        assert self._sock is not None
        handshake = context.wrap_bio(self._arrived, self._leaving, server_hostname=self._host)
        while True:
            try:
                handshake.do_handshake()
            except ssl.SSLWantReadError:
                yield from self._write_all(self._leaving.read())
            except ssl.SSLError:
                # Tell the broker why, without a wait until it has heard it.
                self.unsent += self._leaving.read()
                self._flush()
                raise
            else:
                yield from self._write_all(self._leaving.read())
                break
            yield READABLE
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            if not data:
                raise ConnectionBroken(f"{self.address}: the broker closed the connection in the TLS handshake")
            self._arrived.write(data)
        self._tls = handshake
        # The first bytes behind the handshake may have come with its last ones.
        self._received += self._decrypted(b"")

    def _write_all(self, data: bytes) -> _Step[None]:
        self.unsent += data
        while self.unsent:
            self._flush()
            self._raise_if_broken()
            if self.unsent:
                yield WRITABLE

    def _ask(self, api_key: int, version: int, content: bytes = b"") -> _Step[bytes]:
        """Send a request of the opening; returns its answer."""
        self._correlation_id += 1
        self._write(opening_request(api_key, version, self._correlation_id, self._client, content))
        while (frame := self._next_frame()) is None:
            self._raise_if_broken()
            yield READABLE | WRITABLE if self.unsent else READABLE
            if self.unsent:
                self._flush()
            if data := self._read():
                self._received += data
        if int.from_bytes(frame[:_LENGTH], "big") != self._correlation_id:
            raise ConnectionBroken(f"{self.address}: an answer came to another request")
        return frame

    def _raise_if_broken(self) -> None:
        if self.error is not None:
            raise self.error

    def _ask_for_versions(self) -> _Step[Offered]:
        version = _NEWEST_API_VERSIONS
        code, ranges = read_api_versions((yield from self._ask(API_VERSIONS, version)), version)
        if code == _UNSUPPORTED_VERSION:
            code, ranges = read_api_versions((yield from self._ask(API_VERSIONS, 0)), 0)
        if code:
            raise _login_refused(_REFUSALS.get(code, f"error {code}"))
        return Offered(ranges)

    def _log_in(self, sasl: Sasl) -> _Step[None]:
        code, known = read_sasl_handshake((yield from self._ask(SASL_HANDSHAKE, 1, sasl.mechanism.encode())))
        if code:
            told = _REFUSALS.get(code, f"error {code}")
            raise _login_refused(f"{told}; the broker knows {', '.join(known)}" if known else told)
        login = yield from self._elsewhere(lambda: sasl.begin(self._host))
        lifetime_ms = 0
        while not login.is_done():
            token = yield from self._elsewhere(login.auth_bytes)
            answer = yield from self._ask(SASL_AUTHENTICATE, 1, token)
            code, told_by_broker, challenge, lifetime_ms = read_sasl_authenticate(answer)
            if code:
                raise _login_refused(f"{_REFUSALS.get(code, f'error {code}')}: {told_by_broker}")
            login.receive(challenge)
        if not login.is_authenticated():
            raise _login_refused(f"the login by {sasl.mechanism} failed")
        logger.debug("%s: %s", self.address, login.auth_details())
        share = random.uniform(*_OVER_WHEN)  # noqa: S311 - spreads the logins, and hides nothing
        self._login_until = now_s() + share * lifetime_ms / 1000 if lifetime_ms > 0 else None

    def _log_in_again(self) -> _Step[None]:
        assert self._settings.sasl is not None
        yield from self._log_in(self._settings.sasl)


def _is_ready(file: int, event: int) -> bool:
    if _make_poll is _Select:
        readable, writable, _ = select.select([file], [file], [], 0)
        return bool(writable if event == WRITABLE else readable)
    look = select.poll()  # unlike select(), it takes descriptors above 1023
    look.register(file, event)
    return bool(look.poll(0))


def _words(error: BaseException) -> str:
    """The error in a few words, without the numbers that Python puts before them."""
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error) or type(error).__name__


def _login_refused(told: str) -> ConfigurationError:
    return ConfigurationError(
        f"Kafka refused the authentication: {told}",
        next_step="check security.protocol and the settings that begin with sasl.",
    )


def _not_accepted(error: ssl.SSLCertVerificationError) -> ConfigurationError:
    refused = ConfigurationError(
        f"a Kafka broker's certificate was not accepted: {error.verify_message}",
        next_step="check ssl.ca.location, and that bootstrap.servers has the names that the certificates have",
    )
    refused.__cause__ = error
    return refused
