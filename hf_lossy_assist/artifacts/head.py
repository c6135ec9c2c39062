"""Trained heads: one or two linear layers on a hidden state, saved as config.json, model.safetensors and README.md, never as a pickle."""

import copy
import hashlib
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from safetensors import SafetensorError
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..validation import listed, one_line
from .cards import head_card, save_card
from .files import check_readable, format_json, new_folder
from .head_config import HeadConfig
from .hub import AGAIN, fetch, hub_errors
from .identity import ModelIdentity, doubt_weights, tokenizer_hash
from .json_io import read_json, read_whole


CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # of weights


class Head(torch.nn.Module, PyTorchModelHubMixin, library_name="hf_lossy_assist", tags=["speculative-decoding"]):
    """Base class of `LinearHead` and `MLPHead`. `Head.from_pretrained` loads either.

    `head(features)`: (…, H) of any float dtype → probability (…,) float32.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        if not isinstance(config, HeadConfig):
            raise TypeError(f"{type(self).__name__}: expected a HeadConfig, got {type(config).__name__}")
        if not isinstance(self, KINDS[config.kind]):
            raise ValueError(
                f"{type(self).__name__}: the config is of kind {config.kind!r}: use {KINDS[config.kind].__name__}"
            )
        self.config = config
        self.source: str | None = None  # where it was loaded from or saved to: its name in a policy's JSON form

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
            recorded = getattr(self.config, name)
            if recorded is None or model is None:
                continue
            given = ModelIdentity.of(model)
            conflict = recorded.conflict(given)
            # A judge on the target's states was trained on this draft's mismatches, but also works for other drafts.
            if conflict is not None and (name == "target" or self.config.features.reads("draft")):
                raise ValueError(
                    f"this head was trained for the {name} {recorded}, and the {name} here is {given}: {conflict}. "
                    "Use the models it names, or train a head for these (hf-lossy collect, hf-lossy fit)"
                )
            dtype, _, weights = str(self.config.model_weights.get(name, "")).partition(":")
            doubt = conflict or recorded.doubt(given) or (doubt_weights(weights, dtype, model) if weights else None)
            if doubt is not None:
                line = f"the head's {name} and this {name} may differ: {doubt}; it was trained for the former"
                warnings.warn(line, stacklevel=3)
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

    def save_pretrained(self, save_directory: str | Path, *, push_to_hub: bool = False, **kwargs: Any) -> str | None:
        """Write config.json, model.safetensors and README.md into a folder, all or nothing. A user's README.md there is kept.

        `push_to_hub=True` also uploads; for keyword arguments see `push_to_hub` (`repo_id` defaults to the folder's name).
        """
        save_directory = Path(save_directory)
        with new_folder(save_directory) as folder:
            self.write(folder)
            save_card(self.generate_model_card(), folder, save_directory)
        self.source = str(save_directory)
        if not push_to_hub:
            return None
        kwargs.pop("config", None)
        return self.push_to_hub(repo_id=kwargs.pop("repo_id", None) or save_directory.name, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload to the Hub; arguments: see `huggingface_hub.ModelHubMixin.push_to_hub`. Returns the commit's URL."""
        clone = copy.copy(self)  # the mixin saves it into a temporary folder, which must not become its `source`
        with hub_errors(repo_id):
            return super(Head, clone).push_to_hub(repo_id, **kwargs)

    def write(self, folder: Path) -> None:
        """Write only config.json and model.safetensors. Raises: `ValueError`, one line, if `read` would refuse them."""
        data = safetensors.torch.save(self.weights)
        with check_readable("this head", folder):
            config = self.config.to_dict() | {"weights_sha256": hashlib.sha256(data).hexdigest()}
            (folder / WEIGHTS).write_bytes(data)
            (folder / CONFIG).write_text(format_json(config), encoding="utf-8")
            self.read(folder / CONFIG, folder / WEIGHTS)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> "Head":
        """Load a head from a folder or from the Hub (`org/name`, `org/name@revision`).

        `kwargs`: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `subfolder`. Raises: `ValueError`, one line, for files
        that are missing, truncated, changed or not safetensors; `huggingface_hub`'s errors for the repository.
        """
        source = str(pretrained_model_name_or_path)
        config_file, weights_file = fetch(source, (CONFIG, WEIGHTS), **kwargs)
        head = cls.read(config_file, weights_file)
        head.source = source
        if not isinstance(head, cls):
            raise ValueError(f"{source} holds a {type(head).__name__}, not a {cls.__name__}: use Head.from_pretrained")
        return head

    @staticmethod
    def read(config_file: Path, weights_file: Path) -> "Head":
        """Return a head from its two files."""
        spec = read_json(config_file)
        if not isinstance(spec, dict) or "hidden_size" not in spec or "weights_sha256" not in spec:
            raise ValueError(f"{config_file} is not the config of a head (no hidden_size and weights_sha256 in it)")
        digest = spec.pop("weights_sha256")
        config = HeadConfig.from_dict(spec, str(config_file))
        # In float64, with an MLP's biases and second layer, and the file's header.
        data = read_whole(weights_file, 8 * (config.numbers + 4 * (config.width or 1)) + 2**20)
        try:
            weights = safetensors.torch.load(data)
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{weights_file} is not a whole safetensors file ({error}): download it again ({AGAIN}); pickles are never loaded"
            ) from None
        except KeyError as error:  # a dtype that torch does not have
            raise ValueError(
                f"{weights_file} holds weights of dtype {error.args[0]}; expected {listed(DTYPES)}"
            ) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(
                f"{weights_file} is not the file that {config_file.name} was saved with (SHA-256 differs): save it again, or download it again ({AGAIN})"
            )
        if wrong := [tensor.dtype for tensor in weights.values() if tensor.dtype not in DTYPES]:
            raise ValueError(f"{weights_file} holds weights of dtype {wrong[0]}; expected {listed(DTYPES)}")
        if not all(tensor.float().isfinite().all() for tensor in weights.values()):
            raise ValueError(
                f"{weights_file} holds weights that are NaN or infinite: train the head again (hf-lossy fit)"
            )
        with torch.device("meta"):  # its sizes are not trusted until the weights match
            head = KINDS[config.kind](config)
        try:
            head.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            raise ValueError(f"{weights_file} does not fit {config_file.name}: {one_line(error, 300)}") from None
        return head.eval()

    def generate_model_card(self, *args: object, **kwargs: Any) -> ModelCard:
        """Return the README.md of this head, from its config."""
        return head_card(self.config, **kwargs)

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
