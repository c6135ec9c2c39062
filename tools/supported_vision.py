"""Compare tiny random models of every image-text model type with Transformers' own `generate`, with text and with pictures.

`python tools/supported_vision.py` builds each (`tiny_models.py`, `tiny_vision.py`) and compares strict greedy decoding with
`model.generate`, as `supported_models.py` does for text models: one prompt, and prompts of different length in one left-padded batch;
then one prompt with a picture, and three with one, two and none. The drafts see the target's inputs; one is often right and one
never. The table is written to docs/vision_models.md; it exits with 1 if an output differs. `--only llava gemma3` runs only these.
"""

import sys
from pathlib import Path
from typing import Any

import supported_models as text_models
import torch
import transformers
from model_processes import main
from model_table import escaped, named
from supported_models import NoVerdict, drafts, format_error, prompts, reference, refused_by_us
from tiny_models import tiny_model
from tiny_vision import CHANGES, SEEN  # fmt: skip
from tiny_vision import prompts as with_pictures
from transformers.models.auto import modeling_auto

import hf_lossy_assist as hla


CLASSES: dict[str, str] = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
KIND, PICTURES = "image-text", {"picture": (1,), "pictures": (1, 2, 0)}
TEXTS = {"one": text_models.SHAPES["one"], "ragged": text_models.SHAPES["ragged"]}
# What tests/generation/test_vision_images.py shows of types whose pictures are no tensors that `tiny_vision.py` makes.
IN_TESTS = {
    "mllama": ("refused", "pictures: keeps their keys in layers of its cache that hold nothing else"),
    "git": ("refused", "pictures: keeps them in its cache in front of the text, where no token stands for them"),
    "fuyu": ("equal", "pictures: one prompt, in a test"),
}


