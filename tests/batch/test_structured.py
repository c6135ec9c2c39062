"""Structured output: with drafts, in batches and in `generate_many` the text that `generate` writes with xgrammar's own processor."""

import json
from types import SimpleNamespace

import pytest
import torch
from support import eagle, enumeration, schemas, small
from transformers import LogitsProcessor, LogitsProcessorList

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.trained import Eagle3Drafter
from hf_lossy_assist.text.json_schema import read_schema


xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed: make install brings it")

SETTINGS = {"max_new_tokens": 24, "do_sample": False}
TOKENIZER = schemas.tokenizer()


@pytest.fixture(scope="module")
def target():
    return hla.enable(schemas.target())


@pytest.fixture(scope="module")
def ways(target):
    """How a call drafts."""
    return {
        "model": {"assistant_model": small.near(target, 0.2), "lossy_policy": "strict"},
        "stops": {"assistant_model": small.near(target, 0.2), "lossy_policy": "svip"},
        "lookup": {"prompt_lookup_num_tokens": 4, "lossy_policy": "strict"},
        "suffix": {"lossy_policy": "strict", "drafter": hla.SuffixDrafter()},
        "eagle3": {"lossy_policy": "strict", "drafter": Eagle3Drafter(eagle.network(target, target_layers=(0, 1, 2)))},
    }


WAYS = ("model", "stops", "lookup", "suffix", "eagle3")


def compiled(source):
    return hla.structured(source, TOKENIZER).grammars[0]


def xgrammar_processors(*sources):
    """xgrammar's own processor."""
    return LogitsProcessorList([xgrammar.contrib.hf.LogitsProcessor([compiled(source) for source in sources])])


def ours(*sources):
    return LogitsProcessorList([hla.structured(sources[0] if len(sources) == 1 else sources, TOKENIZER)])


def stock(target, inputs, *sources, **settings):
    return type(target).generate(
        target, **inputs, **SETTINGS | settings, logits_processor=xgrammar_processors(*sources)
    )


def check(target, way, number):
    source = schemas.sources(number + 1)[number]
    inputs = schemas.one(seed=number)
    try:
        expected = stock(target, inputs, source)
    except AssertionError:  # "é", which the tokenizer cannot write; no more than 4 of the numbers below 250
        with pytest.raises(ValueError, match="^logits_processor: no token is left, .* in row 0"):
            target.generate(**inputs, **way, **SETTINGS, logits_processor=ours(source))
        assert "é" in str(source)
        return
    for processors in (ours(source), xgrammar_processors(source)):
        found = target.generate(**inputs, **way, **SETTINGS, logits_processor=processors)
        assert torch.equal(found, expected), (source, TOKENIZER.batch_decode([found[0], expected[0]]))


@pytest.mark.full
@pytest.mark.parametrize("first", range(5))
def test_one_text_is_that_of_generate(target, ways, first):
    for number in (first, first + 5):
        check(target, ways[WAYS[first]], number)


@pytest.mark.nightly
def test_more_schemas_and_grammars(target, ways):
    for number in range(10, 130):
        check(target, ways[WAYS[number % len(WAYS)]], number)


SOURCES = [schemas.sources(16)[n] for n in (0, 1, 2, 4, 7, 9, 11, 15)]


@pytest.mark.full
@pytest.mark.parametrize("way", ["model", *(pytest.param(way, marks=pytest.mark.full) for way in WAYS[1:])])
def test_a_batch_of_eight_with_a_schema_each(target, ways, way):
    inputs = schemas.prompts(8)
    expected = stock(target, inputs, *SOURCES)
    assert len({len(row[row != small.PAD]) for row in expected[:, 12:]}) > 2  # rows end where they will
    for processors in (ours(*SOURCES), xgrammar_processors(*SOURCES))[: 1 + (way == "model")]:
        assert torch.equal(target.generate(**inputs, **ways[way], **SETTINGS, logits_processor=processors), expected)


