"""Logits processors that remember something between calls: `generate`'s text, or one line that names them; never another text."""

import inspect
import itertools
from threading import Event

import pytest
import torch
from support import eagle, small
from support.stateful import FOLLOWED, REFUSED, Counting, Grammar, guidance, pushed
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig
from transformers.generation import logits_process

import hf_lossy_assist as hla
from hf_lossy_assist.batch.processor_kinds import FUNCTIONS, STATEFUL
from hf_lossy_assist.drafters.trained import Eagle3Drafter


SETTINGS = {"max_new_tokens": 16, "do_sample": False}
ONE_EACH = r"^logits_processor: [^\n]*(make one for each row|pass prompts one by one)[^\n]*$"


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama())


@pytest.fixture(scope="module")
def ways(target):
    """How a call drafts."""
    network = eagle.network(target, target_layers=(0, 1, 2))
    return {
        "model": {"assistant_model": small.near(target, 0.2), "lossy_policy": "strict"},
        "stops": {"assistant_model": small.near(target, 0.2), "lossy_policy": "svip"},
        "lookup": {"prompt_lookup_num_tokens": 4, "lossy_policy": "strict"},
        "early exit": {"assistant_early_exit": 1, "lossy_policy": "strict"},
        "suffix": {"lossy_policy": "strict", "drafter": hla.SuffixDrafter()},
        "eagle3": {"lossy_policy": "strict", "drafter": Eagle3Drafter(network)},
        "compiled": {
            "assistant_model": small.near(target, 0.2), "lossy_policy": "strict", "compile_config": CompileConfig(backend="eager"),
        },
    }  # fmt: skip


WAYS = ("model", "stops", "lookup", "early exit", "suffix", "eagle3", "compiled")
EACH_WAY = (*WAYS[:-1], pytest.param("compiled", marks=pytest.mark.full))


def stock(target, inputs, make, **settings):
    return type(target).generate(
        target, **inputs, logits_processor=LogitsProcessorList([make()]), **SETTINGS | settings
    )


@pytest.mark.full(every=144)
@pytest.mark.nightly(every=72)
@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("name", FOLLOWED)
def test_one_text_is_that_of_generate(target, ways, name, way):
    inputs, make = small.one(), FOLLOWED[name]
    expected = stock(target, inputs, make)
    out = target.generate(**inputs, **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([make()]))
    assert torch.equal(out, expected)


@pytest.mark.nightly(every=4)
@pytest.mark.parametrize("way", EACH_WAY)
def test_guidance_runs_the_target_between_rounds(target, ways, way):
    expected = stock(target, small.one(), lambda: guidance(target))
    assert not torch.equal(expected, target.generate(**small.one(), **SETTINGS))
    processors = LogitsProcessorList([guidance(target)])
    assert torch.equal(target.generate(**small.one(), **ways[way], **SETTINGS, logits_processor=processors), expected)


