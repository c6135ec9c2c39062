"""Logits processors that remember something between calls: one text's see the calls of `generate`, several texts' are refused."""

import inspect
import itertools

import pytest
import torch
from support import eagle, small
from support.stateful import HIDDEN, KINDS, Counting, GlobalNoise, Grammar, guidance, pushed
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig
from transformers.generation import StoppingCriteria, logits_process

import hf_lossy_assist as hla
from hf_lossy_assist.batch.callers_code import FUNCTIONS
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
EACH_WAY = (*WAYS[:-1], pytest.param("compiled", marks=pytest.mark.nightly))


def stock(target, inputs, make, **settings):
    return type(target).generate(target, **inputs, logits_processor=[make()], **SETTINGS | settings)


class Watched(LogitsProcessor):
    """Record what a processor is shown."""

    def __init__(self, inner):
        self.inner, self.texts, self.scores = inner, [], []

    def __call__(self, input_ids, scores):
        self.texts.append(input_ids.tolist())
        self.scores.append(scores.clone())
        return self.inner(input_ids, scores)


@pytest.mark.full
@pytest.mark.parametrize("way", EACH_WAY)
def test_one_text_is_that_of_generate_by_the_same_calls(target, ways, way):
    """Each kind in one way; sampling draws from the same stream as a processor that uses torch's, in `generate` at other places."""
    first = WAYS.index(way)
    for n, (name, make) in list(enumerate(KINDS.items()))[first :: len(WAYS)]:
        plain, ours = Watched(make()), None
        settings = SETTINGS | ({"do_sample": True, "top_k": 1} if n % 2 and name != "global noise" else {})
        expected = stock(target, small.one(), lambda plain=plain: plain, **settings)
        ours = Watched(make())
        torch.manual_seed(11)
        out = target.generate(**small.one(), **ways[way], **settings, logits_processor=[ours])
        assert torch.equal(out, expected), name
        assert ours.texts == plain.texts and len(ours.texts) == 16
        assert torch.allclose(torch.cat(ours.scores), torch.cat(plain.scores), atol=1e-4)


@pytest.mark.parametrize("way", ["stops", pytest.param("eagle3", marks=pytest.mark.full)])
def test_guidance_runs_the_target_between_rounds(target, ways, way):
    expected = stock(target, small.one(), lambda: guidance(target))
    assert not torch.equal(expected, target.generate(**small.one(), **SETTINGS))
    processors = LogitsProcessorList([guidance(target)])
    assert torch.equal(target.generate(**small.one(), **ways[way], **SETTINGS, logits_processor=processors), expected)


class Ending(StoppingCriteria):
    """End the text at its `last`-th new token, and write down each call."""

    def __init__(self, log, last):
        self.log, self.last = log, last

    def __call__(self, input_ids, scores, **kwargs):
        self.log.append(("criterion", input_ids.tolist()))
        return torch.tensor([input_ids.shape[1] - 9 >= self.last])


@pytest.mark.parametrize(
    ("way", "ends"),
    [
        *(("model", "criterion"), ("stops", "end token"), ("lookup", "limit"), ("eagle3", "criterion")),
        *(pytest.param(*x, marks=pytest.mark.full) for x in (("early exit", "end token"), ("suffix", "criterion"))),
        pytest.param("compiled", "end token", marks=pytest.mark.nightly),
    ],
)
def test_processors_and_criteria_are_called_in_turn_until_the_text_ends(target, ways, ends, way):
    """The favourite of a draft goes on beyond the end."""

    def call(generate, **more):
        log = []

        def processor(input_ids, scores):
            log.append(("processor", input_ids.tolist()))
            return scores

        settings = {"max_new_tokens": 5 if ends == "limit" else 16, "do_sample": False, **more}
        settings["stopping_criteria"] = [Ending(log, 7 if ends == "criterion" else 99)]
        text = generate(**small.one(), **settings, logits_processor=LogitsProcessorList([processor]))
        return text, log

    plain = type(target).generate(target, **small.one(), **SETTINGS)[0, 9:].tolist()
    more = {"eos_token_id": plain[6], "pad_token_id": 0} if ends == "end token" else {}
    expected, log = call(lambda **given: type(target).generate(target, **given), **more)
    out, ours = call(target.generate, **ways[way], **more)
    assert torch.equal(out, expected) and ours == log


def test_one_object_for_several_rows_is_refused(target, ways):
    for n, name in enumerate(name for name in KINDS if name != HIDDEN):
        way = ("model", "lookup", "eagle3")[n % 3]
        with pytest.raises(ValueError, match=ONE_EACH):
            target.generate(**small.ragged(), **ways[way], **SETTINGS, logits_processor=[KINDS[name]()])


class FirstLength(LogitsProcessor):
    """Remember how long the prompts are, and nothing else."""

    def __init__(self):
        self.begin = None

    def __call__(self, input_ids, scores):
        self.begin = input_ids.shape[1] if self.begin is None else self.begin
        new = input_ids.shape[1] - self.begin
        return scores + 40.0 * (torch.arange(scores.shape[1]) == 4 + new * 5 % 90)


@pytest.mark.parametrize("way", ["model", pytest.param("lookup", marks=pytest.mark.full)])
def test_what_the_first_call_leaves_may_serve_all_rows(target, ways, way):
    for inputs in (small.one(), small.ragged()):
        out = target.generate(**inputs, **ways[way], **SETTINGS, logits_processor=LogitsProcessorList([FirstLength()]))
        assert torch.equal(out, stock(target, inputs, FirstLength))


