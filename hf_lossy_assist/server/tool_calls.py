"""Tool calls in a model's text: the form that the chat template gives them, and parsing them while the text grows."""

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from ..artifacts.files import JSONObject
from ..text.detokenizer import special_in
from .grammar_process import MOST_SPACES


DECODER = json.JSONDecoder(strict=False, parse_int=str)  # int() refuses thousands of digits
JSON: dict[str, object] = {"type": "json_schema", "max_whitespace_cnt": MOST_SPACES}
FIRST, SECOND, OTHER = "first_7x", "second_7x", "other_7x"  # names that occur in no template
CALL = r'(?P<head>\{{\s*"name":\s*"){name}(?P<middle>",\s*"(?:arguments|parameters)":\s*)\{{"k_7x":\s*"v_7x"\}}(?P<tail>\s*\}})'


@dataclass(frozen=True)
class CallForm:
    """The form of calls in a text: each consists of an opening, the arguments (a JSON object) and `closing`, with `separator` between two.

    Args:
        mark: text by which a call is recognised. before, after: text of an opening around the function's name.
    """

    mark: str
    before: str
    after: str
    closing: str
    separator: str

    def opening(self, name: str) -> str:
        return f"{self.before}{name}{self.after}"


@lru_cache(8)
def find_form(tokenizer: PreTrainedTokenizerBase, template: str) -> CallForm:
    """Return the form in which `template`, the tokenizer's with tools, writes calls, by rendering two with it.

    Raises: `ValueError`, one line, if the form is unknown; any error of a template.
    """
    calls = [
        {"type": "function", "id": f"call00{n}x7", "function": {"name": name, "arguments": {"k_7x": "v_7x"}}}
        for n, name in enumerate((FIRST, SECOND))
    ]
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    empty: dict[str, object] = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": OTHER, "description": "", "parameters": empty}}]
    text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
    first, second = (re.search(CALL.format(name=name), text) for name in (FIRST, SECOND))
    if OTHER not in text or first is None or second is None:
        raise ValueError('it does not write calls as {"name": …, "arguments": …}')
    before, between, after = text[: first.start()], text[first.end() : second.start()], text[second.end() :]
    begin = os.path.commonprefix([before[::-1], between[::-1]])[::-1].lstrip()
    rest = between[: len(between) - len(begin)]
    end = rest.rstrip()
    if not begin or not end or not after.startswith(end):
        raise ValueError("no text marks where a call begins and ends")
    if special := special_in(tokenizer, [begin, end]):
        raise ValueError(f"it marks calls by a special token, {next(iter(special.values()))}")
    before, closing = begin + first["head"], first["tail"] + end
    return CallForm(begin.rstrip(), before, first["middle"], closing, rest[len(end) :])


class CallReader:
    """Parser of the calls and the other text of one answer while it arrives.

    Args:
        names: of the functions that may be called.
    """

    def __init__(self, form: CallForm, names: Sequence[str]):
        self.form, self.openings = form, {form.opening(name): name for name in names}
        self.content = ""
        self.calls = list[JSONObject]()  # in OpenAI's format
        self.open = False  # the last call, or a possible beginning of one, is incomplete
        self._text = ""

    def more(self, text: str, last: bool = False) -> list[dict[str, object]]:
        """Parse more of the text; return what that adds to a message: pieces of `content` and of `tool_calls`. `last`: no more will come.

        A call that is cut keeps the arguments up to there; without its complete name it is left out.
        """
        self._text += text
        content, calls, self.open = self._parse(self._text, last)
        new, self.content = content[len(self.content) :], content
        out: list[dict[str, object]] = [{"content": new}] if new else []
        for index, (name, arguments) in enumerate(calls):
            if index == len(self.calls):
                call = {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
                self.calls.append(call | {"function": {"name": name, "arguments": ""}})
                begin = {"index": index, **call, "function": {"name": name, "arguments": ""}}
                out.append({"tool_calls": [begin]})
            function = self.calls[index]["function"]
            if added := arguments[len(function["arguments"]) :]:
                function["arguments"] = arguments
                out.append({"tool_calls": [{"index": index, "function": {"arguments": added}}]})
        return out

    def _parse(self, text: str, last: bool) -> tuple[str, list[tuple[str, str]], bool]:
        """Return the text around the calls, each call's name and arguments, and whether a call is incomplete."""
        content, calls = "", list[tuple[str, str]]()
        while self.form.mark in text:
            before, mark, rest = text.partition(self.form.mark)
            content, text = content + before.rstrip(), mark + rest
            opening = next((opening for opening in self.openings if text.startswith(opening)), None)
            if opening is None:
                return content, calls, True
            text = text[len(opening) :]
            end = _find_object_end(text)
            calls.append((self.openings[opening], text[:end]))
            if end is None or not text.startswith(self.form.closing, end):
                return content, calls, True
            text = text[end + len(self.form.closing) :]
        if not last:  # what may be the beginning of the mark is not shown yet
            begun = (n for n in range(len(self.form.mark), 0, -1) if text.endswith(self.form.mark[:n]))
            text = text[: len(text) - next(begun, 0)]
        return content + (text if last and not calls else text.rstrip()), calls, False


def _find_object_end(text: str) -> int | None:
    """Return where the JSON object at the beginning of a text ends; None if it is incomplete."""
    try:
        return DECODER.raw_decode(text, len(text) - len(text.lstrip()))[1]
    except (ValueError, RecursionError):
        return None


def make_format(
    form: CallForm, schemas: Mapping[str, dict[str, object]], text: bool, several: bool, answer: str | None
) -> str:
    """Return the grammar of a text with calls, as xgrammar's structural tag.

    Args:
        schemas: of each function's arguments. text: allow other text around the calls, and no call at all. several: allow more than one call.
        answer: the JSON schema of a text without calls, if it must match one.
    """
    tags = [
        {"type": "tag", "begin": form.opening(name), "content": JSON | {"json_schema": schema}, "end": form.closing}
        for name, schema in schemas.items()
    ]
    more: dict[str, object] = {"tags": tags, "stop_after_first": not several}
    calls: dict[str, object]
    if text and answer is None:
        calls = {"type": "triggered_tags", "triggers": [form.mark], **more}
    else:
        calls = {"type": "tags_with_separator", "separator": form.separator, "at_least_one": True, **more}
    if text and answer is not None:
        calls = {"type": "or", "elements": [JSON | {"json_schema": json.loads(answer)}, calls]}
    return json.dumps({"type": "structural_tag", "format": calls})
