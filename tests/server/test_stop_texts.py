"""Texts and stop texts through the server, `generate_many` and the commands, with tokenizers whose decoders strip a first space."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from support.scripted import scripted
from support.serving import serving
from support.tokenizers_by_kind import STOP, build_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

import hf_lossy_assist as hla
from hf_lossy_assist.engine.call import TokenLogprobs
from hf_lossy_assist.evaluation.arms import make_arms
from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
from hf_lossy_assist.methods.autojudge.dataset import make_rows
from hf_lossy_assist.methods.autojudge.search import Mined, Mismatch
from hf_lossy_assist.server.detokenize import AnswerLogprobs, AnswerText, StopTexts, TextChanged, TokenTexts
from hf_lossy_assist.server.routes import EventStream
from hf_lossy_assist.tasks.load import ExactTask


PROMPT = "The capital of France is"
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|im_end|>"


class Setting:
    """A tokenizer, target and draft that continue `PROMPT` with " Paris and", a special token and " big"."""

    def __init__(self, kind):
        self.tokenizer = build_tokenizer(kind)
        self.tokenizer.chat_template = CHAT
        self.prompt = self.ids(PROMPT)
        whole = [*self.ids(f"{PROMPT} Paris and"), self.tokenizer.convert_tokens_to_ids(STOP), *self.ids("a big")[-1:]]
        self.new = [*whole[len(self.prompt) :], self.tokenizer.eos_token_id]
        self.target, self.draft = (scripted(self.tokenizer, self.prompt + self.new) for _ in range(2))

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def many(self, **settings):
        settings = {"max_new_tokens": 20, "tokenizer": self.tokenizer, "assistant_model": self.draft} | settings
        [result] = hla.generate_many(self.target, [PROMPT], **settings)
        return result


FULL = pytest.mark.full


@pytest.fixture(
    scope="module", params=["llama2", *(pytest.param(kind, marks=FULL) for kind in ("byte_level", "wordpiece"))]
)
def setting(request):
    """All kinds are in tests/models/test_detokenizer.py and test_logprobs.py."""
    return Setting(request.param)


TEXT = " Paris and big"
STOPS = {
    " Paris": "",
    "is ": " Par",
    "is P": None,  # half of it is the prompt's
    " and": " Paris",
    "and ": " Paris ",
    STOP: " Paris and",
    f"d{STOP}": " Paris an",
    "</s>": TEXT,
}


@FULL
def test_the_server_streamed_and_not(setting):
    assert setting.tokenizer.decode(setting.prompt + setting.new, skip_special_tokens=True) == PROMPT + TEXT
    with serving((setting.target, setting.draft, setting.tokenizer), ("strict",)) as running:
        client = running.client()
        common = {"model": "demo", "max_tokens": 20, "temperature": 0}
        behind = f"{PROMPT}{STOP}"  # as the chat template ends: one token more, so that the script goes on behind it
        for stop, want in (STOPS | {None: None}).items():
            want = TEXT if want is None else want
            given = common | ({} if stop is None else {"stop": [stop, "zzz"]})
            whole = client.completions.create(prompt=PROMPT, **given).choices[0]
            parts = [chunk.choices[0] for chunk in client.completions.create(prompt=PROMPT, stream=True, **given)]
            assert (whole.text, whole.finish_reason) == (want, "stop"), stop
            assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (want, "stop"), stop
        chat = common | {"messages": [{"role": "user", "content": PROMPT}]}
        ids = setting.ids(behind)
        want = setting.tokenizer.decode(ids + setting.new[1:], skip_special_tokens=True).removeprefix(PROMPT)
        parts = client.chat.completions.create(stream=True, **chat)
        assert client.chat.completions.create(**chat).choices[0].message.content == want == " and big"
        assert "".join(part.choices[0].delta.content or "" for part in parts) == want
        for stop, want in ((STOP, " and"), (" and", "")):
            assert client.chat.completions.create(stop=stop, **chat).choices[0].message.content == want
            parts = client.chat.completions.create(stop=[stop], stream=True, **chat)
            assert "".join(part.choices[0].delta.content or "" for part in parts) == want
        # With the last token that there is room for.
        short = common | {"max_tokens": 3, "prompt": PROMPT}
        assert client.completions.create(stop=[STOP], **short).choices[0].finish_reason == "stop"
        assert client.completions.create(**short).choices[0].finish_reason == "length"


def test_generate_many(setting):
    result = setting.many()
    assert result.text == TEXT
    mined = Mined(0, PROMPT, setting.prompt, setting.new, setting.new, "big", [Mismatch(0, 1, 2, False, None)])
    assert make_rows([mined], setting.tokenizer)[0]["response"] == TEXT
    try:
        found = {stop: setting.many(stop_strings=[stop]) for stop in (" Paris", STOP)}
    except ValueError as error:  # Transformers does not look for texts among these tokens
        assert str(error).startswith("stop_strings: Transformers cannot look")
        return
    assert found[" Paris"].text == " Paris" and found[STOP].text == " Paris and"
    assert found[STOP].token_ids[-1] == setting.tokenizer.convert_tokens_to_ids(STOP)
    reasons = [setting.many(**more).finish_reason for more in (
        {}, {"max_new_tokens": 2}, {"stop_strings": [STOP]}, {"stop_strings": [STOP], "max_new_tokens": 3}, {"stop_strings": ["zzz"], "max_new_tokens": 3},
        {"max_new_tokens": 3, "eos_token_id": setting.new[2]}, {"generation_config": GenerationConfig(stop_strings=[STOP], max_new_tokens=3)},
    )]  # fmt: skip
    assert reasons == ["stop", "length", "stop", "stop", "length", "stop", "stop"]
    assert found[STOP].describe()["finish_reason"] == "stop"


@FULL
def test_what_compare_writes(setting, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "p"}\n')
    task, policies = ExactTask(file), {"strict": hla.as_policy("strict")}
    for end, text in {None: TEXT, " and": " Paris and", STOP: " Paris and", " Paris": " Paris"}.items():
        task.ends, task.closing = () if end is None else (end,), None
        writer = TextWriter(setting.target, setting.tokenizer, DecodingSettings(max_new_tokens=20), task)
        for arm in make_arms(setting.target, setting.draft, policies, tokenizer=setting.tokenizer):
            try:
                [answer] = writer.write(arm, [PROMPT], 0, 0)
            except ValueError as error:  # Transformers does not look for texts among these tokens
                assert str(error).startswith("stop_strings: Transformers cannot look") and end
                assert arm.kind != "assisted"
                continue
            assert answer.text == text


def test_a_stop_text_is_found_wherever_tokens_cut_it(setting):
    """Token by token, nothing of it is shown; a text that is written again, after memory ran out, shows nothing twice."""
    written = setting.ids(f"{PROMPT} Paris and" * 8)
    spelled = setting.tokenizer.decode(setting.prompt + written).removeprefix(setting.tokenizer.decode(setting.prompt))
    for begin, end in ((begin, begin + size) for begin in range(20, 60) for size in (1, 3, 8, 150)):
        stop = spelled[begin:end]
        answer = AnswerText(setting.tokenizer, StopTexts(setting.tokenizer, [stop, f"{STOP}zzz"]), setting.prompt)
        want, out, counts = spelled[: spelled.index(stop)], "", [*range(1, 20), *range(15, len(written) + 1)]
        for count in counts:
            out += answer.more(written[:count], last=count == len(written))
            assert want.startswith(out), stop
            if answer.stopped:
                break
        assert (out, answer.stopped) == (want, True), stop


def test_a_special_token_is_found_as_a_whole_and_has_no_place_in_the_shown_text(setting):
    written = setting.new[:-1]
    answer = AnswerText(
        setting.tokenizer, StopTexts(setting.tokenizer, [f"d{STOP[:4]}", f"{STOP}zzz"]), setting.prompt
    )
    logprobs = AnswerLogprobs(answer, setting.prompt, TokenTexts(setting.tokenizer), chat=False)
    assert answer.more(written, last=True) == TEXT and not answer.stopped
    shown = logprobs.more(written, [TokenLogprobs(-1.0, [])] * len(written), last=True)
    assert shown["text_offset"][-1] == TEXT.index(" big")


# -- pieces -------------------------------------------------------------------------------------------------------------
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
