"""Prompts with limits of their own: each text is what `generate` writes with them for its prompt alone."""

import itertools
import json
import time
import warnings

import numpy as np
import pytest
import torch
from support import heads, small, tiny
from support.many import SETTINGS, alone, enabled_pair, prompts, together
from transformers import LogitsProcessor, MaxTimeCriteria, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

import hf_lossy_assist as hla
from hf_lossy_assist.generation import preparation, scheduler


@pytest.fixture(scope="module")
def pair():
    return enabled_pair()


LIMITS = [
    {}, {"max_new_tokens": 3}, {"min_new_tokens": 9}, {"max_new_tokens": 20, "min_new_tokens": 9}, {"max_new_tokens": None}, {"min_new_tokens": 2}, {"seed": 4},
]  # fmt: skip


def test_each_text_has_its_limits(pair):
    texts = [{"prompt": prompt, **limits} for prompt, limits in zip(prompts(), LIMITS, strict=True)]
    known = [{k: v for k, v in limits.items() if v is not None and k != "seed"} for limits in LIMITS]
    for more in ({}, {"repetition_penalty": 1.4}, {"min_new_tokens": 3}):
        given = SETTINGS | more
        expected = [alone(pair[0], prompt, **given | limits) for prompt, limits in zip(prompts(), known, strict=True)]
        assert together(pair, texts, max_rows=1 if more == {} else 3, **more) == expected, more
        assert len(expected[1]) == 3 and len(expected[3]) >= 9
    assert together(pair, texts, max_rows=3, **more, logits_processor=lambda ids: []) == expected


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_heads_read_the_states_of_texts_with_several_shortest_lengths(pair):
    judge = hla.Judge(heads.make_head(weight=torch.arange(32) % 3 - 1.0), 0.5)
    limited = list(zip(prompts(), LIMITS[:4], strict=False))
    for policy in (hla.HeadStop(heads.linear(), 0.45, 4), hla.LossyPolicy(judge, hla.Constant(4))):
        given = SETTINGS | {"assistant_model": pair[1], "lossy_policy": policy}
        expected = [alone(pair[0], prompt, **given | limits) for prompt, limits in limited]
        texts = [{"prompt": prompt, **limits} for prompt, limits in limited]
        assert together(pair, texts, policy, max_rows=3) == expected


def test_stop_strings_of_one_text(pair):
    tokenizer = small.tokenizer()
    whole = [alone(pair[0], prompt, **SETTINGS | {"eos_token_id": None}) for prompt in prompts()]
    words = [tokenizer.decode(ids[4]) for ids in whole]
    general = tokenizer.decode(whole[0][2])
    given = SETTINGS | {"eos_token_id": None, "tokenizer": tokenizer}
    texts = [{"prompt": prompt} for prompt in prompts()]
    texts[1]["stop_strings"], texts[2]["stop_strings"] = words[1], [words[2], "nowhere"]
    for settings in ({}, {"stop_strings": [general]}):
        stops = [[general] if settings else None] * len(texts)
        stops[1], stops[2] = [words[1]], [words[2], "nowhere"]
        more = [{} if stop is None else {"stop_strings": stop} for stop in stops]
        expected = [alone(pair[0], prompt, **given | each) for prompt, each in zip(prompts(), more, strict=True)]
        assert together(pair, texts, max_rows=3, **given | settings) == expected
        assert min(map(len, expected)) < 12


def test_a_seed_is_of_one_text_whatever_its_number(pair):
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 5, "eos_token_id": None}
    prompt = prompts()[0]
    found = together(pair, [prompt, {"prompt": prompt, "seed": 8}, {"prompt": prompt, "seed": 8}, prompt], **settings)
    assert found[1] == found[2] and len({tuple(ids) for ids in found}) == 3
    assert found[0] == together(pair, [prompt], **settings)[0]
    # The call's first text has others.
    assert found[0] != together(pair, [{"prompt": prompt, "seed": 5}], **settings)[0]


class Push(LogitsProcessor):
    """Prefer a token that depends on the last one."""

    def __init__(self, more, by=6.0):
        self.more, self.by = more, by

    def __call__(self, input_ids, scores):
        return scores + self.by * (torch.arange(scores.shape[1]) == (input_ids[:, -1:] * 7 + self.more) % 97)


