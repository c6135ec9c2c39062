"""Fit an EAGLE-3 drafter to the texts of its target, and say on held-out texts how often each place of a draft is right.

From "EAGLE-3" (§3 and §4, huggingface.co/papers/2503.01840): steps weigh 0.8^k; the draft's vocabulary is the target's most frequent tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...drafters.eagle import Eagle3Drafter
from ...drafters.hidden_state import Proposal
from ...drafters.networks.eagle_network import Eagle3Network
from ...models.identity import ModelIdentity, dtype_of, weights_hash
from ...models.introspection import base_of
from ...stats.intervals import Estimate, rate
from ...terminal import Bar
from ...training.processes import Processes
from .chains import accepted_by, rounds_of, steps_of
from .checkpoints import Checkpoints
from .data import Batch, Texts
from .settings import FitSettings
from .untrained import network_for


FEWEST_TEXTS = 8
SAID_EVERY = 20  # steps between two losses that are shown
DECAY = 0.8  # by which a step weighs less than the one before it


@dataclass(frozen=True)
class Report:
    """What a drafter reaches on held-out texts: `acceptance[k]` of drafts' place k + 1, where all before were right (None: no draft came to
    it), and tokens a target call of strict greedy decoding.
    """

    acceptance: tuple[Estimate | None, ...]
    tokens_per_call: Estimate
    texts: int


class Losses(torch.nn.Module):
    """The network as a module whose forward is the loss, for processes that share a batch."""

    def __init__(self, network: Eagle3Network, embedding: torch.nn.Module):
        super().__init__()
        self.network = network
        self.embedding = [embedding]  # the target's, which is not trained

    def forward(self, batch: Batch, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum over places and steps of the weighted cross entropy, and the number of places of the first step."""
        found = list(steps_of(self.network, self.embedding[0], batch, steps))
        weighted = sum(DECAY**k * step.loss for k, step in enumerate(found))
        assert isinstance(weighted, torch.Tensor)
        return weighted, found[0].places


def fit(
    target: Any, texts: Texts, settings: FitSettings, checkpoints: Checkpoints, processes: Processes, accelerator: Any
) -> tuple[Eagle3Drafter, Report | None]:
    """Train a drafter; each process has a part of every batch, and all have the same network in the end.

    Returns: the drafter, and in the first process its figures.
    """
    train, test = split(len(texts), settings)
    embedding = base_of(target).get_input_embeddings()
    network = network_for(target, texts, settings).to(accelerator.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    done = checkpoints.load(network, optimizer)
    model, optimizer = accelerator.prepare(Losses(network, embedding), optimizer)
    a_turn = -(-len(train) // settings.batch_size)
    total = settings.epochs * a_turn
    with Bar(total, "training", "steps", quiet=not processes.first) as bar:
        bar.skip(done)
        for step in range(done, total):
            epoch, place = divmod(step, a_turn)
            order = torch.randperm(
                len(train), generator=torch.Generator().manual_seed(settings.seed * 100_003 + epoch)
            )
            chosen = [
                train[i] for i in order[place * settings.batch_size : (place + 1) * settings.batch_size].tolist()
            ]
            mine = processes.share(chosen) or chosen[:1]  # a process must run as often as the others
            loss, places = model(texts.batch(mine, settings.longest), settings.steps)
            if not processes.share(chosen):
                loss, places = loss * 0, places * 0
            everywhere = accelerator.reduce(places.float(), reduction="sum").clamp(min=1)
            loss = loss * processes.count / everywhere  # gradients of the processes are averaged
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, total)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            if step % SAID_EVERY == 0:
                bar.say(f"training, loss {float(accelerator.reduce(loss.detach(), reduction='mean')):.3f}")
            bar.to(step + 1)
            if (step + 1) % settings.save_every == 0 and processes.first:
                checkpoints.save(network, optimizer, step + 1)
    # The wrapped model goes before its process group: see examples/multi_gpu/train_head.py.
    model, optimizer = accelerator.free_memory(model, optimizer)
    network.eval().requires_grad_(False)
    drafter = Eagle3Drafter(network, None, Proposal(settings.steps))
    report = measure(network, embedding, texts, test, settings) if processes.first else None
    processes.wait()
    return drafter, report


def split(count: int, settings: FitSettings) -> tuple[list[int], list[int]]:
    """The numbers of the texts to train on, and of those that are held out. Raises: `ValueError` where there are too few."""
    if count < FEWEST_TEXTS:
        raise ValueError(f"there are {count} texts; at least {FEWEST_TEXTS} are needed to hold some of them out")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed)).tolist()
    held = max(4, round(count * settings.held_out))
    rest = order[held:]
    if settings.texts is not None and settings.texts > len(rest):
        raise ValueError(f"texts={settings.texts}: there are {len(rest)} beside the {held} that are held out")
    return sorted(rest[: settings.texts]), sorted(order[:held])


def check_lengths(texts: Texts, settings: FitSettings) -> None:
    """Refuse texts of which nothing is left to train on or to measure. Raises: `ValueError`, one line."""
    for numbers, what in zip(split(len(texts), settings), ("it trains on", "are held out"), strict=True):
        if not any(min(len(texts.ids[n]), settings.longest) > max(texts.prompts[n], 2) for n in numbers):
            shortest = min(texts.prompts[n] for n in numbers)
            raise ValueError(
                f"longest={settings.longest}: none of the {len(numbers)} texts that {what} has a token of its answer among those; the shortest prompt "
                f"has {shortest}"
            )


def _schedule(step: int, total: int) -> float:
    """The learning rate's share of its highest: up in the first 5 % of steps, then down as a cosine to a tenth."""
    warm = max(1, total // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


@torch.no_grad()
def measure(
    network: Eagle3Network, embedding: torch.nn.Module, texts: Texts, numbers: Sequence[int], settings: FitSettings
) -> Report:
    """Chains of `settings.steps` greedily drafted tokens at every place of the answers of the texts `numbers`.

    Acceptance is of all places alike. Calls are those of strict decoding, which drafts where the call before ended: more often where drafts fail.
    """
    tried, right = [[] for _ in range(settings.steps)], [[] for _ in range(settings.steps)]  # type: list[list[float]], list[list[float]]
    tokens, calls = [], []  # type: list[float], list[float]
    for start in range(0, len(numbers), settings.batch_size):
        batch = texts.batch(numbers[start : start + settings.batch_size], settings.longest)
        steps = list(steps_of(network, embedding, batch, settings.steps))
        for k, step in enumerate(steps):
            tried[k] += step.tried.sum(dim=1).tolist()
            right[k] += step.right.sum(dim=1).tolist()
        for accepted, length, prompt in zip(
            accepted_by(steps).tolist(), batch.lengths.tolist(), batch.prompts.tolist(), strict=True
        ):
            tokens.append(max(length - prompt, 0))
            calls.append(rounds_of(accepted, prompt - 2, length - 3))
    acceptance = tuple(rate(r, t) if sum(t) else None for r, t in zip(right, tried, strict=True))
    return Report(acceptance, rate(tokens, calls), len(numbers))


def record_of(settings: FitSettings, texts: Texts) -> dict[str, Any]:
    """What a run of `fit` was started with."""
    facts = texts.facts
    return {
        "settings": asdict(settings),
        "target": ModelIdentity.of(texts.target).to_dict(),
        "dtype": dtype_of(texts.target),
        "target_weights": weights_hash(texts.target),
        "data": {name: facts[name] for name in ("prompts", "prompts_sha256", "source")}
        | {"collected": facts["settings"]},
        "tokens": texts.answered(split(len(texts), settings)[0]),
    }
