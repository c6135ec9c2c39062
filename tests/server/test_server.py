"""The server, with the real openai client: each text is `generate`'s, whoever asks beside it, and nothing stays behind."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from prometheus_client import generate_latest
from support.many import count_read
from support.serving import serving
from transformers import PreTrainedModel

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.batch.suffix_memory import SuffixMemory
from hf_lossy_assist.server.http import listen


CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def models():
    loaded = demo.load()
    loaded.tokenizer.chat_template = CHAT
    return loaded.target, loaded.draft, loaded.tokenizer


@pytest.fixture(scope="module")
def running(models):
    with serving(models, ("svip", "strict", "top_k:k=2+svip", "relaxed_top_k:k=1"), rows=4) as service:
        yield service


def problems(count):
    return [problem.prompt for problem in demo.problems(count, seed=7)]


def alone(models, prompt, **settings):
    target, _, tokenizer = models
    inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    out = target.generate(**inputs, **{"max_new_tokens": 48, "do_sample": False} | settings)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def complete(client, prompt, policy="strict", **more):
    extra = {"lossy_policy": policy} | more.pop("extra_body", {})
    out = client.completions.create(
        model="demo", prompt=prompt, extra_body=extra, **{"max_tokens": 24, "temperature": 0} | more
    )
    return out.choices[0].text, out.usage.speculation


@pytest.mark.full
def test_many_clients_get_the_texts_of_generate(models, running):
    """More than there are places; half of them streamed, under two policies."""
    client, prompts = running.client(), problems(8)

    def ask(n):
        given = {"model": "demo", "prompt": prompts[n], "max_tokens": 24, "temperature": 0}
        given["extra_body"] = {"lossy_policy": ("svip", "strict")[n % 2]}
        if n % 3 == 0:  # some of those who share a round
            given["stop"] = ["nothing of this kind"]
        if n % 4 < 2:
            return client.completions.create(**given).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**given, stream=True))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert found == [alone(models, prompt, max_new_tokens=24) for prompt in prompts]
    assert running.free()


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_a_texts_usage(running):
    client = running.client()
    out = client.completions.create(model="demo", prompt=problems(1)[0], max_tokens=5, temperature=0)
    assert (out.object, out.model, out.choices[0].finish_reason) == ("text_completion", "demo", "length")
    speculation = out.usage.speculation
    assert out.usage.completion_tokens == 5 and out.usage.total_tokens == 5 + out.usage.prompt_tokens
    assert speculation["lossy_policy"] == "svip" and speculation["lossless"] and speculation["lossy_share"] == 0
    assert 0 <= speculation["draft_acceptance_rate"] <= 1 <= speculation["mean_acceptance_length"]
    whole = client.completions.create(model="demo", prompt=problems(1)[0], max_tokens=64, temperature=0)
    assert whole.choices[0].finish_reason == "stop"
    given = {"model": "demo", "prompt": problems(3)[2], "max_tokens": 48, "temperature": 0}
    out = client.completions.create(**given, extra_body={"lossy_policy": "top_k:k=2+svip"})
    assert out.usage.speculation["lossless"] is False


def test_streams_say_who_speaks_and_what_it_cost(models, running):
    messages = [{"role": "user", "content": problems(1)[0]}]
    given = {"model": "demo", "messages": messages, "max_tokens": 32, "temperature": 0}
    client = running.client()
    whole = client.chat.completions.create(**given)
    pieces = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant" and not pieces[-1].choices
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]][-1] == whole.choices[0].finish_reason
    written = "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1])
    assert written == whole.choices[0].message.content == alone(models, f"user: {problems(1)[0]}\n", max_new_tokens=32)
    parts = [{"role": "user", "content": [{"type": "text", "text": problems(1)[0]}]}]
    assert client.chat.completions.create(**given | {"messages": parts}).choices[0].message.content == written


def test_a_sampled_text_goes_by_its_seed_and_temperature(running, models):
    client = running.client()

    def ask(seed):
        return complete(client, problems(1)[0], None, max_tokens=16, temperature=2.0, seed=seed)[0]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, [1, 2, 3, 1, 2, 3]))
    assert found[:3] == found[3:] and len(set(found)) == 3

    def texts(temperatures):
        with serving(models, ("strict",), rows=4) as service:
            given = {"prompt": problems(1)[0], "max_tokens": 24, "seed": 1}
            return {t: complete(service.client(), temperature=t, **given)[0] for t in temperatures}

    there, back = texts((0.5, 2.0)), texts((2.0, 0.5))
    assert there == back and there[0.5] != there[2.0]


REFUSED = [
        ({"model": "gpt-4"}, 404, "this server has 'demo'"),
        ({"extra_body": {"lossy_policy": "csd"}}, 400, "lossy_policy: expected one of svip, strict"), ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1, got 0"),
        ({"prompt": [10**9]}, 400, "got token id 1000000000"),
        ({"temperature": 1e-40}, 400, "expected 0, which is greedy, or a number from 0.001"), ({"extra_body": {"max_completion_tokens": 5}}, 400, "are one thing, and differ"),
        ({"prompt": "x" * 100_000}, 400, "shorten it"), ({"prompt": [5] * 300}, 400, "the prompt has 300 tokens, and with its text it may have 256: shorten it"), ({"prompt": "How many? " * 200}, 400, "shorten it"),
]  # fmt: skip


def test_refused_in_one_line(running):
    for more, status, says in REFUSED:
        given = {"model": "demo", "prompt": "How many", "max_tokens": 4} | more
        with pytest.raises(openai.APIStatusError) as refused:
            running.client().completions.create(**given)
        message = refused.value.body["message"]
        assert refused.value.status_code == status and says in message and "\n" not in message, more
    for body, status in (
        (b"{", 400), (b"[]", 400), (b"[" * 100_000, 400), (b" " * (5 * 2**20), 413), (b"\xff", 400),
        (rb'{"prompt": "How \ud800"}', 400), (rb'{"prompt": "How", "metadata": {"\ud800": 1}}', 400),
        (b'{"prompt": "How", "temperature": NaN}', 400), (b'{"prompt": "How", "temperature": 1e999}', 400),
        (b'{"prompt": "How", "seed": 1' + b"0" * 5000 + b"}", 400), (b'{"prompt": [1,', 400),
    ):  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{running.url}/completions", body), timeout=20)
        assert refused.value.code == status and "error" in json.loads(refused.value.read()), body[:40]
    assert running.free()


def test_an_error_within_a_model_is_the_servers(models, running):
    """And what `generate` refuses is the request's: a rule that is defined for greedy decoding alone. The server goes on."""

    def failing(kind):
        def fail(*_):
            raise kind("broken")

        return fail

    given = {"model": "demo", "prompt": "How many", "max_tokens": 4, "temperature": 0}
    for kind, stream in ((ValueError, False), (TypeError, True), (RuntimeError, False), (RuntimeError, True)):
        fault = models[0].register_forward_pre_hook(failing(kind))
        try:
            with pytest.raises(openai.InternalServerError, match="broken"):
                running.client().completions.create(**given, stream=stream)
        finally:
            fault.remove()
        with pytest.raises(openai.BadRequestError, match="greedy"):
            more = {"temperature": 1.0, "extra_body": {"lossy_policy": "relaxed_top_k:k=1"}}
            running.client().completions.create(**given | more, stream=stream)
    assert running.client().completions.create(**given).usage.completion_tokens > 0
    assert running.free()


