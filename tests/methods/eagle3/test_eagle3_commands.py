"""`hf-lossy collect --for eagle3` and `fit eagle3` on the demo's target, and `generate --drafter` with what they made."""

import json

import pytest

import hf_lossy_assist as hla


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:generate_many writes one text at a time")
def test_collect_fit_generate(hf_lossy, tmp_path):
    data, out = tmp_path / "texts", tmp_path / "drafter"
    done = hf_lossy("collect", "--for", "eagle3", "--limit", "12", "--max-new-tokens", "16", "--out", str(data))
    assert done.code == 0 and "answers to 12 prompts" in done.out
    fit = ("fit", "eagle3", str(data), "--epochs", "2", "--steps", "2", "--intermediate-size", "32", "--out", str(out))
    done = hf_lossy(*fit)
    assert done.code == 0 and "tokens a call of the target on 4 held-out texts" in done.out
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "eagle3"
    done = hf_lossy("generate", "--drafter", str(out), "--policy", "svip", "--max-new-tokens", "8")
    assert done.code == 0
    assert f"{out} exists" in hf_lossy(*fit).line
    assert isinstance(hla.load_drafter(out), hla.Eagle3Drafter)


def test_refused_in_one_line(hf_lossy, tmp_path):
    for words, says in (
        ("collect --for eagle3 --assistant D --out {tmp}/x", "--for eagle3: the target alone answers"),
        ("collect --for eagle3 --lambda 1.2 --out {tmp}/x", "--lambda is for --for sprinter and specdec"),
        ("collect --for eagle3 --mix 0.1 --out {tmp}/x", "--mix is for --for specdec"),
        ("fit eagle3 {tmp} --out {tmp}/x", "is no dataset of hf-lossy collect --for eagle3"),
        ("generate --drafter {tmp}/nothing", "is neither a folder here nor"),
        ("generate --drafter {tmp}", "config.json cannot be read"),
    ):
        assert says in hf_lossy(*words.format(tmp=tmp_path).split()).line, words
    assert not list(tmp_path.iterdir())