def test_one_object_serves_many_calls_here_and_in_transformers(target, ways):
    """With drafts and without, in the stock assisted loop and in this package's inside of it, for other prompts and the same again."""
    processors, draft = ours(SOURCES[1]), ways["model"]["assistant_model"]
    for inputs in (schemas.one(7), schemas.prompts(3), schemas.one(9, seed=1), schemas.one(9, seed=1)):
        expected, settings = stock(target, inputs, SOURCES[1]), SETTINGS | {"logits_processor": processors}
        assert torch.equal(type(target).generate(target, **inputs, **settings), expected)
        assert torch.equal(target.generate(**inputs, **ways["model"], **settings), expected)
        if len(inputs["input_ids"]) == 1:
            assert torch.equal(type(target).generate(target, **inputs, assistant_model=draft, **settings), expected)
            with hla.in_transformers_loop(target, "svip"):
                found = type(target).generate(target, **inputs, assistant_model=draft, **settings)
            assert torch.equal(found, expected)


PROMPTS = [schemas.one(5 + n, seed=n)["input_ids"][0].tolist() for n in range(8)]


def new_tokens(target, prompt, source):
    return stock(target, {"input_ids": torch.tensor([prompt])}, source)[0, len(prompt) :].tolist()


@pytest.mark.full
@pytest.mark.parametrize("way", ["model", "suffix"])
def test_generate_many_with_one_for_all_and_one_for_each(target, ways, way):
    settings = {"max_rows": 3} | ways[way] | SETTINGS
    found = hla.generate_many(target, PROMPTS, logits_processor=ours(SOURCES[1]), **settings)
    expected = {n: new_tokens(target, prompt, SOURCES[1]) for n, prompt in enumerate(PROMPTS)}
    assert {result.index: result.token_ids for result in found} == expected
    expected = {n: new_tokens(target, *pair) for n, pair in enumerate(zip(PROMPTS, SOURCES, strict=True))}
    if way == "model":
        prompts = [{"prompt": p, "logits_processor": ours(s)} for p, s in zip(PROMPTS, SOURCES, strict=True)]
        found = hla.generate_many(target, prompts, **settings)
    else:
        made = {tuple(p): ours(s) for p, s in zip(PROMPTS, SOURCES, strict=True)}
        found = hla.generate_many(target, PROMPTS, logits_processor=lambda ids: made[tuple(ids)], **settings)
    assert {r.index: r.token_ids for r in found} == expected


def test_a_vocabulary_that_is_padded():
    """Ids that the tokenizer does not have are forbidden, those in its last word of 32 bits, too."""
    scores = torch.zeros(2, schemas.VOCAB + 50)
    out = hla.structured("root ::= [a-c]", TOKENIZER)(torch.full((2, 3), 5), scores)
    assert TOKENIZER.batch_decode(out[0].isfinite().nonzero()) == ["a", "b", "c"] and torch.equal(out[0], out[1])


def test_drafts_are_masked_too(target):
    """A draft that is its own target and knows the grammar is always right."""
    settings = SETTINGS | {"assistant_model": target, "lossy_policy": "strict", "logits_processor": ours(SOURCES[1])}
    row = target.generate(**schemas.one(), **settings, return_dict_in_generate=True).speculation.rows[0]
    assert row.num_draft_tokens == row.num_accepted_draft_tokens > 0


