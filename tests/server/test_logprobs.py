"""Log-probabilities of answers: the target's, before temperature and top-p, of the tokens that are shown."""

import random

import openai
import pytest
import torch
from support import small
from support.serving import serving
from support.tokenizers_by_kind import KINDS, STOP, build_tokenizer, drawn, spelled

import hf_lossy_assist as hla
from hf_lossy_assist.engine.call import TokenLogprobs
from hf_lossy_assist.server.detokenize import LEAST, AnswerLogprobs, AnswerText, StopTexts, TokenTexts


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|im_end|>"
PROMPT = "The capital of France is"
SETTINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.5, "top_p": 0.9, "seed": 3},
    "lossy": {"temperature": 0, "extra_body": {"lossy_policy": "top_k:k=3"}},
}


@pytest.fixture(scope="module")
def models():
    tokenizer = build_tokenizer("byte_level")
    tokenizer.chat_template = CHAT
    target = small.louder(small.llama(vocab=len(tokenizer)).float(), 2.0)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    hla.enable(target)
    return target, small.near(target, 0.1), tokenizer


@pytest.fixture(scope="module")
def running(models):
    with serving(models, ("strict", "top_k:k=3")) as service:
        yield service


def plain(models, prompt, ids):
    """log p at the place of each of `ids`, by one forward of the target over prompt and text."""
    with torch.no_grad():
        logits = models[0](torch.tensor([prompt + ids])).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(dim=-1)


def find_ids(models, entries):
    """Token ids by their texts and bytes, of which no two tokens of this vocabulary are alike."""
    texts, tokenizer = TokenTexts(models[2]), models[2]
    known = {(text, None if data is None else tuple(data)): token for token in range(len(tokenizer)) for text, data in [texts.find(token)]}  # fmt: skip
    return [known[entry.token, None if entry.bytes is None else tuple(entry.bytes)] for entry in entries]


def check(models, prompt, content, top):
    ids = find_ids(models, content)
    expected = plain(models, prompt, ids)
    assert torch.tensor([entry.logprob for entry in content]) == pytest.approx(
        expected.gather(1, torch.tensor(ids)[:, None])[:, 0], abs=1e-4
    )
    best = expected.topk(top)
    for entry, values, tokens in zip(content, best.values, best.indices.tolist(), strict=True):
        assert torch.tensor([other.logprob for other in entry.top_logprobs]) == pytest.approx(values, abs=1e-4)
        assert find_ids(models, entry.top_logprobs) == tokens


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_chat_has_those_of_a_plain_forward(models, running, name):
    messages = [{"role": "user", "content": PROMPT}]
    given = {"model": "demo", "messages": messages, "max_tokens": 24, "logprobs": True, "top_logprobs": 4}
    create = running.client().chat.completions.create
    whole = create(**given | SETTINGS[name]).choices[0]
    assert len(whole.logprobs.content) == 24  # this text has no end
    check(models, models[2](PROMPT + "<|im_end|>")["input_ids"], whole.logprobs.content, 4)
    joined = b"".join(bytes(entry.bytes or []) for entry in whole.logprobs.content)
    assert joined.decode(errors="replace") == whole.message.content
    parts = [chunk.choices[0] for chunk in create(**given | SETTINGS[name], stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in whole.logprobs.content], abs=1e-5
    )


def test_a_completion_has_them_by_token(models, running, monkeypatch):
    given = {"model": "demo", "prompt": [PROMPT, "Paris"], "max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 2}
    create = running.client().completions.create
    out = create(**given, logprobs=3)
    choices, tokenizer = out.choices, models[2]
    assert out.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in given["prompt"]), "once each"
    assert [choice.index for choice in choices] == [0, 1, 2, 3] and len({choice.text for choice in choices}) == 4
    for choice, prompt in zip(choices, [PROMPT, PROMPT, "Paris", "Paris"], strict=True):
        found = choice.logprobs
        ends = [*found.text_offset[1:], len(choice.text)]
        for token, begin, end in zip(found.tokens, found.text_offset, ends, strict=True):
            assert choice.text[begin:end] == token or token.startswith("bytes:") or token == STOP
        assert all(3 <= len(top) <= 4 and top[token] == logprob for token, top, logprob in zip(found.tokens, found.top_logprobs, found.token_logprobs, strict=True))  # fmt: skip
        [alone] = create(**given | {"prompt": prompt, "n": 1}, logprobs=0).choices
        if choice.index % 2 == 0:  # a prompt's first text is that of a request for one
            assert alone.text == choice.text and [*map(len, alone.logprobs.top_logprobs)] == [1] * len(found.tokens)
            assert alone.logprobs.token_logprobs == pytest.approx(found.token_logprobs, abs=1e-4)
    assert create(**given).choices[0].logprobs is None
    monkeypatch.setattr("hf_lossy_assist.server.requests.MOST_LOGPROBS", 2**15)
    many = {"logprobs": True, "top_logprobs": 20, "n": 64, "max_tokens": 64}
    with pytest.raises(openai.BadRequestError, match="are more than 32768"):
        messages = [{"role": "user", "content": PROMPT}]
        running.client().chat.completions.create(model="demo", messages=messages, **many)


