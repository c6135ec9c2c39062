"""The models under AutoJudge's search: the target's continuations and the draft's choices against `generate`, plain forwards and the laws of
Gumbel-max."""

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from support import hybrids, tiny
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_lossy_assist import demo
from hf_lossy_assist.methods.autojudge import draft_predictions
from hf_lossy_assist.methods.autojudge.draft_predictions import DraftPredictions
from hf_lossy_assist.methods.autojudge.generation_backend import LocalBackend, Sampler, prepare_decoding
from hf_lossy_assist.methods.autojudge.mining_loop import make_end_test
from hf_lossy_assist.tasks.math import GSM8K


NOTHING = LogitsProcessorList()


# -- the target's continuations ---------------------------------------------------------------------------------------


@cache
def model_named(name: str) -> Any:
    if name in hybrids.KINDS:
        return hybrids.model(name)
    return demo.load().target if name == "demo" else tiny.build(name)


def alone(model: Any, text: list[int], budget: int, **settings: Any) -> list[int]:
    """The greedy continuation by `generate`, of one text, with a check that no choice is close."""
    ids = torch.tensor([text])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return tiny.greedy(model, inputs, max_new_tokens=budget, **settings)[0, len(text) :].tolist()


def choosing(model: Any, budget: int) -> tuple[Sampler, Callable]:
    config = GenerationConfig(max_new_tokens=budget, pad_token_id=0, do_sample=False)
    processors, ends = prepare_decoding(model, config)
    return Sampler(processors, None), make_end_test(None, ends)


HYBRIDS = ["qwen3_5_text", "falcon_h1", "nemotron_h", "lfm2"]


@pytest.mark.full(every=20)
@pytest.mark.nightly(every=5)
@pytest.mark.parametrize("name", ["demo", "llama", "qwen2", "gpt2", "gemma2", *HYBRIDS])
def test_continuations_are_those_of_generate(name):
    """Places are started at different times with texts of every relation to what they held before, used again, and given up."""
    model = model_named(name)
    size, jobs, longest = model.config.vocab_size, 10 if name == "demo" else 30, 16
    rng = random.Random(name)
    choice, over = choosing(model, longest)
    batch = LocalBackend(model, 4, 60, choice, over)
    words = lambda n: [rng.randrange(4, size) for _ in range(n)]  # noqa: E731
    prompts = [words(rng.choice([1, 3, 9, 17])) for _ in range(4)]
    last: list[list[int]] = [[] for _ in range(4)]
    under_way: dict[int, tuple[list[int], int]] = {}
    kinds, narrowed, began, checked = [], 0, 0, []

    def begin(place: int) -> None:
        kind = ["fresh", "again", "shorter", "other", "longer", "forgotten"][began % 6] if last[place] else "fresh"
        kinds.append(kind)
        old = last[place]
        cut = rng.randrange(len(old) + 1)
        prefix = {
            "fresh": words(rng.randrange(4)), "again": old[:-1], "shorter": old[:cut], "other": old[:cut] + words(1),
            "longer": old + words(rng.randrange(1, 5)), "forgotten": old[:cut],
        }[kind][:25]  # fmt: skip
        if kind == "fresh":
            prompts[place] = words(rng.choice([1, 3, 9, 17]))
        if kind == "forgotten":
            batch.forget(place)
        budget = rng.randrange(1, longest + 1)
        under_way[place] = (prefix, budget)
        batch.start(place, prompts[place], prefix, budget)

    while began < jobs or under_way:
        for place in range(len(last)):
            if place not in under_way and began < jobs and rng.random() < 0.3:
                begin(place)
                began += 1
        assert batch.busy == bool(under_way)
        if not under_way:
            continue
        for place, new, respelt in batch.step():
            prefix, budget = under_way.pop(place)
            checked.append((prompts[place] + prefix, budget, new))
            last[place] = prefix + new
            assert not respelt
        if len(last) - narrowed > 2 and began > jobs * (narrowed + 1) // 3 and under_way:
            keep = sorted({next(iter(under_way)), *rng.sample(range(len(last)), len(last) - 1)}, reverse=True)
            keep += [place for place in under_way if place not in keep]
            batch.narrow(keep)
            last, prompts = [last[p] for p in keep], [prompts[p] for p in keep]
            under_way = {new: under_way[old] for new, old in enumerate(keep) if old in under_way}
            narrowed += 1
    for text, budget, new in checked:
        assert new == alone(model, text, budget)
    assert len(checked) == jobs and narrowed and len(last) < 5
    assert set(kinds) >= {"fresh", "again", "shorter", "other", "longer"}
    if name in ("llama", "qwen2", "gpt2"):
        assert any(len(new) < budget for _, budget, new in checked), "some end by themselves"


