"""A target that FSDP2 shards over ranks: each rank's texts are those of one process, though the ranks finish at different times."""

import json

import pytest
from support import sharded_calls, tiny
from support.spread_calls import policies
from support.two_processes import SHARDED

import hf_lossy_assist as hla


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def found(two_processes):
    """What each of two gloo ranks returned."""
    _, folder = two_processes("sharded")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_texts_are_those_of_one_process(found, name):
    target = tiny.build(name)
    draft = tiny.noisy(target, 0.05)
    hla.enable(target)
    for rank in range(2):
        for kind, policy in policies(draft).items():
            for sampling in (False, True):
                given = sharded_calls.settings(rank, draft, policy, sampling)
                out = target.generate(**sharded_calls.prompts(rank), **given)
                key = f"{name} {kind} {'sampled' if sampling else 'greedy'}"
                assert found[rank][key] == sharded_calls.written(out), key
    lengths = [len(its[f"{name} strict greedy"][0][0]) for its in found]
    assert lengths[0] < lengths[1], "one rank is done before the other"


def test_an_error_on_one_rank_ends_the_other(found):
    for name in SHARDED:
        assert found[0][f"{name} an error"] == "RuntimeError: a criterion failed"
        assert found[0][f"{name} a refusal"].startswith("ValueError: input_ids")
        assert found[0][f"{name} a refusal of Runner"].startswith("ValueError: num_assistant_tokens is 4")
        for what in ("an error", "a refusal", "a refusal of Runner"):
            assert found[1][f"{name} {what}"].startswith("OtherRankFailed: another rank of this target ended"), what


def test_what_cannot_be_is_said_on_every_rank(found):
    reasons = {
        "draft": "the assistant is spread over ranks (FSDP2)",
        "many": "the target of generate_many is spread over ranks (FSDP2)",
        "compiled": "a target that is spread over ranks cannot be compiled here",
    }
    for name in SHARDED:
        for rank in found:
            for what, reason in reasons.items():
                assert rank[f"{name} {what}"].startswith(f"ValueError: {reason}"), what


def test_zero3_is_refused_by_name(found):
    """By the mark that DeepSpeed leaves on each parameter, of a target and of a draft."""
    for rank in found:
        assert rank["zero3 target"].startswith("ValueError: the target is sharded by DeepSpeed's ZeRO-3, which")
        assert rank["zero3 draft"].startswith("ValueError: the assistant is sharded by DeepSpeed's ZeRO-3, which")


def test_training_goes_on_behind_a_call(found):
    assert all(rank[f"{name} gradients"] is True for rank in found for name in SHARDED)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_synced_gpus_as_transformers_has_it(found):
    """False: every rank makes the same call, and none waits; True: whole models run in step too."""
    for name in SHARDED:
        target = tiny.build(name)
        call = {"assistant_model": tiny.noisy(target, 0.05), "lossy_policy": "svip", "max_new_tokens": 8}
        alone = hla.enable(target).generate(**sharded_calls.prompts(0), **call, do_sample=False).tolist()
        assert found[0][f"{name} the same"] == found[1][f"{name} the same"] == alone
    draft = tiny.noisy(target, 0.05)
    for rank in range(2):
        given = sharded_calls.settings(rank, draft, "svip", False)
        out = hla.enable(draft).generate(**sharded_calls.prompts(rank), **given)
        assert found[rank]["whole models in step"] == out.sequences.tolist()
