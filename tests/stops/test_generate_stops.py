"""Every way to end a text works at every token, also in the middle of an accepted block and in ragged batches: several EOS
ids, stop strings, criteria of one's own, time, length; and a streamer gets each token once, in order.

The draft is the target itself and γ = 20 in most tests, so that nearly every end falls inside a block.
"""

import time

import pytest
import torch
from support.small import PAD, VOCAB, llama, near, one, ragged, tokenizer, words
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla


PROMPTS = {"one": one(), "ragged": ragged()}
NEW = 40
NEVER = {
    "eos_token_id": 96,
    "pad_token_id": PAD,
}  # an EOS that no greedy text here holds: Transformers pads rows only with one


@pytest.fixture(scope="module")
def target():
    return hla.enable(llama())


@pytest.fixture(scope="module")
def drafts(target):
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


@pytest.mark.full(every=4)
@pytest.mark.parametrize("draft", ["itself", "near"])
@pytest.mark.parametrize("shape", PROMPTS)
@pytest.mark.parametrize("places", [(1, 2, 1), (3, 17, 30), (20, 5, 21), (40, 40, 39)], ids=str)
def test_several_eos_ids_end_rows_apart(target, drafts, draft, shape, places):
    eos = ends_at(places, target, PROMPTS[shape])
    settings = {"eos_token_id": eos, "pad_token_id": PAD}
    expected = stock(target, PROMPTS[shape], **settings)
    ours = strict(target, drafts[draft], PROMPTS[shape], **settings, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(expected, ours.sequences)
    assert [len(row.token_sources) for row in ours.speculation.rows] == lengths(expected)
    assert len(ours.scores) == expected.shape[1] - 9


def test_finished_rows_are_filled_with_the_pad_id_given(target, drafts):
    eos = ends_at((3, 17, 30), target, PROMPTS["ragged"])
    settings = {"eos_token_id": eos, "pad_token_id": 96}
    expected, ours = (
        stock(target, PROMPTS["ragged"], **settings),
        strict(target, drafts["near"], PROMPTS["ragged"], **settings),
    )
    assert torch.equal(expected, ours)
    assert (ours == 96).any(dim=1).sum() == 2, "two rows end early, so two are padded"


def test_without_a_pad_id_the_first_eos_id_is_used(target, drafts):
    eos = ends_at((3, 17, 30), target, PROMPTS["ragged"])
    bare = llama(pad_token_id=None)
    expected = stock(bare, PROMPTS["ragged"], eos_token_id=eos)
    assert torch.equal(expected, strict(hla.enable(bare), drafts["near"], PROMPTS["ragged"], eos_token_id=eos))


@pytest.mark.parametrize("draft", ["itself", "near"])
@pytest.mark.parametrize("shape", PROMPTS)
def test_stop_strings_end_each_row_where_they_are_complete(target, drafts, draft, shape):
    """The strings are pairs of words, taken from the middle of each row's own greedy text."""
    tok, text = tokenizer(), stock(target, PROMPTS[shape])[:, 9:]
    strings = [tok.decode(row[6 + 5 * b : 8 + 5 * b]) for b, row in enumerate(text)]
    expected = stock(target, PROMPTS[shape], stop_strings=strings, tokenizer=tok, **NEVER)
    ours = strict(target, drafts[draft], PROMPTS[shape], stop_strings=strings, tokenizer=tok, **NEVER)
    assert torch.equal(expected, ours)
    assert expected.shape[1] < 9 + NEW


def test_a_stop_string_in_the_generation_config_is_honoured(drafts):
    target, tok = hla.enable(llama()), tokenizer()
    target.generation_config.stop_strings = tok.decode(stock(target, PROMPTS["one"])[0, 15:17])
    expected = stock(target, PROMPTS["one"], tokenizer=tok)
    assert torch.equal(expected, strict(target, drafts["itself"], PROMPTS["one"], tokenizer=tok))
    assert expected.shape[1] <= 17


def test_stop_strings_without_a_tokenizer_are_refused_in_one_line(target, drafts):
    with pytest.raises(ValueError, match="^[^\n]*stop_strings[^\n]*tokenizer[^\n]*$"):
        strict(target, drafts["near"], PROMPTS["one"], stop_strings=["w3"])


class SumStop(StoppingCriteria):
    """Stops a row when the sum of its ids divides by 11; keeps every text it was asked about."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.extend({tuple(row) for row in input_ids.tolist()})  # a row's text stands in the place of every row
        return input_ids.sum(dim=1) % 11 == 0


@pytest.mark.parametrize("draft", ["itself", "near"])
@pytest.mark.parametrize("shape", PROMPTS)
def test_a_custom_criterion_is_called_at_every_token(target, drafts, draft, shape):
    plain, drafted = SumStop(), SumStop()
    expected = stock(target, PROMPTS[shape], stopping_criteria=StoppingCriteriaList([plain]), **NEVER)
    ours = strict(target, drafts[draft], PROMPTS[shape], stopping_criteria=StoppingCriteriaList([drafted]), **NEVER)
    assert torch.equal(expected, ours)
    for row, length in zip(expected.tolist(), lengths(expected), strict=True):
        assert length < NEW, "every row must end by the criterion for this to say anything"
        for end in range(10, 9 + length + 1):
            assert drafted.seen.count(tuple(row[:end])) == 1, "each prefix once, the last one included"
    assert set(drafted.seen) <= set(plain.seen)


def test_a_row_that_a_criterion_ended_is_written_on_without_an_eos(target, drafts):
    """There is no padding without an end token, so such a row goes on until the last row ends, as in `generate`."""
    stop = {"stopping_criteria": StoppingCriteriaList([SumStop()]), "pad_token_id": PAD}
    padded, written = stock(target, PROMPTS["ragged"], **stop | NEVER), stock(target, PROMPTS["ragged"], **stop)
    assert torch.equal(strict(target, drafts["near"], PROMPTS["ragged"], **stop), written)
    assert len(set(lengths(padded))) > 1


class ScoreStop(StoppingCriteria):
    """Stops where the two best tokens nearly tie: it needs the scores that the newest token was chosen by."""

    def __call__(self, input_ids, scores, **kwargs):
        last = scores[-1] if isinstance(scores, tuple) else scores
        best = last.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1] < 0.02


@pytest.mark.parametrize("draft", ["itself", "near"])
def test_a_criterion_sees_the_scores_of_the_token_before_it(target, drafts, draft):
    """Transformers hands criteria the scores of all steps if it keeps them; the last is that of the newest token."""
    settings = {"return_dict_in_generate": True, "output_scores": True}
    criteria = {"stopping_criteria": StoppingCriteriaList([ScoreStop()]), "pad_token_id": PAD}
    expected = stock(target, PROMPTS["one"], **settings, **criteria).sequences
    ours = strict(target, drafts[draft], PROMPTS["one"], **settings, **criteria).sequences
    assert torch.equal(expected, ours)
    assert 9 < expected.shape[1] < 9 + NEW


class Slow(StoppingCriteria):
    """Never stops; every token costs 20 ms."""

    def __call__(self, input_ids, scores, **kwargs):
        time.sleep(0.02)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.full(every=2)
@pytest.mark.parametrize("shape", PROMPTS)
def test_max_time_ends_all_rows(target, drafts, shape):
    """At 20 ms a token, 0.2 s is over long before 200 tokens are written, and what was written is the greedy text."""
    out = strict(
        target, drafts["near"], PROMPTS[shape], max_new_tokens=200, max_time=0.2, pad_token_id=PAD,
        stopping_criteria=StoppingCriteriaList([Slow()]), num_assistant_tokens=4,
    )  # fmt: skip
    assert 9 < out.shape[1] < 9 + 100
    expected = stock(target, PROMPTS[shape], max_new_tokens=200)
    for row, length in enumerate(lengths(out)):
        assert torch.equal(out[row, : 9 + length], expected[row, : 9 + length])


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.calls.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("draft", ["itself", "near"])
@pytest.mark.parametrize("eos", [False, True], ids=["full", "ended"])
def test_a_streamer_gets_the_prompt_and_each_token_in_order(target, drafts, draft, eos):
    settings = {"eos_token_id": ends_at((17,), target, PROMPTS["one"]), "pad_token_id": PAD} if eos else {}
    plain, drafted = Recorder(), Recorder()
    stock(target, PROMPTS["one"], streamer=plain, **settings)
    out = strict(target, drafts[draft], PROMPTS["one"], streamer=drafted, **settings)
    assert drafted.calls == plain.calls
    assert (
        drafted.calls[0] == PROMPTS["one"]["input_ids"].tolist()
        and [t for (t,) in drafted.calls[1:]] == out[0, 9:].tolist()
    )
    assert drafted.ended == plain.ended == 1


def test_a_text_streamer_gives_the_text(target, drafts):
    tok = tokenizer()
    streamer = TextIteratorStreamer(tok, skip_prompt=True, timeout=10)
    out = strict(target, drafts["near"], PROMPTS["one"], streamer=streamer)
    assert "".join(streamer) == tok.decode(out[0, 9:])


@pytest.mark.parametrize("settings", [{}, {"num_return_sequences": 2, "do_sample": True}], ids=["batch", "copies"])
def test_a_streamer_with_several_rows_is_refused_in_one_line(target, drafts, settings):
    prompts = PROMPTS["one"] if settings else PROMPTS["ragged"]
    with pytest.raises(ValueError, match="^[^\n]*streamer[^\n]*$"):
        strict(target, drafts["near"], prompts, streamer=Recorder(), **settings)


@pytest.mark.full(every=3)
@pytest.mark.parametrize("shape", PROMPTS)
@pytest.mark.parametrize("new", [1, 2, 3, 20, 21, 22])
def test_a_text_ends_exactly_at_its_length_whatever_the_draft_length(target, drafts, shape, new):
    expected = stock(target, PROMPTS[shape], max_new_tokens=new)
    ours = strict(target, drafts["itself"], PROMPTS[shape], max_new_tokens=new, return_dict_in_generate=True)
    assert torch.equal(expected, ours.sequences)
    assert all(row.num_new_tokens == new == len(row.token_sources) for row in ours.speculation.rows)
    assert ours.speculation.total().num_draft_tokens <= new * len(expected), (
        "no more is drafted than there is room for"
    )


def test_the_last_position_of_the_model_can_be_written():
    """A text as long as the model has positions: the block may not reach beyond them."""
    target = hla.enable(llama(max_position_embeddings=32))
    expected = stock(target, PROMPTS["ragged"], max_new_tokens=None, max_length=32)
    ours = strict(
        target, near(llama(max_position_embeddings=32)), PROMPTS["ragged"], max_new_tokens=None, max_length=32
    )
    assert torch.equal(expected, ours) and ours.shape[1] == 32


def test_the_words_of_the_tokenizer_are_the_models_ids():
    tok = tokenizer()
    assert len(tok) == VOCAB and tok("w0 w91 abcdef")["input_ids"] == [4, 95, 96] and len(words()) == VOCAB - 4
