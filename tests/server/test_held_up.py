"""Clients that stall: what they take of the server is bounded, and they are told why they are closed."""

import asyncio
import json
import logging
import time
from contextlib import ExitStack, contextmanager

import openai
import pytest
from support.serving import STALLS, STREAMS, connect, half_body, head, post, rest, serving

from hf_lossy_assist import demo
from hf_lossy_assist.server.http import MOST_BYTES, MOST_OTHERS, count_connections
from hf_lossy_assist.server.worker import LatestEvents, Progress


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
GIVEN = {"prompt": "How many", "max_tokens": 60, "temperature": 1.8}


@pytest.fixture(scope="module")
def models():
    loaded = demo.load()
    return loaded.target, loaded.draft, loaded.tokenizer


@contextmanager
def logged():
    """The lines of uvicorn's log from here on; a server that starts sets the handlers anew."""
    lines, log = [], logging.getLogger("uvicorn.error")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def slowed(model, seconds=0.1):
    return model.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def test_a_request_that_does_not_come_in_full_is_ended(models):
    with serving(models, key="k", reading=0.3) as service:
        for sent, status in (
            (b"", None), (b"POST /v1/completions HTTP/1.1\r\nHo", None),
            (head("/v1/completions", 100, "k") + b"{", 408), (head("/health", 100) + b"{", 405),
            (head("/v1/completions", 100, "wrong") + b"{", 401), (GET + GET[:9], 200),
            (b"HEAD /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", 200), (b"nonsense\r\n\r\n", 400),
        ):  # fmt: skip
            with connect(service.port) as client:
                client.sendall(sent)
                came = rest(client)  # which ends when the server closes
            assert came.startswith(f"HTTP/1.1 {status} ".encode()) if status else came == b"", sent
            if status == 408:
                assert "within 0.3 seconds" in json.loads(came.partition(b"\r\n\r\n")[2])["error"]["message"]
        with connect(service.port) as client:  # announced too long: refused before it comes
            client.sendall(head("/v1/completions", MOST_BYTES + 1, "k"))
            assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    with serving(models, reading=5) as service, connect(service.port) as client:
        for _ in range(2):
            for byte in GET:
                client.sendall(bytes([byte]))
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.nightly
@pytest.mark.parametrize("stalls", ["unread replies", "unread streams"])
def test_a_reply_that_is_not_read_is_given_up(models, stalls):
    with serving(models, most=200, writing=0.3) as service, ExitStack() as stack:
        client, whole = (
            stack.enter_context(STALLS[stalls](service.port, None)),
            stack.enter_context(connect(service.port)),
        )
        whole.sendall(post("/v1/completions", GIVEN | {"stream": True}))  # somebody who reads
        begun = whole.recv(1)
        deadline = time.monotonic() + 20
        while service.uvicorn.server_state.connections or not service.free():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        came = rest(client)
        assert came.startswith(b"HTTP/1.1 200 ") and came.count(b"[DONE]") < STREAMS
        assert (b'"text": ' in came) == (stalls == "unread streams")
        assert b"[DONE]" in begun + rest(whole)


@pytest.mark.full
def test_clients_who_stall_delay_neither_others_nor_the_end(models):
    """Some of each kind, with the key and without."""
    given = GIVEN | {"model": "demo", "temperature": 0}
    with ExitStack() as stack:
        with serving(models, key="k", most=200, grace=0.3) as service:
            text = service.client("k").completions.create(**given).choices[0].text
            for number in range(8):
                for stalled in STALLS.values():
                    stack.enter_context(stalled(service.port, "k" if number % 2 else None))
            assert service.client("k").completions.create(**given).choices[0].text == text
            began = time.monotonic()
        assert time.monotonic() - began < 15


