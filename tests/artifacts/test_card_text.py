"""Cards show names and recorded texts, wherever they came from, and none of them is HTML, a link, an image or code."""

import re

import pytest
import torch
from support.hub_server import card_problems

from hf_lossy_assist import HeadConfig, LinearHead, Sprinter, demo
from hf_lossy_assist.artifacts.cards import escaped, head_card
from hf_lossy_assist.methods.autojudge import mined
from hf_lossy_assist.models.identity import ModelIdentity
from hf_lossy_assist.training import dataset


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
    policy = Sprinter(head)
    from hf_lossy_assist.artifacts.cards import policy_card

    cards = [head_card(config), policy_card({"stop": "svip"}, False, list(policy.heads().values()), [(WILD, WILD)])]
    for card in cards:
        assert card_problems(str(card))[0] == []
    return [card.text for card in cards]


def check(text: str) -> None:
    assert "onerror=alert(1)" in text  # it is shown
    for acts in ("<img", "![a]", "[b](", "`c`", "\x1b", "\n# Head\n", '");', "\n---", "\nlicense: mine"):
        assert acts not in text, acts
    fences = re.findall(r"^```.*$", text, re.MULTILINE)
    assert len(fences) % 2 == 0 and set(fences) <= {"```", "```python", "```json"}


@pytest.mark.parametrize("method", ["sprinter", "autojudge", "specdec", WILD])
def test_nothing_in_a_heads_or_a_policys_card_acts(method):
    for text in bodies(method):
        check(text)


def test_nothing_in_a_datasets_card_acts(tmp_path):
    found = mined.summary([])
    facts = {
        "target": None, "served": WILD, "served_at": WILD, "draft": MODEL.to_dict(), "settings": TEXTS, "versions": TEXTS,
        "task": WILD, "source": WILD, "judge": WILD, "problems": 1, "found": found,
    }  # fmt: skip
    check(mined.card(facts).partition("\n---\n")[2])
    check(mined.card(facts | {"target": MODEL.to_dict()}).partition("\n---\n")[2])

    from datasets import Dataset

    rows = {"prompt": [0], "kind": [0], "position": [0], "token": [1], "p": [0.5], "q": [0.5], "distance": [0.0]}
    data = Dataset.from_dict(rows | {"features": [[0.0] * 4]}, features=dataset.schema(4))
    facts = {
        "target": MODEL.to_dict(), "draft": MODEL.to_dict(), "settings": {"lam": 1.2, "features": {}, WILD: WILD},
        "versions": TEXTS, "source": WILD, "prompts": 1, "hidden_size": 4,
    }  # fmt: skip
    check(dataset.data_card(facts, data).partition("\n---\n")[2])


def test_plain_names_stay_as_they_are():
    for name in ("Qwen/Qwen2.5-0.5B", "my_model", "τ = 0.5 (d_TV), 90 %", "a * b - c # d", "日本語"):
        assert escaped(name) == name
    config = demo.head().config
    assert config.target.id in head_card(config).text and escaped(config.target) == config.target
    assert escaped(WILD).count("&") == len(re.findall(r'[<>"\[\]`|\\]', WILD.replace("\x1b", "\\x1b")))
