"""EAGLE-3 drafters in files of the `speculators` package draft what that package's own network gives (made by eagle3_golden/make.py)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_lossy_assist.drafters.eagle import EagleModel
from hf_lossy_assist.drafters.io import load_drafter


FOLDERS = sorted(path for path in Path(__file__).with_name("eagle3_golden").iterdir() if path.is_dir())


def opened(folder, rows):
    network = load_drafter(folder).network
    golden = load_file(folder / "golden.safetensors")
    vocabulary = network.config.layer.vocab_size
    return EagleModel(network, network.embed_tokens, network.lm_head, rows, 64, vocabulary), golden, network.target_ids


def over(model, target_ids, logits):
    """Spread golden logits (…, draft vocabulary) over the target's vocabulary."""
    out = torch.full((*logits.shape[:-1], model.vocabulary), -torch.inf)
    out[..., target_ids] = logits
    return out


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_rows_of_different_length_draft_as_the_package_does(folder):
    """Each row begins its chain at a place of its own; three steps, in which the tokens of the text are fed."""
    places = [2, 6, 4]
    model, golden, target_ids = opened(folder, len(places))
    hidden, ids, logits = golden["hidden"], golden["ids"][0], golden["logits"]
    states = torch.nn.utils.rnn.pad_sequence([hidden[0, : place + 1] for place in places], batch_first=True)
    model.learn(states, [place + 1 for place in places])
    tokens = torch.nn.utils.rnn.pad_sequence([ids[: place + 1] for place in places], batch_first=True)
    found = model.feed(tokens, [place + 1 for place in places])
    for b, place in enumerate(places):
        torch.testing.assert_close(
            found[b, : place + 1], over(model, target_ids, logits[0, : place + 1]), rtol=1e-5, atol=1e-5
        )
    for step in (1, 2):
        found = model.feed(torch.stack([ids[place + step] for place in places])[:, None], [1] * len(places))
        for b, place in enumerate(places):
            torch.testing.assert_close(found[b, 0], over(model, target_ids, logits[step, place]), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_behind_a_partial_acceptance(folder):
    """One of three drafted tokens is accepted: the target's states take the place of the network's own, and the chain begins behind them."""
    model, golden, target_ids = opened(folder, 1)
    hidden, ids, logits = golden["hidden"], golden["ids"], golden["logits"]
    model.learn(hidden[:, :4], [4])
    model.feed(ids[:, :4], [4])
    for place in (4, 5, 6):
        model.feed(ids[:, place : place + 1], [1])
    # Of the three tokens behind the fourth one stays; pairs stand on the target's states up to there.
    model.rollback([6])
    # The target has read all of them, and what is behind the second is not the text's.
    model.learn(hidden[:, 4:9], [6])
    assert model.lengths == [5] and model.known == [6]
    found = model.feed(ids[:, 4:6], [2], keep=1)
    torch.testing.assert_close(found[0, 0], over(model, target_ids, logits[0, 5]), rtol=1e-5, atol=1e-5)
    for step in (1, 2):
        found = model.feed(ids[:, 5 + step : 6 + step], [1])
        torch.testing.assert_close(found[0, 0], over(model, target_ids, logits[step, 5]), rtol=1e-5, atol=1e-5)


def test_all_settings_are_there():
    configs = [load_drafter(folder).network.config for folder in FOLDERS]
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "reduced"):
        assert {getattr(config, name) for config in configs} == {True, False}
    assert {config.layer.num_hidden_layers for config in configs} == {1, 2}
    assert {config.layer.model_type for config in configs} == {"llama", "qwen3"}
    assert {len(config.layers_of(6)) for config in configs} == {3, 4}