def test_only_what_is_new_is_run(monkeypatch):
    """A continuation from the middle of a cached response costs its own tokens, and the one that was replaced."""
    model = model_named("llama")
    choice, over = choosing(model, 16)
    batch = LocalBackend(model, 1, 60, choice, lambda response: False)
    widths: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)  # fmt: skip
    try:
        batch.start(0, [5, 6, 7], [], 10)
        while batch.busy:
            batch.step()
        assert widths == [2] + [1] * 10
        widths.clear()
        written = batch.places[0].cached[3:]
        batch.start(0, [5, 6, 7], [*written[:4], 90], 1)
        batch.step()
        assert widths == [1], "all but the replaced token was in the cache"
    finally:
        hook.remove()


def test_what_prompts_have_in_common_is_read_once():
    """Worked examples stand before each question: a place that begins takes their states from one that has read them."""
    model = model_named("llama")
    choice, over = choosing(model, 6)
    common = [5, 6, 7, 8, 9, 10, 11]
    prompts = [[*common, 20], [*common, 21, 22], common[:3], [30, 31, *common]]
    widths: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)  # fmt: skip
    try:
        batch = LocalBackend(model, 4, 60, choice, over)
        widths.clear()
        for place, prompt in enumerate(prompts):
            batch.start(place, prompt, [], 6)
        assert widths == [7, 1, 8], (
            "the first reads its own, the second what it has more, the third nothing, the fourth begins otherwise"
        )
        found = {}
        while batch.busy:
            found |= {place: new for place, new, _ in batch.step()}
        read: list[DraftPredictions] = []
        drafts, second = [
            DraftPredictions(model, prompt, 40, tiny.VOCABULARY, Sampler(NOTHING, None), read)
            for prompt in prompts[:2]
        ]
        drafts([3, 4, 5], 0)
        widths.clear()
        got = second([3, 4, 5], 0)
        assert widths == [4], "the seven common tokens are not read again, though nobody had read them when it began"
    finally:
        hook.remove()
    assert [found[place] for place in range(4)] == [alone(model, prompt, 6) for prompt in prompts]
    assert got == DraftPredictions(model, prompts[1], 40, tiny.VOCABULARY, Sampler(NOTHING, None))([3, 4, 5], 0)


@pytest.mark.parametrize(
    "change",
    [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [5, 9]}, {"min_new_tokens": 9}],
)
def test_the_models_generation_config_counts(change):
    """The processors that `generate` would apply are applied to each place, with the length of that prompt, or refused."""
    model = tiny.build("qwen2")
    for option, value in change.items():
        setattr(model.generation_config, option, value)
    try:
        choice, over = choosing(model, 12)
    except ValueError as error:
        assert "min_new_tokens" in change and "\n" not in str(error)
        return
    batch = LocalBackend(model, 3, 40, choice, over)
    texts = [tiny.prompts((n,), seed=n)["input_ids"][0].tolist() for n in (4, 9, 7)]
    for place, text in enumerate(texts):
        batch.start(place, text, [], 12)
    found = {}
    while batch.busy:
        found |= {place: new for place, new, _ in batch.step()}
    for place, text in enumerate(texts):
        assert found[place] == alone(model, text, 12), f"prompt of {len(text)}"


def test_processors_are_those_of_the_call_not_of_the_models_taste():
    model = tiny.build("llama")
    for option, value in {"do_sample": True, "temperature": 0.3, "top_k": 5, "top_p": 0.5}.items():
        setattr(model.generation_config, option, value)
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, do_sample=True, **given)
    assert prepare_decoding(model, config) == ([], {tiny.EOS})
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, do_sample=True, **given | {"temperature": 0.5})
    assert [type(p) for p in prepare_decoding(model, config)[0]] == [TemperatureLogitsWarper]
    model.generation_config.eos_token_id = [3, 8]
    assert prepare_decoding(model, config)[1] == {3, 8}
    model.generation_config.eos_token_id = None
    assert prepare_decoding(model, config)[1] == set()


def test_a_text_may_end_a_response():
    m = demo.load()
    ids = lambda text: m.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    task = GSM8K([], shots=1)
    task.ends, task.closing = ("The answer", "Ben"), None
    over = make_end_test(m.tokenizer, {m.tokenizer.eos_token_id}, task)
    for text, want in ((" The", False), (" The answer", True), (" Ada has", False), (" Ben", True)):
        assert over(ids(text)) == want, text
    assert over(ids(" Ada") + [m.tokenizer.eos_token_id])
    assert not make_end_test(m.tokenizer, set())(ids(" The answer") + [m.tokenizer.eos_token_id])
    task.closing = re.compile(r"Ada \w+")
    assert over(ids(" Ada has")) and not over(ids(" Ada"))


# -- the draft's choices ----------------------------------------------------------------------------------------------


def one_by_one(model: Any, prompt: list[int], response: list[int], start: int, size: int) -> list[int]:
    out = []
    known = model.get_input_embeddings().weight.shape[0]
    for i in range(start, len(response)):
        text = torch.tensor([prompt + response[:i]]).clamp(max=known - 1)
        with torch.no_grad():
            logits = model(text).logits[0, -1, :size]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-4
        out.append(int(logits.argmax()))
    return out


