"""Train a head on a collected dataset: split by prompt, Adam and binary cross entropy with early stopping.

SPRINTER's (Zhong et al., A.5, huggingface.co/papers/2502.04557), and SpecDec++'s too. Features are standardised and the scaler is
folded into the first layer, so a head reads raw hidden states.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...artifacts.conditions import select_sampling
from ...artifacts.features import FeatureSpec
from ...artifacts.head import KINDS, Head
from ...artifacts.head_config import WIDEST, HeadConfig
from ...models.identity import ModelIdentity, versions
from ...training.dataset import VerifierDataset
from ...validation import check_flag, check_int, check_number, shown


SHARES = (0.7, 0.15, 0.15)  # of the prompts: training, early stopping, the figures that are reported
FEWEST_PROMPTS = 8


@dataclass(frozen=True)
class FitSettings:
    """How a head is fitted; the defaults suit the sizes that collecting gives."""

    kind: str = "linear"
    width: int = 64  # of an MLP
    balance: bool = True  # both labels weigh the same in the loss; the intercept is then moved back to the true share
    learning_rate: float = 0.001
    batch_size: int = 256
    max_epochs: int = 500
    patience: int = 10  # epochs without a better validation loss
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("width", self.width, 1, WIDEST)
        for name in ("batch_size", "max_epochs", "patience"):
            check_int(name, getattr(self, name), 1)
        check_int("--seed", self.seed, 0)
        check_flag("balance", self.balance)
        check_number("learning_rate", self.learning_rate, 0.0, 10.0)
        if self.kind not in tuple(KINDS):
            raise ValueError(f"--head: expected one of {', '.join(KINDS)}, got {shown(self.kind)}")


DEFAULTS = FitSettings()


def split(prompt: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Three (N,) bool masks that share no prompt: training, early stopping, test."""
    names = prompt.unique()
    if len(names) < FEWEST_PROMPTS:
        raise ValueError(
            f"the dataset has {len(names)} prompts; at least {FEWEST_PROMPTS} are needed to split by prompt"
        )
    shuffled = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
    ends = [round(len(names) * sum(SHARES[: i + 1])) for i in range(3)]
    return [torch.isin(prompt, part) for part in shuffled.tensor_split(ends[:2])]


def train_head(
    config: HeadConfig, features: torch.Tensor, y: torch.Tensor, weight: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor], settings: FitSettings,
) -> Head:  # fmt: skip
    """A head that reads raw `features` (N, H) and says `y` (N,) in [0, 1], each record weighing `weight` (N,) in the loss.

    `parts`: the records to train on and those for early stopping, (N,) bool each.
    """
    train, valid = parts
    generator = torch.Generator().manual_seed(settings.seed)
    mean, scale = features[train].mean(dim=0), features[train].std(dim=0).clamp(min=1e-6)
    x = (features - mean) / scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        head = KINDS[config.kind](config)
    optimizer = torch.optim.Adam(head.parameters(), lr=settings.learning_rate)
    rows = train.nonzero()[:, 0]
    best, state, since = float("inf"), head.weights, 0
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
            state = {name: tensor.clone() for name, tensor in head.weights.items()}
        else:
            since += 1
            if since == settings.patience:
                break
    head.load_state_dict(state)
    fold_scaler(head, mean, scale)
    return head.eval()


@torch.no_grad()
def fold_scaler(head: Head, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """Make the first layer, which was trained on (x − mean)/scale, read raw features x. `mean`, `scale`: (H,)."""
    first = next(module for module in head.modules() if isinstance(module, torch.nn.Linear))
    first.weight.div_(scale)
    first.bias.sub_(first.weight @ mean)


def config_of(table: VerifierDataset, settings: FitSettings, method: str, label: str) -> HeadConfig:
    """The config of a head for this data, without figures."""
    facts = table.facts
    collected = facts["settings"]
    return HeadConfig(
        hidden_size=table.features.shape[1],
        kind=settings.kind,
        width=settings.width if settings.kind == "mlp" else None,
        method=method,
        polarity="acceptable",
        label=label,
        features=FeatureSpec(**collected["features"]),
        target=ModelIdentity.from_dict(facts["target"]),
        draft=ModelIdentity.from_dict(facts["draft"]),
        tokenizer_hash=facts["tokenizer_hash"],
        decoding=select_sampling(collected),
        versions=versions(),
    )
