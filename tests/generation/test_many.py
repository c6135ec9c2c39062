"""Many prompts in flight: each text is the one of its prompt alone, whatever stands beside it."""

import itertools

import pytest
import torch
from support import small
from support.many import ENDS, LENGTHS, SETTINGS, alone, enabled_pair, prompts, together
from support.paper_rules import CSD, RegretBudget
from transformers import BatchEncoding, EosTokenCriteria, LogitsProcessor, MaxLengthCriteria, StoppingCriteria

import hf_lossy_assist as hla
from hf_lossy_assist.generation import output, preparation, scheduler


@pytest.fixture(scope="module")
def pair():
    return enabled_pair()


@pytest.mark.full
def test_greedy_texts_are_those_of_generate(pair):
    """Under stops that the matrix of pairs has not, and with one row or more rows than texts."""
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    assert len({len(text) for text in expected}) > 1, "some end by themselves"
    any_of = hla.AnyOf([hla.SVIP(), hla.Heuristic(3)])
    fallback = hla.LossyPolicy(stop=hla.Constant(3)).with_fallback()
    for policy in (hla.Heuristic(2, 8), hla.JointGoodput(), any_of, fallback):
        assert together(pair, prompts(), policy, max_rows=3) == expected, policy
    for rows in (1, 16):
        assert together(pair, prompts(), max_rows=rows) == expected, rows


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_what_a_rule_counts_it_counts_of_each_text(pair):
    """A place that is taken by another text has nothing left of the last one's budget, nor of what that had rejected."""
    settings = SETTINGS | {"max_new_tokens": 24, "eos_token_id": None}
    limited = hla.Limited(hla.TopK(5), per_request=2)
    few = prompts()[:5]
    for rule in (limited, RegretBudget(2.0), CSD(0.5, seen=1), hla.Union([limited, hla.TopK(0)])):
        policy = hla.LossyPolicy(rule, hla.Constant(4))
        more = {"assistant_model": pair[1], "lossy_policy": policy}
        expected = [alone(pair[0], prompt, **settings, **more) for prompt in few]
        assert together(pair, few, policy, max_rows=2, **settings) == expected, rule


def test_a_sampled_text_does_not_depend_on_its_neighbours(pair):
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 5}
    texts = [together(pair, prompts(), hla.Constant(3), max_rows=rows, **settings) for rows in (1, 2, 16)]
    assert texts[0] == texts[1] == texts[2]
    first = together(pair, prompts()[:2], hla.Constant(3), **settings)
    assert first == texts[0][:2]
    assert together(pair, prompts(), hla.Constant(3), **settings | {"seed": 6}) != texts[0]
    same = together(pair, prompts()[:1] * 6, hla.Constant(3), **settings)
    assert len({tuple(text) for text in same}) > 1, "one prompt twice has two texts"


def test_results_come_as_they_finish_and_prompts_are_read_as_rows_become_free(pair):
    read = []

    def endless():
        for n in itertools.count():
            read.append(n)
            yield prompts()[n % len(LENGTHS)]

    found = hla.generate_many(pair[0], endless(), assistant_model=pair[1], max_rows=3, **SETTINGS)
    assert read == []
    first = next(found)
    assert len(read) <= 5 and first.text is None and first.speculation.num_new_tokens == len(first.token_ids)
    seen = {first.index: first} | {result.index: result for result in itertools.islice(found, 20)}
    assert len(seen) == 21 and max(seen) < 24
    for index, result in seen.items():
        assert result.token_ids == alone(pair[0], prompts()[index % len(LENGTHS)], **SETTINGS)
        assert result.speculation.num_new_tokens == len(result.token_ids)
        assert result.speculation.num_spec_steps > 0 and len(result.speculation.rows) == 1


def test_texts_with_a_tokenizer_and_stop_strings(pair):
    tokenizer = small.tokenizer()
    texts = [tokenizer.decode(prompt) for prompt in prompts()]
    word = tokenizer.decode(alone(pair[0], prompts()[0], **SETTINGS)[4])
    given = SETTINGS | {"tokenizer": tokenizer, "stop_strings": [word]}
    found = list(hla.generate_many(pair[0], texts, assistant_model=pair[1], max_rows=3, **given))
    assert sorted(result.index for result in found) == list(range(len(texts)))
    assert any(result.text.endswith(word) and len(result.token_ids) < 12 for result in found)
    for result in found:
        prompt = prompts()[result.index]
        assert result.token_ids == alone(pair[0], prompt, **given)
        before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + result.token_ids))  # fmt: skip
        assert whole.startswith(before) and result.text == whole.removeprefix(before)