def test_a_key_is_required(models):
    with serving(models, key="secret") as service:
        assert [model.id for model in service.client("secret").models.list()] == ["demo"]
        for call in (lambda c: c.models.list(), lambda c: c.completions.create(model="demo", prompt="a")):
            with pytest.raises(openai.AuthenticationError):
                call(service.client("wrong"))
        for scheme, status in (("bearer", 200), ("BEARER", 200), ("Bearer ", 200), ("Basic", 401), ("", 401)):
            assert fetch(f"{service.url}/models", {"Authorization": f"{scheme} secret"})[0] == status


def fetch(url, headers=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=20) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


def test_a_model_by_its_name_and_what_is_not_served(running):
    client = running.client()
    assert client.models.retrieve("demo") == client.models.list().data[0]
    for name in ("other", "org/other", "demo/"):
        with pytest.raises(openai.NotFoundError, match="this server has 'demo', got") as refused:
            client.models.retrieve(name)
        assert refused.value.body["type"] == "not_found_error"
    for path, status in (("/embeddings", 404), ("/completions", 405)):
        code, body = fetch(running.url + path)
        assert code == status and path in body["error"]["message"]


@pytest.mark.full
def test_who_hangs_up_frees_the_place(models):
    """One place: a stream that is left, and a request that nobody waits for, are written no further."""
    with serving(models, rows=1, most=150) as service:
        slow = hook(models[0], 0.05)
        try:
            given = {"model": "demo", "prompt": problems(1)[0], "max_tokens": 150, "temperature": 1.8}
            stream = service.client().completions.create(**given, stream=True)
            next(iter(stream))
            waits = threading.Thread(target=lambda: pytest.raises(openai.APITimeoutError, service.client().with_options(timeout=0.3).completions.create, **given))  # fmt: skip
            waits.start()
            waits.join()
            stream.close()
            assert service.free(5), service.worker.load
        finally:
            slow.remove()
        assert service.client().completions.create(**given | {"max_tokens": 4}).usage.completion_tokens <= 4


