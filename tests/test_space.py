"""`hub_cards/space` without gradio: what it shows, and what the Hub reads of it."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from hf_lossy_assist.text.detokenizer import continuation


ROOT = Path(__file__).parent.parent
SPACE = ROOT / "hub_cards" / "space"


@pytest.fixture(scope="module")
def app():
    spec = importlib.util.spec_from_file_location("space_app", SPACE / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pair(app):
    return app.load()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
@pytest.mark.parametrize("policy", ["svip", "top_k:k=3+svip"])
def test_both_texts_and_where_their_tokens_come_from(app, pair, policy):
    plain, coloured, table = app.compare(pair, pair.prompts[0], policy, 48)
    text = "".join(text for text, _ in coloured)
    ids = pair.tokenizer(pair.prompts[0], return_tensors="pt")
    wanted = pair.target.generate(**ids, max_new_tokens=48)[0].tolist()
    width = ids["input_ids"].shape[1]
    assert plain == [(continuation(pair.tokenizer, wanted[:width], wanted[width:]), None)]
    sources = {source for _, source in coloured}
    assert sources <= set(app.COLOURS) and len(sources) > 1
    assert ("draft-lossy" in sources) == (policy != "svip")
    assert (text == plain[0][0]) == ("| the target's text | yes |" in table)
    assert ("| guarantee | lossless |" in table) == (policy == "svip") and "× the target alone" in table
    assert policy != "svip" or text == plain[0][0]


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
def test_every_policy_that_is_offered_writes_and_others_are_refused(app, pair, monkeypatch):
    assert {"strict", "svip", "autojudge", "sprinter"} <= set(pair.policies)
    for policy in pair.policies:
        runs, seconds, report = app.write(pair, pair.prompts[1], policy, 8)
        assert runs and seconds > 0 and report.num_new_tokens == 8
    for prompt in ("  \n", "Ada has 3 apples. " * 200):
        with pytest.raises(ValueError, match="expected a prompt of 1 to 512 tokens"):
            app.compare(pair, prompt, "svip", 16)
    monkeypatch.setenv("TARGET", "org/model")
    with pytest.raises(ValueError, match="^TARGET and DRAFT name a pair"):
        app.load()


def test_what_the_hub_reads():
    card = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert card["sdk"] == "gradio" and (SPACE / card["app_file"]).is_file()
    assert isinstance(card["python_version"], str) and len(card["short_description"]) <= 60
    listed = (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    needed = re.search(
        r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S
    )
    assert [line for line in listed if not line.startswith(("#", "--"))] == re.findall('"(.+)"', needed[1])
