"""Tool calls in a model's text: the form that the chat template gives them, and parsing them while the text grows."""

import json
import os
import re
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..artifacts.json_io import JSONObject
from ..text.detokenizer import special_in
from ..validation import one_line
from .detokenize import count_begun
from .grammar_process import MOST_SPACES


_forms: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, Any]]" = weakref.WeakKeyDictionary()

JSON: dict[str, object] = {"type": "json_schema", "max_whitespace_cnt": MOST_SPACES}
FIRST, SECOND, OTHER = "first_7x", "second_7x", "other_7x"  # names that occur in no template
CALL = r'(?P<head>\{{\s*"name":\s*"){name}(?P<middle>",\s*"(?:arguments|parameters)":\s*)\{{"k_7x":\s*"v_7x"\}}(?P<tail>\s*\}})'


@dataclass(frozen=True)
class CallForm:
    """The form of calls in a text: each consists of `opening`, the arguments (a JSON object) and `closing`, with `separator` between two.

    Args:
        begin: unique text before the JSON of a call. head, middle, tail: parts of that JSON around the name and the arguments. end: text after it.
    """

    begin: str
    head: str
    middle: str
    tail: str
    end: str
    separator: str

    @property
    def mark(self) -> str:
        """The text by which a call is recognised."""
        return self.begin.rstrip()

    @property
    def closing(self) -> str:
        return self.tail + self.end

    def opening(self, name: str) -> str:
        return f"{self.begin}{self.head}{name}{self.middle}"


def find_form(tokenizer: PreTrainedTokenizerBase, template: str) -> CallForm:
    """Return the form in which `template`, the tokenizer's with tools, writes calls. Raises: `ValueError`, one line, if the form is unknown."""
    known, form = _forms.get(tokenizer, (None, None))
    if known != template:
        try:
            form = _derive_form(tokenizer)
        except Exception as error:  # templates raise errors of any type
            form = one_line(error, 200)
        _forms[tokenizer] = template, form
    if not isinstance(form, CallForm):
        raise ValueError(form)
    return form


def _derive_form(tokenizer: PreTrainedTokenizerBase) -> CallForm:
    """Derive the form by rendering two calls with the template."""
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
    before, between, behind = text[: first.start()], text[first.end() : second.start()], text[second.end() :]
    begin = os.path.commonprefix([before[::-1], between[::-1]])[::-1].lstrip()
    rest = between[: len(between) - len(begin)]
    end = rest.rstrip()
    if not begin or not end or not behind.startswith(end):
        raise ValueError("no text marks where a call begins and ends")
    if special := special_in(tokenizer, [begin, end]):
        raise ValueError(f"it marks calls by a special token, {next(iter(special.values()))}")
    return CallForm(begin, first["head"], first["middle"], first["tail"], end, rest[len(end) :])


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
        self._text = ""  # not parsed yet
        self._arguments: ObjectEnd | None = None  # of the call being parsed

    def more(self, text: str, last: bool = False) -> list[dict[str, object]]:
        """Parse more of the text; return what that adds to a message: pieces of `content` and of `tool_calls`. `last`: no more will come.

        A call that is cut keeps the arguments up to there; without its complete name it is left out.
        """
        self._text += text
        out = list[dict[str, object]]()
        while (piece := self._read_call(last) if self._arguments else self._read_text(last)) is not None:
            out += [piece] if piece else []
        if last:
            self.open, self._text = bool(self._text) or self._arguments is not None, ""
        return out

    def _read_text(self, last: bool) -> dict[str, object] | None:
        """Return the text before a call, or the beginning of a call; None if more text is needed."""
        place = self._text.find(self.form.mark)
        if place < 0:
            held = self._text if last else self._text[: len(self._text) - count_begun(self._text, self.form.mark)]
            shown = held if last and not self.calls else held.rstrip()
            self._text = "" if last else self._text[len(shown) :]
            return self._show(shown)
        if shown := self._text[:place].rstrip():
            self._text = self._text[place:]
            return self._show(shown)
        self._text = self._text[place:]
        opening = next((each for each in self.openings if self._text.startswith(each)), None)
        if opening is None:
            return None
        self._text, self._arguments = self._text[len(opening) :], ObjectEnd()
        call = {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
        function = {"name": self.openings[opening], "arguments": ""}
        self.calls.append(call | {"function": function})
        return {"tool_calls": [{"index": len(self.calls) - 1, **call, "function": dict(function)}]}

    def _show(self, text: str) -> dict[str, object] | None:
        self.content += text
        return {"content": text} if text else None

    def _read_call(self, last: bool) -> dict[str, object] | None:
        """Return more of a call's arguments, or an empty dict at the end of the call; None if more text is needed."""
        assert self._arguments is not None
        if not self._arguments.over:
            count = self._arguments.count(self._text)
            found, self._text = self._text[:count], self._text[count:]
            self.calls[-1]["function"]["arguments"] += found
            return (
                {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": found}}]} if found else None
            )
        if not self._text.startswith(self.form.closing):
            return None
        self._text, self._arguments = self._text[len(self.form.closing) :], None
        return {}


class ObjectEnd:
    """Finds the end of a JSON object while its text arrives."""

    def __init__(self) -> None:
        self.over = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def count(self, text: str) -> int:
        """Return how many characters of `text`, which continues the previous text, belong to the object."""
        for place, letter in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.over = True
                    return place + 1
        return len(text)


def make_format(
    form: CallForm, schemas: Mapping[str, dict[str, object]], text: bool, several: bool, answer: str | None
) -> str:
    """Return the grammar of a text with calls, as xgrammar's structural tag.

    Args:
        schemas: of each function's arguments. text: allow other text around the calls, and no call at all. several: allow more than one call.
        answer: the JSON schema of a text without calls, if it must match one.
    """
    tags = [
        {
            "type": "tag",
            "begin": form.opening(name),
            "content": JSON | {"json_schema": schema},
            "end": form.closing,
        }
        for name, schema in schemas.items()
    ]
    more: dict[str, object] = {"tags": tags, "stop_after_first": not several}
    found: dict[str, object]
    if text and answer is None:
        found = {"type": "triggered_tags", "triggers": [form.mark], **more}
    else:
        found = {"type": "tags_with_separator", "separator": form.separator, "at_least_one": True, **more}
    if text and answer is not None:
        found = {"type": "or", "elements": [JSON | {"json_schema": json.loads(answer)}, found]}
    return json.dumps({"type": "structural_tag", "format": found})
