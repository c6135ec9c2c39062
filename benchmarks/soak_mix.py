"""Requests of every kind for soak.py --mix, what their replies must be, and the pair of models that they are for."""

import json
import random
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_lossy_assist as hla
from hf_lossy_assist.server.grammar_process import MOST_SPACES
from hf_lossy_assist.text.json_schema import hold_characters, read_schema
from hf_lossy_assist.text.structured import make_tokenizer_info


SPECIAL = ["<pad>", "<unk>", "</s>"]
NEW, LONG = 48, 400  # tokens of a plain text; most of a structured one
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<call>\n"
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</call>{% endfor %}"""
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
NUMBER, SMALL = {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "string", "minLength": 1, "maxLength": 5}


def make_object(**parts: object) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "properties": parts, "required": list(parts)}


SCHEMAS: list[dict[str, Any]] = [
    make_object(id=NUMBER, ok={"type": "boolean"}),
    {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
    make_object(name=SMALL, kind={"const": "x"}),
    {"oneOf": [{"type": "null"}, make_object(kind={"const": "a"}), make_object(kind={"const": "b"}, n=NUMBER)]},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    make_object(when={"type": "string", "format": "date"}, tags={"type": "array", "items": SMALL, "maxItems": 2}),
]


@dataclass
class Answer:
    """One text of a reply, whole or joined of a stream's pieces."""

    text: str = ""
    end: str | None = None
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # how much less likely each token is than the likeliest

    def add(self, choice: Any) -> None:
        """Take over a choice, or the piece of one."""
        piece = getattr(choice, "delta", None) or getattr(choice, "message", None)
        self.text += (choice.text if piece is None else piece.content) or ""
        self.end = choice.finish_reason or self.end
        for place, call in enumerate((piece and piece.tool_calls) or []):
            place = place if (index := getattr(call, "index", None)) is None else index
            if place == len(self.calls):
                self.calls.append([call.function.name, ""])
            self.calls[place][1] += call.function.arguments
        if (found := choice.logprobs) is not None and piece is None:
            self.tokens += found.tokens
            self.gaps += [
                max(top.values()) - p for p, top in zip(found.token_logprobs, found.top_logprobs, strict=True)
            ]


@dataclass
class Case:
    """A request, and what is known of its answer. schema: of the text, or of a call's arguments. text: what the answer must be."""

    kind: str
    body: dict[str, Any]
    schema: dict[str, Any] | None = None
    text: str | None = None

    def find_wrong(self, answers: list[Answer], tokens: int) -> str | None:
        """Return what is wrong with the reply's texts, if anything is. tokens: as the reply counts them."""
        if len(answers) != self.body.get("n", 1):
            return f"{len(answers)} texts"
        for answer in answers:
            text = str(answer.calls) if self.kind == "tools" else answer.text
            if self.text is not None and text != self.text:
                return f"{text!r} in place of {self.text!r}"
            if self.kind == "tools" and (answer.end, {name for name, _ in answer.calls}) != ("tool_calls", {"book"}):
                return f"it ends by {answer.end} with the calls {answer.calls}"
            written = "".join(token for token in answer.tokens if token not in SPECIAL)
            counts = tokens, tokens - (answer.end == "stop")  # with the end token, or without
            if self.kind == "logprobs" and (
                written != text or len(answer.tokens) not in counts or max(answer.gaps, default=0.0) > 1e-3
            ):
                return f"the tokens {answer.tokens} are not those of {text!r}, or not the likeliest"
            if self.schema is not None:
                if self.kind == "structured" and answer.end != "stop":
                    return f"it ends by {answer.end}: {text!r}"
                for part in [text] if self.kind == "structured" else [given for _, given in answer.calls]:
                    import_module("jsonschema").validate(json.loads(part), self.schema)  # raises
        return None


def make_pair(folder: Path) -> None:
    """Write a random target, a draft near it and their tokenizer of characters."""
    letters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, *letters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": SPECIAL.index("</s>")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=2048)).eval()
    for name, noise in (("target", 0.0), ("draft", 0.1)):
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:  # with a model's first weights, texts are one token over and over
                    weight.mul_(1.0 if noise else 3.0).add_(noise * weight.std() * torch.randn_like(weight))
            model.lm_head.weight[:2] = (
                0.0  # padding is never the likeliest: where it ends a text, it has no log-probability
            )
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_prompts(count: int) -> list[str]:
    """Return random prompts of 8 to 23 letters."""
    draw = random.Random(5)
    return ["".join(draw.choices("abcdefgh 123", k=8 + n % 16)) for n in range(count)]


def make_cases(target: Any, tokenizer: Any, problems: list[str], texts: list[str]) -> list[Case]:
    """Return a mix of requests with their answers. texts: the target's to `problems`."""
    xgrammar = import_module("xgrammar")
    compiler = xgrammar.GrammarCompiler(make_tokenizer_info(tokenizer, None))
    parameters = make_object(room=NUMBER, name=SMALL)
    tool = {"type": "function", "function": {"name": "book", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "book"}}
    cases = []
    for number, (schema, prompt, text) in enumerate(zip(SCHEMAS, problems, texts, strict=False)):
        chat: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": LONG,
            "temperature": 0,
        }
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        grammar = xgrammar.Grammar.from_json_schema(read_schema(schema), max_whitespace_cnt=MOST_SPACES)
        held = hla.structured(compiler.compile_grammar(hold_characters(grammar)), tokenizer)
        rendered = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
        expected = write_alone(target, tokenizer, rendered, LONG, logits_processor=[held])
        plain = {"prompt": prompt, "max_tokens": NEW, "temperature": 0}
        sampled = {"n": 3, "temperature": 0.9, "seed": number}
        cases += [
            Case("plain", plain, text=text),
            Case("structured", chat | {"response_format": form}, schema, expected),
            Case("three", plain | sampled),
            Case("structured", chat | sampled | {"response_format": form}, schema),
            Case("logprobs", plain | {"logprobs": 2}, text=text),
            Case("tools", chat | {"tools": [tool], "tool_choice": named}, parameters),
        ]
    return cases


def write_alone(target: Any, tokenizer: Any, prompt: str, new: int, **more: Any) -> str:
    """Return the text that `generate` writes."""
    inputs = tokenizer(prompt, return_tensors="pt")
    out = target.generate(**inputs, max_new_tokens=new, do_sample=False, **more)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