@pytest.mark.full(every=12)
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", *HYBRIDS])
def test_draft_choices_are_those_of_single_steps(name, chunk, monkeypatch):
    monkeypatch.setattr(draft_predictions, "CHUNK", chunk)
    model, rng = model_named(name), random.Random(f"{name} choices")
    words = lambda n: [rng.randrange(4, tiny.VOCABULARY) for _ in range(n)]  # noqa: E731
    for prompt in (words(1), words(6)):
        predictions = DraftPredictions(model, prompt, 40, tiny.VOCABULARY, Sampler(NOTHING, None))
        y = words(14)
        for response, start in (
            (y, 0), (y, 0), (y, 9), (y[:5] + words(6), 5), (y[:5], 5), (y + words(3), 2), (words(9), 4),
            (y, 13), (y, 14), (y[:1], 0), ([], 0), (y + words(8), 20),
        ):  # fmt: skip
            got = predictions(response, start)
            assert got == one_by_one(model, prompt, response, start, tiny.VOCABULARY), (len(response), start)


@pytest.mark.parametrize("size", [60, 120])
def test_a_draft_of_another_vocabulary(size):
    """Ids that only one of the two has are never chosen, and the random numbers are those of the target's vocabulary."""
    model = tiny.build("qwen2", vocab_size=size)
    prompt, response = [5, 90, 33], [7, 96, 20, 61, 59, 60, 44]
    predictions = DraftPredictions(model, prompt, 20, tiny.VOCABULARY, Sampler(NOTHING, None))
    assert predictions(response, 0) == one_by_one(model, prompt, response, 0, tiny.VOCABULARY)
    sampled = Sampler(NOTHING, 11)
    got = DraftPredictions(model, prompt, 20, tiny.VOCABULARY, sampled)(response, 0)
    ids = torch.tensor([prompt + response[:-1]]).clamp(max=size - 1)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 :, : tiny.VOCABULARY]
    few = logits.shape[-1]
    noise = [sampled.draw_noise(prompt + response[:i], tiny.VOCABULARY)[:few] for i in range(len(response))]
    assert got == (logits.log_softmax(-1) + torch.stack(noise)).argmax(-1).tolist()
    assert max(got) < tiny.VOCABULARY


# -- one token ----------------------------------------------------------------------------------------------------------


def test_each_text_is_processed_with_its_prefix():
    processor = RepetitionPenaltyLogitsProcessor(4.0)
    logits = torch.randn(5, 12)
    best = logits.argmax(-1).tolist()
    texts = [[best[0]], [1, 2, best[1]], [best[1], best[3]], [7, 8, 9, 10], [best[4]] * 6]
    want = [
        int(processor(torch.tensor([t]), row[None].clone()).argmax()) for t, row in zip(texts, logits, strict=True)
    ]
    before = logits.clone()
    assert Sampler(LogitsProcessorList([processor]), None)(texts, logits) == want != best
    assert torch.equal(logits, before), "the caller's logits are its own"
    assert [Sampler(LogitsProcessorList([processor]), None)([t], row[None])[0] for t, row in zip(texts, logits, strict=True)] == want  # fmt: skip
    assert Sampler(NOTHING, None)([], logits[:0]) == []


def test_the_state_and_the_text_name_the_sample():
    logits = torch.randn(40, 1).expand(40, 50).contiguous()  # all laws flat: the noise alone decides
    texts = [[3, n // 5, n] for n in range(40)]
    tokens = Sampler(NOTHING, 5)(texts, logits)
    order = torch.randperm(40).tolist()
    again = Sampler(NOTHING, 5)([texts[i] for i in order], logits[order])
    assert again == [tokens[i] for i in order]
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    assert [Sampler(NOTHING, 5)([text], logits[:1])[0] for text in texts] == tokens
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sum(a == b for a, b in zip(tokens, Sampler(NOTHING, 6)(texts, logits), strict=True)) < 10
    assert len(set(tokens)) > 15, "each text has noise of its own"
    noise = Sampler(NOTHING, 5).draw_noise
    different = [noise([1, 2], 8), noise([12], 8), noise([2, 1], 8), noise([1, 2, 0], 8), noise([0, 1, 2], 8)]
    assert len({tuple(n.tolist()) for n in different}) == 5
    assert all(torch.isfinite(n).all() for n in different)


def test_the_law_of_gumbel_max_is_the_models():
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0, -2.0, 0.9]])
    warped = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)])
    for processors in (NOTHING, warped):
        law = processors(torch.zeros(1, 0, dtype=torch.long), logits.clone())[0].softmax(-1).double()
        by_state, by_text = torch.zeros(6), torch.zeros(6)
        for n in range(1500):
            by_state[Sampler(processors, n)([[4, 5, 6]], logits)[0]] += 1
        for token in Sampler(processors, 1)([[n, 7] for n in range(1500)], logits.expand(1500, 6)):
            by_text[token] += 1
        for counts in (by_state, by_text):
            assert counts[law == 0].sum() == 0
            expected = law[law > 0] * 1500
            assert chisquare(counts[law > 0].numpy(), (expected * 1500 / expected.sum()).numpy()).pvalue > 0.001
