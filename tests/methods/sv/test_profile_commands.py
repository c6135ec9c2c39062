"""profile, from the command line as a user types it: what comes out, and that what users can mend is one line and exit code 2."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.commands import DEMO, prompts_file
from support.profiles import arrays
from support.refusals import names
from support.small import tokenizer as other_tokenizer
from support.small import words

from hf_lossy_assist import demo
from hf_lossy_assist.artifacts.sv_profile import PROFILE, Profile


COMPANION = ("--companion", demo.FOLDER / "companion")
SMALL = ("--gamma", 3, "--max-new-tokens", 24, "--sample-batch-size", 20, "--batch-size", "2,1", "--rounds", 3)
PROMPTS = 52


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:(the profile's seconds were taken|this profile was made) .*other:UserWarning")
def test_the_demo(hf_lossy, tmp_path):
    """The README's commands, in small."""
    more = ("--limit", PROMPTS, "--gamma", 2, "--top-k", 40, "--seed", 3)
    done = hf_lossy("profile", "--out", tmp_path / "p", *SMALL, *more)
    assert done.code == 0 and "…" not in done.out, done
    made = Profile.from_pretrained(tmp_path / "p")
    assert made.gamma == 3 and made.latency.batches.tolist() == [1, 2]
    assert made.decoding == {"do_sample": True, "temperature": 1.0, "top_k": 40, "top_p": 1.0}
    assert made.training["source"] == "the demo task, calibration problems of seed 3"
    assert (made.training["prompts"], made.training["settings"]["gamma"]) == (PROMPTS, [2, 3])
    assert (made.target.id, made.draft.id, made.companion.id) == ("demo-target", "demo-draft", "demo-companion")
    samples, held_out = made.metrics["samples"], made.metrics["held_out"]
    assert made.bins.counts.shape == (16, 17) and made.bins.counts.sum() == samples - held_out and samples >= 1000
    assert 0.1 < held_out / samples < 0.3 < made.metrics["acceptance"] < 1 and 0 < made.metrics["correlation"] <= 1
    assert all(np.isfinite(values).all() for values in arrays(made).values())
    assert f"{made.metrics['samples']} drafted tokens" in " ".join(done.out.split())
    last = done.out.splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'p'}: by this prediction SV ")
    assert last.endswith(f"hf-lossy compare --policies strict,svip,sv:profile={tmp_path / 'p'}")
    assert ("does not pay" in last) == (not any(made.worthwhile(batch) for batch in (1, 2)))

    given = ("--do-sample", "--batch-size", 3, "--max-new-tokens", 12, "--top-k", 40, "--policy")
    for policy in ("sv", f"sv:profile={tmp_path / 'p'},gamma=2"):
        generated = hf_lossy("generate", "--json", *given, policy)
        assert generated.code == 0, generated.err
        report = json.loads(generated.out)
        assert len(report["outputs"]) == 3 and all(0 < len(o["token_ids"]) <= 12 for o in report["outputs"])
    assert "demo-companion" in hf_lossy("generate", *given, "sv:companion=int8").line, "the profile's is another"
    assert "up to 3 tokens" in hf_lossy("generate", *given, f"sv:profile={tmp_path / 'p'},gamma=5").line


@pytest.mark.nightly
def test_custom_models(hf_lossy, tmp_path):
    """The demo's own folders, with prompts from a file, greedy."""
    file, out = prompts_file(tmp_path, PROMPTS), tmp_path / "p"
    done = hf_lossy("profile", "--out", out, *DEMO, *COMPANION, "--prompts", file, *SMALL, "--gamma", 4, "--greedy")
    assert done.code == 0, done.err
    facts = json.loads((out / PROFILE).read_text())
    assert facts["decoding"] == {"do_sample": False} and facts["training"]["source"] == "prompts.jsonl"
    assert [facts[name]["id"] for name in ("target", "draft", "companion")] == ["target", "draft", "companion"]
    assert facts["training"]["prompts"] == PROMPTS
    assert set(Path(tmp_path).iterdir()) == {file, out}


REFUSED = (
    (["--batch-size", "1,x"], "--batch-size: expected a number, or several with commas between them"),
    (["--max-new-tokens", "15"], "new_tokens: expected a whole number of at least 16"),
    (["--gamma", "40"], "new_tokens: expected a whole number of at least 82"), (["--temperature", "0"], "--greedy"),
    (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"), (["--device", "abacus"], "load: device 'abacus' cannot be used here"),
    ([*DEMO[:2], "--companion", "c", "--prompts", "{tmp}/one.jsonl"], "expected both"),
    ([*DEMO], "--companion"), ([*DEMO, *map(str, COMPANION)], "name other prompts"),
    ([*DEMO, "--companion", "nowhere", "--prompts", "{tmp}/one.jsonl"], "nowhere"),
)  # fmt: skip


@pytest.mark.full
def test_refused_in_one_line(hf_lossy, tmp_path):
    prompts_file(tmp_path, 1).rename(tmp_path / "one.jsonl")
    for arguments, says in REFUSED:
        done = hf_lossy("profile", "--out", tmp_path / "x", *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
        assert says in done.line and not done.out, arguments
        assert names(tmp_path) == {"one.jsonl"}


def test_a_companion_with_another_tokenizer(hf_lossy, tmp_path):
    """Its size is the same: only the ids tell."""
    models, file = demo.load(), prompts_file(tmp_path, PROMPTS)
    models.companion.save_pretrained(tmp_path / "companion")
    vocabulary = sorted(models.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    swapped = [token for token, _ in vocabulary[4:]][::-1]
    other_tokenizer(swapped).save_pretrained(tmp_path / "companion")
    given = ("--out", tmp_path / "x", *DEMO, "--prompts", file, "--companion", tmp_path / "companion")
    line = hf_lossy("profile", *given, *SMALL).line
    assert "companion has another tokenizer" in line and "token ids mean other words" in line
    other_tokenizer(words()).save_pretrained(tmp_path / "companion")  # no token in common but the special ones
    assert "another tokenizer" in hf_lossy("profile", *given, *SMALL).line
    assert not (tmp_path / "x").exists()