PROMPTS = [small.one(6 + n, seed=n)["input_ids"][0].tolist() for n in range(4)]


def many(target, ways, processors, rows=2, way="model"):
    settings = {"max_rows": rows, "logits_processor": processors} | ways[way] | SETTINGS
    return {result.index: result.token_ids for result in hla.generate_many(target, PROMPTS, **settings)}


@pytest.mark.parametrize(
    ("name", "way"),
    [("grammar", "model"), *(pytest.param(*x, marks=pytest.mark.full) for x in (("own noise", "suffix"), ("SynthID", "eagle3")))],
)  # fmt: skip
def test_generate_many_makes_one_for_each_prompt(target, ways, name, way):
    make, calls = KINDS[name], []
    expected = [stock(target, {"input_ids": torch.tensor([p])}, make)[0, len(p) :].tolist() for p in PROMPTS]

    def made(ids):
        calls.append(Watched(make()))
        return [calls[-1]]

    assert many(target, ways, made, way=way) == dict(enumerate(expected))
    assert [len(each.texts) for each in calls] == [16] * len(PROMPTS)


@pytest.mark.full
def test_generate_many_refuses_what_the_texts_share(target, ways):
    numbers, once = itertools.count(1), Counting()

    class Drawing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return pushed(scores, next(numbers))

    with pytest.raises(ValueError, match="^logits_processor: GlobalNoise draws Torch's random numbers"):
        many(target, ways, lambda ids: [GlobalNoise()])
    for rows in (1, 3):
        for processors in ([once], lambda ids: [once], [once.__call__], [Drawing()], [FirstLength()], [Grammar()]):
            with pytest.raises(ValueError, match=ONE_EACH):
                many(target, ways, processors, rows)


@pytest.mark.full
def test_a_function_of_prefixes_that_counts(target, ways):
    def make():
        calls = []

        def allowed(row, ids):
            calls.append(len(ids))
            return [4 + len(calls) % 9, 30 + len(calls) % 11]

        return allowed

    expected = type(target).generate(target, **small.one(), **SETTINGS, prefix_allowed_tokens_fn=make())
    for way in ("model", "lookup", "eagle3"):
        out = target.generate(**small.one(), **ways[way], **SETTINGS, prefix_allowed_tokens_fn=make())
        assert torch.equal(out, expected), way
    settings = ways["model"] | SETTINGS | {"prefix_allowed_tokens_fn": make()}
    for call in (
        lambda: target.generate(**small.ragged(), **settings),
        lambda: list(hla.generate_many(target, PROMPTS, **settings)),
    ):
        with pytest.raises(ValueError, match="^logits_processor: prefix_allowed_tokens_fn remembers"):
            call()


def test_an_error_where_the_text_comes_is_the_callers(target, ways):
    class Failing(Counting):
        def __call__(self, input_ids, scores):
            if self.calls == 6:
                raise LookupError("the sixth")
            return super().__call__(input_ids, scores)

    for way in ("model", "lookup", "eagle3"):
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
    """Two that read and change one list, with one of Transformers' between them; a second call goes on with it."""

    def make():
        calls = []

        class Appending(LogitsProcessor):
            def __call__(self, input_ids, scores):
                calls.append(1)
                return scores + 40.0 * (torch.arange(scores.shape[1]) == 4 + len(calls) * 3 % 90)

        return LogitsProcessorList([Appending(), Appending()])

    settings = SETTINGS | {"repetition_penalty": 1.3}
    for way in ("stops", "suffix"):
        plain, ours = make(), make()
        for _ in range(2):
            expected = type(target).generate(target, **small.one(), **settings, logits_processor=plain)
            out = target.generate(**small.one(), **ways[way], **settings, logits_processor=ours)
            assert torch.equal(out, expected), way


@pytest.mark.full
def test_synth_id_as_a_setting(target, ways):
    sizes = {"ngram_len": 3, "context_history_size": 16, "sampling_table_size": 64}
    settings = SETTINGS | {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], **sizes)}
    expected = type(target).generate(target, **small.one(), **settings)
    assert not torch.equal(expected, type(target).generate(target, **small.one(), **SETTINGS))
    for way in ("model", "lookup", "eagle3"):
        assert torch.equal(target.generate(**small.one(), **ways[way], **settings), expected), way
    texts = [type(target).generate(target, torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in PROMPTS]
    found = hla.generate_many(target, PROMPTS, max_rows=3, **ways["model"], **settings)  # `generate` makes one each
    assert {result.index: result.token_ids for result in found} == dict(enumerate(texts))


STATEFUL = set(
    "PrefixConstrainedLogitsProcessor WhisperNoSpeechDetection UnbatchedClassifierFreeGuidanceLogitsProcessor "
    "SynthIDTextWatermarkLogitsProcessor DiaEOSDelayPatternLogitsProcessor".split()
)


def test_every_processor_of_transformers_is_known():
    """A class of a new release is called as a caller's until its code was read: then it belongs to one of the two sets."""
    kinds = inspect.getmembers(logits_process, inspect.isclass)
    names = {name for name, kind in kinds if issubclass(kind, logits_process.LogitsProcessor) and kind.__module__ == logits_process.__name__}  # fmt: skip
    assert names - {"LogitsProcessor"} <= FUNCTIONS | STATEFUL
    assert not FUNCTIONS & STATEFUL