def test_several_sequences_of_a_prompt_have_its_schema(target, ways):
    inputs = schemas.prompts(2)
    settings = SETTINGS | {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
    expected = stock(target, inputs, SOURCES[1], SOURCES[1], SOURCES[7], SOURCES[7], **settings)
    found = target.generate(**inputs, **ways["model"], **settings, logits_processor=ours(SOURCES[1], SOURCES[7]))
    assert torch.equal(found, expected)


PIECES = ["", "</s>", "a", "b", "ba"]
MEMBERS = {"a" + "ba" * k for k in range(4)} | {"bb"}


class Held:
    """A model whose logits are −∞ where no member of the language goes on, by their texts and without a matcher."""

    def __init__(self, model, begin):
        self.model, self.begin = model, begin

    def __call__(self, ids):
        logits = self.model(ids).logits.clone()
        for row, text in zip(logits, ids[:, self.begin :].tolist(), strict=True):
            text = "".join(PIECES[t] for t in text)
            may = [t > 1 and any(m.startswith(text + PIECES[t]) for m in MEMBERS) for t in range(5)]
            may[1] = text in MEMBERS
            if any(may):
                row[-1, ~torch.tensor(may)] = -torch.inf
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(
    ("policy", "rows"), [("svip", 2), pytest.param(hla.BlockVerification(), 1, marks=pytest.mark.full)]
)
def test_sampled_texts_have_the_targets_distribution_within_the_grammar(monkeypatch, policy, rows):
    """By enumeration of every draft, coin and correction of a round: `enumeration` says why one round is enough."""
    target = hla.enable(small.llama(vocab=5, eos_token_id=1))
    info = xgrammar.TokenizerInfo([p.encode() for p in PIECES], stop_token_ids=[1])
    grammar = xgrammar.GrammarCompiler(info).compile_grammar('root ::= "a" ("ba")* | "bb"')
    texts = enumeration.Texts
    monkeypatch.setattr(
        enumeration, "Texts", lambda model, prompt, *sizes: texts(Held(model, len(prompt)), prompt, *sizes)
    )
    inputs = {"input_ids": torch.tensor([[2, 3, 2, 4], [0, 2, 3, 3]][:rows])}
    inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
    processors = LogitsProcessorList([hla.StructuredOutput([grammar])])
    wrong, runner = enumeration.off(
        target, small.near(target, 0.5), hla.as_policy(policy), inputs, length=4 if rows == 1 else 3, room=5,
        logits_processor=processors,
    )  # fmt: skip
    assert wrong < 1e-6
    assert (runner.expected > 1e-3).sum() >= 3


WRONG = (
    ({"type": "nope"}, "Unsupported type"), ({"$ref": "#/$defs/nowhere"}, "Cannot find field"),
    ({"$ref": "#/x", "x": {"not": {}}}, "within the schema alone"),
    ({"$ref": "http://x.y/z.json"}, "within the schema alone"),
    ({"$ref": "#x", "$defs": {"y": {"$anchor": "x"}}}, "within the schema alone"),
    ({"type": "string", "format": "email"}, "\"format\" 'email' is not held"),
    ({"items": {"type": "string", "format": "xxx"}}, "\"format\" 'xxx' is not held"),
    ({"type": "string", "format": ["date"]}, '"format"'), ({"enum": []}, "enum"), ({"anyOf": []}, "cannot be []"),
    (False, "expected a JSON schema"), (object(), "expected a JSON schema"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum greater"),
    ({"type": "string", "pattern": "("}, "parenthesis"), ({"type": "string", "pattern": "(?=a)b"}, "looks around"),
    ({"type": "string", "pattern": '^"$'}, "not escaped"), ({"type": "string", "pattern": r"^[a\t]$"}, "not escaped"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, '"minLength" beside "pattern"'),
    ({"type": "string", "pattern": "^a$", "format": "date"}, '"format" beside "pattern"'),
    ({"type": "string", "pattern": "(" * 100_000 + ")" * 100_000}, "levels"),
    ({"type": "string", "maxLength": -1}, "cannot be -1"), ({"properties": {"a": {"not": {}}}}, '"not" is not held'),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "allOf"), ({"type": "object", "required": 5}, "required"),
    ({"items": {"properties": {"a": {"type": "null"}}, "required": ["b"]}}, "\"required\" names 'b'"),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": {"type": "integer"}}}, '"minimum" beside "$ref"'),
    ({"type": "integer", "anyOf": [{"minimum": 10}]}, '"type" beside "anyOf"'),
    ({"type": "string", "enum": ["a", 3]}, '"type" beside "enum"'), ({"minimum": 5}, "say the type"),
    ({"type": "number", "multipleOf": 0.5}, '"multipleOf"'),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, '"multipleOf"'), ({"const": "x" * (1 << 21)}, "characters"),
    ({"const": float("nan")}, "JSON"), ((lambda x: x.update(items=x) or x)({"type": "array"}), "Circular"),
    ({"$ref": "#"}, "{'$ref': '#'} is no schema"), ('{"type": ', "Expecting value"), ("root ::= x", "not defined"),
    ("root ::= root", "no text of it begins"), ('rot ::= "a"', "root"), ("root ::= [", "class"),
    ("name and age", "is no schema or grammar that can be held to"),
)  # fmt: skip


def test_what_is_no_grammar_is_one_line():
    for source, reason in WRONG:
        with pytest.raises((ValueError, TypeError), match=r"\Astructured: [^\n]*\Z") as caught:
            hla.structured(source, TOKENIZER)
        assert reason in str(caught.value) and len(str(caught.value)) < 500


