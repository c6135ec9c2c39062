"""The API client against a real server on loopback, with every way in which one can fail."""

import socket
import threading

import pytest
from support.openai_server import OpenAIServer, demo_completions

from hf_lossy_assist import demo
from hf_lossy_assist.tasks.endpoint import Completion, Endpoint


def words(prompt, max_tokens, body):
    """Counts up from the number that the prompt ends with, to 9."""
    start = int(prompt.split()[-1]) + 1
    counted = [str(n) for n in range(start, 10)]
    cut = len(counted) > max_tokens
    return " " + " ".join(counted[:max_tokens]), "length" if cut else "stop"


def echo(messages, max_tokens, body):
    return f"{messages[-1]['content']} ({body['temperature']})", "stop"


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """No proxy stands between this process and loopback, and no key lies about."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server():
    with OpenAIServer(words, echo) as server:
        yield server


@pytest.fixture
def endpoint(server):
    with Endpoint(server.url, "target", retries=2, timeout=10.0) as endpoint:
        yield endpoint


def line(excinfo):
    text = str(excinfo.value)
    assert "\n" not in text
    return text


def test_completions_and_chat(server, endpoint):
    endpoint.check()
    assert endpoint.complete("count from 6", 20) == Completion(" 7 8 9", True)
    assert endpoint.complete("count from 1", 2, stop=["x"], seed=7) == Completion(" 2 3", False)
    assert endpoint.chat([{"role": "user", "content": "hello"}], 5, 0.5) == "hello (0.5)"
    assert server.asked[2].body == {
        "model": "target",
        "prompt": "count from 1",
        "max_tokens": 2,
        "temperature": 0.0,
        "stop": ["x"],
        "seed": 7,
    }
    assert "seed" not in server.asked[1].body and "stop" not in server.asked[1].body
    assert {asked.key for asked in server.asked} == {"none"}


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


@pytest.mark.parametrize("fault", ["500", "429", "close"])
def test_what_passes_is_tried_again_and_counted(server, endpoint, fault):
    server.fail(fault)
    assert endpoint.complete("count from 7", 9).text == " 8 9"
    assert len(server.asked) == 2


def test_a_server_that_hangs_once_is_asked_again(server):
    server.fail("hang")
    with Endpoint(server.url, "target", retries=1, timeout=0.3) as endpoint:
        assert endpoint.complete("count from 7", 9).text == " 8 9"
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    "fault, kind, expected",
    [
        ("500", OSError, "answered 500, at the only try, for the model 'target' (Error code: 500"),
        ("429", OSError, "fewer workers"),
        ("close", ConnectionError, "cannot be reached"),
        ("hang", TimeoutError, "did not answer in 0.3 s"),
        ("html", ValueError, "expected JSON, got '<html> <body>Welcome</body></html>'"),
        ("no_choices", ValueError, "expected a list under 'choices', got"),
        ("no_text", ValueError, "expected a text in the first choice"),
    ],
)
def test_what_stays_is_one_line_with_the_address(server, fault, kind, expected):
    server.fail(fault, 2)
    with Endpoint(server.url, "target", retries=0, timeout=0.3) as endpoint:
        with pytest.raises(kind) as excinfo:
            endpoint.complete("count from 7", 9)
        assert expected in line(excinfo) and server.url in line(excinfo)
        with pytest.raises(kind) as excinfo:
            endpoint.chat([{"role": "user", "content": "hello"}], 9)
        assert server.url in line(excinfo)
        assert len(server.asked) == 2


def test_tries_are_limited(server):
    server.fail("500", 5)
    with Endpoint(server.url, "target", retries=1) as endpoint:
        with pytest.raises(OSError, match="after 2 tries") as excinfo:
            endpoint.complete("count from 7", 9)
        assert "out of memory" in line(excinfo)
    assert len(server.asked) == 2


def test_an_address_where_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Endpoint(f"http://127.0.0.1:{port}/v1", "target", retries=0, timeout=5.0) as endpoint:
        for ask in (endpoint.check, lambda: endpoint.complete("count from 7", 9)):
            with pytest.raises(ConnectionError, match="check the address") as excinfo:
                ask()
            assert str(port) in line(excinfo)


def test_keys(monkeypatch):
    with OpenAIServer(words, key="right") as server:
        with Endpoint(server.url, "target", key="wrong") as endpoint:
            for ask in (endpoint.check, lambda: endpoint.complete("count from 7", 9)):
                with pytest.raises(PermissionError, match="answered 401.*OPENAI_API_KEY") as excinfo:
                    ask()
                assert "right" not in line(excinfo).replace("the right key", "")
            assert len(server.asked) == 2  # a wrong key stays wrong
        monkeypatch.setenv("OPENAI_API_KEY", "right\n")
        with Endpoint(server.url, "target") as endpoint:
            endpoint.check()
            assert endpoint.complete("count from 7", 9).text == " 8 9"


def test_models(server):
    with Endpoint(server.url, "targets", retries=0) as endpoint:
        with pytest.raises(ValueError, match="unknown model 'targets'; there are target. Did you mean 'target'?"):
            endpoint.check()
        with pytest.raises(ValueError, match="for the model 'targets'") as excinfo:
            endpoint.complete("count from 7", 9)
        assert "404" in line(excinfo)
    server.listed = False
    with Endpoint(server.url, "target") as endpoint:
        endpoint.check()
    server.fail("no_choices")
    with Endpoint(server.url, "target") as endpoint, pytest.raises(ValueError, match="expected a list under 'data'"):
        endpoint.check()
    server.fail("html")
    with Endpoint(server.url, "target") as endpoint, pytest.raises(ValueError, match="with the /v1"):
        endpoint.check()


def test_settings_are_checked_before_anything_is_sent(server):
    with pytest.raises(ValueError, match="url: expected one address such as"):
        Endpoint("localhost:8000", "target")
    with pytest.raises(ValueError, match="retries: expected a whole number"):
        Endpoint(server.url, "target", retries=-1)
    with pytest.raises(ValueError, match="timeout"):
        Endpoint(server.url, "target", timeout=0)
    assert server.asked == []


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


def test_many_threads_get_their_own_replies(server, endpoint):
    server.fail("500", 2)
    results = threads(lambda i: endpoint.complete(f"count from {i}", 1), 8)
    assert [result.text for result in results] == [f" {i + 1}" for i in range(8)]
    assert len(server.asked) == 10
