"""Random JSON schemas and grammars, a tokenizer of characters to write them in, and small models whose texts end."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers

from support import small


PIECES = [
    "true", "false", "null", '": "', '", "', '": ', '{"', '"}', "}", ", ", "ab", "id", "12", "-1", "[[", '"a"', "\\",
]  # fmt: skip
CHARACTERS = [chr(n) for n in range(32, 127) if chr(n) not in ("}", "\\")]
VOCAB = 4 + len(CHARACTERS) + len(PIECES)


def tokenizer():
    """Characters of ASCII and some longer pieces, ids from 4 on; 0 to 3 are special, as in `small.tokenizer`."""
    vocab = {"<pad>": small.PAD, "<unk>": 1, "<s>": 2, "</s>": small.EOS}
    vocab |= {piece: 4 + n for n, piece in enumerate(CHARACTERS + PIECES)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return small.of_words(inner)


def target(seed=0):
    return small.llama(seed, vocab=VOCAB, eos_token_id=small.EOS)


def schema(number, levels=2):
    """The random schema of this number."""
    return _schema(random.Random(number), levels)


def _schema(draw, levels):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = draw.choice(kinds + ["object", "array", "anyOf", "ref"] * 3 * (levels > 0))
    if kind == "object":
        names = draw.sample(["a", "b1", "id", "na me", "é", 'q"', "x" * 9], draw.randint(0, 4))
        out = {"type": "object", "properties": {name: _schema(draw, levels - 1) for name in names}}
        out["required"] = [name for name in names if draw.random() < 0.6]
        more = {"additionalProperties": draw.choice([False, {"type": "integer"}])} if draw.random() < 0.5 else {}
        return out | more
    if kind == "array":
        least = draw.randint(0, 2)
        out = {"type": "array", "items": _schema(draw, levels - 1), "minItems": least}
        return out | ({"maxItems": least + draw.randint(0, 2)} if draw.random() < 0.7 else {})
    if kind == "anyOf":
        return {"anyOf": [_schema(draw, levels - 1) for _ in range(draw.randint(1, 3))]}
    if kind == "ref":
        item = {"type": "object", "properties": {"v": _schema(draw, 0), "n": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}}}  # fmt: skip
        return {"$defs": {"t": item | {"required": ["v"]}}, "type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2} if levels == 2 else item["properties"]["v"]  # fmt: skip
    if kind == "string":
        return {"type": "string"} | ({"minLength": 1, "maxLength": draw.randint(1, 6)} if draw.random() < 0.6 else {})
    if kind == "integer":
        low = draw.randint(-200, 200)
        bounds = {"minimum": low, "maximum": low + draw.randint(0, 99)} if draw.random() < 0.5 else {}
        return {"type": "integer"} | bounds
    if kind == "enum":
        return {"enum": draw.sample(["one", "two", "", 3, -4.5, None, True, "é", 'q"\\'], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["x", 7, None, "long text", False])}
    if kind == "pattern":
        patterns = ["^[a-f]{2,4}$", "^(ab|cd)+$", "^[0-9]+(\\.[0-9]{1,2})?$", "^x?y*z$"]
        return {"type": "string", "pattern": draw.choice(patterns)}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "time", "duration", "ipv4", "uuid"])}
    return {"type": kind}


GRAMMARS = [
    'root ::= "yes" | "no" | "yes and " root',
    "root ::= [a-z]{3,9}",
    'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
    'root ::= "<" name ">" root? "</" name ">"\nname ::= [a-c]{1,3}',
    'root ::= ([^"\\\\] | "\\\\" ["n])* "."',
    'root ::= item ("," item){2,5}\nitem ::= "-"? [1-9] [0-9]*',
    'root ::= root "a" | "b"',
    'root ::= ""',
    'root ::= ("ab" | "abc" | "a" "bc" "d")+',
    'root ::= "(" root ")" | "[" root "]" | "x"',
]


def sources(count):
    """`count` schemas and grammars; each eighth is a grammar."""
    return [GRAMMARS[n // 8 % len(GRAMMARS)] if n % 8 == 7 else schema(n) for n in range(count)]


def prompts(rows, seed=0):
    """Prompts of different length, padded on the left."""
    return small.ragged(tuple(range(rows)) if rows > 1 else (0,), 12, seed, VOCAB)


def one(length=7, seed=0):
    return small.one(length, seed, VOCAB)