@pytest.mark.full
def test_a_stop_text_cuts_them_with_the_text(models, running):
    create = running.client().completions.create
    given = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 0}
    whole = create(**given).choices[0]
    for begin in range(2, len(whole.text) - 3, 3):
        stop = whole.text[begin : begin + 3]
        cut = create(**given, stop=[stop]).choices[0]
        assert cut.text == whole.text[: whole.text.index(stop)]
        shown = sum(1 for offset in whole.logprobs.text_offset if offset < len(cut.text))
        assert cut.logprobs.tokens == whole.logprobs.tokens[:shown]
        parts = [chunk.choices[0] for chunk in create(**given, stop=[stop], stream=True)]
        assert "".join(part.text for part in parts) == cut.text
        found = [part.logprobs for part in parts if part.logprobs]
        assert [token for logprobs in found for token in logprobs.tokens] == cut.logprobs.tokens
        assert [place for logprobs in found for place in logprobs.text_offset] == cut.logprobs.text_offset


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tokens_as_they_are_shown_spell_the_text(kind):
    """Tokens of any kind, in pieces of any size, characters of several tokens and special tokens among them."""
    tokenizer, rng = build_tokenizer(kind), random.Random(kind)
    texts, prompt = TokenTexts(tokenizer), tokenizer("The capital is", add_special_tokens=False)["input_ids"]
    for _ in range(25):
        ids = drawn(tokenizer, rng)
        logprobs = [TokenLogprobs(-1.0, [(token, float("-inf"))]) for token in ids]
        stops = rng.choice([[], ["zzz", STOP], [" a"], ["\n", "é"]])
        answers = [AnswerText(tokenizer, StopTexts(tokenizer, stops), prompt) for _ in range(2)]
        whole, streamed = (AnswerLogprobs(answer, prompt, texts, chat=True) for answer in answers)
        text = answers[0].more(ids, last=True)
        content = (whole.more(ids, logprobs, last=True) or whole.format([], [], []))["content"]
        assert [entry["token"] for entry in content] == [texts.find(token)[0] for token in ids[: len(content)]]
        assert all(entry["top_logprobs"][0]["logprob"] == LEAST for entry in content)
        joined = b"".join(bytes(entry["bytes"] or []) for entry in content).decode(errors="replace")
        if "cleaned" in kind:  # spaces are missing in the text, and no token
            assert (
                answers[0].stopped
                or not text
                or len(content) >= len([token for token in ids if token not in texts.special])
            )
        elif "\ufffd" not in text:  # decoders differ in how many there are of them
            assert joined.startswith(text) if answers[0].stopped else joined == text
        pieces, shown, count = [], "", 0
        while count < len(ids) and not answers[1].stopped:  # behind a stop text no token comes
            count += rng.randint(1, 4)
            shown += answers[1].more(ids[:count])
            pieces += (streamed.more(ids[:count], logprobs) or streamed.format([], [], []))["content"]
        shown += answers[1].more(ids[:count], last=True)
        pieces += (streamed.more(ids[:count], logprobs, last=True) or streamed.format([], [], []))["content"]
        assert shown == text and pieces == content


def test_the_bytes_of_tokens_that_are_no_characters():
    for kind in ("byte_level", "llama2"):
        tokenizer = build_tokenizer(kind)
        texts = TokenTexts(tokenizer)
        [first, *_, last] = spelled(tokenizer, "€")
        assert texts.find(first) == ("bytes:\\xe2", [0xE2]) and texts.find(last) == ("bytes:\\xac", [0xAC])
        assert texts.find(tokenizer.eos_token_id) == ("</s>", None)
        assert texts.find(tokenizer(" Paris", add_special_tokens=False)["input_ids"][-1])[0] in (" Paris", "Paris")
    tokenizer = build_tokenizer("wordpiece_cleaned")
    prompt, ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("The", "is big , do n ' t do n ' t and do n ' t")
    )
    for step in (1, 2, 5, 40):
        answer, logprobs = AnswerText(tokenizer, StopTexts(tokenizer), prompt), [TokenLogprobs(-1.0, [])] * len(ids)
        shown, texts = AnswerLogprobs(answer, prompt, TokenTexts(tokenizer), chat=False), ""
        tokens, offsets = [], []
        for count in [*range(step, len(ids), step), len(ids)]:
            texts += answer.more(ids[:count], last=count == len(ids))
            found = shown.more(ids[:count], logprobs, last=count == len(ids)) or shown.format([], [], [])
            tokens += found["tokens"]
            offsets += found["text_offset"]
        assert texts == " is big, don't don't and don't" and len(tokens) == len(ids)
        assert offsets == sorted(offsets) and texts[offsets[-4] :] == " don't" and texts[offsets[0] :] == texts
