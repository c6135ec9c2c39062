"""Servers that mean ill or are broken: replies that drip, or never end; and secrets, which stand in no record and no line."""

import ast
import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.openai_server import OpenAIServer, demo_completions

from hf_lossy_assist import demo
from hf_lossy_assist.methods.autojudge.mine import MineSettings, mine
from hf_lossy_assist.tasks import bounds
from hf_lossy_assist.tasks.endpoint import Completion, Endpoint
from hf_lossy_assist.tasks.tasks import DemoTask


BODY = json.dumps({"choices": [{"text": " ok", "finish_reason": "stop"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
PASSWORD = "s3cr3t-w0rd"


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def read_request(connection: socket.socket) -> None:
    """All of it: what is left unread would reset the connection when it is closed."""
    with connection.makefile("rb") as came:
        length = 0
        while (line := came.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        came.read(length)


@pytest.fixture
def raw():
    """`raw(answer)`: the address of a server that reads a request and lets `answer(connection)` write what it likes."""
    listening, over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    threads: list[threading.Thread] = []

    def serve(answer: Callable[[socket.socket], None]) -> None:
        while not over.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    read_request(connection)
                    answer(connection)
                except OSError:  # the client has gone, as it should
                    pass

    def start(answer: Callable[[socket.socket], None]) -> str:
        threads.append(threading.Thread(target=serve, args=(answer,), daemon=True))
        threads[-1].start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"

    yield start
    over.set()
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for thread in threads:
        thread.join(10)


def drip(connection: socket.socket, data: bytes, first: int) -> None:
    """The first bytes at once, twenty more one by one, each long before a read would time out, and then the rest."""
    connection.sendall(data[:first])
    for i in range(first, first + 20):
        time.sleep(0.05)
        connection.sendall(data[i : i + 1])
    connection.sendall(data[first + 20 :])


WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize("first", [12, len(WHOLE) - len(BODY)], ids=["header", "body"])
def test_a_reply_that_drips_is_late(raw, first):
    url = raw(lambda connection: drip(connection, WHOLE, first))
    with Endpoint(url, "target", retries=0, timeout=0.4) as endpoint:
        with pytest.raises(TimeoutError, match="did not answer in 0.4 s") as error:
            endpoint.complete("a", 9)
    assert "\n" not in str(error.value) and url in str(error.value)
    with Endpoint(url, "target", retries=0, timeout=20) as endpoint:  # slow, but in time
        assert endpoint.complete("a", 9) == Completion(" ok", True)


def test_a_reply_through_a_proxy_that_drips_is_late(raw, monkeypatch):
    proxy = raw(lambda connection: drip(connection, WHOLE, len(WHOLE) - len(BODY)))
    monkeypatch.setenv("HTTP_PROXY", proxy.removesuffix("/v1"))
    monkeypatch.delenv("NO_PROXY")
    with Endpoint("http://server.invalid/v1", "target", retries=0, timeout=0.4) as endpoint:
        with pytest.raises(TimeoutError, match="did not answer in 0.4 s"):
            endpoint.complete("a", 9)


def endless(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n")
    for _ in range(64):
        connection.sendall(b" " * 32768)
    connection.sendall(BODY)


def test_a_reply_that_does_not_end_is_too_much(raw, monkeypatch):
    monkeypatch.setattr(bounds, "LARGEST", 1 << 20)
    url = raw(endless)
    with Endpoint(url, "target", retries=3, timeout=20) as endpoint:
        with pytest.raises(ValueError, match="sent more than 1 MiB in one reply") as error:
            endpoint.complete("a", 9)
        assert "\n" not in str(error.value) and url in str(error.value)
        assert endpoint.requests == 1  # asking again would bring as much


def test_a_server_cannot_send_the_prompt_elsewhere(raw):
    with OpenAIServer(lambda prompt, most, body: ("no", "stop")) as other:
        there = HEAD.replace(b"200 OK", b"307 There") + f"Location: {other.url}/completions\r\n".encode()
        url = raw(lambda connection: connection.sendall(there + b"Content-Length: 0\r\n\r\n"))
        with Endpoint(url, "target", retries=0, timeout=20) as endpoint:
            with pytest.raises(ValueError, match="refused the request .307") as error:
                endpoint.complete("a", 9)
        assert "\n" not in str(error.value) and url in str(error.value) and other.asked == []


def test_a_small_reply_that_unpacks_to_a_large_one_is_refused(raw):
    packed = gzip.compress(BODY + b" " * (1 << 20))
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    url = raw(lambda connection: connection.sendall(head + packed))
    with Endpoint(url, "target", retries=0, timeout=20) as endpoint:
        with pytest.raises(ValueError, match="sent a compressed reply, which was not asked for"):
            endpoint.complete("a", 9)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"choices": ' + b"9" * 5000 + b"}"], ids=["deep", "digits"])
def test_json_that_cannot_be_read_is_one_line(raw, body):
    url = raw(lambda connection: connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
    with Endpoint(url, "target", retries=0, timeout=20) as endpoint:
        with pytest.raises(ValueError, match="where JSON was expected") as error:
            endpoint.complete("a", 9)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_no_other_client_speaks_to_a_server():
    """The Hub's own client aside, everything goes through `Endpoint`, which is bounded."""
    package = Path(bounds.__file__).parent.parent
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [
                getattr(node, "module", None) or "",
                *(a.name for a in getattr(node, "names", []) if isinstance(a, ast.alias)),
            ]
            roots = {name.partition(".")[0] for name in names}
            assert (
                not roots & {"requests", "httpx", "httpx2", "aiohttp", "socket", "http"}
                and "urllib.request" not in names
            ), file
            assert "openai" not in roots or file.name == "endpoint.py"


# -- secrets ----------------------------------------------------------------------------------------------------------


def with_secret(url: str) -> str:
    return url.replace("http://", f"http://user:{PASSWORD}@")


def test_a_password_in_the_address_is_sent_and_shown_nowhere(tmp_path):
    models = demo.load()
    with OpenAIServer(complete=demo_completions(models.target, models.tokenizer)) as server:
        with Endpoint(with_secret(server.url), "target") as endpoint:
            assert PASSWORD not in endpoint.url and "@" not in endpoint.url
            mine(
                endpoint, models.draft, models.tokenizer, DemoTask("calibration", 3), DemoTask("calibration", 3).problems(1),
                tmp_path / "mined", MineSettings(max_new_tokens=8),
            )  # fmt: skip
        sent = server.asked[0].key.removeprefix("Basic ")
        assert base64.b64decode(sent).decode() == f"user:{PASSWORD}"
        written = [p for p in Path(tmp_path).rglob("*") if p.is_file()]
        assert {"mine.json", "README.md"} <= {p.name for p in written}
        for file in written:
            assert PASSWORD.encode() not in file.read_bytes(), file
        assert json.loads((tmp_path / "mined" / "mine.json").read_text())["served_at"] == server.url


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{PASSWORD}@127.0.0.1:9/v1",
        f"user:{PASSWORD}@127.0.0.1:9/v1",
        f"ftp://user:{PASSWORD}@127.0.0.1:9/v1",
        f"http://user:{PASSWORD}@127.0.0.1:port/v1",
        f"http://user:{PASSWORD}@",
        f"http://127.0.0.1:9/v1?key={PASSWORD}",
        f"http://127.0.0.1:9/v1#{PASSWORD}",
    ],
)
def test_no_error_line_shows_a_secret_of_the_address(url):
    with pytest.raises((ValueError, OSError)) as error, Endpoint(url, "target", retries=0, timeout=2) as endpoint:
        endpoint.check()
    shown = error.getrepr(style="value")
    assert "127.0.0.1:9" in str(error.value) or "expected an address" in str(error.value)
    assert PASSWORD not in str(error.value) and PASSWORD not in str(shown) and "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["key", "password"])
def test_what_a_server_says_back_does_not_show_a_secret(raw, how):
    body = json.dumps({"error": {"message": f"bad credentials {PASSWORD} given"}}).encode()
    answer = HEAD.replace(b"200 OK", b"401 No") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    url = raw(lambda connection: connection.sendall(answer))
    with Endpoint(
        with_secret(url) if how == "password" else url, "target", key=PASSWORD if how == "key" else None, retries=0
    ) as endpoint:
        with pytest.raises(PermissionError, match="bad credentials … given") as error:
            endpoint.check()
    assert PASSWORD not in str(error.value)
