"""Tables at 80 columns: nothing in them is cut, however long a policy's name is."""

from types import SimpleNamespace

import pytest

from hf_lossy_assist.cli._printing import show_metrics
from hf_lossy_assist.cli.fit_command import _tabulate_thresholds
from hf_lossy_assist.cli.tune_command import _show_results
from hf_lossy_assist.stats.intervals import Estimate
from hf_lossy_assist.terminal import console


LONG = f"autojudge:head=/a/{'Z' * 70},threshold=0.123456+svip:max_draft=16"


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def whole(text, *names, folded=0):
    """Nothing is cut, no line is wider, and all names are there, the letters of a folded one so many times."""
    lines = text.splitlines()
    assert "…" not in text and max(map(len, lines)) <= 80, text
    assert all(name in text for name in names) and text.count("Z") == 70 * folded, text


def test_compare(capsys):
    wide = {
        "batch_size": 8, "prompts": 1000, "tokens_per_second": Estimate(12345.0, 11234.0, 13456.0), "of_target": Estimate(10.25, 9.75, 10.75),
        "of_assisted": Estimate(10.25, 9.0, 11.0), "first_token": 1.2345, "tokens_per_target_call": 12.34, "acceptance": 0.87, "lossy": 0.123,
        "unchecked": 0.456, "equal": 1000, "right": 900, "judged": 1000, "accuracy": Estimate(0.9, 0.88, 0.92), "better": 100, "worse": 100,
        "p": 0.00012,
    }  # fmt: skip
    wide["guarantee"] = lambda dtype: "lossless up to rounding" if dtype == "bfloat16" else "lossless"
    arms = [SimpleNamespace(arm=name, **wide) for name in ("target", "assisted γ=5", LONG)]
    show_metrics(arms, {"8": "use svip"}, {}, "bfloat16")
    whole(
        capsys.readouterr().out,
        "tokens/s",
        "× assisted",
        "first, ms",
        "12345 (11234–13456)",
        "unchecked",
        "won, lost, p",
        "up to rounding",
        folded=3,
    )


def test_tune(capsys):
    tried = SimpleNamespace(speed=12345.6, harms=12, problems=10000, gains=100)
    step = SimpleNamespace(name=LONG)
    _show_results(
        SimpleNamespace(results=[SimpleNamespace(step=step, tried=tried, harm=0.1234, net=0.1234, certified=True)])
    )
    whole(capsys.readouterr().out, "candidate", "harms", "certified", "12/10000", folded=1)


def test_fit_autojudge(capsys):
    thresholds = [{"threshold": 0.1234567891, "recall": 0.9, "accepted": 0.5}]
    report = SimpleNamespace(thresholds=thresholds, threshold=0.1234567891)
    console().print(_tabulate_thresholds(report))
    whole(capsys.readouterr().out, "important rejected", "0.1234567891 (default)")


@pytest.mark.parametrize("columns", ["80", "60"])
def test_policies(hf_lossy, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    done = hf_lossy("policies")
    assert done.code == 0 and "…" not in done.out
    assert max(map(len, done.out.splitlines())) <= int(columns)
    assert "\n    accept" in done.out.lower() or "\n    " in done.out
    for name in ("all_but_last", "block_verification", "top_k", "svip"):
        assert f"\n{name}  " in done.out, name
