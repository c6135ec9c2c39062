"""`serve --drafter`: predictions and finished texts are drafted from, texts stay `generate`'s, and no tenant searches another's."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.serving import serving
from transformers import PreTrainedModel

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.batch.suffix_memory import SuffixMemory
from hf_lossy_assist.generation import scheduler


@pytest.fixture(scope="module")
def models():
    loaded = demo.load()
    return loaded.target, loaded.draft, loaded.tokenizer


def ask(client, prompt, policy="strict", **more):
    extra = {"lossy_policy": policy} | more.pop("extra_body", {})
    out = client.completions.create(
        model="demo", prompt=prompt, extra_body=extra, **{"max_tokens": 24, "temperature": 0} | more
    )
    return out.choices[0].text, out.usage.speculation


def texts_in(worker):
    return {tenant: len(pool.texts) for tenant, pool in worker._pools.items()}


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_finished_texts_and_predictions_of_one_tenant(models):
    prompts = [problem.prompt for problem in demo.problems(2, seed=7)]
    target, _, tokenizer = models
    with serving((target, None, tokenizer), ("strict", "top_k:k=2"), drafter=hla.SuffixDrafter()) as service:
        first, other = service.client("a"), service.client("b")
        text, slow = ask(first, prompts[0])
        again, fast = ask(first, prompts[0])
        assert again == text and fast["mean_acceptance_length"] > 2 * slow["mean_acceptance_length"]
        apart, same = ask(other, prompts[0])
        assert apart == text and same["mean_acceptance_length"] == slow["mean_acceptance_length"], (
            "another tenant's texts are not searched"
        )
        assert sorted(texts_in(service.worker).values()) == [1, 2]
        predicted = {"type": "content", "content": text}
        hinted, least = ask(service.client("c"), prompts[0], extra_body={"prediction": predicted})
        assert hinted == text and least["mean_acceptance_length"] > 2 * slow["mean_acceptance_length"]
        before = texts_in(service.worker)
        ask(first, prompts[1], "top_k:k=2")
        ask(first, prompts[1], temperature=1.0, seed=3)
        assert texts_in(service.worker) == before, (
            "what a seed repeats, or a lossy policy writes, neither searches the texts nor joins them"
        )


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_prefixes_of_one_tenant(models, drafter, monkeypatch):
    """A prompt that another key has sent costs what it costs alone, so that its time tells nothing."""
    costs, original = [], scheduler.read_some

    def counted(call, most):
        before = sum(call.target.lengths)
        out = original(call, most)
        costs.append(sum(call.target.lengths) - before)
        return out

    monkeypatch.setattr(scheduler, "read_some", counted)
    prompt, (target, draft, tokenizer) = demo.problems(1, seed=7)[0].prompt, models
    whole = len(tokenizer(prompt)["input_ids"]) - 1
    pair = (target, draft, tokenizer) if drafter is None else (target, None, tokenizer)
    with serving(pair, ("strict",), drafter=drafter and hla.SuffixDrafter()) as service:
        found = {ask(service.client(key), prompt, max_tokens=2)[0] for key in ("a", "a", "b", "b", "a")}
        assert len(found) == 1 and costs == [whole, 0, whole, 0, 0]
        costs.clear()
        other = demo.problems(2, seed=7)[1].prompt
        with ThreadPoolExecutor(4) as pool:
            clients = [service.client(key) for key in ("a", "b", "a", "b")]
            list(pool.map(lambda client: ask(client, other, max_tokens=2), clients))
        assert sum(costs) == 2 * (len(tokenizer(other)["input_ids"]) - 1), "once for each key"


def test_a_seed_repeats_a_text_under_auto(models):
    prompt = demo.problems(1, seed=7)[0].prompt
    with serving(models, ("svip",), drafter=hla.AutoDrafter()) as service:
        client, sampled = service.client(), {"temperature": 1.0, "seed": 5}
        first = ask(client, prompt, "svip", **sampled)[0]
        for other in range(2):
            ask(client, prompt, "svip", temperature=1.0, seed=other)
            assert ask(client, prompt, "svip", **sampled)[0] == first
        greedy = {ask(client, prompt, "svip")[0] for _ in range(3)}
    assert len(greedy) == 1


def test_tenants_are_bounded(models, monkeypatch):
    monkeypatch.setattr("hf_lossy_assist.server.worker.MOST_TENANTS", 2)
    prompt = demo.problems(1, seed=7)[0].prompt
    with serving(models, ("svip",), drafter=hla.CompositeDrafter()) as service:
        for key in ("a", "b", "c"):
            ask(service.client(key), prompt, "svip", max_tokens=4)
        assert len(service.worker._pools) == 2
        assert all(isinstance(pool, SuffixMemory) for pool in service.worker._pools.values())


SERVED = {
    "auto": (hla.AutoDrafter, True), "suffix": (hla.SuffixDrafter, False), "composite": (hla.CompositeDrafter, True), "auto+demo": (hla.AutoDrafter, False),
}  # fmt: skip


def test_the_command_takes_registered_drafters(hf_lossy, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "hf_lossy_assist.server.http.listen", lambda app, bounds, give_up, *_: seen.append(give_up.__self__)
    )
    monkeypatch.setattr("hf_lossy_assist.server.worker.Worker.check_settings", lambda self: None)
    for name, (kind, has_draft) in SERVED.items():
        hf_lossy("serve", "--policies", "strict", "--drafter", name)
        worker = seen.pop()
        assert type(worker.drafter) is kind and isinstance(worker.draft, PreTrainedModel) == has_draft


REFUSED = {
    ("--drafter", "sufix"): "suffix", ("--drafter", "suffix", "--model", "m", "--assistant", "d"): "leave assistant out",
    ("--drafter", "suffix"): "SVIP reads what a draft model computes", ("--drafter", "composite", "--model", "m"): "model and assistant: expected both",
    ("--drafter", "demo", "--assistant", "D"): "leave assistant out",
}  # fmt: skip


def test_what_the_command_refuses(hf_lossy):
    for options, says in REFUSED.items():
        assert says in hf_lossy("serve", *options).line
