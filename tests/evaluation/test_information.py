"""The entropies of SV's Tables 1 and 2 find what S and A tell, and nothing else."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from support.sv_samples import random_samples, samples

from hf_lossy_assist import demo
from hf_lossy_assist.methods.sv.collect_samples import ProfileSettings


FOLDER = Path(__file__).parents[2] / "examples" / "reproduce"


@pytest.fixture(scope="module")
def information():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("information")
    sys.path.remove(str(FOLDER))
    del sys.modules["information"]


def test_gain_of_what_decides(information):
    """A law of A alone, of S alone, of both: 1 − E[H₂(law)] bits, less what the cells lose on samples they have not seen."""
    laws = {
        "a": lambda s, a: np.where(a < 0.5, 0.1, 0.9), "s": lambda s, a: np.where(s < 0.5, 0.1, 0.9),
        "sa": lambda s, a: np.where((s < 0.5) == (a < 0.5), 0.1, 0.9),
    }  # fmt: skip
    true = 1 + 0.1 * np.log2(0.1) + 0.9 * np.log2(0.9)  # 0.531
    for name, law in laws.items():
        fitted, held = (random_samples(law, seed=seed) for seed in (0, 1))
        for row in information.measure_entropies(
            fitted, held, [("10 × 10", 10, 10, False), ("adaptive", 16, 16, True)]
        ):
            assert row["gain"] == pytest.approx(true, abs=0.05)
            assert row["gain_s"] == pytest.approx(true if name == "s" else 0.0, abs=0.05)
            assert row["gain_a"] == pytest.approx(true if name == "a" else 0.0, abs=0.05)


def test_cross_entropy_by_hand(information):
    """Two cells, X of level 0 and 9. Everywhere: (2 + 1, 1, …, 2 + 1) of 4 + 10; in the cell of X = 0 twice, (2 + 8·3/14) of 10."""
    one = samples([0, 0, 1, 1], [0] * 4, [0.0, 0.05, 1.0, 0.95])
    cell = np.array([0, 0, 1, 1])
    assert information.compute_cross_entropy(one, one, cell, cell, 2) == pytest.approx(-np.log2((2 + 8 * 3 / 14) / 10))
    everything = -np.log2((2 + 8 * 3 / 14) / 12)
    assert information.compute_cross_entropy(one, one, cell * 0, cell * 0, 1) == pytest.approx(everything)


@pytest.mark.full
def test_of_the_demo_once(information, tmp_path, monkeypatch):
    texts = [problem.prompt for problem in demo.problems(8, 0, "calibration")]
    settings = ProfileSettings(gamma=(4,), new_tokens=24, batch_size=8)
    found = information.measure_information(demo.load(), texts, settings, tmp_path / "out")
    assert [row["cells"] for row in found] == [25, 100, 400, 272] and all(row["entropy"] > 0 for row in found)
    monkeypatch.setattr(information, "collect", None)
    assert information.measure_information(demo.load(), texts, settings, tmp_path / "out") == found
