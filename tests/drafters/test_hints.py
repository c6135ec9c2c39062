"""Documents that will be copied, and finished texts that are searched: the text is the target's with each, and far fewer forwards write it."""

import numpy as np
import pytest
import torch
from support import eagle, small, tiny
from support.many import SETTINGS, alone, enabled_pair, prompts, together

import hf_lossy_assist as hla
from hf_lossy_assist.batch.suffix_memory import Hints, IndexedText, SuffixMemory
from hf_lossy_assist.drafters.suffix import SuffixRun


@pytest.fixture(scope="module")
def pair():
    return enabled_pair()


def written(target, inputs, new=24):
    """The text that the target writes behind each row, and the settings for it."""
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    return target.generate(**inputs, **settings), settings


@pytest.mark.parametrize(
    "kind", ["nothing", "auto", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("model", "eagle", "lookup"))]
)
def test_a_document_is_drafted_from_its_first_token_on(kind):
    target = hla.enable(tiny.shared("llama"))
    inputs = small.ragged()
    expected, settings = written(target, inputs)
    more = {
        "nothing": dict, "model": lambda: {"assistant_model": tiny.draft_of(target, "rarely")}, "eagle": lambda: {"assistant_model": eagle.drafter(target)},
        "auto": lambda: {"drafter": "auto"}, "lookup": lambda: {"prompt_lookup_num_tokens": 8},
    }[kind]()  # fmt: skip
    hints = [row.tolist() for row in expected[:, inputs["input_ids"].shape[1] :]]
    given = settings | more | {"lossy_policy": hla.Constant(8), "return_dict_in_generate": True}
    out = target.generate(**inputs, hints=hints, **given)
    assert out.sequences.equal(expected)
    if kind != "auto":  # which may look at other drafters first
        assert out.speculation.forwards["target"] <= 7, "but for the row whose document is not the first"
    row = {name: value[:1] for name, value in inputs.items()}
    first = target.generate(**row, hints=hints[0], **given)
    assert first.sequences.equal(expected[:1]) and (kind == "auto" or first.speculation.forwards["target"] <= 5)


def test_texts_are_tokenized_and_what_is_no_document_is_refused(pair):
    tokenizer, inputs = small.tokenizer(), small.one()
    expected, settings = written(pair[0], inputs)
    text = tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :])
    given = settings | {"lossy_policy": hla.Constant(8), "return_dict_in_generate": True}
    ids = [np.int64(token) for token in tokenizer(text)["input_ids"]]
    for hints in (text, [text], ("w1 w2", text), ids, [ids], np.array(ids, dtype=np.int32)):
        out = pair[0].generate(**inputs, hints=hints, tokenizer=tokenizer, **given)
        assert out.sequences.equal(expected)
    wrong = {
        "hints: a text needs tokenizer=": "w1", "hints: expected a text, the token ids": [1.5],
        "or a list of these, got": {"a": 1}, "hints: -100 is no token id: ": [[5, 6, 7], [-100, -100, 8]],
        "hints: expected token ids below 97, the target's, got 97: use its tokenizer": [[5, 97]],
        "the token ids of one, or a list of these, got \\[True\\]": [[True]],
    }  # fmt: skip
    for says, hints in wrong.items():
        with pytest.raises((TypeError, ValueError), match=rf"^[^\n]*{says}[^\n]*$"):
            pair[0].generate(**inputs, hints=hints, **given)
    with pytest.raises(ValueError, match="not used by the model: ..hints"):
        pair[0].generate(**inputs, hints=[1, 2], **settings)


@pytest.mark.parametrize("drafter", ["suffix", pytest.param("composite", marks=pytest.mark.full)])
def test_prompts_with_documents_of_their_own(pair, drafter):
    draft = None if drafter == "suffix" else pair[1]
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    given = [{"prompt": prompt, "hints": [text]} for prompt, text in zip(prompts(), expected, strict=True)]
    assert together((pair[0], draft), given, hla.Constant(4), drafter=drafter, max_rows=3) == expected
    more = {"drafter": drafter, "max_rows": 3}
    assert together((pair[0], draft), prompts(), hla.Constant(4), hints=expected, **more) == expected
    with pytest.raises(ValueError, match=r"^prompts: number 0: hints are for a drafter that searches texts[^\n]*$"):
        together(pair, given)


def test_finished_texts_are_searched_by_later_prompts_unless_that_could_change_them(pair):
    """One prompt six times, one row at a time: from the second on its text is known."""
    more = {"drafter": "suffix", "lossy_policy": hla.Constant(8), "max_new_tokens": 24, "eos_token_id": None}

    def found(rows, **settings):
        results = hla.generate_many(pair[0], [prompts()[0]] * 6, max_rows=rows, **more, **settings)
        return sorted(results, key=lambda result: result.index)

    results = found(1, do_sample=False)
    counts = [result.speculation.total().num_spec_steps for result in results]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert max(counts[1:]) <= 5 and counts[0] > 8
    sampled = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 3}
    texts = [[result.token_ids for result in found(rows, **sampled)] for rows in (1, 4)]
    assert texts[0] == texts[1]


def test_a_memory_finds_what_a_search_of_each_text_finds():
    """The latest text with the longest match, whatever was dropped before."""
    generator = torch.Generator().manual_seed(0)
    memory, texts = SuffixMemory(max_tokens=120), []
    for _ in range(12):
        text = IndexedText()
        text.extend(torch.randint(0, 3, (30,), generator=generator).tolist())
        memory.add(text)
        texts.append(text)
    assert memory.tokens == 120
    assert [tokens for tokens, _ in memory.texts.values()] == [text.tokens for text in texts[-4:]]
    for _ in range(50):
        new = torch.randint(0, 3, (12,), generator=generator).tolist()
        found = [(*text.match(new), text.tokens) for text in reversed(texts[-4:])]
        assert memory.match(new, range(2, 9)) == max(found, key=lambda match: match[0])
    memory.clear()
    assert memory.match([1, 2, 1], range(2, 9)) == (0, 0, []) and not memory._found


def test_matches_at_the_beginning_by_hand():
    run = SuffixRun(hla.SuffixDrafter(), False, set(), 100)
    hints = Hints([[7, 8, 9, 10, 11], [20, 21, 22]])

    def draft(prompt, new, limit=9):
        text = IndexedText()
        text.extend([*prompt, *new])
        return run._look_up(text, limit, (hints,), len(prompt))[1]

    assert draft([1, 2, 3], []) == [7, 8, 9, 10], "twice as many as must match"
    assert draft([1, 2, 3], [7]) == [8, 9, 10, 11]
    assert draft([1, 2, 3], [20]) == [21, 22]
    assert draft([1, 2, 3], [5]) == []
    assert draft([1, 2, 3], [5, 6, 8, 9, 10]) == [11]
