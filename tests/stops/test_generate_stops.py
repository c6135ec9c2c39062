"""Every way to end a text works at every token, also in the middle of an accepted block and in ragged batches: several EOS
ids, stop strings, time, length (a caller's criteria: batch/test_criteria.py); and a streamer gets each token once, in order.

The draft is the target itself and γ = 20 in most tests, so that nearly every end falls inside a block.
"""

import pytest
import torch
from support.small import PAD, llama, near, one, ragged, tokenizer
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla


PROMPTS = {"one": one(), "ragged": ragged()}
NEW = 40
# An EOS that no greedy text here holds: Transformers pads rows only with one.
NEVER = {"eos_token_id": 96, "pad_token_id": PAD}
CALLS = (("one", "itself"), ("ragged", "near"))


@pytest.fixture(scope="module")
def target():
    return hla.enable(llama())


@pytest.fixture(scope="module")
def drafts():
    return {"itself": llama(), "near": near(llama())}


def strict(target, draft, prompts, **settings):
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_assistant_tokens": 20} | settings
    return target.generate(**prompts, **settings, assistant_model=draft, lossy_policy="strict")


def stock(target, prompts, **settings):
    return target.generate(**prompts, **({"max_new_tokens": NEW, "do_sample": False} | settings))


def lengths(sequences, width=9):
    """How many new tokens each row has before its padding."""
    return [
        len(row) - next((i for i, t in enumerate(reversed(row)) if t != PAD), 0)
        for row in sequences[:, width:].tolist()
    ]


def ends_at(places, target, prompts):
    """Token ids that end row b of the greedy text no later than at new token `places[b]`."""
    text = stock(target, prompts)[:, 9:]
    return [int(text[row, place - 1]) for row, place in enumerate(places[: len(text)])]


def test_several_eos_ids_end_rows_apart(target, drafts):
    for places in ((1, 2, 1), (3, 17, 30), (40, 40, 39)):
        for shape, draft in CALLS:
            settings = {"eos_token_id": ends_at(places, target, PROMPTS[shape]), "pad_token_id": PAD}
            expected = stock(target, PROMPTS[shape], **settings)
            settings |= {"return_dict_in_generate": True, "output_scores": True}
            ours = strict(target, drafts[draft], PROMPTS[shape], **settings)
            assert torch.equal(expected, ours.sequences)
            assert [len(row.token_sources) for row in ours.speculation.rows] == lengths(expected)
            assert len(ours.scores) == expected.shape[1] - 9


def test_finished_rows_are_filled_with_the_pad_id_given_and_without_one_with_the_first_eos_id(target, drafts):
    eos = ends_at((3, 17, 30), target, PROMPTS["ragged"])
    settings = {"eos_token_id": eos, "pad_token_id": 96}
    expected = stock(target, PROMPTS["ragged"], **settings)
    ours = strict(target, drafts["near"], PROMPTS["ragged"], **settings)
    assert torch.equal(expected, ours)
    assert (ours == 96).any(dim=1).sum() == 2, "two rows end early, so two are padded"
    bare = llama(pad_token_id=None)
    expected = stock(bare, PROMPTS["ragged"], eos_token_id=eos)
    assert torch.equal(expected, strict(hla.enable(bare), drafts["near"], PROMPTS["ragged"], eos_token_id=eos))


def test_stop_strings_end_each_row_where_they_are_complete(target, drafts):
    """The strings are pairs of words, taken from the middle of each row's own greedy text; one in the config is honoured, too."""
    tok = tokenizer()
    for shape, draft in CALLS:
        text = stock(target, PROMPTS[shape])[:, 9:]
        strings = [tok.decode(row[6 + 5 * b : 8 + 5 * b]) for b, row in enumerate(text)]
        expected = stock(target, PROMPTS[shape], stop_strings=strings, tokenizer=tok, **NEVER)
        ours = strict(target, drafts[draft], PROMPTS[shape], stop_strings=strings, tokenizer=tok, **NEVER)
        assert torch.equal(expected, ours) and expected.shape[1] < 9 + NEW
    with pytest.raises(ValueError, match="^[^\n]*stop_strings[^\n]*tokenizer[^\n]*$"):
        strict(target, drafts["near"], PROMPTS["one"], stop_strings=["w3"])
    target = hla.enable(llama())
    target.generation_config.stop_strings = tok.decode(stock(target, PROMPTS["one"])[0, 15:17])
    expected = stock(target, PROMPTS["one"], tokenizer=tok)
    assert torch.equal(expected, strict(target, drafts["itself"], PROMPTS["one"], tokenizer=tok))
    assert expected.shape[1] <= 17


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.calls.append(value.tolist())

    def end(self):
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_each_token_in_order(target, drafts):
    for settings in ({}, {"eos_token_id": ends_at((17,), target, PROMPTS["one"]), "pad_token_id": PAD}):
        plain, drafted = Recorder(), Recorder()
        stock(target, PROMPTS["one"], streamer=plain, **settings)
        out = strict(target, drafts["near"], PROMPTS["one"], streamer=drafted, **settings)
        assert drafted.calls == plain.calls
        assert drafted.calls[0] == PROMPTS["one"]["input_ids"].tolist()
        assert [t for (t,) in drafted.calls[1:]] == out[0, 9:].tolist()
        assert drafted.ended == plain.ended == 1
    tok = tokenizer()
    streamer = TextIteratorStreamer(tok, skip_prompt=True, timeout=10)
    out = strict(target, drafts["near"], PROMPTS["one"], streamer=streamer)
    assert "".join(streamer) == tok.decode(out[0, 9:])


def test_a_streamer_with_several_rows_is_refused_in_one_line(target, drafts):
    for prompts, settings in ((PROMPTS["ragged"], {}), (one(), {"num_return_sequences": 2, "do_sample": True})):
        with pytest.raises(ValueError, match="^[^\n]*streamer[^\n]*$"):
            strict(target, drafts["near"], prompts, streamer=Recorder(), **settings)


def test_a_text_ends_exactly_at_its_length_whatever_the_draft_length(target, drafts):
    for new in (1, 2, 20, 21, 22):
        expected = stock(target, PROMPTS["ragged"], max_new_tokens=new)
        ours = strict(target, drafts["itself"], PROMPTS["ragged"], max_new_tokens=new, return_dict_in_generate=True)
        assert torch.equal(expected, ours.sequences)
        assert all(row.num_new_tokens == new == len(row.token_sources) for row in ours.speculation.rows)
        drafted = ours.speculation.total().num_draft_tokens
        assert drafted <= new * len(expected), "no more is drafted than there is room for"