def hook(model, seconds):
    return model.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def test_too_many_are_turned_away(models):
    with serving(models, rows=1, waiting=1) as service:
        slow = hook(models[0], 0.1)
        try:
            given = {"model": "demo", "prompt": problems(1)[0], "max_tokens": 16, "temperature": 0}
            with ThreadPoolExecutor(6) as pool:
                jobs = [pool.submit(service.client().completions.create, **given) for _ in range(6)]
            errors = [job.exception() for job in jobs]
            first = service.client().completions.create(**given, stream=True)
            next(iter(first))  # it is in work, so that of two texts one could wait: all or none
            with pytest.raises(openai.RateLimitError):
                service.client().completions.create(**given | {"prompt": problems(2)})
            first.close()
        finally:
            slow.remove()
        assert sum(error is None for error in errors) >= 2
        turned = [error for error in errors if error is not None]
        assert turned and all(isinstance(error, openai.RateLimitError) for error in turned)


@pytest.mark.filterwarnings("ignore:generate_many writes one text at a time")
def test_a_text_that_is_written_alone_and_fails_is_reported(models):
    """Its client hears of it, and so do the server's end and the next request."""

    class Own(hla.Constant):
        def start(self, rows):
            return FailingRun(self)

    class FailingRun(hla.StopRun):
        """Somebody's own, without `take`: its texts are written one at a time."""

        def begin_round(self, rows):
            raise RuntimeError("a broken stop")

    with serving(models) as service:
        service.worker.policies["own"] = service.server.limits.policies["own"] = hla.LossyPolicy(stop=Own(3))
        given = {"model": "demo", "prompt": problems(1)[0], "max_tokens": 8, "temperature": 0}
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="a broken stop"):
                service.client().completions.create(**given, extra_body={"lossy_policy": "own"})
        assert service.client().completions.create(**given).usage.completion_tokens > 0
        assert service.free()


def test_metrics_and_health(models):
    with serving(models) as service:
        create = service.client().completions.create
        given = {"model": "demo", "prompt": problems(1)[0], "temperature": 0}
        create(**given, max_tokens=8)
        for most in (1, 7):  # the first text of a stream is timed also where all of it comes at once, at its end
            list(create(**given, max_tokens=most, stream=True))
        page = urllib.request.urlopen(service.url.replace("/v1", "/metrics"), timeout=20).read().decode()
        figures = {name: float(value) for name, value in re.findall(r"^vllm:(\S+) (\S+)$", page, re.MULTILINE)}
        demo_model = 'model_name="demo"'
        assert figures[f'request_success_total{{finished_reason="length",{demo_model}}}'] == 3
        assert figures[f"generation_tokens_total{{{demo_model}}}"] == 16
        assert figures[f"e2e_request_latency_seconds_count{{{demo_model}}}"] == 3
        assert figures[f"time_to_first_token_seconds_count{{{demo_model}}}"] == 2
        assert figures[f"num_requests_running{{{demo_model}}}"] == 0
        assert "_created" not in page
        assert urllib.request.urlopen(service.url.replace("/v1", "/health"), timeout=20).status == 200


