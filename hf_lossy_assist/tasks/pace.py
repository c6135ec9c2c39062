"""The pace of requests to a server: no more in a minute than it takes, over all threads."""

import threading
import time


class Pace:
    """At most `per_minute` turns a minute over all threads, evenly spaced; None: no limit."""

    def __init__(self, per_minute: float | None):
        self.gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Sleep until it is this caller's turn."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self.gap
        if turn > now:
            time.sleep(turn - now)
