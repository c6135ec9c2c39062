"""mine, fit autojudge and generate with a judge, as a user types them, with a Hub on loopback; what users can mend is one line and exit code 2."""

import json
from pathlib import Path

import pytest
from datasets import load_from_disk
from support.commands import DEMO
from support.hub_server import card_problems
from support.mining import undisturbed

from hf_lossy_assist import AutoJudge, Head, LossyPolicy
from hf_lossy_assist.methods.autojudge.dataset import RECORD


pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning"),
    pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning"),
]


def test_mine_fit_generate_push_pull(hf_lossy, hub, tmp_path):
    mined = tmp_path / "mined"
    assert hf_lossy("mine", "--task", "demo", "--limit", 12, "--batch-size", 12, "--out", mined).code == 0
    facts = json.loads((mined / RECORD).read_text())
    found = facts["found"]
    assert facts["settings"]["max_new_tokens"] == 96 and facts["problems"] == 12
    assert 0 < found["important"] < found["mismatches"] == len(load_from_disk(str(mined)))
    assert card_problems((mined / "README.md").read_text()) == ([], [])

    head = tmp_path / "judge"
    fitted = hf_lossy("fit", "autojudge", mined, "--out", head, "--folds", 3)
    assert fitted.code == 0 and "…" not in fitted.out, fitted
    assert "AUROC" in fitted.out and "of the important tokens" in fitted.out
    last = f"see which answers it changes: hf-lossy compare --task demo --policies svip,{head}"
    assert fitted.out.splitlines()[-1] == last
    assert Head.from_pretrained(head).config.polarity == "important"

    policy = f"autojudge:head={head},threshold=0.9,window=8"
    lossy = hf_lossy("generate", "--max-new-tokens", 40, "--json", "--seed", 3, "--policy", policy).json
    assert lossy["policy"]["rule"] == {"name": "judge", "head": str(head), "threshold": 0.9}
    assert lossy["policy"]["stop"] == {"name": "constant", "gamma": 8}
    assert lossy["speculation"]["lossless"] is False and lossy["speculation"]["num_lossy_accepts"] > 0

    for folder, repo in ((head, "org/judge"), (mined, "org/mined")):
        url = hf_lossy("push", folder, repo)
        assert url.code == 0 and hub.url in url.out, url
    pulled = hf_lossy("pull", "datasets/org/mined", "--out", tmp_path / "back")
    assert pulled.code == 0, pulled.err
    assert load_from_disk(str(tmp_path / "back")).to_list() == load_from_disk(str(mined)).to_list()
    assert LossyPolicy.from_pretrained("org/judge") == AutoJudge(Head.from_pretrained("org/judge"))


def test_wrong_uses(hf_lossy, tmp_path):
    out, file, mined = ("--out", tmp_path / "x"), tmp_path / "file.jsonl", undisturbed()[0]
    file.write_text('{"question": "1 + 1?"}\n')
    for arguments, words in (
        (("--task", "gsm"), "'gsm8k'"),
        (("--task", "gsm8k"), "--data"),
        (("--task", "gsm8k", "--data", tmp_path / "none.jsonl"), "none.jsonl"),
        (("--task", "gsm8k", "--data", file, *DEMO), "line 1"),
        (("--task", "code", "--data", file, *DEMO), "--allow-code-execution"),
        (("--task", "gsm8k", "--data", file, *DEMO, "--allow-code-execution"), "runs no programs"),
        (("--task", "demo", *DEMO), "demo models"),
        (("--model", "m"), "for the demo models"),
        (("--drafter", "demo"), "needs a draft model"),
        (("--max-new-tokens", 400), "positions: choose fewer new tokens"),
    ):
        line = hf_lossy("mine", *arguments, *out).line
        assert words in line, line
    assert not list(tmp_path.glob("x*"))

    for arguments, words in (
        ((tmp_path,), "mine.json"),
        ((mined, "--model", DEMO[3], "--assistant", DEMO[3]), "hidden_size"),
        ((mined, "--features", "companion"), "companion"),
        ((mined, "--recall", 2), "recall"),
    ):
        line = hf_lossy("fit", "autojudge", *arguments, *out).line
        assert words in line, line
    assert not list(Path(tmp_path).glob("x*"))
