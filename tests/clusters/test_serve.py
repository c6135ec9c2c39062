"""Two replicas on Ray Serve: texts are `generate`'s while replicas die and are replaced, and no stream is put together of two."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import openai
import pytest

import hf_lossy_assist as hla
from hf_lossy_assist import demo


APP, NEW = f"texts{os.getpid()}", 32
SETTINGS = {"policies": "svip,strict", "replicas": 2, "batch_size": 4, "num_cpus": 0.1, "grace": 60}
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning:ray")]


@pytest.fixture(scope="module")
def url():
    """Where two replicas on a cluster of this machine answer."""
    ray = pytest.importorskip("ray")
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(hla.ray.app(SETTINGS), name=APP)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def texts():
    """Problems and the texts of `generate` for them."""
    target, draft, _, tokenizer = hla.demo.load()
    hla.enable(target)
    out = {}
    for problem in hla.demo.problems(4, seed=7):
        inputs = tokenizer(problem.prompt, return_tensors="pt")
        settings = {"assistant_model": draft, "lossy_policy": "svip", "max_new_tokens": NEW, "do_sample": False}
        ids = target.generate(**inputs, **settings)
        out[problem.prompt] = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return out


def connect(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, prompt, stream):
    """Return the text, and the error that ended it."""
    text = ""
    try:
        out = client.completions.create(model="demo", prompt=prompt, max_tokens=NEW, temperature=0, stream=stream)
        for part in out if stream else [out]:
            text += part.choices[0].text
    except openai.APIError as error:
        return text, error
    return text, None


def find_replicas():
    """The processes of the replicas."""
    name = f"ray::ServeReplica:{APP}:replica".encode()
    files = Path("/proc").glob("[0-9]*/cmdline")
    return [int(file.parent.name) for file in files if file.read_bytes().startswith(name)]


def read_metrics(url, name, label=""):
    """A metric of each replica."""
    counts = Counter()
    for line in urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines():
        if line.startswith(name) and label in line:
            counts[line.partition('replica="')[2].partition('"')[0]] += float(line.split()[-1])
    return counts


def count_answers(url):
    """How many texts each replica has written."""
    ends = [read_metrics(url, "vllm:request_success_total", f'finished_reason="{end}"') for end in ("stop", "length")]
    return ends[0] + ends[1]


class Traffic:
    """Clients that ask without a pause; `answers` are whether they were streamed, the text that should have come, the one that came, and an error."""

    def __init__(self, url, texts, count=4):
        self.url, self.texts, self.going, self.answers = url, texts, True, []
        self.threads = [threading.Thread(target=self.run, args=(n,), daemon=True) for n in range(count)]

    def run(self, number):
        prompts = list(self.texts)
        with connect(self.url) as client:
            while self.going:
                number += 1
                prompt, stream = prompts[number % len(prompts)], number % 3 > 0
                self.answers.append((stream, self.texts[prompt], *ask(client, prompt, stream)))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.going = False
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def wait(self, count):
        """Wait for so many further answers."""
        until, deadline = len(self.answers) + count, time.monotonic() + 60
        while len(self.answers) < until:
            assert time.monotonic() < deadline, self.answers[-5:]
            time.sleep(0.02)


def test_texts_are_those_of_generate(url, texts):
    with connect(url) as client:
        for stream in (False, True):
            assert [ask(client, prompt, stream) for prompt in texts] == [(text, None) for text in texts.values()]
        assert client.models.list().data[0].id == "demo"
        with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
            client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="demo", prompt="x", temperature=-1)
        deadline = time.monotonic() + 30
        while read_metrics(url, "vllm:request_success_total", 'finished_reason="abort"').total() < 1:
            assert time.monotonic() < deadline, "a client that is gone cancels its text"
            settings = {"max_tokens": 400, "temperature": 2, "stream": True}
            with client.completions.create(model="demo", prompt="How many", **settings) as stream:
                next(iter(stream))  # a text may end before its client is gone
            time.sleep(0.3)
        while read_metrics(url, "vllm:num_requests_running").total():
            assert time.monotonic() < deadline, "and frees its row"
            time.sleep(0.1)


def test_a_conversation_stays_at_one_replica(url):
    before, used = count_answers(url), set()
    with connect(url) as client:
        for number in range(8):
            for more in ("", " Then Gina buys 27 eggs.", " Then Gina finds 3 eggs. Then Gina buys 9 eggs."):
                prompt = f"Gina {number} has 14 eggs. " * 16 + more
                client.completions.create(model="demo", prompt=prompt, max_tokens=2)
            after = count_answers(url)
            (replica,) = [name for name in after if after[name] > before[name]]
            assert after[replica] == before[replica] + 3
            before = after
            used.add(replica)
    assert len(used) == 2, "different ones are spread"


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="/proc as Linux has it")
def test_a_replica_that_is_killed(url, texts):
    with Traffic(url, texts) as traffic:
        traffic.wait(8)
        os.kill(find_replicas()[0], signal.SIGKILL)
        traffic.wait(24)
    broken = 0
    for stream, right, text, error in traffic.answers:
        if error is None:
            assert text == right
        else:
            broken += 1
            assert stream and right.startswith(text) and "ended before the text did" in str(error), error
    assert broken <= 4, "requests without a part of an answer went to the other replica"


@pytest.mark.nightly
def test_an_update_drops_nothing(url, texts):
    from ray import serve

    old = set(find_replicas())
    with Traffic(url, texts, count=2) as traffic:
        traffic.wait(4)
        serve.run(hla.ray.app(SETTINGS, policies="strict,svip"), name=APP)
        traffic.wait(4)
    assert [answer[3] for answer in traffic.answers] == [None] * len(traffic.answers)
    assert all(right == text for _, right, text, _ in traffic.answers)
    with connect(url) as client:
        assert client.models.list().data[0].lossy_policies == ["strict", "svip"]
    assert not old & set(find_replicas())


# -- without a cluster --------------------------------------------------------------------------------------------------

WRONG = (
    ("x", "not a mapping"), ({"modle": "M"}, "app: unknown setting 'modle'. Did you mean 'model'"),
    ({"policies": []}, "policies: Input should be a valid string"), ({"replicas": "x"}, "replicas: Input should be a valid integer"),
    ({"replicas": (3, 2)}, r"replicas: expected a number from 1, or \[least, most\], got \(3, 2\)"),
    ({"drafter": "none"}, "drafter: unknown drafter 'none'; there are auto"), ({"device": "tpu9"}, "load: device .* cannot be used here"),
    ({"num_cpus": float("inf")}, "num_cpus: expected a number from 0 to 1e.06, got inf"), ({"model": "M"}, "model and assistant: expected both"),
    ({"model": "./none", "assistant": "./none"}, "./none was not loaded: it is neither a folder here nor a Hub id"),
    ({"batch_size": 0}, "batch_size: expected a whole number .* 1, got 0"), ({"policies": "svop"}, "svop"), ({"api_key": " key"}, "API key"),
)  # fmt: skip


def test_wrong_arguments_are_refused_in_one_line():
    pytest.importorskip("ray")
    for given, line in WRONG:
        with pytest.raises((ValueError, TypeError, OSError), match=line) as refused:
            hla.ray.app(given)
        assert "\n" not in str(refused.value), given


def test_what_requests_of_a_conversation_share():
    pytest.importorskip("ray")
    from hf_lossy_assist.ray.front import find_session

    system, first = {"role": "system", "content": "Count."}, {"role": "user", "content": "a"}
    for one, other, same in (
        ({"messages": [system, first]}, {"messages": [system, first, {"role": "assistant", "content": "b"}]}, True),
        ({"messages": [system, first]}, {"messages": [system, {"role": "user", "content": "b"}]}, False),
        ({"prompt": "a" * 256}, {"prompt": "a" * 256 + "b"}, True),
        ({"prompt": "a" * 256}, {"prompt": "a" * 255 + "b"}, False),
        ({"prompt": [5] * 64}, {"prompt": [5] * 64 + [6]}, True),
        ({"prompt": ["a", "b"]}, {"prompt": "a"}, True),
        ({"prompt": "a", "prompt_cache_key": "k"}, {"prompt": "b", "prompt_cache_key": "k"}, True),
    ):
        assert (find_session(one) == find_session(other)) is same, other


def test_a_folder_without_weights_is_refused_before_a_replica_is_started(tmp_path):
    given = tmp_path / "M"
    shutil.copytree(demo.FOLDER / "target", given, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(OSError, match=r"^\S+/M was not loaded: it has no model.safetensors, [^\n]*$"):
        hla.ray.app(model=str(given), assistant=str(given))


def test_a_config_of_serve_builds_it():
    """As `serve run` does: numbers may be words of a command line."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build

    built = build(hla.ray.app, {"policies": "strict", "batch_size": "8", "replicas": [1, 3]})
    assert built._bound_deployment.name == "front"