class Cap(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.clamp(max=3.0)


PENALTY = RepetitionPenaltyLogitsProcessor
BOTH = {
    "two classes": ([Push(5, 9.0)], [Cap()]), "two classes, turned": ([Cap()], [Push(5, 9.0)]), "one class": ([Push(1)], [Push(2)]),
    "one in place of a default": ([PENALTY(1.8)], [Push(2)]), "both in place of a default": ([PENALTY(1.8)], [PENALTY(3.0)]),
    "a warper": ([TopKLogitsWarper(40), Cap()], [Push(5, 9.0)]),
}  # fmt: skip


ALONE = {"min_new_tokens": 3, "max_tokens": 12}  # which are written one by one


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, ALONE], ids=str)
def test_processors_of_the_call_and_of_the_prompt_all_act(pair, settings):
    """In the order of `generate`, the call's first; where it has a default of one's class, that is replaced."""
    given = {"list": lambda processors: processors, "function": lambda processors: lambda ids: processors}
    forms, few = itertools.cycle(itertools.product(given, given)), prompts()[:3]
    plain = SETTINGS | {key: value for key, value in settings.items() if key != "max_tokens"}
    rows = list(BOTH.items())[: 3 if settings is ALONE else None]  # without a default that could be replaced
    for (name, (first, second)), (of_prompt, of_call) in zip(rows, forms, strict=False):
        expected = [alone(pair[0], prompt, **plain, logits_processor=[*first, *second]) for prompt in few]
        texts = [{"prompt": prompt, "logits_processor": given[of_prompt](second)} for prompt in few]
        found = together(pair, texts, logits_processor=given[of_call](first), max_rows=2, **settings)
        assert found == expected, (name, of_prompt, of_call)


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 12}], ids=["rows", "alone"])
def test_greedy_decoding_leaves_the_global_random_numbers(pair, settings):
    """Sampling draws its seed from them, once."""
    for sampling in (False, True):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        first = together(pair, prompts(), do_sample=sampling, **settings)
        after = torch.get_rng_state()
        assert torch.equal(before, after) == (not sampling)
        torch.manual_seed(3)
        torch.randint(1 << 62, (int(sampling),))
        assert torch.equal(after, torch.get_rng_state())
        torch.manual_seed(3)
        assert together(pair, prompts(), do_sample=sampling, **settings) == first


@pytest.mark.parametrize("rows", [1, 3])
def test_what_goes_wrong_names_the_prompt(pair, rows):
    """Its place among the rows says nothing to who passed many."""
    broken = prompts()[5]

    def makes(ids):
        return [lambda _, scores: scores * float("nan")] if ids == broken else []

    with pytest.raises(ValueError, match=r" in prompt 5, after 0 new tokens$"):
        together(pair, prompts(), max_rows=rows, logits_processor=makes)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_limits_cost_no_further_preparation(pair, monkeypatch):
    calls, original = [], preparation.speculative_generate
    monkeypatch.setattr(preparation, "speculative_generate", lambda *args, **more: (calls.append(1), original(*args, **more))[1])  # fmt: skip
    texts = [{"prompt": prompt, "max_new_tokens": 2 + n} for n, prompt in enumerate(prompts())]
    expected = [alone(pair[0], prompt, **SETTINGS | {"max_new_tokens": 2 + n}) for n, prompt in enumerate(prompts())]
    assert together(pair, texts, max_rows=3, max_new_tokens=12) == expected and len(calls) == 1
    texts = [{"prompt": prompt, "max_new_tokens": 6} if n % 2 else prompt for n, prompt in enumerate(prompts())]
    found = list(hla.generate_many(pair[0], texts, assistant_model=pair[1], do_sample=False))
    for result in found:  # a text without a number has Transformers' default
        assert result.token_ids == alone(pair[0], prompts()[result.index], do_sample=False, **{"max_new_tokens": 6} if result.index % 2 else {})  # fmt: skip


def test_prompts_are_arrays(pair):
    """Each by itself, in a mapping, of NumPy's numbers, or rows of a table."""
    expected = together(pair, prompts())
    for made in (np.array, lambda ids: np.array(ids, dtype=np.int32), torch.tensor, lambda ids: list(np.array(ids))):
        assert together(pair, [made(ids) for ids in prompts()]) == expected
    assert together(pair, [{"prompt": np.array(ids)} for ids in prompts()]) == expected
    limits = {"max_new_tokens": 3, "min_new_tokens": 2, "seed": 1}
    tables = [{"prompt": np.array(ids)} | {key: np.int64(value) for key, value in limits.items()} for ids in prompts()]
    assert together(pair, tables) == together(pair, [{"prompt": ids} | limits for ids in prompts()])
    assert together(pair, np.array([[5, 6, 7], [8, 9, 4]])) == together(pair, [[5, 6, 7], [8, 9, 4]])


