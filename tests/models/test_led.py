"""A target that tensor parallelism spreads over ranks: the text of one process, on every rank."""

import json

import pytest
import torch
from support import small, spread_calls, tiny
from support.two_processes import SPREAD

import hf_lossy_assist as hla


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def found(two_processes):
    """What each of two gloo ranks returned."""
    _, folder = two_processes("spread")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


CALLS = ("strict", "svip", "staged", "sprinter", "judge", "top_k")


def test_all_ranks_return_the_same(found):
    """Also where texts are sampled, though the ranks' own random numbers differ."""
    for name in SPREAD:
        for kind in CALLS:
            for how in ("greedy", "sampled"):
                key = f"{name} {kind} {how}"
                assert found[0][key] == found[1][key], key
    assert len({json.dumps(its) for its in found[0].values()}) > 2 * len(SPREAD)


@pytest.mark.full(every=2)
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_greedy_texts_are_those_of_one_process(found, name):
    target = tiny.build(name)
    draft = tiny.noisy(target, 0.05)
    prompts = small.ragged((0, 3, 5, 1), vocab=tiny.VOCABULARY)
    hla.enable(target)
    for kind, policy in spread_calls.policies(draft).items():
        given = spread_calls.SETTINGS | {"do_sample": False, "assistant_model": draft, "lossy_policy": policy}
        out = target.generate(**prompts, **given)
        stats = out.speculation.summary()
        expected = [out.sequences.tolist(), stats["num_accepted_draft_tokens"], stats["num_lossy_accepts"]]
        assert found[0][f"{name} {kind} greedy"] == expected, kind
    plain = target.generate(**prompts, max_new_tokens=24, do_sample=False)
    assert torch.equal(plain, torch.tensor(found[0][f"{name} strict greedy"][0]))


def test_what_cannot_be_is_said_on_every_rank(found):
    for name in SPREAD:
        for rank in found:
            assert rank[f"{name} other prompts"].startswith(
                "ValueError: prompts, lengths or policies differ between the ranks"
            )
            assert "the assistant is spread over ranks" in rank[f"{name} draft"]
        assert found[0][f"{name} an error"] == "RuntimeError: a criterion failed"
        assert found[1][f"{name} an error"].startswith("OtherRankFailed: rank 0 ended with an error")
