"""Fit SPRINTER's verifier to a collected dataset, and say on held-out prompts how good it is.

Adam and binary cross entropy with early stopping, split by prompt (Zhong et al., §3.2 and A.5,
huggingface.co/papers/2502.04557). Features are standardised and the scaler is folded into the first layer, so a head reads raw hidden states.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch.nn import functional as F

from ...artifacts.cards import head_card, write_card
from ...artifacts.features import FeatureSpec
from ...artifacts.files import new_folder
from ...artifacts.head_config import WIDEST, HeadConfig
from ...artifacts.heads import KINDS, Head
from ...artifacts.sampling_settings import decoding_of
from ...models.identity import ModelIdentity, versions
from ...training.dataset import Table, acceptable, read_table
from ...validation import MOST_FACTOR, check_flag, check_int, check_number, shown


SHARES = (0.7, 0.15, 0.15)  # of the prompts: training, early stopping, the figures that are reported
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
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


@dataclass
class Report:
    """What a fitted head does on the prompts that were kept aside."""

    lam: float
    auroc: float
    brier: float
    acceptable: float  # share of all records
    auroc_by_kind: dict[str, float]
    thresholds: list[dict[str, float]]  # threshold, eta_tp, eta_fp
    roc: list[tuple[float, float]] = field(default_factory=list)  # (η_FP, η_TP)
    reliability: list[tuple[float, float, int]] = field(default_factory=list)  # (mean V, share acceptable, records)

    def at(self, threshold: float) -> tuple[float, float]:
        """(η_TP, η_FP) at the tabled threshold nearest to `threshold`."""
        row = min(self.thresholds, key=lambda r: abs(r["threshold"] - threshold))
        return row["eta_tp"], row["eta_fp"]


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


def fit_head(table: Table, lam: float, settings: FitSettings = FitSettings()) -> tuple[Head, Report]:
    """Fit one head to the labels q ≤ λ·p.

    Returns: the head, in evaluation mode, with its figures in its config, and the full report on the test prompts.

    Raises: `ValueError` where a part of the split has only one of the two labels.
    """
    check_number("--lambda", lam, 0.0, MOST_FACTOR)
    labels = acceptable(table.p, table.q, lam)
    parts = split(table.prompt, settings.seed)
    for name, part in zip(("training", "early stopping", "test"), parts, strict=True):
        if labels[part].unique().numel() < 2:
            share = float(labels[part].float().mean())
            raise ValueError(
                f"λ = {lam:g}: the {name} prompts have only one label ({share:.0%} acceptable); collect more prompts"
            )
    train, valid, test = parts
    weight, share = _weights(table, labels.float(), train, settings.balance)
    config = config_of(table, settings, "sprinter", f"q(x) ≤ {lam:g}·p(x)")
    head = train_head(config, table.features, labels.float(), weight, (train, valid), settings)
    if settings.balance:
        with torch.no_grad():  # an odds ratio moves by the ratio of the label weights
            head.linear.bias += float(np.log(share / (1 - share)))  # type: ignore[union-attr, operator]
    report = measure(head, table.of(test), lam)
    return _with_figures(head, report, table, settings, [int(part.sum()) for part in parts]), report


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
    _fold(head, mean, scale)
    return head.eval()


def _weights(table: Table, y: torch.Tensor, train: torch.Tensor, balance: bool) -> tuple[torch.Tensor, float]:
    """(N,): every kind of prefix counts the same in all (§3.2), and with `balance` each label as well; mean 1 over training.

    Also the share of acceptable tokens where only the kinds are weighted.
    """
    weight = torch.ones_like(y)
    for kind in table.kind[train].unique():
        mine = table.kind == kind
        weight[mine] /= (mine & train).sum()
    share = float((weight * y)[train].sum() / weight[train].sum())
    if balance:
        for label in (0.0, 1.0):
            mine = y == label
            weight[mine] /= weight[mine & train].sum()
    return weight / weight[train].mean(), share


@torch.no_grad()
def _fold(head: Head, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """Make the first layer read raw features: w·(x − mean)/scale + b."""
    first = next(module for module in head.modules() if isinstance(module, torch.nn.Linear))
    first.weight.div_(scale)
    first.bias.sub_(first.weight @ mean)


@torch.no_grad()
def measure(head: Head, table: Table, lam: float) -> Report:
    """AUROC, ROC, (η_TP, η_FP) by threshold, Brier score and reliability of `head` on the records of `table`."""
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import brier_score_loss, roc_auc_score, roc_curve

    v = head(table.features)
    y = acceptable(table.p, table.q, lam)
    fpr, tpr, _ = roc_curve(y.numpy(), v.numpy())
    thin = np.unique(np.linspace(0, len(fpr) - 1, 200).astype(int))
    share, mean = calibration_curve(y.numpy(), v.numpy(), n_bins=10)
    # As scikit-learn bins them: a value on an edge belongs to the bin below.
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, 11)[1:-1], v.numpy()), minlength=10)
    by_kind = {}
    for k, name in enumerate(table.kinds):
        mine = table.kind == k
        if y[mine].unique().numel() == 2:
            by_kind[name] = float(roc_auc_score(y[mine].numpy(), v[mine].numpy()))
    return Report(
        lam=lam,
        auroc=float(roc_auc_score(y.numpy(), v.numpy())),
        brier=float(brier_score_loss(y.numpy(), v.numpy())),
        acceptable=float(y.float().mean()),
        auroc_by_kind=by_kind,
        thresholds=[
            {"threshold": t, "eta_tp": float((v[y] >= t).float().mean()), "eta_fp": float((v[~y] >= t).float().mean())}
            for t in THRESHOLDS
        ],
        roc=[(float(a), float(b)) for a, b in zip(fpr[thin], tpr[thin], strict=True)],
        reliability=[(float(m), float(s), int(c)) for m, s, c in zip(mean, share, counts[counts > 0], strict=True)],
    )


def config_of(table: Table, settings: FitSettings, method: str, label: str) -> HeadConfig:
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
        decoding=decoding_of(collected),
        versions=versions(),
    )


def _with_figures(head: Head, report: Report, table: Table, settings: FitSettings, sizes: Sequence[int]) -> Head:
    """The same head with how it was trained and what it reaches in its config."""
    facts = table.facts
    training = {
        "prompts": facts["source"] or "not named",
        "number_of_prompts": facts["prompts"],
        "tokens": f"{sizes[0]} for training, {sizes[1]} for early stopping, {sizes[2]} for the figures; no prompt in two parts",
        "prefixes": "original, draft-only, target-only and interleaved, weighted equally",
        "loss": f"binary cross entropy, Adam, learning rate {settings.learning_rate:g}, early stopping"
        + (", both labels weighted equally, intercept moved back" if settings.balance else ""),
        "seed": settings.seed,
    }
    metrics = {
        "auroc": report.auroc,
        "brier": report.brier,
        "acceptable_share": report.acceptable,
        **{f"auroc_{name}": value for name, value in report.auroc_by_kind.items()},
        "thresholds": report.thresholds,
    }
    head.config = HeadConfig(**(vars(head.config) | {"lam": report.lam, "training": training, "metrics": metrics}))
    return head


def fit_sprinter(
    data: str | Path, out: str | Path, lambdas: Sequence[float] = (), settings: FitSettings = FitSettings()
) -> tuple[Head, list[Report]]:
    """Fit a head for each λ, and write the one for the λ that the data was collected with (or else the first) to `out`.

    The folder holds what `Head.save_pretrained` writes, plots, and the held-out records that `plan` replays.

    Returns: the head that was written, and every λ's report in the order given. Raises: `ValueError`, one line.
    """
    from ...training.plots import reliability_figure, roc_figure
    from .plan import DIGEST, HELD_OUT, held_out

    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out, or delete it to fit again")
    for lam in lambdas:
        check_number("--lambda", lam, 0.0, MOST_FACTOR)
    table = read_table(data)
    table.check_for("sprinter", "predicting")
    collected = float(table.facts["settings"]["lam"])
    lambdas = list(lambdas) or [collected]
    fitted = [fit_head(table, lam, settings) for lam in lambdas]
    head, report = fitted[lambdas.index(collected) if collected in lambdas else 0]
    others = {f"auroc_lambda_{r.lam:g}": r.auroc for _, r in fitted if r is not report}
    head.config.metrics.update(others)
    with new_folder(out) as folder:
        records = safetensors.torch.save(held_out(table.of(split(table.prompt, settings.seed)[2]), head))
        (folder / HELD_OUT).write_bytes(records)
        head.config.training[DIGEST] = hashlib.sha256(records).hexdigest()
        head.write(folder)
        curves = {f"$\\lambda$ = {r.lam:g}": (*zip(*r.roc, strict=True), r.auroc) for _, r in fitted}
        roc_figure(curves, folder / "roc.png")  # type: ignore[arg-type]
        reliability_figure(report.reliability, folder / "reliability.png")
        write_card(head_card(head.config, plots=["roc.png", "reliability.png"]), folder / "README.md")
    head.source = str(out)
    return head, [r for _, r in fitted]
