"""Proves that stops made of stops answer what their parts answer together, in what they plan, save and check."""

from typing import Any

import pytest
import torch
from support import tiny
from support.heads import draft_of, head_for
from support.refusals import names, refused

import hf_lossy_assist as hla
from hf_lossy_assist import (
    SVIP,
    AllOf,
    AnyOf,
    AtLeast,
    BatchSchedule,
    Confidence,
    Constant,
    HeadStop,
    Heuristic,
    LossyPolicy,
    as_policy,
)


RAGGED = (9, 1, 4, 14)


def run(stop, lengths=(9,), kind="often", **settings) -> Any:
    model = tiny.shared("llama")
    return tiny.assisted(model, tiny.prompts(lengths), tiny.draft_of(model, kind), stop, **settings)


# -- stops made of stops --------------------------------------------------------------------------------------------------


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
    (AtLeast(StopsAt(3, 5), 3), 3),
    (AtLeast(StopsAt(3, 5), 4), 5),  # its answers before the fourth token are ignored
    (AtLeast(StopsAt(limit=2), 4), 4),
    (AtLeast(Constant(2), 4), 4),
    (AnyOf([StopsAt(3, 5), StopsAt(4)]), 3),
    (AnyOf([StopsAt(6), StopsAt(limit=4)]), 4),
    (AnyOf([StopsAt(6), Constant(5)]), 5),
    (AllOf([StopsAt(2, 3, 5), StopsAt(3, 4)]), 3),
    (AllOf([StopsAt(2, 5), StopsAt(3, 4)]), 9),  # never both at one token
    (AllOf([StopsAt(2, 7), StopsAt(3, 4, limit=5)]), 7),  # the second has reached its limit by then
    (AllOf([StopsAt(2, 7), Constant(4)]), 7),
    (AllOf([StopsAt(2, 7, limit=8), Constant(8)]), 8),
    (AllOf([Constant(3), Constant(6)]), 6),
    (AnyOf([AllOf([StopsAt(2, 6), Constant(4)]), AtLeast(StopsAt(1, 5), 2)]), 5),
]


def test_combinations_by_hand():
    for number, (stop, tokens) in enumerate(BY_HAND):
        assert length(stop) == tokens, number


def test_limits_rows_and_the_rest_of_combinations():
    stop = AnyOf([Heuristic(3, 8), AllOf([BatchSchedule({1: 6, 2: 2}), Constant(4)])])
    assert not stop.adaptive and AnyOf([stop, SVIP()]).adaptive
    running = stop.start(2)
    assert running.begin_round([0, 1]) == [3, 3] and running.begin_round([1]) == [3]
    running.observe([1], [3], [3])
    assert running.begin_round([0, 1]) == [3, 4] and running.begin_round([1]) == [
        5
    ]  # the heuristic's 5, and 6 for one row
    assert stop.longest == 6 and stop.start(1).begin_round([0]) == [3]
    shorter = AnyOf([SVIP(h=0.5), AtLeast(Confidence(), 7)]).with_longest(5)
    assert shorter == AnyOf([SVIP(h=0.5, max_draft=5), AtLeast(Confidence(max_draft=5), 5)]) and shorter.longest == 5


def test_the_most_impatient_part_ends_the_round():
    head = head_for(draft_of("llama"))
    assert (
        AnyOf([SVIP(), HeadStop(head, patience=0.5)]).patience == 0.5 == AtLeast(HeadStop(head, patience=0.5)).patience
    )
    assert AllOf([SVIP(), Constant()]).patience == 1.0


def test_parts_read_one_state():
    head = head_for(draft_of("llama"))
    deep = hla.LinearHead(hla.HeadConfig(32, features=hla.FeatureSpec(layer=1, norm=False)))
    assert AnyOf([SVIP(), HeadStop(head)]).features == head.config.features == AtLeast(HeadStop(head)).features
    assert AnyOf([SVIP(), Constant()]).features is None
    with pytest.raises(ValueError, match="^AllOf: their heads must read one hidden state[^\n]*layer 1[^\n]*$"):
        AllOf([HeadStop(head), HeadStop(deep)])


# -- JSON -----------------------------------------------------------------------------------------------------------------


def test_the_nested_form():
    spec = {"stop": {"name": "any_of", "stops": ["svip", {"name": "at_least", "stop": {"name": "constant"}, "n": 3}]}}
    assert as_policy(spec) == LossyPolicy(stop=AnyOf((SVIP(), AtLeast(Constant(), 3))))


def test_heads_inside_are_saved_loaded_and_checked(tmp_path):
    head, other = (
        head_for.__wrapped__(draft_of("llama"), kind) for kind in ("linear", "mlp")
    )  # new: saving marks them
    policy = LossyPolicy(stop=AnyOf([SVIP(), HeadStop(head, 0.3), AtLeast(HeadStop(other, 0.2), 3)]))
    assert policy.heads() == {"stop_1_head": head, "stop_2_0_head": other}
    policy.save_pretrained(tmp_path / "made")
    assert names(tmp_path / "made") == {"policy.json", "README.md", "stop_1_head", "stop_2_0_head"}
    assert LossyPolicy.from_pretrained(tmp_path / "made") == as_policy(str(tmp_path / "made")) == policy
    assert run(policy, RAGGED).speculation.forwards["head"] > 0


# -- refusals -------------------------------------------------------------------------------------------------------------


REFUSED = [
    (lambda: AtLeast(5), TypeError, "AtLeast.stop: expected DraftStop, got 5"),
    (lambda: AnyOf([]), ValueError, "AnyOf: expected at least one inside"),
    (lambda: hla.Union([]), ValueError, "Union: expected at least one inside"),
    (lambda: AllOf([SVIP(), "svip"]), TypeError, "AllOf: .*'svip'"),
    (lambda: as_policy({"stop": {"name": "any_of", "stops": ["svp"]}}), ValueError, "Did you mean 'svip'"),
    (lambda: as_policy({"stop": {"name": "any_of", "stops": "svip"}}), TypeError, "AnyOf: "),
    (lambda: as_policy({"stop": {"name": "at_least", "stop": {"h": 1}}}), ValueError, "stop: expected a name"),
    (lambda: as_policy({"stop": "any_of"}), ValueError, "takes stops: missing a required argument: 'stops'"),
    (lambda: as_policy({"stop": {"name": "at_least", "stops": []}}), ValueError, "takes stop, n: missing a required argument: 'stop'"),
]  # fmt: skip


def test_refused_in_one_line():
    for make, error, words in REFUSED:
        refused(make, words, error)
