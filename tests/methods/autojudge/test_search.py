"""AutoJudge's search by hand and against a literal transcription of Algorithm 1; the models under it against `generate`, plain
forwards and the laws of Gumbel-max."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from support import tiny
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_lossy_assist import demo
from hf_lossy_assist.methods.autojudge import continuing
from hf_lossy_assist.methods.autojudge.continuing import Batch, Choice, DraftChoices, decoding_processors
from hf_lossy_assist.methods.autojudge.in_flight import ended
from hf_lossy_assist.methods.autojudge.search import Continue, Limits, Mined, Mismatch, Work, search


END = 0
NOTHING = LogitsProcessorList()


def problem() -> Mined:
    return Mined(7, "prompt", [1], [], [], None)


class Script:
    """Plays the models and the task: `says[prefix]` is the target's continuation, `answers` of whole responses (by default the
    last token but END), `choices` what the draft returns, call by call. What the search asked for is kept."""

    def __init__(self, says: dict[tuple, list[int]], choices: list[list[int]], answers: dict[tuple, str | None] | None = None):  # fmt: skip
        self.says, self.choices, self.answers = says, choices, answers or {}
        self.asked: list[list[int]] = []
        self.drafted: list[tuple[list[int], int]] = []
        self.compared: list[tuple[str, str]] = []

    def draft(self, y: list[int], start: int) -> list[int]:
        self.drafted.append((list(y), start))
        return list(self.choices[len(self.drafted) - 1])

    def extract(self, ids: list[int]) -> str | None:
        default = str(ids[-1] if ids[-1] != END else ids[-2]) if ids else None
        return self.answers.get(tuple(ids), default)

    def same(self, reference: str, answer: str) -> bool:
        self.compared.append((reference, answer))
        return int(reference) % 10 == int(answer) % 10

    def run(self, max_new_tokens: int = 4, same: Callable[[str, str], bool] | None = None, **settings: Any) -> Mined:
        caps = {name: settings.pop(name) for name in ("max_mismatches", "late") if name in settings}
        over = lambda response: response[-1] == END  # noqa: E731
        limits = Limits(max_new_tokens, **caps)
        mined = problem()
        found, value = search(mined, self.draft, over, self.extract, same or self.same, limits, **settings), None
        try:
            while True:
                asked = found.send(value)
                if isinstance(asked, Work):
                    value = asked.run()
                    continue
                assert isinstance(asked, Continue)
                self.asked.append(list(asked.prefix))
                value = self.says[tuple(asked.prefix)]
                assert len(asked.prefix) + len(value) <= max_new_tokens, "the script itself is too long"
        except StopIteration as stop:
            assert stop.value is mined
        assert self.asked[0] == [] and sorted(map(tuple, self.asked)) == sorted(self.says), (
            "a line of the script unused"
        )
        assert len(self.drafted) == len(self.choices)
        return mined


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_goes_on_from_an_unimportant_token_and_keeps_an_important_one():
    script = Script(
        {(): [1, 2, 3, END], (1, 5): [13, END], (1, 5, 6): [4]}, choices=[[1, 5, 9, END], [6, 8]],
    )  # fmt: skip
    mined = script.run(
        4, same=lambda reference, answer: (script.compared.append((reference, answer)), answer == "13")[1]
    )
    # 3 would have been the next mismatch (9), but the response is another one by then. [1, 5, 6, 4] is as long as may be.
    # Position 3 comes last: END against the draft's 8, which is not continued either.
    assert script.drafted == [([1, 2, 3, END], 0), ([1, 5, 13, END], 2)]
    assert mined.mismatches == [
        Mismatch(1, 2, 5, False, "13"), Mismatch(2, 13, 6, True, "4"), Mismatch(3, END, 8, True, "8"),
    ]  # fmt: skip
    assert script.compared == [("3", "13"), ("3", "4"), ("3", "8")], "with the target's own answer, every time"
    assert (mined.target_response, mined.response, mined.target_answer) == ([1, 2, 3, END], [1, 5, 13, END], "3")
    assert mined.cut is None


def test_an_important_token_needs_no_new_draft_choices():
    script = Script({(): [1, 2, 3, END], (4,): [9, END], (1, 2, 7): [END]}, choices=[[4, 2, 7, END]])
    mined = script.run()
    assert mined.mismatches == [Mismatch(0, 1, 4, True, "9"), Mismatch(2, 3, 7, True, "7")]
    assert mined.response == [1, 2, 3, END]


@pytest.mark.parametrize("important", [False, True])
def test_the_drafts_end_token_is_not_continued(important):
    answers = {(1, END): "9" if important else "4"}
    more: dict[tuple, list[int]] = {(1, 2, 8): [END]} if important else {}
    script = Script({(): [1, 2, 4, END], **more}, [[1, END, 8, END]] + ([] if important else [[]]), answers)
    mined = script.run()
    first = Mismatch(1, 2, END, important, answers[1, END])
    if important:
        assert mined.mismatches == [first, Mismatch(2, 4, 8, True, "8")] and mined.response == [1, 2, 4, END]
    else:
        assert mined.mismatches == [first] and mined.response == [1, END], "nothing is left to search"
        assert script.drafted[1] == ([1, END], 2)


def test_the_whole_response_keeps_to_its_length():
    script = Script({(): [1, 2, 3], (1, 5): [13]}, choices=[[1, 5, 3], [23], []])
    mined = script.run(3)
    assert script.asked == [[], [1, 5]], "[1, 5, 23] is as long as a response may be"
    assert mined.mismatches == [Mismatch(1, 2, 5, False, "13"), Mismatch(2, 13, 23, False, "23")]
    assert mined.response == [1, 5, 23]


def test_without_an_answer():
    script = Script({(): [1, 2, END]}, [], {(1, 2, END): None})
    mined = script.run()
    assert (mined.mismatches, mined.target_answer, mined.response) == ([], None, [1, 2, END])
    script = Script({(): [1, 2, END], (5,): [2, END]}, [[5, 2, END]], {(5, 2, END): None})
    assert script.run().mismatches == [Mismatch(0, 1, 5, True, None)]
    assert not script.compared, "there is nothing to compare"


def test_an_empty_response():
    assert Script({(): []}, []).run().response == []
    assert Script({(): []}, [[]], {(): "empty"}).run().mismatches == []


def test_caps_are_named():
    says = {(): [1, 2, 3, END], (4,): [9, END], (1, 5): [9, END]}
    choices = [[4, 5, 6, END]]
    mined = Script(says, choices).run(max_mismatches=2)
    assert mined.cut == "mismatches" and [m.position for m in mined.mismatches] == [0, 1]
    assert Script(says, [[4, 5, 3, END]]).run(max_mismatches=2).cut is None, "there was no third"

    times = iter([False, False, True])
    mined = Script(says, choices).run(late=lambda: next(times))
    assert mined.cut == "seconds" and [m.position for m in mined.mismatches] == [0, 1]
    assert mined.response == [1, 2, 3, END]
    assert Script({(): [1, END]}, [[1, END]]).run(late=lambda: True).cut is None, "there was nothing to cut"


def test_naive_keeps_nothing():
    script = Script({(): [1, 2, 3, END], (4,): [13, END], (1, 5): [9, END], (1, 2, 33): [END]}, [[4, 5, 33, END]])
    mined = script.run(naive=True, against_running=True)
    assert [m.important for m in mined.mismatches] == [False, True, False]
    assert mined.response == mined.target_response == [1, 2, 3, END]
    assert {reference for reference, _ in script.compared} == {"3"}


def test_the_running_answer():
    says = {(): [1, 2, 3, END], (4,): [5, 4, END], (4, 6): [5, END], (4, 6, 7): [END]}
    choices = [[4, 2, 3, END], [6, 4, END], [7, END], [END]]
    near: Callable[[str, str], bool] = lambda a, b: abs(int(a) - int(b)) <= 1  # noqa: E731
    running = Script(says, choices, {(4, 6, 7, END): "6"}).run(same=near, against_running=True)
    assert [(m.position, m.answer, m.important) for m in running.mismatches] == [
        (0, "4", False), (1, "5", False), (2, "6", False),
    ]  # fmt: skip
    assert running.target_answer == "3" and running.response == [4, 6, 7, END]
    fixed = Script({k: v for k, v in says.items() if len(k) < 3}, choices[:2]).run(same=near)
    assert [m.important for m in fixed.mismatches] == [False, True], "5 is near 4, but not near the target's own 3"
    assert fixed.response == [4, 5, 4, END]


# -- against a transcription of the paper -----------------------------------------------------------------------------

TOP, WORDS = 9, 4


@cache
def word(seed: int, *text: int) -> int:
    """A made-up model: its greedy token after `text`."""
    return random.Random(f"{seed} {text}").choice([END, *range(1, WORDS + 1)] if len(text) > 2 else range(1, WORDS))


def written(seed: int, prefix: Sequence[int]) -> list[int]:
    out = list(prefix)
    while not (out and out[-1] == END) and len(out) < TOP:
        out.append(word(seed, *out))
    return out


def draft_word(seed: int, *text: int) -> int:
    return word(seed, *text) if random.Random(f"{seed} {text} !").random() < 0.6 else word(seed + 10**6, *text)


def literal(seed: int, answer: Callable[[list[int]], Any]) -> tuple[list, list[int]]:
    """Algorithm 1, line by line, with nothing kept from one round to the next."""
    found: list[tuple] = []
    y = written(seed, [])
    alpha, t = answer(y), -1
    while True:
        choices = [draft_word(seed, *y[:i]) for i in range(len(y))]
        left = [i for i in range(len(y)) if y[i] != choices[i] and i > t]
        if not left:
            return found, y
        t = min(left)
        other = written(seed, [*y[:t], choices[t]])
        if answer(other) == alpha:
            found.append((t, y[t], choices[t], False))
            y = other
        else:
            found.append((t, y[t], choices[t], True))


def test_as_the_paper_writes_it():
    both: set[bool] = set()
    longest = differ = 0
    for seed in range(250):
        answer = lambda ids: sum(ids) % 3  # noqa: E731
        want, last = literal(seed, answer)
        found = search(
            problem(), lambda y, start: [draft_word(seed, *y[:i]) for i in range(start, len(y))],  # noqa: B023
            lambda ids: ids[-1] == END, lambda ids: str(sum(ids) % 3), lambda a, b: a == b, Limits(TOP),
        )  # fmt: skip
        value: Any = None
        try:
            while True:
                asked = found.send(value)
                if isinstance(asked, Continue):
                    assert len(asked.prefix) < TOP and END not in asked.prefix
                    value = written(seed, asked.prefix)[len(asked.prefix) :]
                else:
                    value = asked.run()
        except StopIteration as stop:
            mined: Mined = stop.value
        assert [(m.position, m.target_token, m.draft_token, m.important) for m in mined.mismatches] == want
        assert mined.response == last and mined.target_response == written(seed, [])
        assert answer(mined.response) == answer(mined.target_response)
        # What Appendix A promises: where the draft's own answer differs, some token is important.
        own: list[int] = []
        while not (own and own[-1] == END) and len(own) < TOP:
            own.append(draft_word(seed, *own))
        if answer(own) != answer(mined.target_response):
            differ += 1
            assert any(m.important for m in mined.mismatches)
        # And what it is for: the draft with the important tokens replaced writes exactly this response.
        kept, text = {m.position: m.target_token for m in mined.mismatches if m.important}, []
        while not (text and text[-1] == END) and len(text) < TOP:
            text.append(kept.get(len(text), draft_word(seed, *text)))
        assert text == mined.response
        both |= {m.important for m in mined.mismatches}
        longest = max(longest, len(mined.mismatches))
    assert both == {True, False} and longest > 4 and differ > 20


# -- the target's continuations ---------------------------------------------------------------------------------------


@cache
def model_named(name: str) -> Any:
    return demo.load().target if name == "demo" else tiny.build(name)


def alone(model: Any, text: list[int], budget: int, **settings: Any) -> list[int]:
    """The greedy continuation by `generate`, of one text, with a check that no choice is close."""
    ids = torch.tensor([text])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return tiny.greedy(model, inputs, max_new_tokens=budget, **settings)[0, len(text) :].tolist()


def choosing(model: Any, budget: int) -> tuple[Choice, Callable]:
    config = GenerationConfig(max_new_tokens=budget, pad_token_id=0, do_sample=False)
    processors, ends = decoding_processors(model, config)
    return Choice(processors, None), ended(None, ends, ())


@pytest.mark.parametrize("name", ["demo", "llama", "qwen2", "gpt2", "gemma2"])
def test_continuations_are_those_of_generate(name):
    """Places are started at different times with texts of every relation to what they held before, used again, and given up."""
    model = model_named(name)
    size, jobs, longest = model.config.vocab_size, 10 if name == "demo" else 30, 16
    rng = random.Random(name)
    choice, over = choosing(model, longest)
    batch = Batch(model, 4, 60, choice, over)
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
    batch = Batch(model, 1, 60, choice, lambda response: False)
    widths: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)  # fmt: skip
    try:
        batch.start(0, [5, 6, 7], [], 10)
        while batch.busy:
            batch.step()
        assert widths == [2] + [1] * 10
        widths.clear()
        written = batch.cached[0][3:]
        batch.start(0, [5, 6, 7], [*written[:4], 90], 1)
        batch.step()
        assert widths == [1], "all but the replaced token was in the cache"
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "change",
    [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [5, 9]}, {"min_new_tokens": 9}],
)
def test_the_models_own_generation_config_counts(change):
    """What `generate` would apply is applied to each place, with the length of its own prompt; or it is refused."""
    model = tiny.build("qwen2")
    for option, value in change.items():
        setattr(model.generation_config, option, value)
    try:
        choice, over = choosing(model, 12)
    except ValueError as error:
        assert "min_new_tokens" in change and "\n" not in str(error)
        return
    batch = Batch(model, 3, 40, choice, over)
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
    assert decoding_processors(model, config) == ([], {tiny.EOS})
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, do_sample=True, **given | {"temperature": 0.5})
    assert [type(p) for p in decoding_processors(model, config)[0]] == [TemperatureLogitsWarper]
    model.generation_config.eos_token_id = [3, 8]
    assert decoding_processors(model, config)[1] == {3, 8}
    model.generation_config.eos_token_id = None
    assert decoding_processors(model, config)[1] == set()


def test_a_text_may_end_a_response():
    m = demo.load()
    ids = lambda text: m.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    over = ended(m.tokenizer, {m.tokenizer.eos_token_id}, ["The answer", "Ben"])
    for text, want in ((" The", False), (" The answer", True), (" Ada has", False), (" Ben", True)):
        assert over(ids(text)) == want, text
    assert over(ids(" Ada") + [m.tokenizer.eos_token_id])
    assert not ended(m.tokenizer, set(), ())(ids(" The answer") + [m.tokenizer.eos_token_id])


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


@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_draft_choices_are_those_of_single_steps(name, chunk, monkeypatch):
    monkeypatch.setattr(continuing, "CHUNK", chunk)
    model, rng = model_named(name), random.Random(f"{name} choices")
    words = lambda n: [rng.randrange(4, tiny.VOCABULARY) for _ in range(n)]  # noqa: E731
    for prompt in (words(1), words(6)):
        own = DraftChoices(model, prompt, 40, tiny.VOCABULARY, Choice(NOTHING, None))
        y = words(14)
        for response, start in (
            (y, 0), (y, 0), (y, 9), (y[:5] + words(6), 5), (y[:5], 5), (y + words(3), 2), (words(9), 4),
            (y, 13), (y, 14), (y[:1], 0), ([], 0), (y + words(8), 20),
        ):  # fmt: skip
            got = own(response, start)
            assert got == one_by_one(model, prompt, response, start, tiny.VOCABULARY), (len(response), start)


@pytest.mark.parametrize("size", [60, 120])
def test_a_draft_of_another_vocabulary(size):
    """Ids that only one of the two has are never chosen, and the random numbers are those of the target's vocabulary."""
    model = tiny.build("qwen2", vocab_size=size)
    prompt, response = [5, 90, 33], [7, 96, 20, 61, 59, 60, 44]
    own = DraftChoices(model, prompt, 20, tiny.VOCABULARY, Choice(NOTHING, None))
    assert own(response, 0) == one_by_one(model, prompt, response, 0, tiny.VOCABULARY)
    sampled = Choice(NOTHING, 11)
    got = DraftChoices(model, prompt, 20, tiny.VOCABULARY, sampled)(response, 0)
    ids = torch.tensor([prompt + response[:-1]]).clamp(max=size - 1)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 :, : tiny.VOCABULARY]
    few = logits.shape[-1]
    noise = [sampled.noise(prompt + response[:i], tiny.VOCABULARY)[:few] for i in range(len(response))]
    assert got == (logits.log_softmax(-1) + torch.stack(noise)).argmax(-1).tolist()
    assert max(got) < tiny.VOCABULARY


