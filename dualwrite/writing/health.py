"""Whether a writer is ready, and whether Kafka is silent: what it knows of itself, and questions asked in the background.

A readiness check must answer at once, so it reads the last answers instead of asking. A block must not wait for Kafka after
others have waited in vain, so it reads a verdict instead of trying.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final

from dualwrite.clock import now_s
from dualwrite.errors import CompletionPending, DualWriteError, Fenced, TransactionInDoubt, Unavailable
from dualwrite.protocol.outbox import NO_OUTBOX, Outbox, OutboxState
from dualwrite.protocol.process import Breaker, Health, Silence
from dualwrite.protocol.values import Partition, is_of_writer
from dualwrite.writing.lane_pool import Lanes

if TYPE_CHECKING:
    from dualwrite.writing.lane import Lane

logger = logging.getLogger(__name__)

_PROBE_EVERY_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.25
_QUIET_LOOKS: Final = 8
"""After this many looks without a lane in use, the watching thread sleeps until one is taken."""
_MISSING: Final = (Unavailable, TransactionInDoubt, CompletionPending)


class HealthMonitor:
    """Notes whether the servers answer. Used by many threads at once.

    If they did not answer last, the next call of :meth:`health` starts a probe in the background: a platform sends no work to a
    process that is not ready, so no dual write would notice that the servers answer again.

    While lanes are in use, a thread of its own watches what they ask Kafka: see :class:`~dualwrite.protocol.process.Breaker`.
    ``silence`` is its verdict, which anybody may read at no cost.

    ``probe`` asks both servers; ``ask_kafka`` asks only Kafka, and the leaders of these partitions, on new connections. Each
    raises if there is no answer. ``knock`` returns whether all brokers refuse connections; it is None if that should prove
    nothing. ``ask_database`` asks only the database: while messages wait there, dual writes need no more. ``turned`` is called
    when Kafka falls silent, and with None when it answers again.
    """

    silence: Silence | None = None
    """What Kafka has not answered, while it is silent; None while it answers. Only the watching thread assigns it."""

    def __init__(
        self,
        name: str,
        probe: Callable[[], object],
        *,
        ask_database: Callable[[], object] | None = None,
        kafka_at: str = "",
        ask_kafka: Callable[[Collection[Partition]], object] = lambda _: None,
        knock: Callable[[], bool] | None = None,
        turned: Callable[[Silence | None], object] = lambda _: None,
    ) -> None:
        self._name = name
        self._questions = {True: probe, False: ask_database or probe}
        self._needs_kafka = self._database_answered = True
        self._probe = Probe(f"dualwrite {name} probe", self._ask, every_s=_PROBE_EVERY_S)
        self._answered = True
        self._fenced = False
        self._kafka_at = kafka_at
        self._ask_kafka = ask_kafka
        self._knock = knock
        self._knocks = False
        self._knocked: tuple[float, bool] | None = None
        self._turned = turned
        self._breaker = Breaker()
        self._heard_s = self._probe_heard_s = 0.0
        self._lanes: Lanes | None = None
        self._sends_on: Sequence[Lane] = ()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self.sleeps = False
        self.sends = False

    def note(self, error: DualWriteError | None, heard_s: float = 0.0) -> None:
        """Note the end of a dual write, which shows whether the servers answered it.

        An error of another writer that passed through the block says nothing about this one. Kafka has answered the dual write
        after ``heard_s``, on the clock of the process; 0 if it was asked nothing.
        """
        if error is None:
            self._answered = self._database_answered = True
            self._heard_s = max(self._heard_s, heard_s)
        elif error.transactional_id is not None and not is_of_writer(self._name, error.transactional_id):
            return
        elif isinstance(error, Fenced):
            self._fenced = True
        elif isinstance(error, _MISSING) or isinstance(error.__cause__, _MISSING):
            self._answered = False

    def health(
        self,
        lanes: Lanes,
        *,
        is_open: bool,
        unreported_losses: int,
        setting: Outbox = "never",
        outbox: OutboxState = NO_OUTBOX,
        full: str | None = None,
    ) -> Health:
        """The writer's health. Returns at once.

        ``setting`` says whether messages may wait, ``outbox`` what waits, and ``full`` why no more may.
        """
        answered, silence = self._answered, self.silence
        waits = silence is not None or outbox.stopped is not None or (setting == "fallback" and outbox.later is True)
        degraded = setting != "never" and waits
        if is_open and not answered and (silence is None or degraded):
            self._needs_kafka = not degraded
            # An error does not say which server did not answer. While messages wait it is Kafka, unless the probe finds
            # otherwise.
            answered = degraded and self._database_answered
            self._probe.start()
        now, all_lanes = now_s(), lanes.all
        used = [pooled for pooled in all_lanes if pooled.taken_at is not None]
        unsettled = [pooled for pooled in all_lanes if pooled.taken_at is None and pooled.lane.needs_settling]
        left = [left_s for pooled in used if (left_s := pooled.lane.time_left_s) is not None]
        asking = [since for pooled in used if (since := pooled.lane.asking_since) is not None]
        unanswered = [since for since in asking if since > self._heard_s]
        return Health(
            self._name,
            is_open,
            refused=next((str(error) for pooled in all_lanes if (error := pooled.lane.refused) is not None), None),
            fenced=self._fenced or any(pooled.given_up for pooled in unsettled),
            answered=answered,
            degraded=degraded,
            outbox_later=outbox.later,
            outbox_rows=outbox.rows,
            outbox_bytes=outbox.size,
            outbox_oldest_s=0.0 if outbox.oldest_at is None else max(0.0, now - outbox.oldest_at),
            outbox_stopped=outbox.stopped,
            outbox_full=full,
            silence=silence,
            unanswered_s=max((now - since for since in unanswered), default=0.0),
            unreported_losses=unreported_losses,
            max_lanes=lanes.max_lanes,
            lanes=len(all_lanes),
            used=len(used),
            waiting=lanes.waiting,
            unsettled=len(unsettled),
            stuck=sum(pooled.failures > 0 and not pooled.coming for pooled in unsettled),
            unsettled_s=max((pooled.lane.unsettled_s for pooled in unsettled), default=0.0),
            open_s=max((now - since for pooled in used if (since := pooled.taken_at) is not None), default=0.0),
            time_left_s=min(left, default=None),
        )

    def _ask(self) -> None:
        try:
            self._questions[self._needs_kafka]()
            self._answered = self._database_answered = True
        except Exception as error:  # noqa: BLE001 - whatever it is, they did not answer, or the writer was closed meanwhile
            self._database_answered = self._needs_kafka
            logger.info("%s: the servers do not answer yet: %s", self._name, error)

    def refuse_in_silence(self) -> None:
        """If Kafka is silent, raise the error of a block that needs it."""
        if (silence := self.silence) is not None:
            raise silence.error(self._name)

    # Watching for silence

    def watch(
        self, lanes: Lanes, unanswered: tuple[float, str] | None = None, *, sends_on: Sequence[Lane] = ()
    ) -> None:
        """Watch what these lanes ask Kafka, until :meth:`close`. ``unanswered`` is a question that the opening asked.

        ``sends_on`` are the lanes of the sender of messages that wait. While it is at work, :attr:`sends` is true.
        """
        self._lanes, self._sends_on = lanes, sends_on
        if unanswered is not None:
            self._breaker = self._breaker.missing(*unanswered)
        threading.Thread(target=self._watch, name=f"dualwrite {self._name} watch", daemon=True).start()

    def note_sends(self) -> None:
        """Watch: the sender is about to ask Kafka. It sets :attr:`sends` to False when it has nothing more to do."""
        self.sends = True
        if self.sleeps:
            self.wake()

    def wake(self) -> None:
        """Watch: a lane is in use. Call it if :attr:`sleeps`, once the lane is taken."""
        self.sleeps = False
        self._wake.put(None)

    def close(self) -> None:
        """Stop watching. May be called more than once."""
        self._closed = True
        self._wake.put(None)

    def _watch(self) -> None:
        quiet = 0
        while not self._closed:
            try:
                quiet = 0 if self._look() else quiet + 1
            except Exception:
                logger.exception("%s: could not look whether Kafka answers", self._name)
            if quiet < _QUIET_LOOKS:
                pause_s: float | None = _LOOK_EVERY_S
            else:
                self.sleeps = True
                if self._look():  # one was taken before its block could see that nobody watches
                    self.sleeps, quiet = False, 0
                    continue
                pause_s, quiet = None, 0
            with suppress(queue.Empty):
                self._wake.get(timeout=pause_s)

    def _look(self) -> bool:
        """Judge what the lanes have asked. Returns whether to look again soon."""
        assert self._lanes is not None
        lanes, now = [*(pooled.lane for pooled in self._lanes.all), *self._sends_on], now_s()
        in_use = self.sends or any(pooled.taken_at is not None for pooled in self._lanes.all)
        breaker = self._breaker.answered(
            max(self._heard_s, self._probe_heard_s, *(lane.heard_s for lane in lanes), 0.0)
        )
        for question in [question for lane in lanes if (question := lane.question) is not None]:
            breaker = breaker.missing(*question)
        if (knocked := self._knocked) is not None:
            self._knocked = None
            breaker = breaker.knocked(knocked[0], refused=knocked[1])
        breaker = breaker.judged(now)
        if self._knock is not None and not self._knocks and breaker.must_knock(now):
            self._knocks = True
            threading.Thread(
                target=self._knock_at_all, args=(self._knock, now), name=f"dualwrite {self._name} knock", daemon=True
            ).start()
        if breaker.must_probe(now):
            breaker = breaker.probing(now)
            partitions = frozenset(one for lane in lanes for one in lane.sends_to)
            threading.Thread(
                target=self._probe_kafka, args=(partitions,), name=f"dualwrite {self._name} probe of Kafka", daemon=True
            ).start()
        self._breaker = breaker
        if breaker.silent is not (self.silence is not None):
            self._turn(breaker, now)
        return in_use or breaker.asked is not None

    def _turn(self, breaker: Breaker, now: float) -> None:
        if breaker.silent and breaker.asked is not None:
            since_s, what = breaker.asked
            since = datetime.now(timezone.utc) - timedelta(seconds=now - since_s)
            self.silence = Silence(self._kafka_at, since, since_s, what)
            meanwhile = "dual writes are refused" if self._knock is None else "messages wait in the database"
            logger.warning("%s: %s: %s until it answers", self._name, self.silence, meanwhile)
        elif (former := self.silence) is not None:
            self.silence = None
            logger.warning("%s: Kafka answers again, after %.1f s", self._name, now - former.since_s)
            if not self._answered:
                self._probe.start()
        self._turned(self.silence)

    def _knock_at_all(self, knock: Callable[[], bool], began_s: float) -> None:
        refused = False
        try:
            refused = knock()
        except Exception as error:  # noqa: BLE001 - such as a writer that was closed meanwhile: that refuses nothing
            logger.debug("%s: could not find out whether the brokers refuse connections: %s", self._name, error)
        finally:
            self._knocked, self._knocks = (began_s, refused), False

    def _probe_kafka(self, partitions: Collection[Partition]) -> None:
        try:
            self._ask_kafka(partitions)
        except Unavailable as error:
            logger.debug("%s: Kafka does not answer: %s", self._name, error)
            return
        except Exception as error:  # noqa: BLE001 - a refusal is an answer
            logger.debug("%s: Kafka answers: %s", self._name, error)
        self._probe_heard_s = now_s()
        self._wake.put(None)


# Asks the servers now and then from a background thread: a caller gets the last answer and never waits.

EVERY_S: Final = 30.0
_FORGOTTEN_AFTER_S: Final = 180.0


class Probe:
    """Asks in a thread of its own: one question at a time, at most one every ``every_s``. Thread-safe."""

    # The question handles its errors.
    def __init__(self, name: str, ask: Callable[[], None], *, every_s: float) -> None:
        self._name = name
        self._ask = ask
        self._every_s = every_s
        self._lock = threading.Lock()
        self._next_at = 0.0

    def start(self) -> None:
        """Ask, unless it is too soon. Returns at once."""
        with self._lock:
            if now_s() < self._next_at:
                return
            self._next_at = float("inf")  # one at a time
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._ask()
        finally:
            self._next_at = now_s() + self._every_s


class SeldomAsked:
    """A number that a server reports, as of the last time it was asked. Reading it starts another request once that is due."""

    def __init__(self, name: str, ask: Callable[[], float], on_error: Callable[[Exception], None]) -> None:
        self._question = ask
        self._on_error = on_error
        self._probe = Probe(name, self._ask, every_s=EVERY_S)
        self._answer: tuple[float, float] | None = None

    def __call__(self) -> float | None:
        """The last answer. None before the first one, and again three minutes after the last."""
        answer = self._answer
        self._probe.start()
        return None if answer is None or now_s() - answer[1] > _FORGOTTEN_AFTER_S else answer[0]

    def _ask(self) -> None:
        try:
            self._answer = self._question(), now_s()
        except Exception as error:  # noqa: BLE001 - the next question may be answered
            self._on_error(error)
