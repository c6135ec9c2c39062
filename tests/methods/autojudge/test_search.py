"""AutoJudge's search by hand and against a literal transcription of Algorithm 1."""

import random
import re
from collections.abc import Callable, Sequence
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
from hf_lossy_assist.methods.autojudge.search import Continue, Limits, Mined, Mismatch, Work, search
from hf_lossy_assist.tasks.math import GSM8K


END = 0


def problem() -> Mined:
    return Mined(7, "prompt", [1], [], [], None)


class Script:
    """Plays the models and the task: `says[prefix]` is the target's continuation, `answers` of whole responses (by default the
    last token but END), `choices` what the draft returns, call by call. What the search asked for is kept."""

    def __init__(self, says: dict[tuple, list[int]], choices: list[list[int]], answers: dict[tuple, str | None] | None = None):  # fmt: skip
        self.says, self.choices, self.answers = says, choices, answers or {}
        self.prefixes: list[list[int]] = []
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
                step = found.send(value)
                if isinstance(step, Work):
                    value = step.run()
                    continue
                assert isinstance(step, Continue)
                self.prefixes.append(list(step.prefix))
                value = self.says[tuple(step.prefix)]
                assert len(step.prefix) + len(value) <= max_new_tokens, "the script itself is too long"
        except StopIteration as stop:
            assert stop.value is mined
        assert self.prefixes[0] == [], "the whole response comes first"
        assert sorted(map(tuple, self.prefixes)) == sorted(self.says), "a line of the script unused"
        assert len(self.drafted) == len(self.choices)
        return mined


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_goes_on_from_an_unimportant_token_and_keeps_an_important_one():
    script = Script({(): [1, 2, 3, END], (1, 5): [13, END], (1, 5, 6): [4]}, choices=[[1, 5, 9, END], [6, 8]])

    def same(reference, answer):
        script.compared.append((reference, answer))
        return answer == "13"

    mined = script.run(4, same)
    # 3 would have been the next mismatch (9), but the response is another one by then. [1, 5, 6, 4] is as long as may be.
    # Position 3 comes last: END against the draft's 8, which is not continued either.
    assert script.drafted == [([1, 2, 3, END], 0), ([1, 5, 13, END], 2)]
    assert mined.mismatches == [
        Mismatch(1, 2, 5, False, "13"), Mismatch(2, 13, 6, True, "4"), Mismatch(3, END, 8, True, "8"),
    ]  # fmt: skip
    assert script.compared == [("3", "13"), ("3", "4"), ("3", "8")], "with the target's own answer, every time"
    assert (mined.target_response, mined.response, mined.target_answer) == ([1, 2, 3, END], [1, 5, 13, END], "3")
    assert mined.cut is None


def test_without_an_answer():
    script = Script({(): [1, 2, END]}, [], {(1, 2, END): None})
    mined = script.run()
    assert (mined.mismatches, mined.target_answer, mined.response) == ([], None, [1, 2, END])
    script = Script({(): [1, 2, END], (5,): [2, END]}, [[5, 2, END]], {(5, 2, END): None})
    assert script.run().mismatches == [Mismatch(0, 1, 5, True, None)]
    assert not script.compared, "there is nothing to compare"


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
    for seed in range(120):
        answer = lambda ids: sum(ids) % 3  # noqa: E731
        want, last = literal(seed, answer)
        found = search(
            problem(), lambda y, start: [draft_word(seed, *y[:i]) for i in range(start, len(y))],  # noqa: B023
            lambda ids: ids[-1] == END, lambda ids: str(sum(ids) % 3), lambda a, b: a == b, Limits(TOP),
        )  # fmt: skip
        value: Any = None
        try:
            while True:
                step = found.send(value)
                if isinstance(step, Continue):
                    assert len(step.prefix) < TOP and END not in step.prefix
                    value = written(seed, step.prefix)[len(step.prefix) :]
                else:
                    value = step.run()
        except StopIteration as stop:
            mined: Mined = stop.value
        assert [(m.position, m.target_token, m.draft_token, m.important) for m in mined.mismatches] == want
        assert mined.response == last and mined.target_response == written(seed, [])
        assert answer(mined.response) == answer(mined.target_response)
        # What Appendix A promises: where the draft's own answer differs, some token is important.
        drafted: list[int] = []
        while not (drafted and drafted[-1] == END) and len(drafted) < TOP:
            drafted.append(draft_word(seed, *drafted))
        if answer(drafted) != answer(mined.target_response):
            differ += 1
            assert any(m.important for m in mined.mismatches)
        # And what it is for: the draft with the important tokens replaced writes exactly this response.
        replaced, text = {m.position: m.target_token for m in mined.mismatches if m.important}, []
        while not (text and text[-1] == END) and len(text) < TOP:
            text.append(replaced.get(len(text), draft_word(seed, *text)))
        assert text == mined.response
        both |= {m.important for m in mined.mismatches}
        longest = max(longest, len(mined.mismatches))
    assert both == {True, False} and longest > 4 and differ > 10


# -- the models under the search: against `generate` and plain forwards -------------------------------------------------


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


@pytest.mark.full
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


@pytest.mark.full
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
