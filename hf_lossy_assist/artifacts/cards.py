"""Model cards, filled by the templates in `templates/`.

Names and texts may be anybody's: what a template inserts is displayed literally, and is no HTML, link, image or code.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lazy_loader
from huggingface_hub import CardData, DatasetCardData, EvalResult, ModelCard, ModelCardData

from ..models.introspection import plain_name
from ..validation import visible
from .files import JSONObject
from .identity import ModelIdentity


jinja2, markupsafe = lazy_loader.load("jinja2"), lazy_loader.load("markupsafe")
README = "README.md"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # form of an entry of `base_model`
TAGS = ["hf_lossy_assist", "speculative-decoding", "assisted-generation"]
# Characters that begin HTML, a link, an image, code or a table cell, or that end a Python string literal.
_ACTS = re.compile(r"[&<>\"\\`\[\]|]")
Figure = tuple[str, str, object]  # type and name of a metric, and its value; what is no number was not measured


def escape(value: object) -> str:
    """Return a value's text for a card, in which it is displayed literally."""
    return _ACTS.sub(lambda match: f"&#{ord(match[0])};", visible(" ".join(str(value).split())))


@cache
def _templates() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        finalize=lambda value: value if isinstance(value, markupsafe.Markup) else escape(value),
    )
    environment.filters |= {"settings": join_items, "loading": format_loading, "literal": markupsafe.Markup}
    return environment


def join_items(values: Mapping[str, object]) -> str:
    """Return settings as a text: "name value, name value"."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def format_loading(model: ModelIdentity | None, otherwise: str) -> str:
    """Return Python code that loads a model in the form in which it was used. `otherwise`: the name to show for an unknown model."""
    name = otherwise if model is None else model.id
    plain = plain_name(name)
    loaded = f'AutoModelForCausalLM.from_pretrained("{escape(plain)}")'
    changes = re.findall(r":int8|\[:\d+\]", name[len(plain) :])
    if ":int8" in changes:  # conversion before or after taking the first layers gives the same model
        loaded = f'hla.load("{escape(plain)}", dtype="int8")'
    for change in changes:
        if change != ":int8":
            loaded = f"hla.early_exit({loaded}, {change[2:-1]})"
    escaped: str = markupsafe.Markup(loaded)
    return escaped


def fill(template: str, metadata: CardData, **values: object) -> str:
    """Return the text of a template. `values`: escaped where they are inserted."""
    return str(_templates().get_template(template).render(card_data=markupsafe.Markup(metadata.to_yaml()), **values))


def render(
    template: str,
    models: Iterable[ModelIdentity | None],
    tag: str,
    results: tuple[str, str, Iterable[Figure]] = ("", "", ()),
    task: str = "text-generation",
    **values: Any,
) -> ModelCard:
    """Return a card made of a template.

    Args:
        models: `base_model` names those that have a name of the Hub's form.
        results: for the model index, which the Hub reads: what was measured, on which data, and the figures.
    """
    names = {plain_name(model.id) for model in models if model is not None}
    what, data, figures = results
    measured = [
        EvalResult(
            task_type=task,
            dataset_type="custom",
            dataset_name=data,
            metric_type=kind,
            metric_name=name,
            metric_value=float(value),
        )
        for kind, name, value in figures
        if isinstance(value, int | float)
    ]
    metadata = ModelCardData(
        license="apache-2.0",
        library_name="hf_lossy_assist",
        tags=sorted([*TAGS, *filter(None, [tag])]),
        base_model=sorted(name for name in names if HUB_ID.fullmatch(name)) or None,
        model_name=what if measured else None,
        eval_results=measured or None,
    )
    return ModelCard(fill(template, metadata, **values))


def drafter_card(target: ModelIdentity, record: JSONObject, method: str, **values: Any) -> ModelCard:
    """Return the card of a trained drafter for `target`, from its fit.json; `values`: more for the template."""
    figures: list[Figure] = [
        ("accuracy", f"the target's token at position {k} of a draft, where all before are", share and share[0])
        for k, share in enumerate(record["acceptance"], 1)
    ]
    figures.append(("tokens_per_call", "tokens a call of the target", record["tokens_per_call"][0]))
    results = f"{method} drafter", str(record["data"]["source"] or "held-out outputs"), figures
    tag = method.lower().replace("-", "")
    return render("drafter.md", [target], tag, results, target=target, facts=record, method=method, **values)


def data_card(template: str, tag: str, facts: JSONObject, **values: object) -> str:
    """Return the README.md of a dataset. `tag`: the method it is for; `facts`: its record; `values`: more for the template."""
    tags = ["hf_lossy_assist", tag]
    metadata = DatasetCardData(license="apache-2.0", tags=tags, task_categories=["text-classification"])
    settings = {name: value for name, value in facts["settings"].items() if name != "features"}
    draft = ModelIdentity.from_dict(facts["draft"])
    return fill(template, metadata, facts=facts, draft=draft, settings=settings, **values)


def save_card(card: ModelCard, folder: Path, goal: Path) -> None:
    """Write a card into `folder`, whose files will replace those in `goal`; a README.md that is there stays."""
    old, text = goal / README, str(card).rstrip("\n") + "\n"
    if not old.is_file():
        (folder / README).write_text(text, encoding="utf-8")
    elif old.read_text(encoding="utf-8", errors="replace") != text:
        warnings.warn(
            f"{old} stays as it is, and is not the card of what was saved beside it: delete it and save again to have that",
            stacklevel=3,
        )