def test_what_is_no_limit_is_refused_by_the_number_of_its_prompt(pair):
    number, ids = "^prompts: number 1: ", {"prompt": [5, 6]}
    text = "^prompts: expected a text or a list of token ids, got "
    for prompt, line in (
        (np.ones(3), rf"{text}\[1.0, 1.0, 1.0\] as number 1$"),
        (np.array(5), f"{text}5 as number 1$"),
        (torch.ones(3, dtype=torch.long, device="meta"), rf"{text}[^\n]* as number 1$"),
        ({"prompt": 7}, f"{text}7 as number 1$"),
        (ids | {"max_tokens": 3}, rf"{number}unknown key 'max_tokens'. Did you mean 'max_new_tokens'\?$"),
        ({"max_new_tokens": 3}, f'{number}the key "prompt" is missing'),
        (ids | {"max_new_tokens": 0}, f"{number}max_new_tokens: expected a whole number of at least 1, got 0$"),
        (ids | {"max_new_tokens": 2.0}, f"{number}max_new_tokens: expected a whole number"),
        (ids | {"min_new_tokens": True}, f"{number}min_new_tokens: expected a whole number"),
        (ids | {"seed": -1}, f"{number}seed: expected a whole number"),
        (ids | {"stop_strings": [3]}, rf"{number}stop_strings: expected a text or [^\n]*, got \[3\]$"),
        (ids | {"stop_strings": ["a", ""]}, f"{number}stop_strings: expected a text"),
    ):
        with pytest.raises((ValueError, TypeError), match=line):
            list(hla.generate_many(pair[0], [[5, 6], prompt], assistant_model=pair[1], **SETTINGS))
    given = SETTINGS | {"assistant_model": pair[1], "tokenizer": small.tokenizer()}
    with pytest.raises(ValueError, match=r"^prompts: the tokenizer cannot read the text 'w1 \\ud800', number 1: "):
        list(hla.generate_many(pair[0], ["w1", "w1 \ud800"], **given))


def test_the_time_of_a_text_begins_with_the_text(pair, monkeypatch):
    """And not while it waits for a place; a criterion that the caller began before ends all."""
    now, original = [0.0], scheduler.run_stages
    monkeypatch.setattr(time, "time", lambda: now[0])

    def a_second(*args):
        now[0] += 1
        original(*args)

    monkeypatch.setattr(scheduler, "run_stages", a_second)
    given = {"eos_token_id": None, "max_rows": 2}
    found = together(pair, prompts(), hla.Constant(1), max_time=3.5, **given)
    assert {len(ids) >= 4 for ids in found} == {True} and max(map(len, found)) <= 8
    made = together(pair, prompts(), hla.Constant(1), stopping_criteria=lambda ids: [MaxTimeCriteria(3.5)], **given)
    assert made == found
    begun = MaxTimeCriteria(3.5)
    now[0] += 1
    before = together(pair, prompts(), hla.Constant(1), stopping_criteria=[begun], **given)
    assert max(map(len, before)) <= 6 and len(before[-1]) <= 2


def test_a_file_of_prompts_has_the_same_keys(tmp_path):
    from hf_lossy_assist.tasks.prompts import read_texts

    def read(row):
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps(row), encoding="utf-8")
        return read_texts(file)[0]

    assert read({"question": "a", "answer": "b", "id": 3}) == ("a", "b", None)
    row = {"prompt": "a", "max_new_tokens": 3, "min_new_tokens": None, "stop_strings": "b", "seed": 0}
    assert read(row).limits == {"max_new_tokens": 3, "stop_strings": ["b"], "seed": 0}
    for wrong, line in (
        ({"max_new_token": 3}, "line 1: unknown key 'max_new_token'. Did you mean 'max_new_tokens'"),
        ({"max_new_tokens": 3, "id": 4}, "line 1: unknown key 'id'"),
        ({"max_new_tokens": "3"}, "line 1: max_new_tokens: expected a whole number of at least 1, got '3'"),
    ):
        with pytest.raises((ValueError, TypeError), match=line):
            read({"prompt": "a"} | wrong)


def test_a_text_that_fills_the_table_of_positions_ends_alone():
    """With a warning that names its prompt, and one for which there are no positions is empty; the others go on."""
    target = hla.enable(tiny.build("gpt2", n_positions=24))
    texts, settings = prompts((9, 24, 15, 25, 3)), SETTINGS | {"eos_token_id": tiny.NEVER_EMITTED}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = together((target, tiny.draft_of(target, "often")), texts, max_rows=2, **settings)
    for line in ("1 ends after 1 new", "2 ends after 10 new", "3 has 25 tokens, and the target 24 p"):
        line = f"prompt {line}"
        assert any(line in str(each.message) for each in seen), line
    fits = zip(texts, (12, 1, 10, 0, 12), strict=True)
    assert found == [alone(target, text, **settings | {"max_new_tokens": new}) if new else [] for text, new in fits]