@pytest.mark.parametrize("way", ["model", "lookup", "eagle3"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_back_is_refused_by_name(target, ways, name, way):
    kind = REFUSED[name]
    line = rf"^logits_processor: {kind.__name__} (holds a|changes a) [^\n]*leave lossy_policy out[^\n]*$"
    with pytest.raises(ValueError, match=line):
        target.generate(**small.one(), **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([kind()]))


@pytest.mark.full
@pytest.mark.nightly(every=60)
@pytest.mark.parametrize("inputs", [small.ragged(), small.ragged((0, 0))], ids=["ragged", "even"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_one_object_for_several_rows_is_refused(target, ways, name, inputs):
    make = FOLLOWED[name]
    for way in ("model", "lookup", "eagle3", "compiled"):
        with pytest.raises(ValueError, match=ONE_EACH):
            target.generate(**inputs, **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([make()]))


class FirstLength(LogitsProcessor):
    """Remember how long the prompts are, and nothing else."""

    def __init__(self):
        self.begin = None

    def __call__(self, input_ids, scores):
        self.begin = input_ids.shape[1] if self.begin is None else self.begin
        new = input_ids.shape[1] - self.begin
        return scores + 40.0 * (torch.arange(scores.shape[1]) == 4 + new * 5 % 90)


@pytest.mark.parametrize("way", ["model", "lookup", "eagle3"])
def test_what_the_first_call_leaves_may_serve_all_rows(target, ways, way):
    for inputs in (small.one(), small.ragged()):
        out = target.generate(**inputs, **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([FirstLength()]))
        assert torch.equal(out, stock(target, inputs, FirstLength))


PROMPTS = [small.one(6 + n, seed=n)["input_ids"][0].tolist() for n in range(4)]


@pytest.mark.full(every=27)
@pytest.mark.nightly(every=27)
@pytest.mark.parametrize("way", ["model", "stops", "suffix", "eagle3"])
@pytest.mark.parametrize("name", [name for name in FOLLOWED if name not in ("class attribute", "global", "Python's noise", "global noise")])  # fmt: skip
def test_generate_many_makes_one_for_each_prompt(target, ways, name, way):
    make = FOLLOWED[name]
    expected = [stock(target, {"input_ids": torch.tensor([p])}, make)[0, len(p) :].tolist() for p in PROMPTS]
    found = hla.generate_many(
        target, PROMPTS, max_rows=2, logits_processor=lambda ids: [make()], **ways[way], **SETTINGS
    )
    assert {result.index: result.token_ids for result in found} == dict(enumerate(expected))


def many(target, ways, processors, rows=2):
    settings = {"max_rows": rows, "logits_processor": processors} | ways["model"] | SETTINGS
    return list(hla.generate_many(target, PROMPTS, **settings))


@pytest.mark.parametrize("name", ["class attribute", "global", "global noise"])
def test_generate_many_refuses_state_that_the_texts_share(target, ways, name):
    """Each prompt has an object, and what these remember is one thing."""
    with pytest.raises(ValueError, match="^logits_processor: "):
        many(target, ways, lambda ids: [FOLLOWED[name]()])


def test_generate_many_refuses_one_iterator_for_all_prompts(target, ways):
    numbers = itertools.count(1)

    class Drawing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return pushed(scores, next(numbers))

    with pytest.raises(ValueError, match="^logits_processor: Drawing shares what it remembers"):
        many(target, ways, lambda ids: [Drawing()], rows=3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [Counting, FirstLength, Grammar])
def test_generate_many_refuses_one_object_for_all_prompts(target, ways, make, rows):
    with pytest.raises(ValueError, match=ONE_EACH):
        many(target, ways, LogitsProcessorList([make()]), rows)


@pytest.mark.full
def test_a_function_of_prefixes_that_counts(target, ways):
    def make():
        calls = []

        def allowed(row, ids):
            calls.append(len(ids))
            return [4 + len(calls) % 9, 30 + len(calls) % 11]

        return allowed

    expected = type(target).generate(target, **small.one(), **SETTINGS, prefix_allowed_tokens_fn=make())
    for way in WAYS:
        out = target.generate(**small.one(), **ways[way], **SETTINGS, prefix_allowed_tokens_fn=make())
        assert torch.equal(out, expected), way
    with pytest.raises(ValueError, match="^logits_processor: prefix_allowed_tokens_fn remembers"):
        target.generate(**small.ragged(), **ways["model"], **SETTINGS, prefix_allowed_tokens_fn=make())


@pytest.mark.full
@pytest.mark.parametrize("least", [-torch.inf, -1e9], ids=["never", "hardly"])
def test_an_error_at_a_place_that_the_text_never_comes_to_is_none(target, ways, least):
    """A draft may come where `generate` does not ask; where the text does come there, the error is the caller's own."""

    class Strict(Grammar):
        def __call__(self, input_ids, scores):
            return super().__call__(input_ids, scores).clamp(min=least)

    expected = stock(target, small.one(), Strict)
    for way in WAYS:
        out = target.generate(**small.one(), **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([Strict()]))
        assert torch.equal(out, expected), way

    class Failing(Counting):
        def __call__(self, input_ids, scores):
            if self.calls == 6:
                raise LookupError("the sixth")
            return super().__call__(input_ids, scores)

    for way in WAYS:
        with pytest.raises(LookupError, match="^'?the sixth'?$"):
            target.generate(**small.one(), **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([Failing()]))


def test_a_function_of_prefixes_is_given_the_prompts_number(target, ways):
    """As Transformers counts: all sequences of a prompt have its number."""
    settings = {"num_return_sequences": 2, "do_sample": True, "top_k": 1, "max_new_tokens": 6}
    settings["prefix_allowed_tokens_fn"] = lambda prompt, ids: [[5, 6], [41, 42], [60, 61]][prompt]
    expected = type(target).generate(target, **small.ragged(), **settings)
    for way in ("model", "lookup", "eagle3"):
        assert torch.equal(target.generate(**small.ragged(), **ways[way], **settings), expected), way


@pytest.mark.full
def test_processors_beside_each_other_share_what_they_remember(target, ways):
    """Two that read and change one list, with one of Transformers' between them."""

    def make():
        calls = []

        class Appending(LogitsProcessor):
            def __call__(self, input_ids, scores):
                calls.append(1)
                return scores + 40.0 * (torch.arange(scores.shape[1]) == 4 + len(calls) * 3 % 90)

        return LogitsProcessorList([Appending(), Appending()])

    settings = SETTINGS | {"repetition_penalty": 1.3}
    expected = type(target).generate(target, **small.one(), **settings, logits_processor=make())
    for way in WAYS:
        out = target.generate(**small.one(), **ways[way], **settings, logits_processor=make())
        assert torch.equal(out, expected), way


@pytest.mark.full
def test_afterwards_an_object_remembers_the_text_alone(target, ways):
    """As after `generate`: its caller may read it, or go on with it."""
    for way in WAYS:
        ours, plain = Counting(), Counting()
        for _ in range(2):
            out = target.generate(**small.one(), **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([ours]))
            assert torch.equal(out, stock(target, small.one(), lambda plain=plain: plain))
        assert ours.calls == plain.calls == 32


def test_what_other_threads_wait_for_is_not_put_back(target):
    """An event that is set while the draft writes stays set: another thread may have set it to end the text."""
    counting, draft = Counting(), small.near(target, 0.2)
    counting.event, steps = Event(), itertools.count()
    draft.register_forward_hook(lambda *_: counting.event.set() if next(steps) == 3 else None)
    settings = SETTINGS | {"assistant_model": draft, "logits_processor": LogitsProcessorList([counting])}
    assert torch.equal(
        target.generate(**small.one(), lossy_policy="strict", **settings), stock(target, small.one(), Counting)
    )
    assert counting.event.is_set() and counting.calls == 16


@pytest.mark.full
def test_synth_id_as_a_setting(target, ways):
    watermark = SynthIDTextWatermarkingConfig(
        keys=[1, 2, 3, 4], ngram_len=3, context_history_size=16, sampling_table_size=64
    )
    expected = type(target).generate(target, **small.one(), **SETTINGS, watermarking_config=watermark)
    assert not torch.equal(expected, type(target).generate(target, **small.one(), **SETTINGS))
    for way in ("model", "lookup", "eagle3"):
        out = target.generate(**small.one(), **ways[way], **SETTINGS, watermarking_config=watermark)
        assert torch.equal(out, expected), way
    with pytest.raises(ValueError, match=ONE_EACH):
        target.generate(**small.ragged(), **ways["model"], **SETTINGS, watermarking_config=watermark)


def test_every_processor_of_transformers_is_known():
    """A class of a new release is followed as a caller's until its code was read: then it belongs to one of the two sets."""
    kinds = inspect.getmembers(logits_process, inspect.isclass)
    names = {name for name, kind in kinds if issubclass(kind, logits_process.LogitsProcessor) and kind.__module__ == logits_process.__name__}  # fmt: skip
    assert names - {"LogitsProcessor"} <= FUNCTIONS | STATEFUL
    assert not FUNCTIONS & STATEFUL
