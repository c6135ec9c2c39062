"""Model cards of heads, drafters, profiles and policies, filled from their files by the templates in `templates/`."""

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from ..models.introspection import plain_name
from ..registry import Names, find_method
from ..validation import visible
from .certificate import Certificate
from .head_config import HeadConfig
from .identity import ModelIdentity
from .json_io import JSONObject


README = "README.md"
TEMPLATES = Path(__file__).parent / "templates"
ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # form of an entry of `base_model`
TAGS = ["hf_lossy_assist", "speculative-decoding", "assisted-generation"]
_MADE_HERE = re.compile(r"(?P<text>.*\n)\n<!-- made by hf_lossy_assist (?P<digest>[0-9a-f]{16}) -->\n", re.DOTALL)
# Characters that begin HTML, a link, an image, code or a table cell, or that end a Python string literal.
_ACTS = re.compile(r"[&<>\"\\`\[\]|]")
# Places where GitHub-style Markdown creates links automatically: before the character that turns text into an address. Renderers also search the
# text with entities decoded, so a comment is inserted.
_LINKS = re.compile(
    r"(?i)(?<=http)(?=://)|(?<=https)(?=://)|(?<=ftp)(?=://)|(?<=xmpp)(?=:)|(?<=mailto)(?=:)|(?<=www)(?=\.)|(?<=[\w.+-])(?=@[\w-]+\.)"
)
APART = "<!-- -->"
# Rows of `metrics.thresholds` have the figures of one of these groups.
ROWS = (("threshold", "recall", "accepted"), ("threshold", "drafted", "accepted"), ("threshold", "eta_tp", "eta_fp"))
REMARKS = ("verdict", "warning")  # lines about the figures, from `training.evidence`
# Other tables in `metrics`: the figures of each row, and its texts.
TABLES = {
    "comparison": (("auroc", "auroc_train"), ("group", "input")),
    "information": (("cells", "entropy", "conditional", "gain", "gain_s", "gain_a"), ("resolution",)),
    "alternatives": (("rows", "target", "strict", "svip"), ()),
}
LARGEST = 1e300


