"""A model behind an OpenAI-compatible API: what it answers, servers that fail, and keys, which stand in no record and no line."""

import ast
import json
import socket
import threading
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


def words(prompt, max_tokens, body):
    """Counts up from the number that the prompt ends with, to 9."""
    start = int(prompt.split()[-1]) + 1
    counted = [str(n) for n in range(start, 10)]
    cut = len(counted) > max_tokens
    return " " + " ".join(counted[:max_tokens]), "length" if cut else "stop"


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """No proxy stands between this process and loopback, and no key lies about."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server():
    with OpenAIServer(words) as server:
        yield server


@pytest.fixture
def endpoint(server):
    with Endpoint(server.url, "target", retries=2, timeout=10.0) as endpoint:
        yield endpoint


def line(excinfo):
    text = str(excinfo.value)
    assert "\n" not in text
    return text


def test_completions(server, endpoint):
    assert endpoint.complete("count from 6", 20) == Completion(" 7 8 9", True)
    assert endpoint.complete("count from 1", 2, stop=["x"], seed=7) == Completion(" 2 3", False)
    assert server.requests[1].body == {
        "model": "target",
        "prompt": "count from 1",
        "max_tokens": 2,
        "temperature": 0.0,
        "stop": ["x"],
        "seed": 7,
    }
    assert "seed" not in server.requests[0].body and "stop" not in server.requests[0].body
    assert {request.key for request in server.requests} == {"none"}


@pytest.mark.full
def test_the_demo_target_behind_the_api_is_the_demo_target(server, endpoint):
    models, problem = demo.load(), demo.problems(1, seed=3)[0]
    server.complete = demo_completions(models.target, models.tokenizer)
    whole = endpoint.complete(problem.prompt, 200)
    assert whole.finished and demo.answer(whole.text) == problem.answer
    assert "<eos>" not in whole.text
    part = endpoint.complete(problem.prompt, 11)
    assert not part.finished and whole.text.startswith(part.text)
    rest = endpoint.complete(problem.prompt + part.text, 200)  # texts join by concatenation
    assert part.text + rest.text == whole.text and rest.finished
    stopped = endpoint.complete(problem.prompt, 200, stop=[" The answer"])
    assert stopped.finished and whole.text.startswith(stopped.text) and "The answer" not in stopped.text


def test_what_passes_is_tried_again(server, endpoint):
    server.fail("500")
    assert endpoint.complete("count from 7", 9).text == " 8 9"
    assert len(server.requests) == 2


@pytest.mark.full(every=4)
@pytest.mark.parametrize(
    "fault, kind, expected",
    [
        ("500", OSError, "answered 500 for the model 'target': Error code: 500"),
        ("429", OSError, "answered 429"),
        ("close", ConnectionError, "cannot be reached"),
        ("hang", TimeoutError, "did not answer in 0.3 s"),
        ("html", ValueError, "with the /v1?"),
        ("no_choices", ValueError, "with the /v1?"),
        ("no_text", ValueError, "expected a text, got"),
    ],
)
def test_what_stays_is_one_line_with_the_address(server, fault, kind, expected):
    server.fail(fault, 2)
    with Endpoint(server.url, "target", retries=0, timeout=0.3) as endpoint:
        with pytest.raises(kind) as excinfo:
            endpoint.complete("count from 7", 9)
        assert expected in line(excinfo) and server.url in line(excinfo)
        assert len(server.requests) == 1


def test_an_address_where_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Endpoint(f"http://127.0.0.1:{port}/v1", "target", retries=0, timeout=5.0) as endpoint:
        with pytest.raises(ConnectionError, match="check the address") as excinfo:
            endpoint.complete("count from 7", 9)
        assert str(port) in line(excinfo)


def test_keys(monkeypatch):
    with OpenAIServer(words, key="right") as server:
        with Endpoint(server.url, "target", key="wrong") as endpoint:
            with pytest.raises(PermissionError, match="answered 401") as excinfo:
                endpoint.complete("count from 7", 9)
            assert "right" not in line(excinfo) and len(server.requests) == 1  # a wrong key stays wrong
        monkeypatch.setenv("OPENAI_API_KEY", "right\n")
        with Endpoint(server.url, "target") as endpoint:
            assert endpoint.complete("count from 7", 9).text == " 8 9"


def test_a_model_that_the_server_has_not(server):
    with Endpoint(server.url, "targets", retries=0) as endpoint:
        with pytest.raises(ValueError, match="answered 404 for the model 'targets'") as excinfo:
            endpoint.complete("count from 7", 9)
        assert "\n" not in line(excinfo)


def threads(call, count):
    """`call(i)` in `count` threads at once; the results in order."""
    results = [None] * count

    def run(i):
        results[i] = call(i)

    started = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return results


@pytest.mark.full
def test_many_threads_get_their_replies(server, endpoint):
    server.fail("500", 2)
    results = threads(lambda i: endpoint.complete(f"count from {i}", 1), 8)
    assert [result.text for result in results] == [f" {i + 1}" for i in range(8)]
    assert len(server.requests) == 10


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
KEY = "s3cr3t-w0rd"


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


def test_a_server_cannot_send_the_prompt_elsewhere(raw):
    with OpenAIServer(lambda prompt, most, body: ("no", "stop")) as other:
        there = HEAD.replace(b"200 OK", b"307 There") + f"Location: {other.url}/completions\r\n".encode()
        url = raw(lambda connection: connection.sendall(there + b"Content-Length: 0\r\n\r\n"))
        with Endpoint(url, "target", retries=0, timeout=20) as endpoint:
            with pytest.raises(ValueError, match="answered 307") as error:
                endpoint.complete("a", 9)
        assert "\n" not in str(error.value) and url in str(error.value) and other.requests == []


@pytest.mark.full
def test_no_other_client_speaks_to_a_server():
    """The Hub's own client aside, everything goes through `Endpoint`."""
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
            if file.name in ("http.py", "cluster.py"):  # which listens; which asks whether a cluster's address answers
                roots -= {"socket"}
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
        assert {request.key for request in server.requests} == {KEY}
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
            assert "\n" not in str(error.value)
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
        assert server.requests[0].key.endswith("none")


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{KEY}@127.0.0.1:9/v1",
        f"http://[user:{KEY}@127.0.0.1:port/v1",
        f"http://127.0.0.1:9/v1?key={KEY}",
        f"http://127.0.0.1:9/v1#{KEY}",
        f"http://\x1b{KEY}/v1",
        "localhost:8000",
    ],
)
def test_no_address_or_one_with_a_password_is_refused_and_not_shown(url):
    with pytest.raises(ValueError, match="url: expected an address .* without a user, a password") as error:
        Endpoint(url, "target")
    assert KEY not in str(error.value) and "\n" not in str(error.value)
