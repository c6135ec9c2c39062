"""Fit an EAGLE-3 drafter to its target's texts, and measure on held-out texts how often each position of a draft is right.

`Training` holds what differs for another drafter on the same data. From "EAGLE-3" (§3 and §4, huggingface.co/papers/2503.01840): step k has weight 0.8^k; the draft's vocabulary is the target's most frequent tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from accelerate import Accelerator
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from ...artifacts.cards import README, drafter_card, write_card
from ...artifacts.files import format_json, write_bytes, write_text
from ...artifacts.identity import ModelIdentity, versions, weights_hash
from ...artifacts.json_io import JSONObject
from ...drafters.base import Proposal
from ...drafters.io import save_drafter
from ...drafters.networks.base import HiddenStateNetwork
from ...drafters.trained import DSparkDrafter, Eagle3Drafter
from ...models.introspection import base_of, dtype_of
from ...stats.intervals import Estimate, rate
from ...terminal import Bar
from ...training.processes import Processes
from ...training.run_folder import RunFolder
from .data import TextBatch, TextDataset
from .initialise import DrafterFitSettings, make_network
from .unrolled_loss import ChainStep, count_accepted, count_calls, unroll


RECORD = "fit.json"
DEFAULTS = DrafterFitSettings()
MOMENTS = ("exp_avg", "exp_avg_sq")  # of the optimizer, for each weight
FEWEST_TEXTS = 8
SHOWN_EVERY = 20  # steps between two updates of the displayed loss
DECAY = 0.8  # ratio of a step's weight to that of the step before it


@dataclass(frozen=True)
class DrafterReport:
    """The figures of a drafter on held-out texts, with strict greedy decoding."""

    # For each position of a draft, given that all before were right; None: no draft reached it.
    acceptance: tuple[Estimate | None, ...]
    tokens_per_call: Estimate  # of the target
    texts: int


class Training(NamedTuple):
    """A kind of drafter that is trained here: name and paper for its card, an untrained network, its drafts at every position of a batch, its class."""

    name: str
    paper: str
    make_network: Callable[..., Any]
    unroll: Callable[..., Iterator[ChainStep]]
    drafter: type[Eagle3Drafter | DSparkDrafter]


EAGLE3 = Training("EAGLE-3", "2503.01840", make_network, unroll, Eagle3Drafter)


class UnrolledLoss(torch.nn.Module):
    """The network as a module whose forward is the loss, for processes that share a batch."""

    def __init__(self, method: Training, network: HiddenStateNetwork, embedding: torch.nn.Module):
        super().__init__()
        self.network, self.method = network, method
        self.embedding = [embedding]  # the target's; in a list, so that it is not trained

    def forward(self, batch: TextBatch, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the weighted cross entropy over positions and steps, and the number of positions in the first step."""
        found = list(self.method.unroll(self.network, self.embedding[0], batch, steps))
        weighted = sum(DECAY**k * step.loss for k, step in enumerate(found))
        assert isinstance(weighted, torch.Tensor)
        return weighted, found[0].places