def test_what_a_client_sends_ahead_is_not_read(models):
    with serving(models, rows=1) as service, connect(service.port) as client:
        slow = slowed(models[0])
        try:
            client.sendall(post("/v1/completions", GIVEN))
            while service.worker.load != (1, 0):
                time.sleep(0.01)
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.sendall(GET * 2**20)
            [connection] = service.uvicorn.server_state.connections
            assert len(connection.conn.trailing_data[0]) < 2**20
        finally:
            slow.remove()


def test_nonsense_behind_a_request_ends_its_stream(models):
    """Without a traceback in the log."""
    with serving(models, rows=1, most=200) as service, connect(service.port) as client, logged() as lines:
        slow = slowed(models[0])
        try:
            last = b"Host: x\r\nConnection: close"
            client.sendall(post("/v1/completions", GIVEN | {"stream": True}).replace(b"Host: x", last))
            came = client.recv(65536)
            client.sendall(b"nonsense")
            assert b"[DONE]" not in came + rest(client) and service.free(5)
        finally:
            slow.remove()
        assert not lines


def test_connections_are_bounded(models, monkeypatch):
    with serving(models, connections=4) as service, logged() as lines:
        held = [connect(service.port) for _ in range(4)]
        for client in held:
            client.sendall(GET)
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        for _ in range(20):
            with connect(service.port) as client:
                assert rest(client) == b""
        assert not lines
        for client in held:
            client.close()
        assert service.client().models.list().data
    resource = pytest.importorskip("resource")
    for files, most in (
        (100, 50), (1024, 512), (10**6, 272 + MOST_OTHERS), (resource.RLIM_INFINITY, 272 + MOST_OTHERS),
    ):  # fmt: skip
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert count_connections(272) == most


@pytest.mark.full
def test_the_bodies_being_read_are_bounded(models):
    """Small ones are read all the same."""
    with serving(models, bodies=300_000) as service:

        def refused():
            with pytest.raises(openai.APIStatusError) as found:
                service.client().completions.create(model="demo", prompt="x" * 300_000)
            return found.value.status_code

        held = half_body(service.port, length=200_000)
        while service.server.bodies.bytes < 130_000:
            time.sleep(0.01)
        assert refused() == 503 and service.client().completions.create(**GIVEN, model="demo").choices
        held.close()
        while service.server.bodies.bytes:
            time.sleep(0.01)
        assert refused() == 400 and service.server.bodies.bytes == 0  # it is read, and is too long for the model


@pytest.mark.full
def test_texts_that_outlast_the_grace_are_ended_by_name(models, monkeypatch):
    # Else chance may end one before all have come.
    monkeypatch.setattr(models[0].generation_config, "eos_token_id", None)
    with serving(models, rows=1, grace=0.3) as service:
        slow = slowed(models[0])
        with ExitStack() as stack:
            stack.callback(slow.remove)
            clients = [stack.enter_context(connect(service.port)) for _ in range(3)]
            clients[0].sendall(post("/v1/completions", GIVEN | {"stream": True}))
            clients[0].recv(1024)  # its text has the one row before the others ask
            for client in clients[1:]:
                client.sendall(post("/v1/completions", GIVEN))
            while service.worker.load != (1, 2):
                time.sleep(0.01)
            service.uvicorn.should_exit = True
            ends = [rest(client) for client in clients]
        for end in ends:
            assert b"the server ended before the text did: ask again" in end and b"[DONE]" not in end
        assert [end.startswith(b"HTTP/1.1 503 ") for end in ends] == [False, True, True]
        service.worker.join(20)
        assert not service.worker.is_alive() and service.worker.error is None


def test_events_do_not_pile_up_for_a_client_that_does_not_read():
    async def last():
        latest = LatestEvents()
        for count in range(1, 4):
            latest.tell(0, Progress(list(range(count))))
            latest.tell(1, Progress([count]))
        await asyncio.sleep(0)
        return await latest.get(), await latest.get(), latest._events

    assert asyncio.run(last()) == ((0, Progress([0, 1, 2])), (1, Progress([3])), {})
