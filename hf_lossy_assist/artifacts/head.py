"""Trained heads: one or two linear layers on a hidden state, saved as config.json, model.safetensors and README.md, never as a pickle."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import ModelCard
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..validation import listed
from .artifact import Artifact
from .cards import head_card
from .head_config import HeadConfig
from .identity import ModelIdentity, tokenizer_hash
from .json_io import JSONObject


CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # of weights


class Head(torch.nn.Module, Artifact):
    """Base class of `LinearHead` and `MLPHead`. `Head.from_pretrained` loads either.

    `head(features)`: (…, H) of any float dtype → probability (…,) float32.
    """

    kind = "head"
    facts_file, tensors_file, checksum = CONFIG, WEIGHTS, "weights_sha256"

    def __init__(self, config: HeadConfig):
        super().__init__()
        if not isinstance(self, KINDS[config.kind]):
            raise ValueError(
                f"{type(self).__name__}: the config is of kind {config.kind!r}: use {KINDS[config.kind].__name__}"
            )
        self.config = config
        self.source = None

    def logit(self, features: torch.Tensor) -> torch.Tensor:
        """Return log(P / (1 − P)), (…, H) → (…,) float32."""
        raise NotImplementedError(f"{type(self).__name__} needs a method logit(features)")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.logit(features).sigmoid()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}

    @property
    def digest(self) -> str:
        """SHA-256 of the weights as they are saved."""
        return hashlib.sha256(safetensors.torch.save(self.weights)).hexdigest()

    def check(
        self,
        target: PreTrainedModel | None = None,
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Refuse models that this head was not trained for.

        Raises: `ValueError` if sizes, architecture or tokenizer differ. Another id or revision, or other weights, of the same sizes only warn.
        """
        for name, model in (("target", target), ("draft", draft)):
            if (recorded := getattr(self.config, name)) is not None and model is not None:
                # A judge on the target's states was trained on this draft's mismatches, but also works for other drafts.
                strict = name == "target" or self.config.features.reads("draft")
                weights = self.config.model_weights.get(name, "")
                recorded.check(model, name, "the head", "train a head for these (hf-lossy fit)", weights, strict)
        spec = self.config.features
        read = [model for name, model in (("draft", draft), ("target", target)) if spec.reads(name)]
        if read and all(model is not None for model in read):
            sizes = [ModelIdentity.of(model).hidden_size for model in read]
            if sum(sizes) != self.config.hidden_size:
                of = "draft and target" if spec.model == "both" else spec.model
                raise ValueError(
                    f"this head reads {self.config.hidden_size} numbers of the {of}, and here there are {sum(sizes)} "
                    f"({', '.join(str(ModelIdentity.of(model)) for model in read)}): another hidden size"
                )
        known = self.config.tokenizer_hash
        if tokenizer is not None and known is not None and (here := tokenizer_hash(tokenizer)) != known:
            raise ValueError(
                f"this head was trained with a tokenizer of hash {known[:12]}…, and the tokenizer here has {here[:12]}…: token ids "
                "mean other words"
            )

    def facts(self) -> JSONObject:
        return self.config.to_dict()

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.weights

    def card(self, plots: Sequence[str] = ()) -> ModelCard:
        """Return the README.md of this head, from its config. `plots`: names of image files in the same folder."""
        return head_card(self.config, plots)

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
        assert config.width is not None, "checked by HeadConfig"
        self.hidden = torch.nn.Linear(config.hidden_size, config.width)
        self.linear = torch.nn.Linear(config.width, 1)

    def logit(self, features: torch.Tensor) -> torch.Tensor:
        # Functions instead of modules, and ReLU instead of GELU, halve the head's time, which every drafted token costs.
        hidden = F.linear(features.float(), self.hidden.weight.float(), self.hidden.bias.float()).relu()
        return F.linear(hidden, self.linear.weight.float(), self.linear.bias.float()).squeeze(-1)


KINDS: dict[str, type[Head]] = {"linear": LinearHead, "mlp": MLPHead}
