"""EAGLE-3 drafters in files of the `speculators` package draft what that package's own network gives (by make_golden.py)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_lossy_assist.drafters.io import load_drafter
from hf_lossy_assist.drafters.networks.base import HiddenStateModel


FOLDERS = sorted(path for path in Path(__file__).with_name("eagle3_golden").iterdir() if path.is_dir())


def opened(folder, rows):
    network = load_drafter(folder).network
    vocabulary = network.config.layer.vocab_size
    model = HiddenStateModel(network, network.embed_tokens, network.lm_head, rows, 64, vocabulary)
    return model, load_file(folder / "golden.safetensors")


def steps(model, ids, logits, places):
    """Three steps behind `places`, in which the tokens of the text are fed, draft the golden logits; others of the vocabulary are −inf."""
    for step in range(3):
        found = model.step(torch.stack([ids[place + step] for place in places])[:, None])
        for b, place in enumerate(places):
            expected = torch.full_like(found[b], -torch.inf)
            expected[model.network.target_ids] = logits[step, place]
            torch.testing.assert_close(found[b], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_chains_are_the_packages(folder):
    """Each row begins its chain at a place of its own; ids[i] is the token of pair i, so that a text has one before it."""
    places = [2, 6, 4]
    model, golden = opened(folder, len(places))
    hidden, ids = golden["hidden"], torch.cat([golden["ids"][0, :1], golden["ids"][0]])
    pad = torch.nn.utils.rnn.pad_sequence
    model.take(pad([hidden[0, : place + 1] for place in places], batch_first=True), [place + 1 for place in places])
    model.read(pad([ids[: place + 2] for place in places], batch_first=True))
    steps(model, ids[1:], golden["logits"], places)
    for drafts in (True, False):
        behind_a_partial_acceptance(folder, drafts)


def behind_a_partial_acceptance(folder, drafts):
    """One of three drafted tokens is accepted: the target's states take the place of the network's own, and the chain begins behind them.

    Also where nothing was drafted from the states that it had.
    """
    model, golden = opened(folder, 1)
    hidden, ids = golden["hidden"], torch.cat([golden["ids"][:, :1], golden["ids"]], dim=1)
    model.take(hidden[:, :4], [4])
    model.read(ids[:, :5])
    for place in (4, 5, 6) if drafts else ():
        model.step(ids[:, place : place + 1])
    # The target has read all of them, and what is behind the second is not the text's.
    model.take(hidden[:, 4:9], [6])
    model.read(ids[:, 4:7])
    assert model.known == model.learned == [6]
    steps(model, ids[0, 1:], golden["logits"], [5])
