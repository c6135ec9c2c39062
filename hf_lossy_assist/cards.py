"""Model cards of heads and policies, filled from what their configs record. Templates stand in `templates/`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData


if TYPE_CHECKING:
    from .heads import HeadConfig

TEMPLATES = Path(__file__).parent / "templates"
PAPERS = {
    "sprinter": ("SPRINTER", "https://huggingface.co/papers/2502.04557"),
    "autojudge": ("AutoJudge", "https://huggingface.co/papers/2504.20039"),
    "specdec": ("SpecDec++", "https://huggingface.co/papers/2405.19715"),
}
ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # what `base_model` may hold


def head_card(config: "HeadConfig", plots: Sequence[str] = (), **extra: Any) -> ModelCard:
    """The card of a head. `plots`: names of image files that lie beside it."""
    metrics, training = config.metrics, config.training
    paper, link = PAPERS.get(config.method, (config.method, ""))
    data = _data(
        [m.id for m in (config.target, config.draft) if m is not None],
        tags=["hf_lossy_assist", "speculative-decoding", "assisted-generation", config.method],
        results=[
            (name, label, metrics[name]) for name, label in (("auroc", "AUROC"), ("brier", "Brier score")) if name in metrics
        ],
        name=f"{config.method} head",
        measured_on=str(training.get("prompts", "held-out prompts")),
    )  # fmt: skip
    return ModelCard.from_template(
        data, template_path=str(TEMPLATES / "head.md"), c=config, paper=paper, link=link, metrics=metrics,
        training=training, plots=list(plots), decoding=_pairs(config.decoding), **extra,
    )  # fmt: skip


def policy_card(
    spec: dict[str, Any], lossless: bool, heads: Sequence[Any] = (), measured: Sequence[tuple[str, str]] = ()
) -> ModelCard:
    """The card of a policy in its JSON form `spec`. `measured`: rows (what, figure) for its table of figures."""
    configs = [head.config for head in heads]
    models = [m.id for c in configs for m in (c.target, c.draft) if m is not None]
    data = _data(
        models,
        tags=["hf_lossy_assist", "speculative-decoding", "assisted-generation"],
        results=[],
        name="policy",
        measured_on="",
    )
    return ModelCard.from_template(
        data, template_path=str(TEMPLATES / "policy.md"), lossless=lossless, heads=configs, measured=measured,
        json=json.dumps(spec, indent=2, ensure_ascii=False),
    )  # fmt: skip


def _data(
    models: Sequence[str], tags: list[str], results: Sequence[tuple[str, str, Any]], name: str, measured_on: str
) -> ModelCardData:
    on_the_hub = sorted({m for m in models if ON_THE_HUB.fullmatch(m)})
    evaluated: dict[str, Any] = {}
    if results:
        evaluated = {
            "model_name": name,
            "eval_results": [
                EvalResult(
                    task_type="text-classification", dataset_type="custom", dataset_name=measured_on,
                    metric_type=kind, metric_name=label, metric_value=float(value),
                )
                for kind, label, value in results
            ],
        }  # fmt: skip
    return ModelCardData(
        license="apache-2.0",
        library_name="hf_lossy_assist",
        tags=sorted(tags),
        base_model=on_the_hub or None,
        **evaluated,
    )


def _pairs(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "not recorded"
