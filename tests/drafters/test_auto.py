"""The choice among drafters while they run: its regret in simulated rounds of given costs, and the text and distribution under each choice."""

import random
from types import SimpleNamespace

import pytest
import torch
from support import eagle, sv_models, tiny
from support.enumeration import off
from support.tiny import NEVER_EMITTED, some_eos

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.auto import NEAR, TRIES, WAIT, WINDOW, AutoRun, Estimates
from hf_lossy_assist.drafters.base import DrafterRun, certain_draft
from hf_lossy_assist.stops.fallback import DraftSwitch, SwitchRule


RULE = SwitchRule(0.05, 3, WINDOW, WAIT, 0.02, TRIES, NEAR, remembers=True)
RAGGED = (9, 1, 4, 14)


class World:
    """Rows of a text that is fixed beforehand, a model and matches that guess it with given chances, and seconds of given size for each round.

    `parts`: (tokens, chance of the model, chance of a match at a place, chance of its tokens), one after the other; a match is of 4 tokens,
    or of those since a place divisible by `grows`, and so are its drafts.
    """

    def __init__(self, *parts, model=1.9, token=0.02, seed=0, rows=1, grows=0):
        draw = random.Random(seed)
        self.size, self.grows = sum(part[0] for part in parts), grows
        self.seconds, self.model_cost, self.token_cost, self.estimates = 0.0, model, token, Estimates()
        self.texts, self.guesses, self.matches = [], [], []
        for _ in range(rows):
            text = [draw.randrange(1, 90) for _ in range(self.size + 99)]
            chances = [part for part in parts for _ in range(part[0])] + [parts[-1]] * 99
            self.texts.append(text)
            self.guesses.append([x if draw.random() < part[1] else 0 for x, part in zip(text, chances, strict=True)])
            width, matches = 16 if grows else 8, []
            for i, part in enumerate(chances):
                found = draw.random() < part[2]
                matches.append([x if draw.random() < part[3] else 0 for x in text[i : i + width]] if found else [])
            self.matches.append(matches)

    def write(self, fixed=None) -> float:
        """Write all rows, drafting as `AutoRun` chooses, or always as `fixed` says; return the seconds."""
        self.seconds, count = 0.0, len(self.texts)
        rows = SimpleNamespace(
            finished=[False] * count, row_id_list=list(range(count)), ids=torch.zeros(1), row_ids=torch.arange(count)
        )
        place = [1] * count
        rows.text_on_host = lambda b: self.texts[b][: place[b]]
        rows.cached_lengths = lambda: [n - 1 for n in place]
        world = self

        class Text(DrafterRun):
            skip_validation = gives_probs = True

            def find(self, rows, limits):
                self.texts = {b: SimpleNamespace(tokens=rows.text_on_host(b)) for b in range(count)}
                sizes = [n % world.grows + 1 if world.grows else 4 for n in place]
                found = [
                    world.matches[b][n][: min(limit, 2 * size)]
                    for b, (n, limit, size) in enumerate(zip(place, limits, sizes, strict=True))
                ]
                return [(min(size, 16) if tokens else 0, tokens) for size, tokens in zip(sizes, found, strict=True)]

        class Model(DrafterRun):
            skip_validation = gives_probs = True

            def propose(self, rows, limits, randomness):
                world.seconds += world.model_cost - 1
                each = enumerate(zip(place, limits, strict=True))
                tokens = [world.guesses[b][n : n + min(limit, 5)] for b, (n, limit) in each]
                return certain_draft(tokens, rows, limits, False)

        switch = DraftSwitch(RULE, count, now=lambda: self.seconds)
        context = SimpleNamespace(vocabulary=99, reads_probs=False, sampling=False)
        run = AutoRun(Text(), Model(), context, switch, self.estimates)
        if fixed is not None:
            run._choose = lambda may, gains, longest: fixed
            run.switch.begin = lambda rows: True
        self.chosen = []
        while not all(rows.finished):
            limits = [0 if over else 16 for over in rows.finished]
            draft = run.propose(rows, limits, None)
            drafted = [
                tokens[:n]
                for tokens, n in zip(draft.tokens.tolist(), draft.counts or draft.lengths.tolist(), strict=True)
            ]
            self.seconds += 1 + self.token_cost * max(map(len, drafted))
            accepted = []
            for b, tokens in enumerate(drafted):
                wanted = self.texts[b][place[b] :]
                n = next((i for i, token in enumerate(tokens) if token != wanted[i]), len(tokens))
                accepted.append(n)
                place[b] += 0 if rows.finished[b] else n + 1
            self.chosen.append(run.chosen)
            run.learn(rows, SimpleNamespace(draft=SimpleNamespace(gamma=max(map(len, drafted)))), accepted)
            rows.finished = [n >= self.size for n in place]
        return self.seconds


FIXED = {"none": ("none", 1e9), "text": ("text", -1.0), "model": ("model", 1e9), "both": ("model", -1.0)}


def regret(world) -> float:
    """The share of seconds that the choice takes beyond the best fixed drafter's."""
    fixed = {name: World.write(world, choice) for name, choice in FIXED.items()}
    world.estimates = Estimates()
    best = min(fixed.values())
    return world.write() / best - 1


