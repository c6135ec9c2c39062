"""Cards show names and recorded texts, wherever they came from, and none of them is HTML, a link, an image or code; the Hub reads their figures."""

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from support.hub_server import card_problems
from support.profiles import profile

from hf_lossy_assist import HeadConfig, LinearHead, Sprinter, demo
from hf_lossy_assist.artifacts.cards import escape
from hf_lossy_assist.artifacts.identity import ModelIdentity
from hf_lossy_assist.methods.autojudge import dataset as mined
from hf_lossy_assist.methods.eagle3.fit import EAGLE3, make_card
from hf_lossy_assist.training import verifier_dataset


WILD = '<img src=x onerror=alert(1)>"); import os #\n\n# Head\n![a](http://x)[b](http://y)`c` | d \\\n```\n---\nlicense: mine\n\x1b[2J'
MODEL = ModelIdentity(WILD, WILD, WILD, 4, 1, 8)
TEXTS = {WILD: WILD, "nested": [WILD, {"deep": WILD}]}


def bodies(method: str) -> list[str]:
    """The text of each card, below its metadata."""
    torch.manual_seed(0)
    config = HeadConfig(
        4, method=method, label=WILD, target=MODEL, draft=MODEL, tokenizer_hash=WILD, decoding=TEXTS, training=TEXTS,
        metrics={"auroc": 0.5, WILD: 1.0, "comparison": [{"group": WILD, "input": WILD, "auroc": 0.5, "auroc_train": 0.5}]},
        versions={WILD: WILD},
    )  # fmt: skip
    head = LinearHead(config)
    cards = [head.card(), Sprinter(head).card()]
    for card in cards:
        assert card_problems(str(card))[0] == []
    return [card.text for card in cards]


def check(text: str) -> None:
    assert "onerror=alert(1)" in text  # it is shown
    for acts in ("<img", "![a]", "[b](", "`c`", "\x1b", "\n# Head\n", '");', "\n---", "\nlicense: mine"):
        assert acts not in text, acts
    fences = re.findall(r"^```.*$", text, re.MULTILINE)
    assert len(fences) % 2 == 0 and set(fences) <= {"```", "```python", "```json"}


def find_results(card: ModelCard) -> tuple[str, dict[str, float], set[str]]:
    """The model index as the Hub's client reads it from the card's text: its name, the values by name, and the datasets."""
    name, found = model_index_to_eval_results(ModelCard(str(card)).data.to_dict()["model-index"])
    return name, {one.metric_name: one.metric_value for one in found}, {one.dataset_name for one in found}


def test_a_drafters_figures_are_metadata():
    """They are read from its fit.json; a position that no draft came to has none. The demo's card is made of the file beside it."""
    folder = demo.FOLDER / "eagle3_drafter"
    record = json.loads((folder / "fit.json").read_text())
    card = make_card(record, EAGLE3)
    assert str(card) in (folder / "README.md").read_text(encoding="utf-8") and card_problems(str(card)) == ([], [])
    name, values, datasets = find_results(card)
    assert name == "EAGLE-3 drafter" and datasets == {record["data"]["source"]}
    assert [*values.values()] == [share[0] for share in record["acceptance"]] + [record["tokens_per_call"][0]]
    shares = [record["acceptance"][0], None, None, None, None]
    assert len(find_results(make_card(record | {"acceptance": shares}, EAGLE3))[1]) == 2
    wild = make_card(record | {"target": MODEL.to_dict(), "data": record["data"] | {"source": WILD}}, EAGLE3)
    assert card_problems(str(wild)) == ([], []) and find_results(wild)[2] == {WILD}
    check(wild.text)


def test_a_profiles_figures_are_metadata():
    """And metrics that are none, of a profile from anybody, are left out."""
    made, folder = demo.profile(), demo.FOLDER / "sv_profile"
    card = made.card(["cells.png", "goodput.png"])
    assert str(card) in (folder / "README.md").read_text(encoding="utf-8") and card_problems(str(card)) == ([], [])
    name, values, datasets = find_results(card)
    assert name == "sv profile" and datasets == {made.training["source"]}
    gain = made.metrics["information"][-1]["gain"]
    assert [*values.values()] == [made.metrics["acceptance"], made.metrics["correlation"], gain]
    wrong = {"acceptance": "x", "correlation": None, WILD: 1.0}
    facts = {"target": MODEL, "tokenizer_hash": WILD, "machine": WILD, "versions": {WILD: WILD}}
    wild = profile(metrics=wrong, training=TEXTS | {"source": WILD}, decoding=TEXTS, **facts).card()
    assert "model-index" not in wild.data.to_dict() and card_problems(str(wild))[0] == []
    check(wild.text)
    speeds = [{"rows": 4.0, "target": 10.0, "strict": 21.0, "svip": 32.0}]
    assert "| 4 | 10 | 21 | 32 |" in profile(metrics={"alternatives": speeds}).card().text


@pytest.mark.parametrize("method", ["sprinter", "autojudge", "specdec", WILD])
def test_nothing_in_a_heads_or_a_policys_card_acts(method):
    for text in bodies(method):
        check(text)


def test_nothing_in_a_datasets_card_acts(tmp_path):
    found = mined.summarise([], 8)
    facts = {
        "target": MODEL.to_dict(), "draft": MODEL.to_dict(), "settings": TEXTS, "versions": TEXTS,
        "task": WILD, "source": WILD, "judge": WILD, "problems": 1, "found": found,
    }  # fmt: skip
    check(mined.make_data_card(facts).partition("\n---\n")[2])

    from datasets import Dataset

    rows = {"prompt": [0], "kind": [0], "position": [0], "token": [1], "p": [0.5], "q": [0.5], "distance": [0.0]}
    data = Dataset.from_dict(rows | {"features": [[0.0] * 4]}, features=verifier_dataset.make_schema(4))
    facts = {
        "target": MODEL.to_dict(), "draft": MODEL.to_dict(), "settings": {"lam": 1.2, "features": {}, WILD: WILD},
        "versions": TEXTS, "source": WILD, "prompts": 1, "hidden_size": 4,
    }  # fmt: skip
    check(verifier_dataset.make_data_card(facts, data).partition("\n---\n")[2])


def test_plain_names_stay_as_they_are():
    for name in ("Qwen/Qwen2.5-0.5B", "my_model", "τ = 0.5 (d_TV), 90 %", "a * b - c # d", "日本語"):
        assert escape(name) == name
    head = demo.head()
    assert head.config.target.id in head.card().text
    assert escape(WILD).count("&") == len(re.findall(r'[<>"\[\]`|\\]', WILD.replace("\x1b", "\\x1b")))
