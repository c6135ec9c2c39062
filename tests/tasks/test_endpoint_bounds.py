"""Servers that mean ill or are broken: replies that drip, or never end; and secrets, which stand in no record and no line."""

import ast
import gzip
import json
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from support.openai_server import OpenAIServer, demo_completions

from hf_lossy_assist import demo
from hf_lossy_assist.methods.autojudge.mine import mine
from hf_lossy_assist.methods.autojudge.mining_loop import MineSettings
from hf_lossy_assist.tasks import endpoint as endpoint_file
from hf_lossy_assist.tasks.endpoint import Completion, Endpoint
from hf_lossy_assist.tasks.load import DemoTask


BODY = json.dumps({"choices": [{"text": " ok", "finish_reason": "stop"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
KEY = "s3cr3t-w0rd"


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
    monkeypatch.setattr(endpoint_file, "LARGEST", 1 << 20)
    url = raw(endless)
    with Endpoint(url, "target", retries=3, timeout=20) as endpoint:
        with pytest.raises(ValueError, match="sent more than 1 MiB in one reply") as error:
            endpoint.complete("a", 9)
        assert "\n" not in str(error.value) and url in str(error.value)


def test_a_server_cannot_send_the_prompt_elsewhere(raw):
    with OpenAIServer(lambda prompt, most, body: ("no", "stop")) as other:
        there = HEAD.replace(b"200 OK", b"307 There") + f"Location: {other.url}/completions\r\n".encode()
        url = raw(lambda connection: connection.sendall(there + b"Content-Length: 0\r\n\r\n"))
        with Endpoint(url, "target", retries=0, timeout=20) as endpoint:
            with pytest.raises(ValueError, match="answered 307") as error:
                endpoint.complete("a", 9)
        assert "\n" not in str(error.value) and url in str(error.value) and other.asked == []


def test_a_small_reply_that_unpacks_to_a_large_one_is_refused(raw):
    packed = gzip.compress(BODY + b" " * (1 << 20))
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    url = raw(lambda connection: connection.sendall(head + packed))
    with Endpoint(url, "target", retries=0, timeout=20) as endpoint:
        with pytest.raises(ValueError, match="it sent a compressed reply, which was not asked for"):
            endpoint.complete("a", 9)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"choices": ' + b"9" * 5000 + b"}"], ids=["deep", "digits"])
def test_json_that_cannot_be_read_is_one_line(raw, body):
    url = raw(lambda connection: connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
    with Endpoint(url, "target", retries=0, timeout=20) as endpoint:
        with pytest.raises(ValueError, match="expected JSON") as error:
            endpoint.complete("a", 9)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_no_other_client_speaks_to_a_server():
    """The Hub's own client aside, everything goes through `Endpoint`, which is bounded."""
    package = Path(endpoint_file.__file__).parent.parent
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if getattr(node, "level", 0):  # from the package itself
                continue
            names = [
                getattr(node, "module", None) or "",
                *(a.name for a in getattr(node, "names", []) if isinstance(a, ast.alias)),
            ]
            roots = {name.partition(".")[0] for name in names}
            assert not roots & {"requests", "httpx", "httpx2", "aiohttp", "socket"} and not {
                "urllib.request",
                "http.client",
            } & set(names), file
            assert "openai" not in roots or file.name == "endpoint.py"


# -- secrets ----------------------------------------------------------------------------------------------------------


def reply(text: str, status: bytes = b"200 OK") -> bytes:
    body = text.encode()
    return HEAD.replace(b"200 OK", status) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_key_is_sent_and_shown_nowhere(tmp_path):
    models, task = demo.load(), DemoTask("calibration", 3)
    with OpenAIServer(complete=demo_completions(models.target, models.tokenizer), key=KEY) as server:
        with Endpoint(server.url, "target", key=KEY) as endpoint:
            mine(
                endpoint, models.draft, models.tokenizer, task, task.problems(1), tmp_path / "mined", MineSettings(max_new_tokens=8),
            )  # fmt: skip
            assert KEY not in repr(endpoint)
        assert {asked.key for asked in server.asked} == {KEY}
        written = [p for p in Path(tmp_path).rglob("*") if p.is_file()]
        assert {"mine.json", "README.md"} <= {p.name for p in written}
        for file in written:
            assert KEY.encode() not in file.read_bytes(), file
        assert json.loads((tmp_path / "mined" / "mine.json").read_text())["served_at"] == server.url


def test_a_key_that_a_server_repeats_is_neither_shown_nor_recorded(raw):
    repeated = f"no: {KEY} given"
    failures = [
        reply(json.dumps({"error": {"message": repeated}}), b"401 No"),
        reply(json.dumps({"error": {"message": repeated}}), b"404 No"),
        reply(json.dumps({"message": repeated}), b"500 No"),
        reply(json.dumps({"nothing": repeated})),
        reply(f"<html>{repeated}"),
    ]
    replies = iter([*failures, reply(json.dumps({"choices": [{"text": f" the key is {KEY}!"}]}))])
    with Endpoint(raw(lambda connection: connection.sendall(next(replies))), "target", key=KEY, retries=0) as endpoint:
        for _ in failures:
            with pytest.raises((ValueError, OSError)) as error:
                endpoint.complete("a", 9)
            assert "…" in str(error.value) and "\n" not in str(error.value)
            # Nor does the traceback that a debugger or a log shows, with the client's own errors in it.
            assert KEY not in "".join(traceback.format_exception(error.value))
        assert endpoint.complete("a", 9).text == " the key is …!"


@pytest.mark.parametrize("key", ["sk-line\nend-1", "sk-\x1bescape-1", "sk-accént-1"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(monkeypatch, key):
    for given in ({"key": key}, {}):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ValueError, match="key: it holds characters that no HTTP header can carry") as error:
            Endpoint("http://127.0.0.1:9/v1", "target", **given)
        text = str(error.value)
        assert "\n" not in text and key[:3] not in text and key[-4:] not in text


def test_a_blank_key_is_none(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    with OpenAIServer(lambda prompt, most, body: ("ok", "stop")) as server, Endpoint(server.url, "target") as endpoint:
        assert endpoint.complete("a", 9).text == "ok"
        assert server.asked[0].key.endswith("none")


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{KEY}@127.0.0.1:9/v1",
        f"user:{KEY}@127.0.0.1:9/v1",
        f"ftp://user:{KEY}@127.0.0.1:9/v1",
        f"http://user:{KEY}@127.0.0.1:port/v1",
        f"http://user:{KEY}@",
        f"http://u:12345/x?{KEY}@127.0.0.1:9/v1",
        f"http://u:{KEY}/x@127.0.0.1:9/v1",
        f"http://127.0.0.1:9/v1?key={KEY}",
        f"http://127.0.0.1:9/v1#{KEY}",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_shown(url):
    with pytest.raises(ValueError, match="url: expected one address .* without a user, a password") as error:
        Endpoint(url, "target")
    assert KEY not in str(error.value) and "\n" not in str(error.value)


def test_several_servers_are_refused():
    with pytest.raises(ValueError, match="several servers behind a proxy"):
        Endpoint("http://127.0.0.1:9/v1,http://127.0.0.1:10/v1", "target")


def test_a_closed_endpoint_says_so():
    endpoint = Endpoint("http://127.0.0.1:9/v1", "target")
    endpoint.close()
    endpoint.close()
    with pytest.raises(ConnectionError, match="is closed"):
        endpoint.complete("a", 9)


@pytest.mark.parametrize(
    "url",
    ["http://a..b/v1", f"http://{'a' * 64}.org/v1", "http://127.0.0.1\n:9/v1", "http://a\x01b/v1", "http://a b/v1", "http://a/\x7fv1",
     "http://[::1/v1", "http://a:99999/v1"],
)  # fmt: skip
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(ValueError, match="^url: ") as error:
        Endpoint(url, "target", retries=0)
    assert "\n" not in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize("charset", ["rot13", "idna", "undefined", "no-such"])
@pytest.mark.parametrize("status", [b"200 OK", b"400 No"])
def test_a_reply_in_a_charset_of_no_text_is_read_as_json_is(raw, charset, status):
    head = HEAD.replace(b"200 OK", status).replace(
        b"application/json", f"application/json; charset={charset}".encode()
    )
    url = raw(lambda connection: connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY))
    with Endpoint(url, "target", retries=0) as endpoint:
        if status == b"200 OK":
            assert endpoint.complete("a", 9) == Completion(" ok", True)
        else:
            with pytest.raises(ValueError, match="answered 400") as error:
                endpoint.complete("a", 9)
            assert url in str(error.value) and "\n" not in str(error.value)
