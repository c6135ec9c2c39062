"""Proves that mining over a server gives what the model itself gives, through other spellings, faults and the server's death."""

import html
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk
from support.hub_server import card_problems
from support.mining import SETTINGS, TASK, found, loaded, local, without_costs
from support.openai_server import OpenAIServer, demo_completions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_lossy_assist.methods.autojudge.dataset import RECORD, read_unit
from hf_lossy_assist.methods.autojudge.generation_backend import ServerBackend
from hf_lossy_assist.methods.autojudge.mine import mine
from hf_lossy_assist.tasks.base import Problem
from hf_lossy_assist.tasks.endpoint import Endpoint
from hf_lossy_assist.tasks.load import DemoTask


@cache
def served() -> Callable[..., tuple[str, str]]:
    m, known = loaded(), {}
    complete = demo_completions(m.target, m.tokenizer)

    def remembered(prompt: str, max_tokens: int, body: dict) -> tuple[str, str]:
        key = prompt, max_tokens, str(body.get("stop"))
        if key not in known:
            known[key] = complete(prompt, max_tokens, body)
        return known[key]

    return remembered


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(complete=served()) as server:
        yield server


@pytest.mark.nightly
def test_a_server_gives_what_the_model_gives(server):
    for fault in ("500", "429", "close"):
        server.fail(fault)
    with Endpoint(server.url, "target") as endpoint:
        remote = found(endpoint, TASK.problems(3), batch_size=3, workers=3)
    assert remote == local()[:3]
    assert len(server.requests) == sum(one.continuations for one in remote) + 3, "three were sent again"


class Stopping(DemoTask):
    """Responses are over at the closing phrase; the answer is the last sum."""

    ends = (" That is all", " What a nice", " Done")

    def extract(self, problem: Problem, response: str) -> str | None:
        sums = re.findall(r"= (\d+)", self.cut(response))
        return sums[-1] if sums else None


@pytest.mark.full
def test_a_task_with_end_texts_over_a_server(server):
    task = Stopping("calibration")
    here = found(None, TASK.problems(2), task=task)
    assert all(len(one.target_response) < len(full.target_response) for one, full in zip(here, local(), strict=False))
    with Endpoint(server.url, "target") as endpoint:
        remote = found(endpoint, TASK.problems(2), task=task, batch_size=2)
    assert without_costs(remote) == without_costs(here)


def spelling() -> Any:
    """A BPE tokenizer that merges a and b, whatever stands around them."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "</s>": 4}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("\n", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def test_other_spellings_are_counted():
    tokenizer, requests = spelling(), []
    assert tokenizer("cab")["input_ids"] == [2, 3]
    says = {"ca": ("b", "length"), "cc": ("b", "stop"), "a": ("cab", "stop"), "cca": ("", "stop"), "b": ("cc", "stop")}

    def complete(prompt: str, max_tokens: int, body: dict) -> tuple[str, str]:
        requests.append((prompt, max_tokens))
        return says[prompt]

    with (
        OpenAIServer(complete=complete) as server,
        ThreadPoolExecutor(2) as pool,
        Endpoint(server.url, "target") as end,
    ):
        remote, got = ServerBackend(end, tokenizer, [4], lambda response: response[-1] == 4, pool), {}
        cases = [([2], [0], 3), ([2], [2], 3), ([0], [], 2), ([2, 2], [0], 5), ([1], [], 2)]
        for place, (prompt, prefix, budget) in enumerate(cases):
            remote.start(place, prompt, prefix, budget)
        while remote.busy:
            got |= {place: rest for place, *rest in remote.step()}
    assert [got[place] for place in range(5)] == [
        [[1], True],  # "cab" would be c + ab
        [[1, 4], False],  # ended, and there is room to say so
        [[2, 3], False],  # as long as allowed: nobody knows whether it would have ended
        [[4], False],
        [[2, 2], False],
    ]
    assert sorted(requests) == sorted([("ca", 3), ("cc", 3), ("a", 2), ("cca", 5), ("b", 2)])


@pytest.mark.full
def test_a_server_that_dies_is_gone_on_with(tmp_path, server):
    m = loaded()

    def run(resume: bool) -> Path:
        with Endpoint(server.url, "target", retries=0) as endpoint:
            given = TASK.problems(3)
            return mine(endpoint, m.draft, m.tokenizer, TASK, given, tmp_path / "data", SETTINGS, batch_size=2, workers=2, resume=resume)  # fmt: skip

    needed = sorted(one.continuations for one in local()[:3])
    served_before, answer = [], server.complete

    def mortal(*request: Any) -> Any:
        served_before.append(request)
        if len(served_before) == needed[0] + needed[1] + 1:
            server.fail("close", 1000)
        return answer(*request)

    server.complete = mortal
    with pytest.raises(OSError, match=server.url) as error:
        run(resume=False)
    assert "\n" not in str(error.value)
    done = [read_unit(file) for file in (tmp_path / "data.partial").glob("[0-9]*.json")]
    assert 1 <= len(done) < 3 and not (tmp_path / "data").exists()
    server._faults.clear()
    sent = len(served_before)
    out = run(resume=True)
    assert len(served_before) - sent == sum(
        one.continuations for one in local()[:3] if one.problem not in {k.problem for k in done}
    )
    rows = load_from_disk(str(out)).to_list()
    assert [(r["problem"], r["position"], r["important"]) for r in rows] == [
        (one.problem, x.position, x.important) for one in local()[:3] for x in one.mismatches
    ]
    facts, card = json.loads((out / RECORD).read_text()), (out / "README.md").read_text()
    assert (
        facts["served_at"] == server.url
        and facts["served"] == "target"
        and facts["target"] is None
        and facts["found"]["retokenised"] == 0
    )
    assert server.url in html.unescape(card)
    assert "another spelling in tokens | 0 |" in card and card_problems(card) == ([], [])