class Replies:
    """The parts of an answer, and the error that ends it."""

    def __init__(self, parts):
        self.parts = parts

    async def __aiter__(self):
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part

    def cancel(self):
        pass


class Scripted:
    """Replicas whose answers are a script."""

    def __init__(self, answers):
        self.answers, self.answer = list(answers), self

    def options(self, **options):
        return self

    def remote(self, scope, body):
        return Replies(self.answers.pop(0))


HEAD = {"type": "http.response.start", "status": 200, "headers": []}
PART = {"type": "http.response.body", "body": b"data: a", "more_body": True}
LAST = {"type": "http.response.body", "body": b"whole", "more_body": False}


@pytest.mark.parametrize(
    ("answers", "status", "text", "tries"),
    [
        ([[HEAD], [HEAD, LAST]], 200, "whole", 2),
        ([[HEAD], [HEAD], [HEAD, LAST]], 503, "ended before the text did", 2),
        ([[HEAD, PART], [HEAD, LAST]], 200, 'data: adata: {"error": {"message": "the replica that wrote', 1),
    ],
    ids=["sent again before the first part", "not for ever", "never spliced"],
)
def test_what_clients_get_of_a_replica_that_ends(answers, status, text, tries):
    from ray.exceptions import RayActorError

    from hf_lossy_assist.ray.front import Front

    sent = []
    replicas = Scripted([parts if LAST in parts else [*parts, RayActorError()] for parts in answers])

    async def receive():
        return {"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(Front(replicas)({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send))
    assert sent[0]["status"] == status and text in b"".join(each["body"] for each in sent[1:]).decode()
    assert len(answers) - len(replicas.answers) == tries
