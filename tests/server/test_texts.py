"""A streamed text: its pieces make the whole, and nothing of a stop text is ever shown."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_lossy_assist.server.detokenize import AnswerText, StopTexts, TextChanged
from hf_lossy_assist.server.routes import EventStream


@pytest.fixture(scope="module")
def tokenizer():
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def test_a_character_that_is_never_whole_is_shown_in_the_end(tokenizer):
    ids = tokenizer("5 €")["input_ids"][:-1]
    answer = AnswerText(tokenizer, StopTexts(tokenizer))
    assert answer.more(ids) == "" and answer.more(ids, last=True) == "5 �"


def test_a_text_that_is_written_again_is_not_shown_twice(tokenizer):
    """Memory ran out, and it was begun anew."""
    ids, answer = tokenizer("one two three")["input_ids"], AnswerText(tokenizer, StopTexts(tokenizer))
    shown = [answer.more(ids[:count]) for count in (3, 7, 0, 3, 5, 9)] + [answer.more(ids, last=True)]
    assert "".join(shown) == "one two three"
    answer = AnswerText(tokenizer, StopTexts(tokenizer))
    answer.more(ids[:7])
    with pytest.raises(TextChanged):
        answer.more([*ids[:5], ids[0]])


def test_a_stream_whose_client_left_before_its_first_byte_is_ended():
    ended = []

    async def pieces():
        yield "never sent"

    async def send(message):
        raise OSError("gone")

    async def receive():
        await asyncio.sleep(60)

    stream = EventStream(pieces(), lambda: ended.append(True))
    with pytest.raises(ClientDisconnect):
        asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send))
    assert ended == [True]