def test_what_prompts_begin_with_is_read_once():
    pair = target, draft = enabled_pair()
    begin = prompts((40,))[0]
    texts = [begin + prompt for prompt in prompts()]
    widths = {target: [], draft: []}

    def note(model, args, kwargs):
        widths[model].append(kwargs["input_ids"].shape[1])

    expected = [alone(target, text, **SETTINGS) for text in texts]
    hooks = [model.register_forward_pre_hook(note, with_kwargs=True) for model in widths]
    assert together(pair, texts, max_rows=3) == expected
    for hook in hooks:
        hook.remove()
    assert [sum(width >= 40 for width in widths[model]) for model in pair] == [1, 1]


class Counting(LogitsProcessor):
    """A caller's own processor that forbids what a text has three times."""

    def __call__(self, input_ids, scores):
        assert len(input_ids) == 1, "a row's own call has one row"
        ids, counts = input_ids[0].unique(return_counts=True)
        return scores.index_fill(1, ids[counts >= 3], -float("inf"))


def test_no_more_tokens_than_there_is_room_for(pair, monkeypatch):
    going, original = [], scheduler.run_stages

    def watched(call, *args):
        going.append(sum(call.rows.max_lengths))
        original(call, *args)

    monkeypatch.setattr(scheduler, "run_stages", watched)
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    assert together(pair, prompts(), max_rows=7, max_tokens=60) == expected
    assert max(going) <= 60
    going.clear()
    assert together(pair, prompts(), max_rows=7, max_tokens=10) == expected
    assert max(going) <= 26, "one at a time, since each needs more by itself"


def test_cached_prefixes_take_no_more_memory_than_they_need(pair):
    texts = [begin + prompt for begin in prompts((40, 50)) for prompt in prompts((40, 9))]
    many = hla.generate_many(pair[0], texts, assistant_model=pair[1], max_rows=7, **SETTINGS)
    next(many)
    prefixes = many._scheduler.prefixes
    segments = [each for root in prefixes._roots.values() for each in root.below() if each.parent]
    assert sum(len(each.ids) for each in segments) == prefixes.tokens == 40 + 50 + 39 + 39
    for segment in segments:
        assert len(segment.states) == 2
        for states in (held for layers in segment.states for layer in layers for held in layer):
            assert states.shape[2] == len(segment.ids)
            assert states.untyped_storage().nbytes() == states.numel() * states.element_size()


def test_what_cannot_be_joined_is_written_alone_with_a_warning(pair):
    class Mine(hla.stops.StopRun):
        """Somebody's own, which may keep something for a row."""

    class Own(hla.Constant):
        def start(self, rows):
            return Mine(self)

    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    with pytest.warns(UserWarning, match=r"one text at a time here: Mine has no method take\(row, other\)") as seen:
        assert together(pair, prompts(), Own(3), max_rows=3) == expected
    assert len(seen) == 1


def test_refused_at_once(pair):
    mapping = BatchEncoding({"input_ids": [[5]], "attention_mask": [[1]]})
    for given, says in (
        ({"max_rows": 0}, "max_rows"), ({"seed": -1}, "seed"), ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"), ({"streamer": object()}, "streamer belongs to one call"),
        ({"max_length": 9}, "max_length belongs"),
        ({"attention_mask": torch.ones(1, 1)}, "attention_mask belongs"),
        ({"prompts": "text"}, "expected texts or lists"), ({"prompts": 3}, "prompts: expected texts or lists"),
        ({"prompts": mapping}, "prompts: .*got a mapping: pass its"),
    ):  # fmt: skip
        given = {"prompts": prompts(), "assistant_model": pair[1]} | given
        with pytest.raises((ValueError, TypeError), match=rf"^[^\n]*{says}[^\n]*$"):
            hla.generate_many(pair[0], **given)