def worlds():
    """Worlds, and at most how much longer than with the best fixed drafter each takes."""
    yield World((1500, 0.7, 0.1, 0.1)), 0.04  # prose, a good model
    yield World((1500, 0.2, 0.1, 0.1)), 0.04  # prose, a bad model
    yield World((4000, 0.5, 0.9, 0.97)), 0.04  # copies
    yield World((4000, 0.6, 0.3, 0.8)), 0.04  # code
    yield World((1500, 0.47, 0.0, 0.0)), 0.04  # no match, a model at its price
    # Copies of 24 tokens: each length of a match is seen a few times, and a long draft costs much.
    for token, rows in ((0.03, 1), (0.08, 3), (0.15, 1)):
        yield World((576, 0.6, 1.0, 0.97), token=token, rows=rows, grows=24), 0.05
    # A text that changes is written faster than by any fixed drafter, and a copied stretch is soon forgotten.
    yield World((700, 0.75, 0.05, 0.1), (700, 0.2, 0.95, 0.98), (700, 0.1, 0.0, 0.0)), -0.05
    yield World((1500, 0.7, 0.9, 0.97), (1500, 0.7, 0.9, 0.1)), -0.13


@pytest.mark.full
def test_regret_against_the_best_fixed_drafter():
    for number, (world, most) in enumerate(worlds()):
        assert regret(world) < most, number
    world = World((900, 0.6, 0.5, 0.97), rows=3)  # rows with a good match take it beside the model
    assert regret(world) < 0.02 and {"model", "text"} <= set(world.chosen)


@pytest.mark.full
def test_regret_grows_more_slowly_than_the_text():
    short, long = (regret(World((size, 0.2, 0.1, 0.1))) for size in (300, 4800))
    assert long < max(0.5 * short, 0.01)


def test_later_calls_continue_with_the_estimates():
    """A model that loses is not tried anew by each call, nor is a plain round measured in each where it pays."""
    for chance, kind, most in ((0.1, "model", 2), (0.8, "none", 2)):
        world = World((60, chance, 0.0, 0.0))
        for _ in range(6):
            world.write()
        assert world.chosen.count(kind) <= most


def test_expected_tokens_by_hand():
    estimates = Estimates()
    assert estimates.chance(3) == 0.5 and estimates.longest(3) == 3 and estimates.gain(3, 2) == 0.75
    estimates.learn(3, 5, True)
    assert estimates.chance(3) == 6.5 / 8 and estimates.chance(4) == 6 / 8, "two tokens' worth of all lengths'"
    assert estimates.cost(1, 9, 2.0) == 1.0, "nothing is measured"
    estimates.add_seconds(1, 4, 3.0)
    assert estimates.cost(1, 9, 2.0) == 1.5 and estimates.cost(1, 3, 2.0) == 1.0 and estimates.cost(2, 9, 2.0) == 1.0


def scripted(monkeypatch):
    """Let each round choose the next of all three."""
    kinds, seen = [("text", 0.0), ("model", 0.7), ("none", 1e9), ("model", 1e9)], []

    def choose(self, may, gains, longest):
        seen.append(kinds[len(seen) % len(kinds)])
        return seen[-1] if may or seen[-1][0] != "model" else kinds[0]

    monkeypatch.setattr(AutoRun, "_choose", choose)
    return seen


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_greedy_is_generate_whatever_is_chosen(kind, monkeypatch):
    model, inputs = hla.enable(tiny.shared("llama")), tiny.prompts(RAGGED)
    draft = tiny.draft_of(model, "often") if kind == "model" else eagle.drafter(model)
    eos = some_eos(tiny.greedy(model, inputs, eos_token_id=NEVER_EMITTED), max(RAGGED))
    expected, seen = tiny.greedy(model, inputs, eos_token_id=eos), scripted(monkeypatch)
    auto = hla.AutoDrafter(hla.SuffixDrafter(min_match=1))
    out = tiny.assisted(model, inputs, draft, drafter=auto, eos_token_id=eos)
    assert out.sequences.equal(expected) and len(seen) > 3 and out.speculation.num_draft_tokens > 0


@pytest.mark.full
@pytest.mark.parametrize("chosen", ["none", "text", "model"])
def test_samples_have_the_targets_distribution(chosen, monkeypatch):
    target, draft, _ = sv_models.models(3)
    ids = torch.tensor([[0, 2, 2, 0, 2], [0, 0, 0, 2, 1]])
    prompts = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 5, [0] + [1] * 4])}
    monkeypatch.setattr(AutoRun, "_choose", lambda self, *_: (chosen, 1e9 if chosen == "none" else 0.0))
    distance, runner = off(
        target, draft, hla.Constant(2), prompts, length=2, end=sv_models.END, real=True, others={"drafter": "auto"}
    )
    assert distance < 2e-6 and runner.widths == ({0} if chosen == "none" else {2})


def test_wrong_settings_end_in_one_line():
    for settings, says in (
        ({"first": "model"}, "AutoDrafter: expected a SuffixDrafter as first"),
        ({"then": "composite"}, "AutoDrafter.then: expected a drafter such as"),
        ({"margin": 2}, "AutoDrafter.margin"),
        ({"trials": 0.0}, "AutoDrafter.trials"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^[^\n]*{says}[^\n]*$"):
            hla.AutoDrafter(**settings)
    with pytest.raises(ValueError, match="SVIP reads what a draft model computes, and AutoDrafter has none"):
        tiny.assisted(tiny.shared("llama"), tiny.prompts((5,)), None, "svip", drafter="auto")
