"""Proves that stops made of stops answer what their parts answer together, in what they plan, save and check."""

from typing import Any

import pytest
import torch
from support import tiny
from support.heads import draft_of, head_for
from support.refusals import names, refused

import hf_lossy_assist as hla


RAGGED = (9, 1, 4, 14)


def run(stop, lengths=(9,), kind="often", **settings) -> Any:
    model = tiny.shared("llama")
    return tiny.assisted(model, tiny.prompts(lengths), tiny.draft_of(model, kind), stop, **settings)


class StopsAt(hla.DraftStop):
    """Stops at the given places of each round, and at its limit."""

    def __init__(self, *places: int, limit: int = 9):
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "limit", limit)

    @property
    def longest(self) -> int:
        return self.limit

    def start(self, rows):
        return StopsAtRun(self)


class StopsAtRun(hla.StopRun):
    def begin_round(self, rows):
        self.drafted = 0
        return super().begin_round(rows)

    def after_token(self, input_ids, scores, *, rows, features=None):
        self.drafted += 1
        return torch.full((len(input_ids),), self.drafted in self.settings.places)


def length(stop) -> int:
    """How many tokens a round drafts; each round the same, or it has kept something."""
    found = set()
    started = stop.start(1)
    for _ in range(2):
        [limit] = started.begin_round([0])
        drafted = 0
        while drafted < limit:
            drafted += 1
            if bool(started(torch.zeros(1, 1), (torch.zeros(1, 4),), rows=[0])):
                break
        found.add(drafted)
    assert len(found) == 1
    return found.pop()


BY_HAND = [
    (StopsAt(3, 5), 3),
    (hla.AtLeast(StopsAt(3, 5), 3), 3),
    (hla.AtLeast(StopsAt(3, 5), 4), 5),  # its answers before the fourth token are ignored
    (hla.AtLeast(StopsAt(limit=2), 4), 4),
    (hla.AtLeast(hla.Constant(2), 4), 4),
    (hla.AnyOf([StopsAt(3, 5), StopsAt(4)]), 3),
    (hla.AnyOf([StopsAt(6), StopsAt(limit=4)]), 4),
    (hla.AnyOf([StopsAt(6), hla.Constant(5)]), 5),
    (hla.AllOf([StopsAt(2, 3, 5), StopsAt(3, 4)]), 3),
    (hla.AllOf([StopsAt(2, 5), StopsAt(3, 4)]), 9),  # never both at one token
    (hla.AllOf([StopsAt(2, 7), StopsAt(3, 4, limit=5)]), 7),  # the second has reached its limit by then
    (hla.AllOf([StopsAt(2, 7), hla.Constant(4)]), 7),
    (hla.AllOf([StopsAt(2, 7, limit=8), hla.Constant(8)]), 8),
    (hla.AllOf([hla.Constant(3), hla.Constant(6)]), 6),
    (hla.AnyOf([hla.AllOf([StopsAt(2, 6), hla.Constant(4)]), hla.AtLeast(StopsAt(1, 5), 2)]), 5),
]


def test_combinations_by_hand():
    for number, (stop, tokens) in enumerate(BY_HAND):
        assert length(stop) == tokens, number


def test_limits_rows_and_the_rest_of_combinations():
    stop = hla.AnyOf([hla.Heuristic(3, 8), hla.AllOf([hla.BatchSchedule({1: 6, 2: 2}), hla.Constant(4)])])
    assert not stop.adaptive and hla.AnyOf([stop, hla.SVIP()]).adaptive
    running = stop.start(2)
    assert running.begin_round([0, 1]) == [3, 3] and running.begin_round([1]) == [3]
    running.observe([1], [3], [3])
    # The heuristic's 5, and 6 for one row.
    assert running.begin_round([0, 1]) == [3, 4] and running.begin_round([1]) == [5]
    assert stop.longest == 6 and stop.start(1).begin_round([0]) == [3]
    shorter = hla.AnyOf([hla.SVIP(h=0.5), hla.AtLeast(hla.Confidence(), 7)]).with_longest(5)
    assert (
        shorter == hla.AnyOf([hla.SVIP(h=0.5, max_draft=5), hla.AtLeast(hla.Confidence(max_draft=5), 5)])
        and shorter.longest == 5
    )


def test_the_most_impatient_part_ends_the_round():
    head = head_for(draft_of("llama"))
    assert (
        hla.AnyOf([hla.SVIP(), hla.HeadStop(head, patience=0.5)]).patience
        == 0.5
        == hla.AtLeast(hla.HeadStop(head, patience=0.5)).patience
    )
    assert hla.AllOf([hla.SVIP(), hla.Constant()]).patience == 1.0


def test_parts_read_one_state():
    head = head_for(draft_of("llama"))
    deep = hla.LinearHead(hla.HeadConfig(32, features=hla.FeatureSpec(layer=1, norm=False)))
    assert (
        hla.AnyOf([hla.SVIP(), hla.HeadStop(head)]).features
        == head.config.features
        == hla.AtLeast(hla.HeadStop(head)).features
    )
    assert hla.AnyOf([hla.SVIP(), hla.Constant()]).features is None
    with pytest.raises(ValueError, match="^AllOf: their heads must read one hidden state[^\n]*layer 1[^\n]*$"):
        hla.AllOf([hla.HeadStop(head), hla.HeadStop(deep)])


def test_heads_inside_are_saved_loaded_and_checked(tmp_path):
    # New ones: saving marks them.
    head, other = (head_for.__wrapped__(draft_of("llama"), kind) for kind in ("linear", "mlp"))
    stops = [hla.SVIP(), hla.HeadStop(head, 0.3), hla.AtLeast(hla.HeadStop(other, 0.2), 3)]
    policy = hla.LossyPolicy(stop=hla.AnyOf(stops))
    assert policy.heads() == {"stop_1_head": head, "stop_2_0_head": other}
    policy.save_pretrained(tmp_path / "made")
    assert names(tmp_path / "made") == {"policy.json", "README.md", "stop_1_head", "stop_2_0_head"}
    assert hla.LossyPolicy.from_pretrained(tmp_path / "made") == hla.as_policy(str(tmp_path / "made")) == policy
    assert run(policy, RAGGED).speculation.forwards["head"] > 0


def test_refused_in_one_line():
    for make, error, words in (
        (lambda: hla.AtLeast(5), TypeError, "AtLeast.stop: expected DraftStop, got 5"),
        (lambda: hla.AnyOf([]), ValueError, "AnyOf: expected at least one inside"),
        (lambda: hla.Union([]), ValueError, "Union: expected at least one inside"),
        (lambda: hla.AllOf([hla.SVIP(), "svip"]), TypeError, "AllOf: .*'svip'"),
        (lambda: hla.as_policy({"stop": {"name": "any_of", "stops": ["svp"]}}), ValueError, "Did you mean 'svip'"),
        (lambda: hla.as_policy({"stop": {"name": "any_of", "stops": "svip"}}), TypeError, "AnyOf: "),
        (lambda: hla.as_policy({"stop": {"name": "at_least", "stop": {"h": 1}}}), ValueError, "stop: expected a name"),
    ):
        refused(make, words, error)