def test_a_prompt_that_is_none_is_refused_by_its_number(pair):
    for prompt in ("text", [], [1.5], None, [[1, 2]], b"\x05\x06", [2**70]):
        with pytest.raises((ValueError, TypeError), match="^prompts: "):
            list(hla.generate_many(pair[0], [[5, 6], prompt], assistant_model=pair[1], **SETTINGS))
    with pytest.raises(ValueError, match="token 5000 is outside the target's vocabulary"):  # as of the first one
        list(hla.generate_many(pair[0], [[5, 6], [7, 5000]], assistant_model=pair[1], **SETTINGS))


def test_statistics_of_all_texts_together(pair):
    many = hla.generate_many(pair[0], prompts(), assistant_model=pair[1], lossy_policy=hla.Constant(3), max_rows=3, **SETTINGS)  # fmt: skip
    assert many.speculation is None
    found = list(many)
    stats = many.speculation
    assert stats.num_new_tokens == sum(len(result.token_ids) for result in found)
    for name in ("num_spec_steps", "num_accepted_draft_tokens"):
        assert getattr(stats, name) == sum(getattr(result.speculation, name) for result in found)
    assert stats.num_spec_tokens == 3 and stats.lossless and len(stats.rows) == 1
    assert stats.forwards["target"] < stats.num_spec_steps, "rows share the target's forwards"
    assert 0 < stats.seconds["target"] and stats.alone is not None and stats.alone.seconds > 0
    assert all(0 < result.seconds for result in found)


@pytest.mark.full
def test_statistics_take_no_more_memory_for_more_texts(pair, monkeypatch):
    monkeypatch.setattr(output, "LATEST", 5)
    many = hla.generate_many(pair[0], prompts() * 4, assistant_model=pair[1], max_rows=2, **SETTINGS)
    for _ in many:
        assert len(many._scheduler.clock.reads) <= 5 + 20
    assert len(many.speculation.rows) == 1 and not many.speculation.rows[0].token_sources


def test_numbers_decide_the_random_numbers(pair):
    """Processes that share prompts among them write what one writes."""
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 5}
    whole = together(pair, prompts(), hla.Constant(3), **settings)
    for share in (range(0, len(LENGTHS), 2), range(1, len(LENGTHS), 2)):
        given = SETTINGS | settings | {"lossy_policy": hla.Constant(3), "numbers": share}
        many = hla.generate_many(pair[0], [prompts()[n] for n in share], assistant_model=pair[1], **given)
        assert {result.index: result.token_ids for result in many} == {n: whole[n] for n in share}
    for numbers, line in (([3], "there are fewer than prompts"), (itertools.repeat(3), "3 is there twice")):
        with pytest.raises(ValueError, match=f"^numbers: {line}"):
            list(hla.generate_many(pair[0], prompts(), assistant_model=pair[1], numbers=numbers, **SETTINGS))


