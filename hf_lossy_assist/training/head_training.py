"""Train a head on collected data: split by prompt, binary cross entropy with early stopping; and what its figures are worth.

Features are standardised (Zhong et al., A.5, huggingface.co/papers/2502.04557), and the scaler is folded into the first layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch.nn import functional as F

from ..artifacts.conditions import select_sampling
from ..artifacts.features import FeatureSpec
from ..artifacts.files import check_new
from ..artifacts.head import KINDS, Head, HeadConfig
from ..artifacts.identity import ModelIdentity, versions
from ..registry import find_method_for_head
from ..setting_fields import check_bounds
from ..stats.intervals import Estimate, wilson
from ..validation import MOST, shown
from .jobs import recorded_weights
from .verifier_dataset import VerifierDataset, read_dataset


SHARES = (0.7, 0.15, 0.15)  # of the prompts: for training, early stopping, and the reported figures
FEWEST_PROMPTS = 8
FEWEST = 50  # held-out tokens of the rarer label; a share of 50 is known to ± 14 points at worst
CHANCE = 0.5  # AUROC of a random guess


@dataclass(frozen=True)
class HeadFitSettings:
    """Settings for fitting a head; the defaults suit the dataset sizes of `collect`."""

    kind: str = "linear"
    width: Annotated[int, (1, MOST)] = 64  # of an MLP
    balance: bool = True  # equal weight for both labels in the loss; the intercept is then corrected to the true share
    learning_rate: Annotated[float, (0, 10)] = 0.001
    batch_size: Annotated[int, (1, MOST)] = 256
    max_epochs: Annotated[int, (1, MOST)] = 500
    patience: Annotated[int, (1, MOST)] = 10  # epochs without a better validation loss
    seed: Annotated[int, (0, MOST)] = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.kind not in tuple(KINDS):
            raise ValueError(f"--head: expected one of {', '.join(KINDS)}, got {shown(self.kind)}")


def split_prompts(prompt: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return (N,) bool masks that share no prompt, for "training", "early stopping" and "test"."""
    names = prompt.unique()
    if len(names) < FEWEST_PROMPTS:
        raise ValueError(
            f"the dataset has {len(names)} prompts; at least {FEWEST_PROMPTS} are needed to split by prompt"
        )
    shuffled = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
    ends = [round(len(names) * sum(SHARES[: i + 1])) for i in range(2)]
    masks = [torch.isin(prompt, prompts) for prompts in shuffled.tensor_split(ends)]
    return dict(zip(("training", "early stopping", "test"), masks, strict=True))