BROKEN = [("server.routes.read_request", False), ("server.answers.Pending.whole", False), ("server.answers.Pending.next", True), ("server.answers.Pending.stream", True)]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_an_error_of_the_server_is_counted(models, monkeypatch):
    """Once, as failed; and the server goes on."""

    def fail(*_):
        raise KeyError("x" * 1000)

    with serving(models) as service:
        body = {"model": "demo", "prompt": "How many", "max_tokens": 2}
        for count, (broken, streams) in enumerate(BROKEN, 1):
            with monkeypatch.context() as patch:
                patch.setattr(f"hf_lossy_assist.{broken}", fail)
                with pytest.raises((openai.InternalServerError, openai.APIConnectionError)) as error:
                    list(service.client().completions.create(**body, stream=streams))
            if isinstance(error.value, openai.InternalServerError):
                assert error.value.body["message"] == "the server failed (KeyError): see its log"
            assert service.free()
            page = generate_latest(service.server.metrics.registry).decode()
            ends = [float(re.search(rf'finished_reason="{end}".*? (\S+)', page)[1]) for end in ("error", "abort")]
            assert ends == [count, 0], broken
            assert service.client().completions.create(**body).choices[0].text


def test_an_address_that_is_taken_is_one_line(models, capfd):
    with serving(models) as service:
        server, where = service.server, ("127.0.0.1", service.port, print)
        with pytest.raises(
            OSError, match=f"--host 127.0.0.1 --port {service.port} cannot be listened at: is it in use"
        ):
            listen(server.app(), server.bounds, service.worker.give_up, *where)
    out, err = capfd.readouterr()
    assert not out and "ERROR" not in err


