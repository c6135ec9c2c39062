"""Text of new tokens: decode(prompt + new) minus decode(prompt), of each kind of tokenizer, whole and as it grows."""

import itertools
import os
import random

import pytest
from support.tokenizers_by_kind import KINDS, SPECIAL, STOP, build_tokenizer, drawn, spelled

from hf_lossy_assist.server.detokenize import AnswerText, StopTexts
from hf_lossy_assist.text.detokenizer import Detokenizer, continuation, special_in, special_tokens


COUNT = 30  # continuations of each tokenizer
TOKENIZERS = [build_tokenizer(kind) for kind in sorted(KINDS)]


def difference(tokenizer, prompt, new):
    """By its definition; what the prompt's last bytes and the new ones make of one character is the new text's."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + new))
    return whole[len(os.path.commonprefix([before, whole])) :]


def continuations(count=COUNT):
    for tokenizer, seed in itertools.product(TOKENIZERS, range(count)):
        rng = random.Random(seed)
        prompt = drawn(tokenizer, rng, rng.choice((0, 4, 60, 300)))
        if seed % 5 == 0:  # as chat templates end
            prompt += rng.choices(sorted(tokenizer.added_tokens_decoder), k=rng.choice((1, 2, 40)))
        yield tokenizer, rng, prompt, drawn(tokenizer, rng, rng.choice((10, 60, 200)))


def streamed(tokenizer, prompt, new, stops, rng):
    text, count, out = AnswerText(tokenizer, StopTexts(tokenizer, stops), prompt), 0, []
    while count < len(new) and not text.stopped:
        count = min(count + rng.randint(1, 5), len(new))
        out.append(text.more(new[:count], last=count == len(new)))
    return "".join(out)


def test_streamed_is_whole_is_the_difference():
    for tokenizer, rng, prompt, new in continuations():
        want = difference(tokenizer, prompt, new)
        assert continuation(tokenizer, prompt, new) == want, (prompt, new)
        assert streamed(tokenizer, prompt, new, [], rng) == want, (prompt, new)


def test_stop_texts_with_spaces_at_either_end():
    """Any part of the text may be one, those that begin with its first space among them."""
    for tokenizer, rng, prompt, new in continuations():
        text = difference(tokenizer, prompt, new)
        begin = rng.choice((0, rng.randrange(len(text) + 1)))
        stops = [stop for stop in (text[begin : begin + rng.randint(1, 4)], " zzz ", "\n ") if stop]
        end = min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))
        assert AnswerText(tokenizer, StopTexts(tokenizer, stops), prompt).more(new, last=True) == text[:end]
        assert streamed(tokenizer, prompt, new, stops, rng) == text[:end], (prompt, new, stops)


@pytest.mark.full
def test_a_token_at_a_time_ends_where_the_text_first_has_a_stop_text():
    for tokenizer, rng, prompt, new in continuations():
        text, place = difference(tokenizer, prompt, new), rng.randint(0, 40)
        if not (stop := text[place : place + 2]):
            continue
        reading = AnswerText(tokenizer, StopTexts(tokenizer, [stop]), prompt)
        for count in range(1, len(new) + 1):
            want = stop in difference(tokenizer, prompt, new[:count])
            assert reading.stops_at(new[:count]) == want, (prompt, new, stop)


class Counting:
    """A tokenizer that counts the tokens it decodes at once."""

    def __init__(self, tokenizer):
        self.tokenizer, self.most = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **settings):
        self.most = max(self.most, len(ids))
        return self.tokenizer.decode(ids, **settings)


def test_prompts_of_any_length_are_decoded_in_their_last_part():
    """A long prompt costs what a short one does; a text that is another than before is read anew."""
    for tokenizer in TOKENIZERS:
        ids = tokenizer("The capital of France is")["input_ids"]
        counting = Counting(tokenizer)
        reading, new = Detokenizer(counting, ids * 300), ids * 40
        for count in range(1, len(new) + 1):
            reading.decode(new[:count])
        for text in (new, ids[1:] * 30, ids * 2):
            assert reading.decode(text) == difference(tokenizer, ids * 300, text)
        assert counting.most < 150


def test_a_special_token_is_a_stop_text_like_another():
    """By itself, and with text at either side of it."""
    for tokenizer, stop in itertools.product(TOKENIZERS, (STOP, SPECIAL["eos_token"])):
        word = tokenizer("Paris is")["input_ids"]
        new = [*word, tokenizer.convert_tokens_to_ids(stop), *word]
        prompt = tokenizer("The capital of France is")["input_ids"]
        first, whole = difference(tokenizer, prompt, word), difference(tokenizer, prompt, new)
        for stops, want in (
            ([stop], first), (["zzz", stop], first), ([f"is{stop}"], first.removesuffix("is")),
            ([f"{stop}zzz"], whole), (["zzz"], whole),
        ):  # fmt: skip
            for seed in range(4):
                assert streamed(tokenizer, prompt, new, stops, random.Random(seed)) == want, stops
            assert AnswerText(tokenizer, StopTexts(tokenizer, stops), prompt).more(new, last=True) == want
        assert special_in(tokenizer, [f"is{stop}", "zzz"]) == {tokenizer.convert_tokens_to_ids(stop): stop}
        assert special_tokens(tokenizer).keys() == set(tokenizer.added_tokens_decoder)


def test_bytes_that_come_to_no_character_take_no_others_back():
    """Byte fallback reads a run of bytes as one: of one that may still go wrong, nothing is shown."""
    tokenizer = build_tokenizer("llama2")
    new = spelled(tokenizer, "ab €\n") + spelled(tokenizer, "€")[:1]
    text = AnswerText(tokenizer, StopTexts(tokenizer), spelled(tokenizer, "ab"))
    shown = [text.more(new[:count], last=count == len(new)) for count in range(1, len(new) + 1)]
    assert "".join(shown) == difference(tokenizer, spelled(tokenizer, "ab"), new) == "ab " + "�" * 5


@pytest.mark.parametrize("kind", ["llama2", "wordpiece"])
def test_stop_texts_of_many_special_tokens_are_searched_as_they_are(kind):
    """Each special token of them may be written as a token or letter by letter, any of them apart from the others."""
    tokenizer = build_tokenizer(kind)
    special = [f"<|{n:02}|>" for n in range(24)]
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    stop, word = "".join(special), tokenizer("Paris is", add_special_tokens=False)["input_ids"]
    tokens = tokenizer.convert_tokens_to_ids(special)
    assert StopTexts(tokenizer, [stop, "|>", "0"]).texts == [stop, "|>", "0"]  # there were 2^24 variants
    before = difference(tokenizer, word, word)
    for seed in range(4):
        rng = random.Random(seed)
        assert streamed(tokenizer, word, [*word, *tokens, *word], [stop, "zzz"], rng) == before
        cut = difference(tokenizer, word, [*word, *word])
        assert streamed(tokenizer, word, [*word, *tokens[1:], *word], [stop, "|>", "0", "<|"], rng) == cut
    if kind == "wordpiece":  # it has no letters
        return
    mixed = [each for n, token in enumerate(tokens) for each in ([token] if n % 3 else spelled(tokenizer, special[n]))]
    assert streamed(tokenizer, word, [*word, *mixed, *word], [stop], random.Random(5)) == before
    assert streamed(tokenizer, word, [*word, *mixed], [f"{stop}x"], random.Random(5)).startswith(f"{before}<|00|>")


def test_a_setting_without_effect_holds_no_text_back():
    """Llama 3's file says that spaces are cleaned up, and Transformers ignores that for BPE."""
    for kind, lag in (("byte_level", 0), ("llama2", 0), ("wordpiece", 32)):
        tokenizer = build_tokenizer(kind)
        tokenizer.clean_up_tokenization_spaces = True
        word = tokenizer("Paris is big , and big", add_special_tokens=False)["input_ids"]
        text = AnswerText(tokenizer, StopTexts(tokenizer), word)
        assert len(difference(tokenizer, word, word * 4)) - len(text.more(word * 4)) == lag, kind