OF_CALLS = {"min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty", "begin_suppress_tokens", "bad_words_ids"}  # fmt: skip
SAME_FOR_ALL = (  # settings, and how often Transformers prepares four prompts
    ({}, 1), ({"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}, 1), ({"min_new_tokens": 10}, 5),
    ({"repetition_penalty": 1.7}, 1), ({"no_repeat_ngram_size": 2}, 1), ({"exponential_decay_length_penalty": (3, 1.5)}, 5),
    ({"begin_suppress_tokens": [20, 60]}, 5), ({"forced_eos_token_id": 7}, 5), ({"encoder_repetition_penalty": 1.4}, 5),
    ({"encoder_no_repeat_ngram_size": 1}, 5), ({"bad_words_ids": [[20, 20], [60]]}, 1), ({"max_time": 60.0}, 1),
    ({"drafter": "suffix", "assistant_model": None}, 1), ({"logits_processor": lambda ids: []}, 1),
    ({"logits_processor": lambda ids: [Counting()], "do_sample": True, "top_k": 5}, 5),
    ({"prefix_allowed_tokens_fn": lambda row, ids: range(5, 90)}, 5),
    ({"stopping_criteria": lambda ids: [FromItsPrompt(ids)]}, 1),
    ({"stopping_criteria": lambda ids: [MaxLengthCriteria(len(ids) + 4)]}, 1),
    ({"stopping_criteria": lambda ids: [EosTokenCriteria(ENDS[0])]}, 1),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_is_the_same_for_all_prompts_is_prepared_once(pair, monkeypatch, first):
    """And else by Transformers for each prompt; processors see each text alone."""
    calls, original, few = [], preparation.speculative_generate, prompts()[:4]
    plain = [alone(pair[0], prompt, **SETTINGS) for prompt in few]
    ours = SETTINGS | {"assistant_model": pair[1], "lossy_policy": hla.Constant(3), "seed": 3, "max_rows": 2}

    def found(given):
        calls.clear()
        return {result.index: result.token_ids for result in hla.generate_many(pair[0], few, **ours | given)}

    def counted(*args, **more):
        calls.append(1)
        return original(*args, **more)

    monkeypatch.setattr(preparation, "speculative_generate", counted)
    for given, count in SAME_FOR_ALL[first::3]:
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "serves_any_prompt", lambda processor: False)
            expected = found(given)
        assert found(given) == expected and len(calls) == count, given
        if given.keys() & OF_CALLS:
            texts = [alone(pair[0], prompt, **SETTINGS | given) for prompt in few]
            assert expected == dict(enumerate(texts)) and texts != plain, given


def test_what_was_prepared_once_holds_no_prompt_and_no_text(pair):
    many = hla.generate_many(pair[0], prompts(), assistant_model=pair[1], max_rows=3, **SETTINGS)
    list(many)
    template = many._scheduler.preparation.template
    assert not template.call.rows.ids.numel()
    for model in (template.call.target, *template.call.drafter.cached_models):
        assert model.lengths == [] and not any(layer.is_initialized for layer in model.cache.layers)


@pytest.mark.nightly
def test_prompts_are_read_ahead_together_and_no_more_of_them_than_there_is_room_for(pair, monkeypatch):
    """A forward reads several, also where places become free one by one."""
    held, read, step, original = [], [], scheduler.Scheduler.step, scheduler.with_prompts

    def look(self):
        found = step(self)
        block = self.block
        held.append([len(request.prompt) for request in self._ahead])
        for model in [] if block is None else block.call.models:
            for layer in model.cache.layers:
                longest = max(block.call.rows.lengths)
                assert layer.keys.shape[0] == len(block.call.rows.lengths) and layer.keys.shape[2] == longest - 1
        return found

    monkeypatch.setattr(scheduler.Scheduler, "step", look)

    def noted(call, parts):
        read.append([len(part.prompt) for part in parts])
        return original(call, parts)

    monkeypatch.setattr(scheduler, "with_prompts", noted)
    texts = prompts() * 4
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in texts]
    monkeypatch.setattr(scheduler, "AHEAD", 60)
    assert together(pair, texts, max_rows=5) == expected
    assert max(map(sum, held)) <= 60 and max(map(len, held)) >= 3
    assert sum(map(len, read)) == len(texts) and len(read) < len(texts) / 2
    assert all(len(widths) * max(widths) <= 60 for widths in read)
    held.clear(), read.clear()
    monkeypatch.setattr(scheduler, "AHEAD", 10_000)
    assert together(pair, texts, max_rows=5, max_tokens=90) == expected
    assert max(map(len, held)) <= 5


class FromItsPrompt(StoppingCriteria):
    """Keeps how long its prompt is, and ends the text after five tokens."""

    def __init__(self, ids):
        self.begins = len(ids)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] - self.begins >= 5])


def test_criteria_and_processors_made_for_each_prompt(pair):
    found = together(
        pair, prompts(), max_rows=3, stopping_criteria=lambda ids: [FromItsPrompt(ids)],
        logits_processor=lambda ids: [Counting()] if len(ids) % 2 else [],
    )  # fmt: skip
    counted = [alone(pair[0], prompt, **SETTINGS, logits_processor=[Counting()]) for prompt in prompts()]
    plain = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    assert found == [(counted if len(prompt) % 2 else plain)[n][:5] for n, prompt in enumerate(prompts())]
    assert together(pair, prompts(), max_rows=3, logits_processor=[Counting()]) == counted