def batches(name: str, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the inputs of each call with a model type."""
    found = {shape: prompts(lengths, seed) for shape, lengths in TEXTS.items()}
    if name in SEEN:
        found |= {shape: with_pictures(SEEN[name], counts, seed) for shape, counts in PICTURES.items()}
    return found


def attempt(model: Any, pair: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return {"verdict": "equal" | "unequal" | "refused" | "generate fails", "why": …} of one batch with both drafts."""
    try:
        wanted = reference(model, inputs)
    except NoVerdict:
        raise
    except Exception as error:
        return {"verdict": "generate fails", "why": format_error(error)}
    for name, draft in pair.items():
        try:
            drafting = {"assistant_model": draft, "lossy_policy": "strict"}
            out = hla.enable(model).generate(**inputs, **text_models.SETTINGS, **drafting)
        except Exception as error:
            kind = "refused" if refused_by_us(error) else "unequal"
            return {"verdict": kind, "why": str(error) if kind == "refused" else format_error(error)}
        finally:
            hla.disable(model)
        if not torch.equal(out.sequences[:, -text_models.NEW :], wanted):
            return {"verdict": "unequal", "why": f"{name} right draft"}
    return {"verdict": "equal", "why": ""}


def reads_pictures(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Raise `NoVerdict` if the output is the same with other pictures."""
    if "pixel_values" in inputs:
        other = inputs | {"pixel_values": -inputs["pixel_values"]}
        if torch.equal(reference(model, inputs), reference(model, other)):
            raise NoVerdict("its text does not depend on the picture")


def examine(name: str, attention: str) -> dict[str, Any]:
    """Examine one model type: {"not built": …} or, by shape, the result of `attempt`."""
    why = ""
    for seed in range(text_models.ATTEMPTS):
        try:
            changes = SEEN[name].changes if name in SEEN else CHANGES.get(name, {})
            model = tiny_model(name, KIND, attention, seed, **changes)
            inputs = batches(name, seed)
            pair = drafts(model)
            found = {shape: attempt(model, pair, batch) for shape, batch in inputs.items()}
            for shape in [shape for shape in TEXTS if found[shape]["verdict"] == "unequal"]:
                # `generate` may write each prompt alone otherwise.
                found[shape] = text_models.try_shape(model, pair, inputs[shape])
            if found.get("picture", {}).get("verdict") == "equal":
                reads_pictures(model, inputs["picture"])
            return found
        except NoVerdict as error:
            why = str(error)
        except Exception as error:
            return {"not built": format_error(error)}
    return {"not built": f"no verdict with {text_models.ATTEMPTS} seeds: {why}"}


def make_row(result: dict[str, Any]) -> dict[str, str]:
    """Return a row of the page. If the two kinds of attention differ, it describes the worse one."""
    tried = {kind: result[kind] for kind in text_models.ATTENTIONS if "not built" not in result[kind]}
    name, attention = result["name"], ", ".join(tried)
    row = {"type": name, "kind": "causal", "class": CLASSES[name], "attention": attention, "why": ""}
    if not tried:
        return row | {"text": "not built", "pictures": "not built", "why": result["eager"]["not built"]}
    for column, shapes in {"text": TEXTS, "pictures": PICTURES}.items():
        found = [(shape, outs[shape]) for outs in tried.values() for shape in shapes if shape in outs]
        bad = [(shape, out) for shape, out in found if out["verdict"] != "equal"]
        row[column] = "equal" if found and not bad else "not shown" if not found else bad[0][1]["verdict"]
        if bad and bad[0][0] in ("ragged", "pictures") and not any(shape in ("one", "picture") for shape, _ in bad):
            row[column] = "one prompt at a time"
        if column == "pictures" and row[column] == "not shown" and row["type"] in IN_TESTS:
            row[column], row["why"] = IN_TESTS[row["type"]]
        if bad:
            row["why"] = row["why"] or f"{bad[0][0]}: {bad[0][1]['why']}"
    return row


def page(results: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the page, and the number of models with another output."""
    rows = [make_row(result) for result in sorted(results, key=lambda result: str(result["name"]))]
    built = [row for row in rows if row["text"] != "not built"]
    lines = [
        "# Vision models", "",
        "This page compares strict greedy decoding with `model.generate`, token for token, on a tiny random model of every image-text model type in the installed",
        "Transformers ([method](models.md)). Text calls: one prompt, and four of 9, 1, 4 and 14 tokens in one batch. Picture calls (random pictures, in the shape of",
        "the type's processor): one prompt with a picture, and three with one, two and none. The drafts see the target's inputs; one is often",
        "right, one never. A prompt with pictures is read once, as in `generate`. The first such prompt of each kind is probed: a block of",
        "tokens is compared with one token at a time, and refused on disagreement. `not shown`: the test has no pictures of this shape, so only the",
        "probe guards the output. `generate fails`: Transformers' own `generate` fails on this tiny model or in this release.",
        "",
        f"Made by `python tools/supported_vision.py` ({sum(result['seconds'] for result in results) / 60:.0f} minutes of a CPU core), with",
        f"hf_lossy_assist {hla.__version__}, Transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}.",
        "", "| model types | text | pictures | why |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    names: dict[tuple[str, str, str], list[str]] = {}
    for row in built:
        why = escaped(row["why"].replace(row["class"] + " ", "", 1))
        names.setdefault((row["text"], row["pictures"], why), []).append(named(row))
    lines += [f"| {' '.join(types)} | {' | '.join(verdicts)} |" for verdicts, types in names.items()]
    lines += ["", "Not built: " + " ".join(named(row) for row in rows if row["text"] == "not built")]
    return "\n".join(lines) + "\n", sum("unequal" in (row["text"], row["pictures"]) for row in rows)


def work(names: list[str]) -> None:
    text_models.work(names, lambda name, attention, _: examine(name, attention))


if __name__ == "__main__":
    docs = Path(__file__).resolve().parent.parent / "docs" / "vision_models.md"
    names = lambda only: [name for name in sorted(CLASSES) if not only or name in only]  # noqa: E731
    sys.exit(main(__file__, str(__doc__), names, work, page, 10 * text_models.SECONDS, docs))
