"""Random tables and laws for speculative verification, profiles that drop much, and models over few tokens."""

import functools

import numpy as np
import torch

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.conditions import describe_machine
from hf_lossy_assist.artifacts.identity import ModelIdentity
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.artifacts.sv_profile import Profile
from support import tiny


def steep(target, draft, companion, of: Bins, cost: float = 0.3, batch: int = 1, pays: float = 2.0) -> Profile:
    """A profile whose rounds cost 1 + `cost` for each verified token of a row, so that much is dropped."""
    tokens = np.arange(8 * batch + 1)
    latency = Latency(np.array([batch]), tokens[None], (1 + cost * tokens / batch)[None], *np.zeros((3, 1)))
    models = (ModelIdentity.of(m) for m in (target, draft, companion))
    return Profile(of, latency, 8, np.array([pays]), *models, "", {}, describe_machine(torch.device("cpu")))


def laws(random, *shape):
    return torch.from_numpy(random.dirichlet(np.ones(shape[-1]), size=shape[:-1]))


def bins(random, rows=3, columns=4):
    accept = np.sort(random.random((rows, columns)), axis=1)
    return Bins(
        np.sort(random.random(rows - 1)), np.sort(random.random((rows, columns - 1)), axis=1), accept, accept.mean(axis=1),
        np.ones((rows, columns), dtype=np.int64),
    )  # fmt: skip


def distance(out, p):
    """How far the first two committed tokens are from the target's laws, at most; the laws do not depend on the prefix here."""
    size = p.shape[-1]
    first, second = np.zeros(size), np.zeros((size, size))
    for tokens, chance in out.items():
        first[tokens[0]] += chance
        if len(tokens) > 1:
            second[tokens[0], tokens[1]] += chance
    worst = np.abs(first - p[0].numpy()).max()
    for x in range(size):
        if second[x].sum() > 1e-9:
            worst = max(worst, np.abs(second[x] / second[x].sum() - p[1].numpy()).max())
    return worst


SIZE, END = 4, 1


@functools.cache
def models(size: int = SIZE):
    """Target, draft and companion over `size` tokens, whose laws are neither flat nor certain."""
    target = tiny.build("llama", vocab_size=size, eos_token_id=None, pad_token_id=0, bos_token_id=None)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.25)
    return hla.enable(target), tiny.noisy(target, 0.6), tiny.noisy(target, 0.5, seed=4)


def prompts(*lengths: int, size: int = SIZE):
    inputs = tiny.prompts(lengths)
    return {"input_ids": inputs["input_ids"] % size, "attention_mask": inputs["attention_mask"]}


def extreme(cost: float = 0.45, step: float = 0.4, size: int = SIZE, rows: int = 1) -> Profile:
    """Steep costs of a verified token and of a drafted one, and cells in which some tokens are kept and others dropped."""
    accept = np.array([[0.05, 0.3, 0.6], [0.1, 0.5, 0.95]])
    cells = Bins(np.array([0.75], np.float32), np.array([[0.5, 0.9], [0.6, 0.95]], np.float32), accept, accept.mean(axis=1),
                 np.ones((2, 3), dtype=np.int64))  # fmt: skip
    tokens = np.arange(8 * rows + 1)
    seconds = (1 + cost * tokens / rows)[None]
    latency = Latency(np.array([rows]), tokens[None], seconds, np.array([step]), *np.zeros((2, 1)))
    return make_profile(cells, latency, size)


def shipped(size: int = SIZE) -> Profile:
    """The cells and seconds that come with the demo."""
    profile = hla.Profile.from_pretrained(hla.demo.FOLDER / "sv_profile")
    return make_profile(profile.bins, profile.latency, size)


def make_profile(cells: Bins, latency: Latency, size: int) -> Profile:
    identities = (ModelIdentity.of(m) for m in models(size))
    pays = np.full(latency.batches.size, 2.0)
    gamma = int(latency.tokens[0, -1] // latency.batches[0])  # where the table ends
    return Profile(cells, latency, gamma, pays, *identities, "", {}, describe_machine(torch.device("cpu")))