def test_strings_hold_no_control_characters():
    for limits in ({}, {"minLength": 200}, {"minLength": 1, "maxLength": 500}, {"pattern": '^[^"\\\\\\n]+$'}):
        grammar = compiled({"type": "string"} | limits)
        for text, held in (('"ab', True), ('"é東', True), ('"a\t', False), ('"a\n', False), ('"a\x00', False)):
            assert xgrammar.GrammarMatcher(grammar).accept_string(text) == held, (limits, text)


def cat(name, **more):
    properties = {"kind": {"const": name}, "n": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": ["kind"]} | more


ONE_OF = (  # and whether its branches exclude each other
    ([{"type": "string"}, {"type": ["integer", "null"]}], True), ([{"const": 1}, {"enum": ["a", True]}], True),
    ([{"enum": [1, 2]}, {"type": "string"}], True), ([cat("cat"), cat("dog"), {"$ref": "#/$defs/cow"}], True),
    ([{"type": "null"}, cat("cat"), cat("dog")], True), ([{"type": "string"}], True),
    ([{"const": "a"}, {"const": "b"}], False), ([{"type": "integer"}, {"type": "number"}], False),
    ([{"const": 1}, {"enum": [1.0, "a"]}], False), ([{"const": "a"}, {"type": "string"}], False),
    ([cat("cat"), cat("dog", required=["n"])], False), ([cat("cow"), {"$ref": "#/$defs/cow"}], False),
    ([{"type": "string"}, {}], False), ([{"type": "null"}, {"anyOf": [{"type": "null"}, {"type": "string"}]}], False),
    ([{"$ref": "#/$defs/horse"}, {"type": "string"}], False),
)  # fmt: skip


def test_one_of_is_held_or_refused():
    for branches, held in ONE_OF:
        source = {"type": "array", "items": {"oneOf": branches}, "$defs": {"cow": cat("cow")}}
        if held:
            assert json.loads(read_schema(source))["items"] == {"anyOf": branches}
            continue
        with pytest.raises(ValueError, match='"oneOf" is held if its branches differ'):
            read_schema(source)


WRONG_DATES = ("9214-02-31", "1900-02-29", "2023-04-31", "2023-13-01", "0000-01-01")
TIMES = ("00:00:00Z", "23:59:59.5+23:59"), ("24:00:00Z", "12:00:60Z", "12:00:00", "12:00:00.Z", "12:00:00+24:00")
FORMATS = {
    "date": (("2024-02-29", "2000-02-29", "9214-12-31"), WRONG_DATES),
    "time": TIMES,
    "date-time": (["2024-02-29T00:00:00Z"], [f"{text}T00:00:00Z" for text in WRONG_DATES] + [f"2024-01-01T{text}" for text in TIMES[1]]),
    "ipv4": (["0.10.199.255"], ["92.93.93.036", "1.2.3.256", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (["::", "::1", "1::", "1:2:3:4:5:6:7:ABCD", "1::3:4:5:6:7:8", "1:2:3:4:5:6::8"], ["1::2::3", ":::", "1:2", "1:2:3:4:5:6:7:8:9", "fe80::1%eth0", "::1.2.3.04", "12345::"]),
    "uuid": (["01234567-89ab-CDEF-0123-456789abcdef"], ["0123456789abcdef0123456789abcdef", "01234567-89ab-cdef-0123-456789abcdeg"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT0S", "P4W"], ["P", "PT", "P1Y2D", "P1W2D", "1D", "P1.5D"]),
    "uri": (["http://a@b.c:1/d?e#f", "urn:x:%20"], ["a/b", "http://a b", "x:%2", "x:[", "1:a"]),
    "uri-reference": (["../a?b#c", ""], ["a b", "%2", "1:a", "a\\b"]),
    "uri-template": (["/a{?b:3,c*}"], ["{a", "a}", "{}", "{a:0}", "a b"]),
}  # fmt: skip


def test_formats_are_exact():
    info = xgrammar.TokenizerInfo([chr(code) for code in range(32, 127)] + ["</s>"], stop_token_ids=[95])
    for name, (members, others) in FORMATS.items():
        schema = read_schema({"type": ["string", "null"], "format": name})
        grammar = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(schema)
        for text in (*members, *others):
            matcher = xgrammar.GrammarMatcher(grammar)
            held = matcher.accept_string(f'"{text}"') and matcher.accept_token(95)
            assert held == (text in members), text


def test_a_limit_of_memory_is_no_wrong_schema(monkeypatch):
    def short_of_memory(*_):
        raise RuntimeError("std::bad_alloc")

    monkeypatch.setattr("hf_lossy_assist.text.structured.find_begin", short_of_memory)
    with pytest.raises(MemoryError, match="^structured: .* takes more memory to compile than there is"):
        hla.structured({"type": "null"}, TOKENIZER)


def test_wrong_uses_are_one_line(target, ways):
    with pytest.raises(ValueError, match="^structured: [^\n]*an empty list"):
        hla.structured([], TOKENIZER)
    with pytest.raises(ValueError, match="^structured: number 1: "):
        hla.structured([{}, {"enum": []}], TOKENIZER)
    with pytest.raises(ValueError, match="^structured: 2 grammars for a call of 3 texts"):
        target.generate(**schemas.prompts(3), **ways["model"], **SETTINGS, logits_processor=ours({}, {"const": 1}))
    with pytest.raises(TypeError, match=r"^[^\n]+$"):
        next(hla.generate_many(target, [{"prompt": [5], "logits_processor": "json"}], **ways["model"], **SETTINGS))


@pytest.mark.full
@pytest.mark.parametrize("known", ["passed", "in the target's folder"])
def test_the_tokenizer_of_another_model_is_refused(known, tmp_path, ways):
    target, draft = hla.enable(schemas.target()), ways["model"]["assistant_model"]
    passed = {"tokenizer": TOKENIZER} if known == "passed" else {}
    if not passed:
        TOKENIZER.save_pretrained(tmp_path)
        target.config.name_or_path = str(tmp_path)
    settings, drafting = SETTINGS | passed, ways["model"]

    runner = {"custom_generate": hla.Runner("strict", draft, **passed)} | SETTINGS

    def many(prompts, **more):
        return list(hla.generate_many(target, prompts, **settings, **drafting, **more))

    def in_transformers_loop(grammar):
        with hla.in_transformers_loop(target, "strict"):
            target.generate(**schemas.one(), **settings, assistant_model=draft, logits_processor=grammar)

    calls = [
        lambda grammar: target.generate(**schemas.one(), **settings, **drafting, logits_processor=grammar),
        lambda grammar: target.generate(**schemas.one(), **runner, logits_processor=grammar),
        lambda grammar: many([[5, 6]], logits_processor=grammar),
        lambda grammar: many([[7], {"prompt": [5, 6], "logits_processor": grammar}]),
        *([] if passed else [in_transformers_loop]),  # which does not hand a tokenizer on
    ]
    more = schemas.tokenizer()
    more.add_tokens(["more"])
    line = "^structured: tokenizer: the target's token ids are other words: pass the target's own tokenizer$"
    for call in calls:
        for tokenizer in (TOKENIZER, schemas.tokenizer(), more):
            call([hla.structured('root ::= "a" | "w1" | "w2"', tokenizer)])
        with pytest.raises(ValueError, match=line):
            call([hla.structured('root ::= "a" | "w1" | "w2"', small.tokenizer())])


def test_a_tokenizer_whose_size_is_not_the_models():
    """Larger, it is another model's in plain `generate` too; much smaller, it may be."""
    target = schemas.target()
    target.resize_token_embeddings(60)
    line = r"^structured: tokenizer: .* other words: [^\n]* \(it has 114 tokens, the model 60\)$"
    with pytest.raises(ValueError, match=line):
        type(target).generate(target, **small.one(vocab=60), **SETTINGS, logits_processor=ours({}))
    target.resize_token_embeddings(2000)
    settings = SETTINGS | {"assistant_model": target, "lossy_policy": "strict", "logits_processor": ours({})}
    line = "^structured: tokenizer: it has 114 tokens, the target 2000: if it is another model's, "
    with pytest.warns(UserWarning, match=line):
        hla.enable(target).generate(**schemas.one(), **settings)


def test_a_librarys_processor_for_several_rows_is_refused_with_the_way_out(target, ways):
    class Guided(LogitsProcessor):
        """As Outlines' processors are made."""

        read = 0

        def __call__(self, input_ids, scores):
            self.read += 1
            return scores

    Guided.__module__ = "outlines.backends.outlines_core"
    with pytest.raises(ValueError, match=r"^logits_processor: Guided [^\n]* use hla.structured\([^\n]*$"):
        target.generate(**schemas.prompts(3), **ways["model"], **SETTINGS, logits_processor=[Guided()])
