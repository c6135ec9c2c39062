"""End the processes of a job on several machines once one of them has ended: each launcher sees those of one machine."""

import atexit
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ..terminal import show
from ..validation import check_positive


if TYPE_CHECKING:
    from torch.distributed import Store

SECONDS = "HF_LOSSY_HEARTBEAT_SECONDS"
DONE = "done"
RESUME = "the same command with --resume goes on from what is done"


class Heartbeats(threading.Thread):
    """Writes a counter to the launcher's store, and reads those of the other ranks. Ends this process if one stands still, or if the store is gone."""

    def __init__(self, store: "Store", rank: int, count: int, seconds: float):
        """`seconds`: of silence after which a rank has ended."""
        super().__init__(name="hf-lossy-heartbeats", daemon=True)
        self.store, self.rank, self.seconds = store, rank, seconds
        self.last = {other: (b"", time.monotonic()) for other in range(count) if other != rank}
        self.stopped, self.failed = threading.Event(), False

    def run(self) -> None:
        beats = 0
        while self.last and not self.stopped.is_set():
            beats += 1
            try:
                self.store.set(self._key(self.rank), str(beats))
                silent = self._find_silent()
            except RuntimeError:  # the store, on the first machine
                silent = 0
            if silent is not None and not self.stopped.is_set():
                show(
                    f"\nhf-lossy: rank {self.rank} ends: nothing was heard of rank {silent} for {self.seconds:g} seconds; {RESUME}",
                    file=sys.stderr,
                )
                sys.stdout.flush()
                os._exit(1)  # the main thread may be waiting for that rank, in a call that nothing interrupts
            self.stopped.wait(self.seconds / 6)

    def stop(self) -> None:
        """Leave: after success the others go on without this rank, otherwise they miss it."""
        self.stopped.set()
        if not self.failed and not hasattr(sys, "last_value"):  # an exception that nothing caught
            try:
                self.store.set(self._key(self.rank), DONE)
            except RuntimeError:
                pass  # the launcher has ended

    def _key(self, rank: int) -> str:
        return f"hf-lossy/alive/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{rank}"

    def _find_silent(self) -> int | None:
        """Return a rank whose counter has stood still for too long, if there is one; forget those that are done."""
        for rank, (seen, since) in list(self.last.items()):
            beat = self.store.get(self._key(rank)) if self.store.check([self._key(rank)]) else b""
            if beat == DONE.encode():
                del self.last[rank]
            elif beat != seen:
                self.last[rank] = beat, time.monotonic()
            elif time.monotonic() - since > self.seconds:
                return rank
        return None


_running: list[Heartbeats] = []


def start_heartbeats(rank: int, count: int) -> None:
    """Watch the other ranks if torchrun (or `accelerate launch`) has started them on several machines; a launcher alone sees to its machine's."""
    several = os.environ.get("LOCAL_WORLD_SIZE", str(count)) != str(count)
    if _running or not several or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch.distributed as dist

    try:
        seconds = float(os.environ.get(SECONDS, 60))
    except ValueError:
        raise ValueError(f"{SECONDS}: expected a number of seconds, got {os.environ[SECONDS]!r}") from None
    check_positive(SECONDS, seconds, 86_400)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(seconds, 60)))
    _running.append(Heartbeats(store, rank, count, seconds))
    _running[0].start()
    atexit.register(_running[0].stop)


def mark_failed() -> None:
    """Let the other ranks end, too, as this one is ending with an error."""
    for beats in _running:
        beats.failed = True
