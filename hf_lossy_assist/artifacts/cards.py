"""Model cards of heads, drafters, profiles and policies, filled from their files by the templates in `templates/`.

Names and texts may be anybody's: what a template inserts is displayed literally, and is no HTML, link, image or code.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lazy_loader
from huggingface_hub import CardData, DatasetCardData, EvalResult, ModelCard, ModelCardData

from ..models.introspection import plain_name
from ..registry import Names, find_method
from ..validation import visible
from .certificate import Certificate
from .head_config import HeadConfig
from .identity import ModelIdentity
from .json_io import JSONObject


jinja2, markupsafe = lazy_loader.load("jinja2"), lazy_loader.load("markupsafe")
README = "README.md"
TEMPLATES = Path(__file__).parent / "templates"
ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # form of an entry of `base_model`
TAGS = ["hf_lossy_assist", "speculative-decoding", "assisted-generation"]
_MADE_HERE = re.compile(r"(?P<text>.*\n)\n<!-- made by hf_lossy_assist (?P<digest>[0-9a-f]{16}) -->\n", re.DOTALL)
# Characters that begin HTML, a link, an image, code or a table cell, or that end a Python string literal.
_ACTS = re.compile(r"[&<>\"\\`\[\]|]")


def escape(value: object) -> str:
    """Return a value's text for a card, in which it is displayed literally."""
    return _ACTS.sub(lambda found: f"&#{ord(found[0])};", visible(" ".join(str(value).split())))


@cache
def _templates() -> Any:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        finalize=lambda value: value if isinstance(value, markupsafe.Markup) else escape(value),
    )


def render(template: str, data: CardData, **values: Any) -> ModelCard:
    """Return a card with this metadata, made of a template. `values`: escaped where they are inserted, but for Markup."""
    yaml = markupsafe.Markup(data.to_yaml())
    return ModelCard(_templates().get_template(template).render(card_data=yaml, **values))


def write_card(card: ModelCard, file: Path) -> None:
    """Write a card with a last line that later shows whether it was edited."""
    text = str(card).rstrip("\n") + "\n"
    file.write_text(f"{text}\n<!-- made by hf_lossy_assist {_digest(text)} -->\n", encoding="utf-8")


def save_card(card: ModelCard, folder: Path, goal: Path) -> None:
    """Write a card into `folder`, whose files will replace those in `goal`; a README.md there that a user wrote stays."""
    old = goal / README
    made = _MADE_HERE.fullmatch(old.read_text(encoding="utf-8", errors="replace")) if old.is_file() else None
    if old.is_file() and (made is None or _digest(made["text"]) != made["digest"]):
        warnings.warn(
            f"{old} stays as it is, and is not the card of what was saved beside it: delete it and save again to have that",
            stacklevel=3,
        )
        return
    write_card(card, folder / README)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def join_items(values: Mapping[str, object]) -> str:
    """Return settings as a text: "name value, name value"."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def head_card(config: HeadConfig, plots: Sequence[str] = ()) -> ModelCard:
    """Return the card of a head. `plots`: names of image files in the same folder."""
    # None: the method of a later version, or of a package that is not installed.
    method = find_method(config.method) if config.method in Names("method") else None
    paper, link, recipe = config.method, "", ""
    if method is not None:
        paper, link, recipe = method.title, f"https://{method.source}", method.make.__name__
    figures = [
        (name, label, config.metrics.get(name)) for name, label in (("auroc", "AUROC"), ("brier", "Brier score"))
    ]
    prompts = str(config.training.get("prompts", "held-out prompts"))
    evaluated = make_results(f"{config.method} head", prompts, figures, "text-classification")
    return render(
        "head.md",
        make_data([config.target, config.draft], config.method, **evaluated),
        c=config,
        paper=paper,
        link=link,
        recipe=recipe,
        target=format_loading(config.target, "TARGET"),
        draft=format_loading(config.draft, "DRAFT"),
        lossless=method is not None and method.guarantee == "lossless",
        plots=list(plots),
        decoding=join_items(config.decoding) or "not recorded",
    )


def format_loading(model: ModelIdentity | None, otherwise: str) -> Any:
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
    return markupsafe.Markup(loaded)


def policy_card(
    spec: Mapping[str, object],
    lossless: bool,
    heads: Sequence[HeadConfig] = (),
    measured: Sequence[tuple[str, str]] = (),
    certificate: Certificate | None = None,
) -> ModelCard:
    """Return the card of a policy with the JSON form `spec` and heads with these configs. `measured`: rows (what, figure) for its table of figures."""
    evaluated = {} if certificate is None else make_results("policy", certificate.task, certificate.results())
    return render(
        "policy.md",
        make_data([model for c in heads for model in (c.target, c.draft)], **evaluated),
        lossless=lossless,
        heads=heads,
        measured=measured,
        json=markupsafe.Markup(json.dumps(spec, indent=2, ensure_ascii=False)),
    )


def drafter_card(target: ModelIdentity, record: JSONObject, method: str, **shown: object) -> ModelCard:
    """Return the card of a trained drafter for `target`, from its fit.json; `shown`: further values for the template."""
    figures = [
        ("accuracy", f"the target's token at position {k} of a draft, where all before are", share and share[0])
        for k, share in enumerate(record["acceptance"], 1)
    ]
    figures.append(("tokens_per_call", "tokens a call of the target", record["tokens_per_call"][0]))
    source = str(record["data"]["source"] or "held-out outputs")
    data = make_data([target], method.lower().replace("-", ""), **make_results(f"{method} drafter", source, figures))
    loaded = format_loading(target, "TARGET")
    return render("drafter.md", data, target=target, loaded=loaded, facts=record, method=method, **shown)


def data_card(template: str, tag: str, facts: JSONObject, **shown: Any) -> str:
    """Return the README.md of a dataset. `tag`: the method it is for; `facts`: its record; `shown`: further values for the template."""
    settings = {name: value for name, value in facts["settings"].items() if name != "features"}
    card = render(
        template,
        DatasetCardData(license="apache-2.0", tags=["hf_lossy_assist", tag], task_categories=["text-classification"]),
        facts=facts,
        draft=ModelIdentity.from_dict(facts["draft"]),
        settings=join_items(settings),
        versions=join_items(facts["versions"]),
        **shown,
    )
    return str(card)


def make_results(
    name: str, dataset: str, figures: Iterable[tuple[str, str, float | None]], task: str = "text-generation"
) -> dict[str, object]:
    """Return metadata from which the Hub makes a model index, for those of the figures (type, name, value) that were measured."""
    results = [
        EvalResult(
            task_type=task,
            dataset_type="custom",
            dataset_name=dataset,
            metric_type=kind,
            metric_name=label,
            metric_value=float(value),
        )
        for kind, label, value in figures
        if isinstance(value, int | float)
    ]
    return {"model_name": name, "eval_results": results} if results else {}


def make_data(models: Sequence[ModelIdentity | None], *tags: str, **evaluated: Any) -> ModelCardData:
    """Return a card's metadata: `base_model` names those of the models that have a name of the Hub's form."""
    names = {plain_name(model.id) for model in models if model is not None}
    on_the_hub = sorted(name for name in names if ON_THE_HUB.fullmatch(name))
    return ModelCardData(
        license="apache-2.0",
        library_name="hf_lossy_assist",
        tags=sorted([*TAGS, *tags]),
        base_model=on_the_hub or None,
        **evaluated,
    )
