"""The models under AutoJudge's search: the target's continuations and the draft's choices against `generate` and plain forwards."""

import random
import re
from functools import cache
from typing import Any

import pytest
import torch
from support import hybrids, small, tiny
from support.refusals import refused
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation import SuppressTokensLogitsProcessor

from hf_lossy_assist import demo
from hf_lossy_assist.methods.autojudge import draft_predictions
from hf_lossy_assist.methods.autojudge.draft_predictions import DraftPredictions, Sampler, prepare_decoding
from hf_lossy_assist.methods.autojudge.mine import MiningLoop, make_end_test
from hf_lossy_assist.methods.autojudge.search import Continue, Mined
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


def write(model: Any, jobs: list[tuple[list[int], list[int], int]], rows: int = 3) -> list[list[int]]:
    """The continuations of (prompt, prefix, budget) by the loop of a mine, `rows` of them at a time."""
    over = make_end_test(None, prepare_decoding(model, 30)[1])

    def search(mined: Mined, prefix: list[int], budget: int) -> Any:
        mined.response = yield Continue(prefix, budget)
        return mined

    mined = [Mined(index, "", prompt, [], [], None) for index, (prompt, _, _) in enumerate(jobs)]
    searches = ((one, search(one, prefix, budget)) for one, (_, prefix, budget) in zip(mined, jobs, strict=True))
    loop = MiningLoop(model, small.near(model, 0.3), rows, 120, over)
    assert sorted(one.problem for one in loop.run(searches)) == list(range(len(jobs)))
    assert [one.continuations for one in mined] == [1] * len(jobs)
    return [one.response for one in mined]


@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma2", "lfm2"))]
)
def test_continuations_are_those_of_generate(name):
    """More texts than are written at a time, with every relation to those before them."""
    model, rng = model_named(name), random.Random(name)
    words = lambda n: [rng.randrange(4, model.config.vocab_size) for _ in range(n)]  # noqa: E731
    (sizes, most), jobs = ((1, 3, 9, 17), 30) if name == "qwen2" else ((1, 9), 12), []
    for size in sizes:
        prompt, old = words(size), words(12)
        for prefix in ([], old, old[:-1], old[:5], old[:5] + words(1), old + words(4)):
            jobs.append((prompt, prefix, rng.randrange(1, most)))
    found = write(model, jobs)
    for (prompt, prefix, budget), new in zip(jobs, found, strict=True):
        assert new == alone(model, prompt + prefix, budget)
    if name == "qwen2":
        assert any(len(new) < budget for (*_, budget), new in zip(jobs, found, strict=True)), "some end by themselves"


def test_only_what_is_new_is_read():
    """The prompt and the beginning of a response are read once, though the cache of each text is given up."""
    model, rng = model_named("llama"), random.Random("new")
    prompt, response = ([rng.randrange(4, tiny.VOCABULARY) for _ in range(60)] for _ in range(2))
    widths: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)  # fmt: skip
    try:
        write(model, [(prompt, response[:end], 1) for end in (0, 40, 50)], rows=1)
    finally:
        hook.remove()
    assert sum(widths) == 2 * (59 + 40 + 10) + 3, "of target and draft, and the target's forwards for the new tokens"


def test_the_models_generation_config_counts():
    """The processors that `generate` would apply are applied to each response, or refused if they count from its prompt; its taste is not."""
    model = tiny.build("qwen2")
    model.generation_config.update(do_sample=True, temperature=0.3, top_k=5, top_p=0.5)
    assert prepare_decoding(model, 4) == (NOTHING, {tiny.EOS})
    model.generation_config.update(min_new_tokens=9)
    refused(lambda: prepare_decoding(model, 12), "sets a MinLengthLogitsProcessor")
    model.generation_config.update(min_new_tokens=None, no_repeat_ngram_size=2, suppress_tokens=[5, 9])
    prompts = [tiny.prompts((n,), seed=n)["input_ids"][0].tolist() for n in (4, 9, 7)]
    assert write(model, [(prompt, [], 12) for prompt in prompts]) == [alone(model, prompt, 12) for prompt in prompts]
    model.generation_config.update(eos_token_id=[3, 8], no_repeat_ngram_size=None, suppress_tokens=[7])
    processors, ends = prepare_decoding(model, 4)
    assert [type(p) for p in processors] == [SuppressTokensLogitsProcessor] and ends == {3, 8}
    model.generation_config.eos_token_id = None
    assert prepare_decoding(model, 4)[1] == set()


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


@pytest.mark.parametrize(
    ("name", "chunk"), [("llama", 3), pytest.param("gemma2", 256, marks=pytest.mark.full), ("lfm2", 3)]
)
def test_draft_choices_are_those_of_single_steps(name, chunk, monkeypatch):
    monkeypatch.setattr(draft_predictions, "CHUNK", chunk)
    model, rng = model_named(name), random.Random(f"{name} choices")
    words = lambda n: [rng.randrange(4, tiny.VOCABULARY) for _ in range(n)]  # noqa: E731
    for prompt in (words(1), words(6)):
        predictions = DraftPredictions(model, prompt, 40, tiny.VOCABULARY, Sampler(NOTHING))
        y = words(14)
        for response, start in (
            (y, 0), (y, 0), (y, 9), (y[:5] + words(6), 5), (y[:5], 5), (y + words(3), 2), (words(9), 4),
            (y, 13), (y, 14), (y[:1], 0), ([], 0), (y + words(8), 20),
        ):  # fmt: skip
            got = predictions(response, start)
            assert got == one_by_one(model, prompt, response, start, tiny.VOCABULARY), (len(response), start)


def test_a_draft_of_another_vocabulary():
    """Ids that only one of the two has are never chosen, and the random numbers are those of the target's vocabulary."""
    for size in (60, 120):
        model = tiny.build("qwen2", vocab_size=size)
        model.lm_head.register_forward_hook(lambda *call: call[2] - 100)  # no logit is above that of a token it lacks
        prompt, response = [5, 90, 33], [7, 96, 20, 61, 59, 60, 44]
        predictions = DraftPredictions(model, prompt, 20, tiny.VOCABULARY, Sampler(NOTHING))
        assert predictions(response, 0) == one_by_one(model, prompt, response, 0, tiny.VOCABULARY)


def test_each_text_is_processed_with_its_prefix():
    processor = RepetitionPenaltyLogitsProcessor(4.0)
    logits = torch.randn(5, 12)
    best = logits.argmax(-1).tolist()
    texts = [[best[0]], [1, 2, best[1]], [best[1], best[3]], [7, 8, 9, 10], [best[4]] * 6]
    pairs, before = list(zip(texts, logits, strict=True)), logits.clone()
    want = [int(processor(torch.tensor([text]), row[None].clone()).argmax()) for text, row in pairs]
    assert Sampler(LogitsProcessorList([processor]))(texts, logits) == want != best
    assert torch.equal(logits, before), "the caller's logits are its own"
    assert [Sampler(LogitsProcessorList([processor]))([text], row[None])[0] for text, row in pairs] == want
    assert Sampler(NOTHING)([], logits[:0]) == []
