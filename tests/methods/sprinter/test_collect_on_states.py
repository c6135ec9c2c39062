"""Collecting and fitting heads on the states of a drafter on the target's states: what is recorded is what the network computes without caches."""

import json

import pytest
import torch
from support import eagle, small
from support.collecting import read_rows, word_prompts

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.features import FeatureTap
from hf_lossy_assist.drafters.trained import DFlashDrafter
from hf_lossy_assist.methods.sprinter.collect import collect
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.methods.sprinter.fit import fit_sprinter
from hf_lossy_assist.methods.sprinter.specdec_fit import fit_specdec
from hf_lossy_assist.training.head_training import HeadFitSettings


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy")

NEW, PLACES = 7, 3
PROMPTS = word_prompts(5, 9, 4)


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3))


def rebuild_texts(rows, kinds):
    """(number of prompt, kind, its first tokens, its records) of each row whose text can be told from its records."""
    tokenizer = small.tokenizer()
    for (number, kind), records in rows.items():
        prompt = tokenizer(PROMPTS[number].prompt)["input_ids"]
        if kinds[kind] in ("draft", "replaced"):
            yield prompt, [record["token"] for record in records], records
        elif kinds[kind] == "original":
            cut = max(len(prompt) // 2, len(prompt) - NEW, 1)
            yield prompt[:cut], prompt[cut:], records


def collected(target, drafter, out, **settings):
    given = CollectSettings(new_tokens=NEW, batch_size=2, do_sample=False, places=PLACES, **settings)
    return read_rows(collect(target, drafter, small.tokenizer(), PROMPTS, out, given)), given


@pytest.mark.parametrize("position", ["predicting", "token"])
def test_states_of_every_place_of_a_draft(target, tmp_path, position):
    """A record's state stands on the target's states up to the last third token, and on the network's own behind it."""
    drafter = eagle.drafter(target)
    prompts = (
        [problem for problem in PROMPTS if len(problem.prompt.split()) > 4] if position == "predicting" else PROMPTS
    )
    assert prompts
    more = {} if position == "predicting" else {"mix": 0.0, "features": hla.FeatureSpec(position="token")}
    rows, given = collected(target, drafter, tmp_path / "data", **more)
    seen = 0
    for text, following, records in rebuild_texts(rows, given.kinds):
        for record in records:
            place = record["position"]
            begin = place - place % PLACES
            behind = following[begin:place]
            known = torch.tensor(text + following[:begin])
            behind += [record["token"]] * (position == "token")
            logits, _, read, _ = eagle.chain_with_states(target, drafter.network, known, len(behind) + 1, 0, behind)
            torch.testing.assert_close(torch.tensor(record["features"]).double(), read[-1], rtol=1e-5, atol=1e-5)
            assert record["token"] == int(logits[place - begin].argmax())
            p = target(torch.tensor([text + following[:place]])).logits[0, -1]
            assert record["p"] == float(p.argmax() == record["token"])
            seen += 1
    assert seen > 2 * NEW


@torch.no_grad()
def test_places_of_a_block(target, tmp_path):
    drafter, seen = DFlashDrafter(eagle.dflash_network(target)), 0
    rows, given = collected(target, drafter, tmp_path / "data")
    for text, following, records in rebuild_texts(rows, given.kinds):
        for record in records:
            place = record["position"]
            known = torch.tensor(text + following[: place - place % PLACES])
            model = drafter.make_model(target, 1, 64, small.VOCAB)
            model.take(drafter.hook(target).read(target, known[:-1])[None], [len(known) - 1])
            with FeatureTap(drafter.network, hla.FeatureSpec()) as tap:
                model.read(known[None])
                expected = tap.latest[0, 1 + place % PLACES]
            torch.testing.assert_close(torch.tensor(record["features"]).double(), expected, rtol=1e-5, atol=1e-5)
            seen += 1
    assert seen > 2 * NEW


@pytest.mark.full
def test_a_head_remembers_its_drafter(target, tmp_path):
    drafter = eagle.trained(target, small.ragged((0, 1, 2, 3, 4, 0)), rounds=30)
    prompts = word_prompts(*range(4, 24))
    fitted = {}
    for name, more in {"sprinter": {}, "specdec": {"mix": 0.2, "features": hla.FeatureSpec(position="token")}}.items():
        settings = CollectSettings(new_tokens=6, batch_size=10, temperature=1.5, places=2, **more)
        data = collect(target, drafter, small.tokenizer(), prompts, tmp_path / name, settings)
        assert json.loads((data / "collect.json").read_text())["draft"]["model_type"] == "eagle3"
        fit = fit_sprinter if name == "sprinter" else fit_specdec
        how = {"settings": HeadFitSettings(max_epochs=3)}
        fitted[name], _ = fit(data, tmp_path / f"{name} head", **how)
        assert fitted[name].config.draft == drafter.identity
    inputs = small.ragged()
    for policy in (hla.SpecDecPP(fitted["specdec"]), hla.Sprinter(fitted["sprinter"], 0.2)):
        out = target.generate(**inputs, assistant_model=drafter, lossy_policy=policy, max_new_tokens=12, do_sample=False)  # fmt: skip
        assert out.shape == (3, 21)
        with pytest.raises(ValueError, match="made for the draft") as error:
            target.generate(**inputs, assistant_model=small.near(target), lossy_policy=policy, max_new_tokens=12)
        assert "\n" not in str(error.value)


def test_what_cannot_be_collected_is_refused(target, tmp_path):
    tokenizer, other = small.tokenizer(), eagle.drafter(small.llama(layers=3, hidden_size=16), hidden=16)
    for draft, prompts, settings, message in (
        (small.near(target), PROMPTS, {"places": 2}, "is for drafters on the target's states"),
        (eagle.drafter(target), word_prompts(5, 2), {}, "prompt 1 is too short"),
        (other, PROMPTS, {}, "it is another target's"),
        (DFlashDrafter(eagle.dflash_network(target)), PROMPTS, {"mix": 0.1, "features": hla.FeatureSpec(position="token")}, "before its tokens are drawn"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            collect(
                target, draft, tokenizer, prompts, tmp_path / message[:8], CollectSettings(new_tokens=3, **settings)
            )
        assert "\n" not in str(error.value)
