"""Several servers of one model: who is asked, who rests, and what comes of a server that dies and returns."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.openai_server import OpenAIServer

from hf_lossy_assist.tasks.endpoint import Completion, Endpoint
from hf_lossy_assist.tasks.pool import Pool


pytestmark = pytest.mark.slow


def shout(prompt, max_tokens, body):
    time.sleep(0.02)
    return prompt.upper(), "stop"


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """No proxy stands between this process and loopback, and no key lies about."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def servers():
    with OpenAIServer(shout) as first, OpenAIServer(shout) as second:
        yield first, second


def pool(*servers, rest=0.05):
    return Pool([Endpoint(its.url, "target", retries=0, timeout=5.0) for its in servers], rest)


def test_requests_are_shared_out(servers):
    with pool(*servers) as its, ThreadPoolExecutor(4) as threads:
        its.check()
        found = list(threads.map(lambda n: its.complete(f"text {n}", 9), range(40)))
        assert found == [Completion(f"TEXT {n}", True) for n in range(40)]
        counts = [len([a for a in server.asked if a.path.endswith("completions")]) for server in servers]
        assert sum(counts) == 40 and min(counts) >= 12
        assert its.requests == 42 and its.model == "target" and its.url == ",".join(sorted(s.url for s in servers))


def test_a_server_that_fails_rests_and_comes_back(servers):
    first, second = servers
    with pool(first, second, rest=2.0) as its:
        first.fail("500", 1)
        texts = [its.complete(f"text {n}", 9).text for n in range(10)]
        assert texts == [f"TEXT {n}" for n in range(10)]
        assert len(first.asked) == 1 and len(second.asked) == 10, "it rests"
        time.sleep(2.1)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda n: its.complete(f"text {n}", 9), range(20)))
        assert len(first.asked) > 5, "and is asked again"


def test_a_server_that_dies_in_the_middle():
    with OpenAIServer(shout) as alive:
        dying = OpenAIServer(shout)
        dying.__enter__()
        with pool(alive, dying) as its, ThreadPoolExecutor(4) as threads:
            first = its.complete("before", 9)
            ended = threading.Timer(0.1, lambda: dying.__exit__(None, None, None))
            ended.start()
            found = list(threads.map(lambda n: its.complete(f"text {n}", 9).text, range(400)))
            ended.join()
            assert its.requests > 401, "some were sent in vain"
        assert first.text == "BEFORE" and found == [f"TEXT {n}" for n in range(400)]


def test_when_all_are_dead_the_last_error_is_raised(servers):
    with pool(*servers, rest=0.01) as its:
        for server in servers:
            server.fail("500", 3)
        with pytest.raises(OSError, match=r"^http[^\n]* failed, at the only try[^\n]*$"):
            its.complete("text", 9)
        assert its.requests == 6, "each was asked three times"
        assert its.complete("text", 9).text == "TEXT"


def test_what_is_wrong_with_the_request_is_raised_at_once(servers):
    with OpenAIServer(shout, key="secret") as locked, pool(locked, servers[0]) as its:
        with pytest.raises(PermissionError, match="refused the key"):
            its.complete("text", 9)
    with pytest.raises(ValueError, match=r"^a pool needs servers of one model, got 2: other, target$"):
        Pool([Endpoint(servers[0].url, name) for name in ("target", "other")])
    with pytest.raises(ValueError, match="got 0: none"):
        Pool([])


def test_an_outage_is_one_failure_however_many_were_under_way(servers):
    with pool(servers[0], rest=0.1) as its, ThreadPoolExecutor(8) as threads:
        servers[0].fail("500", 8)
        began = time.monotonic()
        assert len(list(threads.map(lambda n: its.complete(f"text {n}", 9), range(8)))) == 8
        assert time.monotonic() - began < 2, "eight failures behind one another would rest for 25 s"


def test_who_waits_for_a_server_is_let_go_when_the_pool_is_closed(servers):
    with pool(servers[0], rest=30.0) as its, ThreadPoolExecutor(1) as threads:
        servers[0].fail("500", 1)
        waiting = threads.submit(its.complete, "text", 9)
        while not its._seats[0].back:
            time.sleep(0.01)
        its.close()
        with pytest.raises(ConnectionError, match="closed before a server could be asked again"):
            waiting.result(10)


def test_one_of_them_may_be_down_from_the_first(servers):
    gone = OpenAIServer(shout)
    with gone:
        address = gone.url
    dead, alive = (Endpoint(url, "target", retries=0, timeout=2.0) for url in (address, servers[0].url))
    with Pool([dead, alive], rest=0.05) as its:
        its.check()
        assert its.complete("text", 9).text == "TEXT"
    dead = Endpoint(address, "target", retries=0, timeout=2.0)
    with Pool([dead], rest=0.01) as its, pytest.raises(OSError, match="cannot be reached"):
        its.check()