class Checkpoints:
    """Checkpoints of a training run in one folder, from which a killed run continues exactly; only the latest is kept.

    Weights and the optimizer's moments are safetensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def save(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write the state after `step` steps."""
        state = dict(network.named_parameters())
        tensors = {f"weight.{name}": weight.detach().cpu().contiguous() for name, weight in state.items()}
        for name, parameter in state.items():
            for moment in MOMENTS:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu().contiguous()
        before = self._all()
        write_bytes(self.folder / f"{step:05d}.safetensors", safetensors.torch.save(tensors))
        for file in before:
            file.unlink()

    def load(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the latest checkpoint. Returns: how many steps are done."""
        for file in reversed(self._all()):
            tensors, step = safetensors.torch.load_file(file), int(file.stem)
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    parameter.copy_(tensors[f"weight.{name}"])
                    moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
                    optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
            return step
        return 0

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.safetensors"))


def fit_eagle3(
    target: PreTrainedModel,
    data: str | Path,
    out: str | Path,
    settings: DrafterFitSettings = DEFAULTS,
    *,
    resume: bool = False,
) -> tuple[Eagle3Drafter, DrafterReport | None]:
    """Train a drafter for `target` on the data of `collect` in `data`, and write it to `out` in the format of `speculators`, with a card.

    Every `settings.save_every` steps a checkpoint is written to `out`.partial, from which `resume` continues. Processes started by
    `accelerate launch` share each batch.

    Returns: the drafter, and in the first process its figures on held-out texts. Raises: `ValueError`, one line.
    """
    drafter, report = fit_drafter(EAGLE3, target, data, out, settings, resume=resume)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter, report


def fit_drafter(
    method: Training,
    target: PreTrainedModel,
    data: str | Path,
    out: str | Path,
    settings: DrafterFitSettings,
    *,
    resume: bool = False,
) -> tuple[Eagle3Drafter | DSparkDrafter, DrafterReport | None]:
    """Train a drafter by `method`; see `fit_eagle3`."""
    texts = TextDataset(data, target)
    split = split_texts(len(texts), settings)
    _check_lengths(texts, split, settings)
    processes = Processes.started()
    accelerator = Accelerator(cpu=target.device.type == "cpu")
    facts = {
        "settings": asdict(settings),
        "target": ModelIdentity.of(target).to_dict(),
        "dtype": dtype_of(target),
        "target_weights": weights_hash(target),
        "data": {name: texts.facts[name] for name in ("prompts", "prompts_sha256", "source")}
        | {"collected": texts.settings},
        "tokens": texts.count_answered(split[0]),
    }

    def write() -> None:
        report = measure(drafter.network, base_of(target).get_input_embeddings(), texts, split[1], settings, method)
        found.append(report)
        figures = {
            "acceptance": [None if share is None else list(share) for share in report.acceptance],
            "tokens_per_call": list(report.tokens_per_call),
            "held_out_texts": report.texts,
            "versions": versions(),
        }
        with run.result() as folder:
            save_drafter(drafter, folder, target, embeddings=False)
            write_text(folder / RECORD, format_json(facts | figures))
            write_card(make_card(facts | figures, method), folder / README)

    found: list[DrafterReport] = []
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        checkpoints = Checkpoints(run.part)
        drafter = train(method, target, texts, split[0], settings, checkpoints, processes, accelerator)
        processes.on_first(write)
    return drafter, found[0] if found else None


def train(
    method: Training,
    target: PreTrainedModel,
    texts: TextDataset,
    numbers: Sequence[int],
    settings: DrafterFitSettings,
    checkpoints: Checkpoints,
    processes: Processes,
    accelerator: Accelerator,
) -> Eagle3Drafter | DSparkDrafter:
    """Train a drafter on the texts `numbers`; each process has a part of every batch, and all end with the same network."""
    network = method.make_network(target, texts, settings).to(accelerator.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    done = checkpoints.load(network, optimizer)
    losses = UnrolledLoss(method, network, base_of(target).get_input_embeddings())
    model, optimizer = accelerator.prepare(losses, optimizer)
    size, per_epoch = settings.batch_size, -(-len(numbers) // settings.batch_size)
    total = settings.epochs * per_epoch
    with Bar(total, "training", "steps", quiet=not processes.first) as bar:
        bar.skip(done)
        for step in range(done, total):
            epoch, place = divmod(step, per_epoch)
            generator = torch.Generator().manual_seed(settings.seed * 100_003 + epoch)
            order = torch.randperm(len(numbers), generator=generator)
            chosen = [numbers[i] for i in order[place * size : (place + 1) * size].tolist()]
            shared = processes.share(chosen)
            # Every process must run the same number of forwards.
            loss, places = model(texts.batch(shared or chosen[:1], settings.longest), settings.steps)
            if not shared:
                loss, places = loss * 0, places * 0
            everywhere = accelerator.reduce(places.float(), reduction="sum").clamp(min=1)
            loss = loss * processes.count / everywhere  # gradients are averaged over processes
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, total)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            if step % SHOWN_EVERY == 0:
                bar.say(f"training, loss {float(accelerator.reduce(loss.detach(), reduction='mean')):.3f}")
            bar.to(step + 1)
            if (step + 1) % settings.save_every == 0 and processes.first:
                checkpoints.save(network, optimizer, step + 1)
    # Free the wrapped model before its process group: see examples/multi_gpu/train_head.py.
    model, optimizer = accelerator.free_memory(model, optimizer)
    return method.drafter(network.eval().requires_grad_(False), None, Proposal(settings.steps))


def split_texts(count: int, settings: DrafterFitSettings) -> tuple[list[int], list[int]]:
    """Return the numbers of the texts to train on, and of the held-out ones. Raises: `ValueError` if there are too few."""
    if count < FEWEST_TEXTS:
        raise ValueError(f"there are {count} texts; at least {FEWEST_TEXTS} are needed to hold some of them out")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed)).tolist()
    held = max(4, round(count * settings.held_out))
    rest = order[held:]
    if settings.texts is not None and settings.texts > len(rest):
        raise ValueError(f"texts={settings.texts}: there are {len(rest)} beside the {held} that are held out")
    return sorted(rest[: settings.texts]), sorted(order[:held])


def _check_lengths(texts: TextDataset, split: tuple[list[int], list[int]], settings: DrafterFitSettings) -> None:
    """Refuse texts that leave nothing to train on or to measure."""
    for numbers, what in zip(split, ("it trains on", "are held out"), strict=True):
        if not any(min(len(texts.ids[n]), settings.longest) > max(texts.prompts[n], 2) for n in numbers):
            shortest = min(texts.prompts[n] for n in numbers)
            raise ValueError(
                f"longest={settings.longest}: none of the {len(numbers)} texts that {what} has a token of its answer among those; the shortest prompt "
                f"has {shortest}"
            )


def _schedule(step: int, total: int) -> float:
    """Return the learning rate as a share of its maximum: linear warm-up in the first 5 % of steps, then cosine decay to a tenth."""
    warm = max(1, total // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


@torch.no_grad()
def measure(
    network: HiddenStateNetwork,
    embedding: torch.nn.Module,
    texts: TextDataset,
    numbers: Sequence[int],
    settings: DrafterFitSettings,
    method: Training = EAGLE3,
) -> DrafterReport:
    """Measure chains of `settings.steps` greedily drafted tokens at every position of the answers in the texts `numbers`.

    Acceptance weighs all positions equally. Calls are those of strict decoding, which drafts where the previous call ended, so more often where
    drafts fail.
    """
    tried, right = ([list[float]() for _ in range(settings.steps)] for _ in range(2))
    tokens, calls = list[float](), list[float]()
    for start in range(0, len(numbers), settings.batch_size):
        batch = texts.batch(numbers[start : start + settings.batch_size], settings.longest)
        steps = list(method.unroll(network, embedding, batch, settings.steps))
        for k, step in enumerate(steps):
            tried[k] += step.tried.sum(dim=1).tolist()
            right[k] += step.right.sum(dim=1).tolist()
        accepted = count_accepted(steps).tolist()
        for row, length, prompt in zip(accepted, batch.lengths.tolist(), batch.prompts.tolist(), strict=True):
            tokens.append(max(length - prompt, 0))
            calls.append(count_calls(row, prompt - 2, length - 3))
    acceptance = tuple(rate(r, t) if sum(t) else None for r, t in zip(right, tried, strict=True))
    return DrafterReport(acceptance, rate(tokens, calls), len(numbers))


def make_card(record: JSONObject, method: Training) -> ModelCard:
    """Return the README.md of a drafter, from the record in its fit.json."""
    rows = [(str(k + 1), _format_interval(share, 100, "%.1f %%")) for k, share in enumerate(record["acceptance"])]
    return drafter_card(
        ModelIdentity.from_dict(record["target"]),
        record,
        method.name,
        paper=method.paper,
        rows=rows,
        tokens=_format_interval(record["tokens_per_call"], 1, "%.2f"),
        texts=record["held_out_texts"],
        settings=", ".join(f"{name} {value}" for name, value in record["settings"].items() if value is not None),
        versions=", ".join(f"{name} {value}" for name, value in record["versions"].items()),
    )


def _format_interval(estimate: Sequence[float | None] | None, factor: float, form: str) -> str:
    if estimate is None:
        return "no draft came to it"
    value, low, high = (None if end is None else form % (factor * end) for end in estimate)
    return f"{value} (too few texts for an interval)" if low is None or high is None else f"{value} ({low} to {high})"