def train_head(
    config: HeadConfig,
    features: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    shift: float,
    splits: Mapping[str, torch.Tensor],
    settings: HeadFitSettings,
) -> Head:
    """Train a head that reads raw `features` (N, H) and predicts `y` (N,) in [0, 1].

    `weight` (N,): of each record in the loss; `shift`: of the log-odds afterwards. `splits`: from `split_prompts`.
    """
    train, valid = splits["training"], splits["early stopping"]
    generator = torch.Generator().manual_seed(settings.seed)
    mean, scale = features[train].mean(dim=0), features[train].std(dim=0).clamp(min=1e-6)
    x = (features - mean) / scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        head = KINDS[config.kind](config)
    optimizer = torch.optim.Adam(head.parameters(), lr=settings.learning_rate)
    rows = train.nonzero()[:, 0]
    best, state, since = float("inf"), head.tensors(), 0
    for _ in range(settings.max_epochs):
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(settings.batch_size):
            loss = F.binary_cross_entropy_with_logits(head.logit(x[batch]), y[batch], weight[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            now = float(F.binary_cross_entropy_with_logits(head.logit(x[valid]), y[valid], weight[valid]))
        if now < best - 1e-5:
            best, since = now, 0
            state = {name: tensor.clone() for name, tensor in head.tensors().items()}
        elif (since := since + 1) == settings.patience:
            break
    head.load_state_dict(state)
    fold_scaler(head, mean, scale)
    with torch.no_grad():
        find_linears(head)[-1].bias.add_(shift)
    return head.eval()


def find_linears(head: Head) -> list[torch.nn.Linear]:
    """Return the layers of a head, in order."""
    return [module for module in head.modules() if isinstance(module, torch.nn.Linear)]


@torch.no_grad()
def fold_scaler(head: Head, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """Convert the first layer, trained on (x − mean)/scale, to read raw features x. `mean`, `scale`: (H,)."""
    first = find_linears(head)[0]
    first.weight.div_(scale)
    first.bias.sub_(first.weight @ mean)


def make_config(
    table: VerifierDataset, settings: HeadFitSettings, method: str, label: str, lam: float | None = None
) -> HeadConfig:
    """Return the config of a head for this data, without figures."""
    facts = table.facts
    return HeadConfig(
        hidden_size=table.features.shape[1],
        kind=settings.kind,
        width=settings.width if settings.kind == "mlp" else None,
        method=method,
        polarity="acceptable",
        label=label,
        lam=lam,
        features=FeatureSpec(**facts["settings"]["features"]),
        target=ModelIdentity.from_dict(facts["target"]),
        draft=ModelIdentity.from_dict(facts["draft"]),
        model_weights=recorded_weights(facts),
        tokenizer_hash=facts["tokenizer_hash"],
        decoding=select_sampling(facts["settings"]),
        versions=versions(),
    )


def open_collected(data: str | Path, out: str | Path, method: str, position: str) -> VerifierDataset:
    """Read the dataset that a method's head is fitted to; refuse that of another method, and an `out` that exists."""
    check_new(out, "fit again")
    table = read_dataset(data)
    spec = FeatureSpec(**table.facts["settings"]["features"])
    if spec.position != position:
        other = find_method_for_head("acceptable", spec.position).name
        raise ValueError(
            f"this dataset holds the {spec}: it is for hf-lossy fit {other}. Collect again with --for {method}"
        )
    return table


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """Held-out data behind a head's figures."""

    auroc: Estimate  # with an interval over whole texts
    texts: int  # held-out problems or prompts
    unit: str  # the name for them
    counts: dict[str, int]  # held-out tokens by label; expected numbers if labels are probabilities
    missing: dict[str, str]  # by label, how to get more of them

    @property
    def warning(self) -> str | None:
        """One line if the figures are based on few tokens, else None."""
        rarer = self._find_rarer()
        if self.counts[rarer] >= FEWEST:
            return None
        few = f"{self.counts[rarer]} {rarer} tokens in {self._texts()}, fewer than {FEWEST}"
        return f"these figures are of {few}: {self.missing[rarer]}"

    @property
    def verdict(self) -> str | None:
        """One line if the held-out texts do not show that the head is better than chance, else None."""
        if self.auroc.low is not None and self.auroc.low > CHANCE:
            return None
        return f"no better than chance as far as is known: {self}; {self.missing[self._find_rarer()]}"

    def metrics(self) -> dict[str, object]:
        """Return the entries for the head's config."""
        figures: dict[str, object] = dict(zip(("auroc", "auroc_low", "auroc_high"), self.auroc, strict=True))
        figures |= {f"held_out_{self.unit}s": self.texts}
        figures |= {f"held_out_{label}": count for label, count in self.counts.items()}
        figures |= {"verdict": self.verdict, "warning": self.warning}
        return {name: value for name, value in figures.items() if value is not None}

    def __str__(self) -> str:
        value, low, high = self.auroc
        between = "no interval" if low is None else f"95 %: {low:.3f} to {high:.3f}"
        return f"AUROC {value:.3f} ({between}, {self._texts()})"

    def _find_rarer(self) -> str:
        """Return the label with fewer tokens."""
        return min(self.counts, key=lambda label: self.counts[label])

    def _texts(self) -> str:
        return f"{self.texts} held-out {self.unit}" + ("s" if self.texts != 1 else "")


@dataclass
class HeadReport:
    """The figures of a fitted head on held-out texts that all methods have."""

    evidence: Evidence  # with the AUROC and its interval
    brier: float
    thresholds: list[dict[str, float]]  # a threshold and the method's figures there, with intervals

    @property
    def auroc(self) -> float:
        """The AUROC; with folds their mean, with soft labels that of outcomes drawn from them."""
        return self.evidence.auroc.value

    def metrics(self) -> dict[str, object]:
        """Return the entries for the head's config."""
        return {**self.evidence.metrics(), "brier": self.brier, "thresholds": self.thresholds}

    def row_at(self, threshold: float) -> dict[str, float]:
        """Return the row of the tabulated threshold nearest to `threshold`."""
        return min(self.thresholds, key=lambda row: abs(row["threshold"] - threshold))


def format_share(hits: int, count: int) -> str:
    """Return a share with its counts and Wilson's 95 % interval: "6 of 6 (100 %; 95 %: 61 % to 100 %)"."""
    if not count:
        return "0 of 0"
    share, low, high = (f"{100 * (value or 0):.3g} %" for value in wilson(hits, count))
    return f"{hits} of {count} ({share}; 95 %: {low} to {high})"


def add_intervals(rows: Sequence[dict[str, float]], counts: dict[str, int]) -> list[dict[str, float]]:
    """Return rows of thresholds with Wilson's `…_low` and `…_high` of each share; `counts`: number of tokens behind each."""
    out = [dict(row) for row in rows]
    for row in out:
        for name, count in counts.items():
            if count:
                _, low, high = wilson(round(row[name] * count), count)
                row |= {f"{name}_low": low or 0.0, f"{name}_high": high or 0.0}
    return out
