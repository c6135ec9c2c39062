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
    assert all(any(unit < at < unit + 1 for at in moves) for unit in range(total)), moves
    moves.clear()


@pytest.mark.full
def test_jobs_move_within_a_batch(tmp_path, moves):
    target, draft, tokenizer = tiny_pair()
    given = word_prompts(4, 6, 5)
    collecting.collect(target, draft, tokenizer, given, tmp_path / "data", CollectSettings(new_tokens=5, batch_size=2))
    within(moves, 2)
    settings = ProfileSettings(gamma=(2,), new_tokens=12, batch_size=2, batches=(1,), rounds=3)
    texts, companion = [text.prompt for text in given], tiny.noisy(target, 0.1)
    profiled = collect_samples.Profiled(target, draft, companion, small.tokenizer(), texts, settings)
    with RunFolder.opened(tmp_path / "out", collect_samples.STARTED, {}) as run:
        collect_samples.collect(profiled, run)
    within(moves, 2)
    m = models()
    mining.mine(m.target, m.draft, m.tokenizer, TASK, TASK.problems(1), tmp_path / "mined", MineSettings(NEW))
    within(moves, 1)
