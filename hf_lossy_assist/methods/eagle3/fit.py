"""Fit an EAGLE-3 or DSpark drafter to its target's texts, and measure on held-out texts how often each position of a draft is right.

From "EAGLE-3" (§3 and §4, huggingface.co/papers/2503.01840): step k has weight 0.8^k; the draft's vocabulary is the target's most frequent tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from huggingface_hub import ModelCard
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from ...artifacts.cards import README, drafter_card
from ...artifacts.files import JSONObject, format_json, write_text
from ...artifacts.identity import ModelIdentity, versions, weights_hash
from ...drafters.base import Proposal
from ...drafters.io import save_drafter
from ...drafters.networks.base import HiddenStateNetwork
from ...drafters.trained import DSparkDrafter, Eagle3Drafter
from ...models.introspection import base_of, dtype_of
from ...stats.intervals import Estimate, rate
from ...terminal import Bar
from ...training.processes import Processes
from ...training.run_folder import RunFolder
from ..drafter_settings import DrafterFitSettings, DSparkFitSettings
from .collect import TextBatch, TextDataset
from .initialise import make_dspark_network, make_network
from .unrolled_loss import ChainStep, count_accepted, count_calls, unroll, unroll_blocks


Drafter: TypeAlias = Eagle3Drafter | DSparkDrafter
RECORD = "fit.json"
DEFAULTS = DrafterFitSettings()
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
    drafter: type[Drafter]


EAGLE3 = Training("EAGLE-3", "2503.01840", make_network, unroll, Eagle3Drafter)
DSPARK = Training("DSpark", "2607.05147", make_dspark_network, unroll_blocks, DSparkDrafter)


class UnrolledLoss(torch.nn.Module):
    """The network as a module whose forward is the loss, as Transformers' trainer takes it."""

    def __init__(self, method: Training, network: HiddenStateNetwork, embedding: torch.nn.Module, steps: int):
        super().__init__()
        self.network, self.method, self.steps = network, method, steps
        self.embedding = [embedding]  # the target's; in a list, so that it is not trained

    def forward(self, batch: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the weighted cross entropy over positions and steps, and the number of positions in the first step."""
        steps = list(self.method.unroll(self.network, self.embedding[0], batch, self.steps))
        return torch.stack([DECAY**k * step.loss for k, step in enumerate(steps)]).sum(), steps[0].positions


class DrafterTrainer(Trainer):
    """Transformers' trainer with a loss per position of all processes' texts."""

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, TextBatch], **_: object) -> torch.Tensor:
        loss, count = model(inputs["batch"])
        everywhere = self.accelerator.reduce(count.float(), reduction="sum").clamp(min=1)
        return loss * self.accelerator.num_processes / everywhere  # gradients are averaged over processes


class StepBar(TrainerCallback):
    """Shows steps and loss in this package's bar."""

    def __init__(self, bar: Bar):
        self.bar = bar

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.bar.to(state.global_step)

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
        if "loss" in logs:
            self.bar.say(f"training, loss {logs['loss']:.3f}")


def fit_drafter(
    target: PreTrainedModel,
    data: str | Path,
    out: str | Path,
    settings: DrafterFitSettings = DEFAULTS,
    *,
    resume: bool = False,
) -> tuple[Drafter, DrafterReport | None]:
    """Train a drafter for `target` on the data of `collect` in `data`, and write it to `out` in the format of `speculators`, with a card.

    `settings`: EAGLE-3's, or a DSpark drafter's. Every `settings.save_every` steps a checkpoint is written to `out`.partial, from which `resume`
    continues. Processes started by `accelerate launch` share each batch.

    Returns: the drafter, and in the first process its figures on held-out texts. Raises: `ValueError`, one line.
    """
    method = DSPARK if isinstance(settings, DSparkFitSettings) else EAGLE3
    texts = TextDataset(data, target, settings.likely)
    split = split_texts(texts, settings)
    processes = Processes.started()
    data_facts = {name: texts.facts[name] for name in ("prompts", "prompts_sha256", "source")}
    facts = {
        "settings": asdict(settings),
        "target": ModelIdentity.of(target).to_dict(),
        "dtype": dtype_of(target),
        "target_weights": weights_hash(target),
        "data": data_facts | {"collected": texts.settings},
        "tokens": texts.count_answered(split[0]),
    }

    def write() -> None:
        report = measure(drafter.network, base_of(target).get_input_embeddings(), texts, split[1], settings, method)
        reports.append(report)
        figures = {
            "acceptance": [None if share is None else list(share) for share in report.acceptance],
            "tokens_per_call": list(report.tokens_per_call),
            "held_out_texts": report.texts,
            "versions": versions(),
        }
        with run.result() as folder:
            save_drafter(drafter, folder, target, embeddings=False)
            write_text(folder / RECORD, format_json(facts | figures))
            make_card(facts | figures, method).save(folder / README)

    reports: list[DrafterReport] = []
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        texts.store_in(run.part / "0-states", settings.longest)
        drafter = train(method, target, texts, split[0], settings, run.part / "0-checkpoints", processes)
        processes.on_first(write)
    return drafter, reports[0] if reports else None


def train(
    method: Training,
    target: PreTrainedModel,
    texts: TextDataset,
    indices: Sequence[int],
    settings: DrafterFitSettings,
    checkpoints: Path,
    processes: Processes,
) -> Drafter:
    """Train a drafter on the texts `indices` from the last checkpoint; processes share every batch."""
    network = method.make_network(target, texts, settings)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=-(-settings.batch_size // processes.count),
        learning_rate=settings.learning_rate,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=0.05,
        seed=settings.seed,
        save_steps=settings.save_every,
        save_total_limit=1,
        logging_steps=SHOWN_EVERY,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        use_cpu=target.device.type == "cpu",
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # the trainer would split batches over all that it sees
    with Bar(
        settings.epochs * -(-len(indices) // settings.batch_size), "training", "steps", quiet=not processes.first
    ) as bar:
        trainer = DrafterTrainer(
            UnrolledLoss(method, network, base_of(target).get_input_embeddings(), settings.steps),
            arguments,
            data_collator=lambda chosen: {"batch": texts.batch(chosen, settings.longest)},
            train_dataset=indices,
            callbacks=[StepBar(bar)],
        )
        trainer.remove_callback(PrinterCallback)
        # A checkpoint's state is written last, so one that was killed before is none.
        whole = [file.parent for file in checkpoints.glob("*/trainer_state.json")]
        last = max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    # Free the wrapped model before its process group: see examples/multi_gpu/train_head.py.
    trainer.accelerator.free_memory()
    return method.drafter(network.eval().requires_grad_(False), None, Proposal(settings.steps))


def split_texts(texts: TextDataset, settings: DrafterFitSettings) -> tuple[list[int], list[int]]:
    """Return the numbers of the texts to train on, and of those held out; each has an answer within `longest`.

    Raises: `ValueError` if there are too few.
    """
    pairs = enumerate(zip(texts.ids, texts.prompts, strict=True))
    indices = [n for n, (ids, prompt) in pairs if min(len(ids), settings.longest) > max(prompt, 2)]
    if len(indices) < FEWEST_TEXTS:
        raise ValueError(
            f"{len(indices)} of {len(texts)} texts have a token of their answer among the first {settings.longest}; "
            f"at least {FEWEST_TEXTS} are needed to hold some of them out"
        )
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    shuffled, first = [indices[i] for i in order], max(4, round(len(indices) * settings.held_out))
    return sorted(shuffled[first:]), sorted(shuffled[:first])


@torch.no_grad()
def measure(
    network: HiddenStateNetwork,
    embedding: torch.nn.Module,
    texts: TextDataset,
    indices: Sequence[int],
    settings: DrafterFitSettings,
    method: Training = EAGLE3,
) -> DrafterReport:
    """Measure chains of `settings.steps` greedily drafted tokens at every position of the answers in the texts `indices`.

    Acceptance weighs all positions equally. Calls are those of strict decoding, which drafts where the previous call ended, so more often where
    drafts fail.
    """
    tried, right = ([list[float]() for _ in range(settings.steps)] for _ in range(2))
    tokens, calls = list[float](), list[float]()
    for start in range(0, len(indices), settings.batch_size):
        batch = texts.batch(indices[start : start + settings.batch_size], settings.longest)
        steps = list(method.unroll(network, embedding, batch, settings.steps))
        for k, step in enumerate(steps):
            tried[k] += step.tried.sum(dim=1).tolist()
            right[k] += step.right.sum(dim=1).tolist()
        accepted = count_accepted(steps).tolist()
        for row, length, prompt in zip(accepted, batch.lengths.tolist(), batch.prompts.tolist(), strict=True):
            tokens.append(max(length - prompt, 0))
            calls.append(count_calls(row, prompt - 2, length - 3))
    acceptance = tuple(rate(r, t) if sum(t) else None for r, t in zip(right, tried, strict=True))
    return DrafterReport(acceptance, rate(tokens, calls), len(indices))


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