@pytest.mark.full
def test_the_command_ends_what_it_writes_and_then_itself(models):
    """SIGTERM in the middle of a stream: it is sent to its end, and nothing new is taken."""
    command = [sys.executable, "-m", "hf_lossy_assist.cli", "serve", "--port", "0", "--max-new-tokens", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            line = job.stdout.readline()
            url = re.search(r"http://\S+/v1", line).group()
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
            given = {"model": "demo", "prompt": problems(1)[0], "max_tokens": 90, "temperature": 2.0, "seed": 3}
            whole = client.completions.create(**given).choices[0].text
            stream = iter(client.completions.create(**given, stream=True))
            written = next(stream).choices[0].text
            job.send_signal(signal.SIGTERM)
            written += "".join(chunk.choices[0].text for chunk in stream)
            assert written == whole
            assert job.wait(30) in (0, -signal.SIGTERM), job.stderr.read()
        finally:
            job.kill()


@pytest.mark.full
def test_many_policies_do_not_stay(models):
    """Clients name any temperature: what was made for one goes when nobody uses it."""
    with serving(models) as service:
        for n in range(5):
            complete(service.client(), "How many", None, max_tokens=2, temperature=0.5 + n / 100)
        assert len(service.worker._groups) <= 2
    assert torch.is_grad_enabled()


# -- drafters -----------------------------------------------------------------------------------------------------------
def texts_in(worker):
    return {tenant: len(pool.texts) for tenant, pool in worker._pools.items()}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_finished_texts_and_predictions_of_one_tenant(models):
    prompts = problems(2)
    target, _, tokenizer = models
    with serving((target, None, tokenizer), ("strict", "top_k:k=2"), drafter=hla.SuffixDrafter()) as service:
        first, other = service.client("a"), service.client("b")
        text, slow = complete(first, prompts[0])
        again, fast = complete(first, prompts[0])
        assert again == text and fast["mean_acceptance_length"] > 2 * slow["mean_acceptance_length"]
        apart, same = complete(other, prompts[0])
        assert apart == text and same["mean_acceptance_length"] == slow["mean_acceptance_length"]
        assert sorted(texts_in(service.worker).values()) == [1, 2]
        predicted = {"type": "content", "content": text}
        hinted, least = complete(service.client("c"), prompts[0], extra_body={"prediction": predicted})
        assert hinted == text and least["mean_acceptance_length"] > 2 * slow["mean_acceptance_length"]
        before = texts_in(service.worker)
        complete(first, prompts[1], "top_k:k=2")
        complete(first, prompts[1], temperature=1.0, seed=3)
        assert texts_in(service.worker) == before, "what a seed repeats, or a lossy policy writes, is not kept"


@pytest.mark.full
@pytest.mark.parametrize("drafter", [None, pytest.param("suffix", marks=pytest.mark.full)])
def test_prefixes_of_one_tenant(models, drafter, monkeypatch):
    """A prompt that another key has sent costs what it costs alone, so that its time tells nothing."""
    costs = count_read(monkeypatch)
    (prompt, other), (target, draft, tokenizer) = problems(2), models
    whole = len(tokenizer(prompt)["input_ids"]) - 1
    pair = (target, draft, tokenizer) if drafter is None else (target, None, tokenizer)
    with serving(pair, ("strict",), drafter=drafter and hla.SuffixDrafter()) as service:
        found = {complete(service.client(key), prompt, max_tokens=2)[0] for key in ("a", "a", "b", "b", "a")}
        assert len(found) == 1 and costs == [whole, 0, whole, 0, 0]
        costs.clear()
        with ThreadPoolExecutor(4) as pool:
            clients = [service.client(key) for key in ("a", "b", "a", "b")]
            list(pool.map(lambda client: complete(client, other, max_tokens=2), clients))
        assert sum(costs) == 2 * (len(tokenizer(other)["input_ids"]) - 1), "once for each key"


@pytest.mark.full
def test_drafters_that_learn_repeat_the_text_of_a_seed_and_know_few_tenants(models, monkeypatch):
    prompt = problems(1)[0]
    with serving(models, ("svip",), drafter=hla.AutoDrafter()) as service:
        client, sampled = service.client(), {"temperature": 1.0, "seed": 5}
        first = complete(client, prompt, "svip", **sampled)[0]
        for other in range(2):
            complete(client, prompt, "svip", temperature=1.0, seed=other)
            assert complete(client, prompt, "svip", **sampled)[0] == first
        greedy = {complete(client, prompt, "svip")[0] for _ in range(3)}
    assert len(greedy) == 1
    monkeypatch.setattr("hf_lossy_assist.server.worker.MOST_TENANTS", 2)
    with serving(models, ("svip",), drafter=hla.CompositeDrafter()) as service:
        for key in ("a", "b", "c"):
            complete(service.client(key), prompt, "svip", max_tokens=4)
        assert len(service.worker._pools) == 2
        assert all(isinstance(pool, SuffixMemory) for pool in service.worker._pools.values())


REFUSED_DRAFTERS = {
    ("--drafter", "sufix"): "suffix", ("--drafter", "suffix", "--model", "m", "--assistant", "d"): "leave assistant out",
    ("--drafter", "suffix"): "SVIP reads what a draft model computes", ("--drafter", "composite", "--model", "m"): "model and assistant: expected both",
    ("--drafter", "demo", "--assistant", "D"): "leave assistant out",
}  # fmt: skip
SERVED = {
    "auto": (hla.AutoDrafter, True), "suffix": (hla.SuffixDrafter, False), "composite": (hla.CompositeDrafter, True), "auto+demo": (hla.AutoDrafter, False),
}  # fmt: skip


@pytest.mark.full
def test_the_command_takes_registered_drafters_and_refuses_others(hf_lossy, monkeypatch):
    for options, says in REFUSED_DRAFTERS.items():
        assert says in hf_lossy("serve", *options).line
    seen = []
    listening = lambda app, bounds, give_up, *_: seen.append(give_up.__self__)  # noqa: E731
    monkeypatch.setattr("hf_lossy_assist.server.http.listen", listening)
    monkeypatch.setattr("hf_lossy_assist.server.worker.Worker.check_settings", lambda self: None)
    for name, (kind, has_draft) in SERVED.items():
        hf_lossy("serve", "--policies", "strict", "--drafter", name)
        worker = seen.pop()
        assert type(worker.drafter) is kind and isinstance(worker.draft, PreTrainedModel) == has_draft