# -- one token ----------------------------------------------------------------------------------------------------------


def test_each_text_is_processed_with_its_own_prefix():
    processor = RepetitionPenaltyLogitsProcessor(4.0)
    logits = torch.randn(5, 12)
    best = logits.argmax(-1).tolist()
    texts = [[best[0]], [1, 2, best[1]], [best[1], best[3]], [7, 8, 9, 10], [best[4]] * 6]
    want = [
        int(processor(torch.tensor([t]), row[None].clone()).argmax()) for t, row in zip(texts, logits, strict=True)
    ]
    kept = logits.clone()
    assert Choice(LogitsProcessorList([processor]), None)(texts, logits) == want != best
    assert torch.equal(logits, kept), "the caller's logits are its own"
    assert [Choice(LogitsProcessorList([processor]), None)([t], row[None])[0] for t, row in zip(texts, logits, strict=True)] == want  # fmt: skip
    assert Choice(NOTHING, None)([], logits[:0]) == []


def test_the_state_and_the_text_name_the_sample():
    logits = torch.randn(40, 1).expand(40, 50).contiguous()  # all laws flat: the noise alone decides
    texts = [[3, n // 5, n] for n in range(40)]
    tokens = Choice(NOTHING, 5)(texts, logits)
    order = torch.randperm(40).tolist()
    again = Choice(NOTHING, 5)([texts[i] for i in order], logits[order])
    assert again == [tokens[i] for i in order]
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    assert [Choice(NOTHING, 5)([text], logits[:1])[0] for text in texts] == tokens
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sum(a == b for a, b in zip(tokens, Choice(NOTHING, 6)(texts, logits), strict=True)) < 10
    assert len(set(tokens)) > 15, "each text has noise of its own"
    noise = Choice(NOTHING, 5).noise
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
            by_state[Choice(processors, n)([[4, 5, 6]], logits)[0]] += 1
        for token in Choice(processors, 1)([[n, 7] for n in range(1500)], logits.expand(1500, 6)):
            by_text[token] += 1
        for counts in (by_state, by_text):
            assert counts[law == 0].sum() == 0
            expected = law[law > 0] * 1500
            assert chisquare(counts[law > 0].numpy(), (expected * 1500 / expected.sum()).numpy()).pvalue > 0.001


def test_target_and_draft_share_the_noise():
    """Identical laws never mismatch; laws that differ do so about as seldom as a coupling allows."""
    p = torch.randn(600, 20)
    texts = [[n] for n in range(600)]
    choice = Choice(NOTHING, 3)
    tokens = choice(texts, p)
    assert tokens == choice(texts, p + torch.randn(600, 1)), "a law is the same whatever is added to all of its logits"
    q = p + 0.3 * torch.randn(600, 20)
    tv = float((p.softmax(-1) - q.softmax(-1)).abs().sum(-1).mean()) / 2
    apart = sum(a != b for a, b in zip(tokens, choice(texts, q), strict=True)) / 600
    assert 0 < apart < 2 * tv < 0.4  # 1 − (1 − tv) / (1 + tv), at most
    independent = sum(a != b for a, b in zip(tokens, Choice(NOTHING, 4)(texts, q), strict=True)) / 600
    assert independent > 3 * apart
