"""Bars: they move within a batch, say what is left, and never go back."""

import pytest
from support import small, tiny
from support.collecting import models, tiny_pair, word_prompts
from support.mining import NEW, TASK

from hf_lossy_assist.methods.autojudge import mine as mining
from hf_lossy_assist.methods.autojudge.mine import MineSettings
from hf_lossy_assist.methods.sprinter import collect as collecting
from hf_lossy_assist.methods.sprinter.collect import CollectSettings
from hf_lossy_assist.methods.sv import collect_samples
from hf_lossy_assist.methods.sv.collect_samples import ProfileSettings
from hf_lossy_assist.terminal import Bar
from hf_lossy_assist.training import processes
from hf_lossy_assist.training.run_folder import RunFolder


def test_a_bar_shows_parts_and_what_is_left(capsys):
    with Bar(8, "mining", "problems") as bar:
        for done in (0.25, 3.4, 2.0):
            bar.to(done)
        assert bar.done == 3.4
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.startswith("mining:  42%|") and "3.4/8 problems, " in last and "to go" in last


@pytest.fixture
def moves(monkeypatch):
    """Where each bar stood, move by move."""
    found = []

    class Seen(Bar):
        def to(self, done):
            super().to(done)
            found.append(self.done)

    monkeypatch.setattr(processes, "Bar", Seen)
    return found


def within(moves, total):
    """Forward, to the end, and with stations inside each unit."""
    assert moves == sorted(moves) and moves[-1] == total
    for unit in range(total):
        assert any(unit < at < unit + 1 for at in moves), (unit, moves)


def test_collecting_moves_within_a_batch(tmp_path, moves):
    settings = CollectSettings(new_tokens=5, batch_size=2)
    collecting.collect(*tiny_pair(), word_prompts(4, 6, 5), tmp_path / "data", settings)
    within(moves, 2)


@pytest.mark.full
def test_mining_moves_within_a_problem(tmp_path, moves):
    m = models()
    mining.mine(m.target, m.draft, m.tokenizer, TASK, TASK.problems(1), tmp_path / "data", MineSettings(NEW))
    assert moves == sorted(moves) and moves[-1] == 1 and any(0 < at < 1 for at in moves)


def test_sampling_for_a_profile_moves_within_a_batch(tmp_path, moves):
    target, draft, tokenizer = tiny_pair()
    texts = [text.prompt for text in word_prompts(4, 6, 5)]
    settings = ProfileSettings(gamma=(2,), new_tokens=12, batch_size=2, batches=(1,), rounds=3)
    with RunFolder.opened(tmp_path / "out", collect_samples.STARTED, {}) as run:
        collect_samples.collect(
            collect_samples.Profiled(target, draft, tiny.noisy(target, 0.1), small.tokenizer(), texts, settings), run
        )
    within(moves, 2)
