"""Trained heads: one or two linear layers on a hidden state, saved as config.json, model.safetensors and README.md, never as a pickle."""

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import ModelCard
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..registry import Names, find_entry
from ..validation import check_number, listed
from .artifact import TensorArtifact
from .cards import render
from .features import FeatureSpec
from .files import JSONObject, check_types
from .identity import ModelIdentity, check_tokenizer


CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # of weights
# Where heads saved by older versions have some fields: the field, the dict, the entry in it.
MOVED = (("threshold", "metrics", "threshold"), ("lam", "training", "lambda"))


@dataclass(frozen=True)
class HeadConfig:
    """Content of a head's config.json, except the weights' checksum.

    Args:
        width: of an MLP's hidden layer.
        method: the method that the head was trained for, a name from `register_method`.
        polarity: the label that its probability refers to, "acceptable" (SPRINTER's) or "important" (AutoJudge's).
        decoding: the sampling settings of the distributions that the labels are based on.
        training, metrics, versions: for readers: how the head was trained, and its figures on held-out prompts.
        threshold: the decision threshold, if fitting chose one; None: the method's.
        lam: λ of the label q(x) ≤ λ·p(x), if the method has one.
        model_weights: by role, precision and `weights_hash` of the models, "float32:…"; heads of older versions have none.

    Raises: `TypeError` or `ValueError`, one line.
    """

    hidden_size: int
    kind: str = "linear"  # or "mlp"
    width: int | None = None
    method: str = "sprinter"
    polarity: str = "acceptable"
    label: str = ""
    features: FeatureSpec = FeatureSpec()
    target: ModelIdentity | None = None
    draft: ModelIdentity | None = None
    tokenizer_hash: str | None = None
    decoding: dict[str, object] = field(default_factory=dict)
    training: JSONObject = field(default_factory=dict)
    metrics: JSONObject = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    threshold: float | int | None = None
    lam: float | int | None = None
    model_weights: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        if self.threshold is not None:
            check_number("HeadConfig.threshold", self.threshold, 0.0, 1.0)

    def to_dict(self) -> JSONObject:
        """Return the JSON form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, spec: Mapping[str, object], where: str = "head config") -> "HeadConfig":
        """Read the JSON form, including that of older versions; entries of a later version are ignored with a warning."""
        fields = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(spec) - fields):
            warnings.warn(f"{where}: entries not known to this version are ignored: {listed(unknown)}", stacklevel=2)
        values: JSONObject = {name: value for name, value in spec.items() if name in fields}
        for name, kind in (("features", FeatureSpec), ("target", ModelIdentity), ("draft", ModelIdentity)):
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        for name, moved_from, entry in MOVED:
            old = dict(values.get(moved_from, {}))
            if values.get(name) is None and entry in old:
                values |= {name: old.pop(entry), moved_from: old}
        return cls(**values)


class Head(torch.nn.Module, TensorArtifact):
    """Base class of `LinearHead` and `MLPHead`. `Head.from_pretrained` loads either.

    `head(features)`: (…, H) of any float dtype → probability (…,) float32.
    """

    kind = "head"
    facts_file, tensors_file, checksum = CONFIG, WEIGHTS, "weights_sha256"

    def __init__(self, config: HeadConfig):
        super().__init__()
        if not isinstance(self, KINDS[config.kind]):
            raise ValueError(f"{type(self).__name__}: the config is of kind {config.kind!r}")
        self.config = config
        self.source = None

    def logit(self, features: torch.Tensor) -> torch.Tensor:
        """Return log(P / (1 − P)), (…, H) → (…,) float32."""
        raise NotImplementedError(f"{type(self).__name__} needs a method logit(features)")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.logit(features).sigmoid()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}

    @property
    def digest(self) -> str:
        """SHA-256 of the weights as they are saved."""
        return hashlib.sha256(safetensors.torch.save(self.tensors())).hexdigest()

    def check(
        self,
        target: PreTrainedModel | None = None,
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Refuse models that this head was not trained for.

        Raises: `ValueError` if sizes, architecture or tokenizer differ. Another id or revision, or other weights, of the same sizes only warn.
        """
        instead = "train a head for these (hf-lossy fit)"
        for name, model in (("target", target), ("draft", draft)):
            if (recorded := getattr(self.config, name)) is not None and model is not None:
                # A judge on the target's states was trained on this draft's mismatches, but also works for other drafts.
                strict = name == "target" or self.config.features.reads("draft")
                weights = self.config.model_weights.get(name, "")
                recorded.check(model, name, "the head", instead, weights, strict=strict)
        check_tokenizer(tokenizer, self.config.tokenizer_hash, "the head", instead)

    def facts(self) -> JSONObject:
        return self.config.to_dict()

    def card(self, plots: Sequence[str] = ()) -> ModelCard:
        """Return the README.md of this head, from its config. `plots`: names of image files in the same folder."""
        config = self.config
        # None: the method of a later version, or of a package that is not installed.
        method = find_entry("method", config.method) if config.method in Names("method") else None
        figures = [
            (name, label, config.metrics.get(name)) for name, label in (("auroc", "AUROC"), ("brier", "Brier score"))
        ]
        results = f"{config.method} head", str(config.training.get("prompts", "held-out prompts")), figures
        models = (config.target, config.draft)
        values = {"c": config, "method": method, "plots": plots}
        return render("head.md", models, config.method, results, "text-classification", **values)

    @classmethod
    def build(cls, facts: JSONObject, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
        config = HeadConfig.from_dict(facts, where)
        if not all(tensor.dtype in DTYPES and tensor.float().isfinite().all() for tensor in tensors.values()):
            raise ValueError(
                f"weights that are NaN, infinite or not of {listed(DTYPES)}: train the head again (hf-lossy fit)"
            )
        with torch.device("meta"):  # its sizes are not trusted until the weights match
            head = KINDS[config.kind](config)
        head.load_state_dict(tensors, strict=True, assign=True)
        return head.eval()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.features})"


class LinearHead(Head):
    """sigmoid(w·h + b): SPRINTER's verifier and AutoJudge's judge (a standardised logistic regression folds into it)."""

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.linear = torch.nn.Linear(config.hidden_size, 1)

    def logit(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(features.float(), self.linear.weight.float(), self.linear.bias.float()).squeeze(-1)


class MLPHead(Head):
    """sigmoid(w₂·ReLU(W₁h + b₁) + b₂), with `config.width` hidden units."""

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        if config.width is None:
            raise ValueError("HeadConfig.width: an MLP's config has one")
        self.hidden = torch.nn.Linear(config.hidden_size, config.width)
        self.linear = torch.nn.Linear(config.width, 1)

    def logit(self, features: torch.Tensor) -> torch.Tensor:
        # Functions instead of modules, and ReLU instead of GELU, halve the head's time, which every drafted token costs.
        hidden = F.linear(features.float(), self.hidden.weight.float(), self.hidden.bias.float()).relu()
        return F.linear(hidden, self.linear.weight.float(), self.linear.bias.float()).squeeze(-1)


KINDS: dict[str, type[Head]] = {"linear": LinearHead, "mlp": MLPHead}