def escape(value: object) -> Any:
    """Escape a text for a card so that it is displayed literally; in a mapping, list or dataclass escape all texts."""
    if isinstance(value, str):
        text = _ACTS.sub(lambda found: f"&#{ord(found[0])};", visible(" ".join(value.split())))
        return _LINKS.sub(APART, text)
    if isinstance(value, Mapping):
        return {escape(key): escape(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [escape(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: escape(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    return value


def write_card(card: ModelCard, file: Path) -> None:
    """Write a card with a last line that later shows whether it was edited."""
    text = str(card).rstrip("\n") + "\n"
    file.write_text(f"{text}\n<!-- made by hf_lossy_assist {_digest(text)} -->\n", encoding="utf-8")


def save_card(card: ModelCard, folder: Path, goal: Path) -> None:
    """Write a card into `folder`, whose files will replace those in `goal`; a README.md there that a user wrote is kept."""
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


def head_card(config: HeadConfig, plots: Sequence[str] = (), **extra: Any) -> ModelCard:
    """Return the card of a head. `plots`: names of image files in the same folder."""
    config = dataclasses.replace(config, metrics=select_metrics(config.metrics))
    metrics, shown = config.metrics, escape(config)
    # None: the method of a later version, or of a package that is not installed.
    method = find_method(config.method) if config.method in Names("method") else None
    named = (method.title, f"https://{method.source}", method.make.__name__) if method else (shown.method, "", "")
    prompts = str(config.training.get("prompts", "held-out prompts"))
    figures = [(name, label, metrics.get(name)) for name, label in (("auroc", "AUROC"), ("brier", "Brier score"))]
    evaluated = make_results(f"{config.method} head", prompts, figures, "text-classification")
    return ModelCard.from_template(
        make_data([config.target, config.draft], config.method, **evaluated),
        template_path=str(TEMPLATES / "head.md"),
        c=shown,
        **dict(zip(("paper", "link", "recipe"), named, strict=True)),
        target=format_loading(config.target, "TARGET"),
        draft=format_loading(config.draft, "DRAFT"),
        lossless=method is not None and method.guarantee == "lossless",
        metrics=shown.metrics,
        training=shown.training,
        plots=list(plots),
        decoding=", ".join(f"{name} {value}" for name, value in shown.decoding.items()) or "not recorded",
        **extra,
    )


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
    return loaded


def select_metrics(metrics: JSONObject) -> JSONObject:
    """Return the part of `metrics` that a card shows: numbers, remarks, and tables of this package; other entries may be arbitrary."""
    tables = ("thresholds", *TABLES)
    found: JSONObject = {str(k): value for k, value in metrics.items() if _is_number(value) and k not in tables}
    rows = metrics.get("thresholds")
    if rows is not None and any(_is_table(rows, names) for names in ROWS):
        found["thresholds"] = [{name: value for name, value in row.items() if _is_number(value)} for row in rows]
    found |= {name: metrics[name] for name in REMARKS if isinstance(metrics.get(name), str)}
    for table, (names, texts) in TABLES.items():
        rows = metrics.get(table)
        if rows is not None and _is_table(rows, names):
            if all(isinstance(row.get(name), str) for row in rows for name in texts):
                found[table] = rows
    return found


def _is_table(rows: object, names: Sequence[str]) -> bool:
    """Return whether these are rows, each with a number under every one of `names`."""
    if not isinstance(rows, list | tuple) or not rows:
        return False
    return all(isinstance(row, Mapping) and all(_is_number(row.get(name)) for name in names) for row in rows)


def _is_number(value: object) -> bool:
    """Return whether this is a number for which a float can hold a hundred times its value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -LARGEST <= value <= LARGEST  # False for NaN


def policy_card(
    spec: Mapping[str, object],
    lossless: bool,
    heads: Sequence[HeadConfig] = (),
    measured: Sequence[tuple[str, str]] = (),
    certificate: Certificate | None = None,
) -> ModelCard:
    """Return the card of a policy with the JSON form `spec` and heads with these configs. `measured`: rows (what, figure) for its table of figures."""
    configs = [dataclasses.replace(head, metrics=select_metrics(head.metrics)) for head in heads]
    evaluated = {} if certificate is None else make_results("policy", certificate.task, certificate.results())
    data = make_data([model for c in configs for model in (c.target, c.draft)], **evaluated)
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "policy.md"),
        lossless=lossless,
        heads=escape(configs),
        measured=escape(measured),
        json=json.dumps(spec, indent=2, ensure_ascii=False),
    )


def drafter_card(target: ModelIdentity, record: JSONObject, method: str, **shown: object) -> ModelCard:
    """Return the card of a trained drafter for `target`, from its fit.json; `shown`: further values for the template."""
    figures = [
        ("accuracy", f"the target's token at position {k} of a draft, where all before are", share and share[0])
        for k, share in enumerate(record["acceptance"], 1)
    ]
    figures.append(("tokens_per_call", "tokens a call of the target", record["tokens_per_call"][0]))
    source = str(record["data"]["source"] or "held-out outputs")
    return ModelCard.from_template(
        make_data([target], method.lower().replace("-", ""), **make_results(f"{method} drafter", source, figures)),
        template_path=str(TEMPLATES / "drafter.md"),
        target=escape(target),
        loaded=format_loading(target, "TARGET"),
        facts=escape(record),
        method=method,
        **escape(shown),
    )


def data_card(template: str, tag: str, facts: JSONObject, **shown: Any) -> str:
    """Return the README.md of a dataset. `tag`: the method it is for; `facts`: its record, escaped; `shown`: further values for the template."""
    card = DatasetCard.from_template(
        DatasetCardData(license="apache-2.0", tags=["hf_lossy_assist", tag], task_categories=["text-classification"]),
        template_path=str(TEMPLATES / template),
        facts=facts,
        draft=ModelIdentity.from_dict(facts["draft"]),
        settings=", ".join(f"{k} {v}" for k, v in facts["settings"].items() if k != "features" and v is not None),
        versions=", ".join(f"{k} {v}" for k, v in facts["versions"].items()),
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
        if value is not None
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
