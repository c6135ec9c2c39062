"""`hf-lossy serve` as a process, with clients who stall: others are answered, and memory, log and end are within the documented bounds."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import pytest
from support.serving import STALLS, half_head

from hf_lossy_assist.server.http import Bounds


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GRACE, LATER = 5, 10  # seconds; LATER: docs/how-to/serve.md
MEGABYTE = 2**20
GIVEN = {"model": "demo", "prompt": "How many legs have six ants?", "max_tokens": 32, "temperature": 0}


class Process:
    """A server on loopback."""

    def __init__(self, job, port, log):
        self.job, self.port, self.log = job, port, log
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0, timeout=120
        )

    def text(self):
        return self.client.completions.create(**GIVEN).choices[0].text

    def memory(self, name):
        """`name`: VmRSS now, VmHWM its peak since `reset`; in MB."""
        status = Path(f"/proc/{self.job.pid}/status").read_text(encoding="utf-8")
        return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE).group(1)) / 1024

    def reset(self):
        Path(f"/proc/{self.job.pid}/clear_refs").write_text("5", encoding="utf-8")

    def lines(self):
        return len(self.log.read_text(encoding="utf-8").splitlines())


@contextmanager
def process(folder, files):
    serve = ["-m", "hf_lossy_assist.cli", "serve", "--port", "0", "--grace", str(GRACE), "--max-new-tokens", "200"]
    command = ["sh", "-c", f'ulimit -n {files}; exec "$0" "$@"', sys.executable, *serve]
    environment = os.environ | {"HF_LOSSY_API_KEY": "secret"}
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as errors:
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    with job:
        try:
            server = Process(job, int(re.search(r":(\d+)/v1", job.stdout.readline()).group(1)), log)
            with server.client:
                yield server
        finally:
            job.kill()


@pytest.mark.nightly
def test_all_kinds_at_once_and_more_connections_than_files(tmp_path):
    with process(tmp_path, files=256) as server, ExitStack() as stack:
        [text] = {server.text() for _ in range(4)}  # what a server does once is done
        server.reset()
        idle, before = server.memory("VmRSS"), server.lines()
        for number in range(16):
            for kind in STALLS:  # every second one presents the key
                stack.enter_context(STALLS[kind](server.port, "secret" if number % 2 else None))
        assert [server.text() for _ in range(3)] == [text] * 3
        with ExitStack() as flood:
            for _ in range(600):
                flood.enter_context(half_head(server.port))
            time.sleep(2)  # asyncio tries to accept again after one
            assert server.job.poll() is None
        deadline = time.monotonic() + 60
        while True:  # connections that were closed are found one after another
            try:
                assert server.text() == text
                break
            except (openai.APIConnectionError, openai.InternalServerError):
                assert time.monotonic() < deadline
                time.sleep(0.5)
        peak, began = server.memory("VmHWM"), time.monotonic()
        server.job.send_signal(signal.SIGTERM)
        server.job.wait(GRACE + LATER)  # raises where it goes on
        lines = server.lines() - before
        figures = f"idle {idle:.0f} MB, peak {peak:.0f} MB, ended after {time.monotonic() - began:.1f} s, {lines} lines of log"
        assert peak <= 1.3 * idle + Bounds().bodies / MEGABYTE + 0.5 * 128, figures
        assert lines <= 100, server.log.read_text(encoding="utf-8")[-3000:]
