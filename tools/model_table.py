"""Write docs/models.md from the results of `supported_models.py`: counts, and a table for each verdict."""

import collections
import re
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

import hf_lossy_assist as hla


WORST_FIRST = ("traceback", "unequal", "refused", "batch 1 only", "equal")
TITLES = {
    "traceback": "Ends in a traceback",
    "unequal": "Another output",
    "equal": "Equal in rows: one prompt, ragged batches, batches of equal length",
    "batch 1 only": "Equal in Transformers' own assisted loop, which runs the policy, one prompt at a time; a batch is refused",
    "refused": "Refused, in one line",
    "not built": "Not built",
}


def verdict(shapes: dict[str, Any]) -> tuple[str, str]:
    """Return the page's verdict on one attention's results, and the reason."""
    if "not built" in shapes:
        return "not built", shapes["not built"]
    results = {name: result for name, result in shapes.items() if isinstance(result, dict)}
    for bad in ("traceback", "unequal"):
        for name, result in results.items():
            if result["verdict"] == bad:
                return bad, f"{name}: {result['why']}"
    refused = {name: result["why"] for name, result in results.items() if result["verdict"] == "refused"}
    notes = {name: r["why"] for name, r in results.items() if r["verdict"] == "equal" and r.get("why")}
    if "one" in refused or (refused and "one" not in results):
        return "refused", next(iter(refused.values()))
    if refused:
        line = next(iter(refused.values()))
        inside = re.search(r"cannot be decoded in rows \((.*)\)", line)
        return "batch 1 only", inside.group(1) if inside else line
    if len(set(notes.values())) == 1 and len(notes) == len(results):
        return "equal", next(iter(notes.values()))
    return "equal", "; ".join(f"{name}: {note}" for name, note in notes.items())


def judged(result: dict[str, Any]) -> dict[str, str]:
    """Return a row of the page: name, class, kind, attention, verdict, why."""
    model_type, kind = result["name"].split("/")
    names = {"causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}  # fmt: skip
    found = {a: verdict(result[a]) for a in ("sdpa", "eager") if a in result}
    tried = {a: pair for a, pair in found.items() if pair[0] != "not built"}
    name, attention = names[kind].get(model_type.split("+")[0], ""), ", ".join(tried)
    row = {"type": model_type, "class": name, "kind": kind, "attention": attention}
    if not tried:  # eager attention is what every model has
        return row | {"verdict": "not built", "why": found["eager" if "eager" in found else "sdpa"][1]}
    worst = min(tried.values(), key=lambda pair: WORST_FIRST.index(pair[0]))
    return row | {"verdict": worst[0], "why": worst[1]}


def page(results: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the page, and the number of models with another output or a traceback."""
    rows = [judged(result) for result in sorted(results, key=lambda result: result["name"])]
    seconds = sum(result["seconds"] for result in results)
    groups = {name: [row for row in rows if row["verdict"] == name] for name in TITLES}
    built = len(rows) - len(groups["not built"])
    lines = [
        "# Models", "",
        "This page compares strict greedy decoding with `model.generate`, token for token, on a tiny random model of every causal and encoder-decoder model",
        "type in the installed Transformers. Rules shrink the default config (tools/tiny_models.py); attention is `sdpa` and `eager`.",
        "Windows and chunks have 8 tokens, sequences 25 to 38. Each model runs three calls: one prompt; four left-padded prompts of 9, 1, 4 and 14 tokens;",
        "three prompts of 9 tokens. One draft is a noisy copy of the model and often right; another is never right. If a reference",
        "hardly varies, or chooses by less than 2e-5 of its largest logit, another seed is used.",
        "Speech encoder-decoders (Whisper, Speech2Text, Moonshine) are equal too, as tested in tests/generation/test_whisper.py and",
        "test_encoder_decoders.py.", "",
        f"Made by `python tools/supported_models.py` ({seconds / 60:.0f} minutes of a CPU core), with hf_lossy_assist {hla.__version__},",
        f"Transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}. A test repeats some of them. See also [vision models](vision_models.md).",
        "Names are those of `config.model_type`; a star: with eager attention alone.", "", "| verdict | models |",
        "| --- | ---: |", f"| built | {built} |",
        *(f"| {TITLES[name][0].lower() + TITLES[name][1:]} | {len(group)} |" for name, group in groups.items()),
    ]  # fmt: skip
    for name, group in groups.items():
        if group:
            rows_of = by_reason if name in ("batch 1 only", "refused") else by_note
            lines += ["", f"## {TITLES[name]}", "", *rows_of(group)]
    return "\n".join(lines) + "\n", len(groups["traceback"]) + len(groups["unequal"])


def by_reason(group: list[dict[str, str]]) -> list[str]:
    """Return a table with a row for each reason."""
    types = collections.defaultdict[str, list[str]](list)
    for row in group:
        reason = row["why"].replace(row["class"] + " ", "", 1).removesuffix(": leave lossy_policy out")
        if reason.startswith("cannot be decoded in "):
            reason = reason.removeprefix("cannot be decoded in ").removesuffix(")").replace(" (", ": ", 1)
            reason = reason.replace("), nor in Transformers' own assisted loop (", "; in that loop: ")
        types[escaped(reason)].append(named(row))
    lines = ["| model types | why |", "| --- | --- |"]
    return lines + [f"| {' '.join(names)} | {reason} |" for reason, names in types.items()]


def by_note(group: list[dict[str, str]]) -> list[str]:
    """Return a paragraph of the model types without a note, and one for each note."""
    if group[0]["verdict"] == "not built":  # their reasons are those of the shrunk config, which is no user's
        return [" ".join(map(named, group))]
    types = collections.defaultdict[str, list[str]](list, {"": []})
    for row in group:
        types[escaped(row["why"].replace(row["class"] + " ", "", 1))].append(named(row))
    return [line for why, names in types.items() for line in (why + ": " * bool(why) + " ".join(names), "")][:-1]


def named(row: dict[str, str]) -> str:
    """Return the model type, of an encoder-decoder with its kind, and with a star if only eager attention was tried."""
    kind = "" if row["kind"] == "causal" else f"/{row['kind']}"
    return f"`{row['type']}{kind}`" + "\\*" * (row["attention"] == "eager")


def escaped(text: str) -> str:
    """Escape text so that it stays one cell and one line."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
