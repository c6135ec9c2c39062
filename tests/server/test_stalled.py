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

    def __init__(self, job, port, key, log):
        self.job, self.port, self.log = job, port, log
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=key or "none", max_retries=0, timeout=120
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
def process(folder, key, files=1024):
    serve = ["-m", "hf_lossy_assist.cli", "serve", "--port", "0", "--grace", str(GRACE), "--max-new-tokens", "200"]
    command = ["sh", "-c", f'ulimit -n {files}; exec "$0" "$@"', sys.executable, *serve]
    environment = os.environ | ({"HF_LOSSY_API_KEY": key} if key else {})
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as errors:
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    with job:
        try:
            server = Process(job, int(re.search(r":(\d+)/v1", job.stdout.readline()).group(1)), key, log)
            with server.client:
                yield server
        finally:
            job.kill()


def stall(server, stack, kinds, count, key):
    """Have clients stall; every second one presents the key."""
    for number in range(count):
        for kind in kinds:
            stack.enter_context(STALLS[kind](server.port, key if number % 2 else None))


def check_end(server, connections, idle, before):
    """Have the server end; check what it took, and return it as a line."""
    peak = server.memory("VmHWM")
    began = time.monotonic()
    server.job.send_signal(signal.SIGTERM)
    server.job.wait(GRACE + LATER)  # raises where it goes on
    ended = time.monotonic() - began
    lines = server.lines() - before
    figures = f"idle {idle:.0f} MB, peak {peak:.0f} MB, ended after {ended:.1f} s, {lines} lines of log"
    assert peak <= 1.3 * idle + Bounds().bodies / MEGABYTE + 0.5 * connections, figures
    assert lines <= 100, server.log.read_text(encoding="utf-8")[-3000:]
    return figures


def settle(server):
    """Let the server do what it does once; returns its text, its size and its log's length."""
    texts = {server.text() for _ in range(4)}
    server.reset()
    return texts.pop(), server.memory("VmRSS"), server.lines()


@pytest.mark.nightly
@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("kind", STALLS)
def test_64_clients_who_stall(tmp_path, kind, key):
    with process(tmp_path, key) as server, ExitStack() as stack:
        text, idle, before = settle(server)
        stall(server, stack, [kind], 64, key)
        assert [server.text() for _ in range(3)] == [text] * 3
        print(f"\n{kind}, {'a' if key else 'no'} key: {check_end(server, 64, idle, before)}")


@pytest.mark.nightly
def test_all_kinds_at_once_and_more_connections_than_files(tmp_path):
    with process(tmp_path, "secret", files=100) as server, ExitStack() as stack:
        text, idle, before = settle(server)
        stall(server, stack, STALLS, 4, "secret")
        assert server.text() == text
        with ExitStack() as flood:
            for _ in range(300):
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
        check_end(server, 50, idle, before)
