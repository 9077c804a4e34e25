"""Waits out what passes by itself: a server that is overwhelmed or restarts, a network that is cut."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from storage.object_store import StoreError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 5.0
_WORTH_TELLING = 1.0
"""Seconds without success that are worth a line of the log."""
_ANOTHER_OUTAGE = 120.0
"""Seconds without a failure after which the next one belongs to another outage; longer than one try takes."""


class Interrupted(StoreError):
    """A request failed in a way that may pass."""

    def __init__(self, doing: str, reason: str, *, perhaps_done: bool = True) -> None:
        """`perhaps_done`: the request may have taken place all the same."""
        super().__init__(f"{doing} was interrupted: {reason}")
        self.doing, self.reason, self.perhaps_done = doing, reason, perhaps_done


class PatienceEnded(StoreError):
    """Requests were interrupted for longer than anybody wanted to wait."""


class Patience:
    """Repeats what is interrupted, with growing and random pauses. Threads share it."""

    def __init__(self, seconds: float, outage: Outage | None = None) -> None:
        """`seconds` without progress end it."""
        self._seconds, self._outage = seconds, outage or Outage()

    def of_seconds(self, seconds: float) -> Patience:
        """Return another patience with the same server, at most as long as this one."""
        return Patience(min(seconds, self._seconds), self._outage)

    def wait_out(self, call: Callable[[], Answer], progress: Callable[[], int] = lambda: 0) -> Answer:
        """Call until it is not Interrupted; the time counts anew whenever `progress` has grown.

        Raises PatienceEnded, which says how long was waited; other errors as they come.
        """
        since, before, wait = time.monotonic(), progress(), _FIRST_WAIT
        while True:
            try:
                return call()
            except Interrupted as error:
                waited = time.monotonic() - since
                if progress() > before:
                    since, before, wait = time.monotonic(), progress(), _FIRST_WAIT
                elif waited > self._seconds:
                    raise PatienceEnded(
                        f"{error.doing}: failed again and again for {waited:.0f} s (at last: {error.reason})"
                        "; check the network and the server"
                    ) from None
                elif waited > _WORTH_TELLING:
                    self._outage.notice(error, self._seconds)
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, _LONGEST_WAIT)


class Outage:
    """A time in which requests are interrupted: told once, whatever the number of tries and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noticed = -_ANOTHER_OUTAGE

    def notice(self, error: Interrupted, patience: float) -> None:
        """Log the first of many."""
        with self._lock:
            now = time.monotonic()
            new = now - self._noticed >= _ANOTHER_OUTAGE
            self._noticed = now
        if new:
            log.warning("%s; trying again for up to %.0f s", error, patience)
