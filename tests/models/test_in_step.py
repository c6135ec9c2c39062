"""A target whose weights are spread over ranks: texts are those of one process, whether FSDP2 shards it or tensor parallelism spreads it."""

import json

import pytest
import torch
from support import sharded_calls, small, spread_calls, tiny
from support.two_processes import SHARDED, SPREAD

import hf_lossy_assist as hla


pytestmark = pytest.mark.nightly
CALLS = ("strict", "svip", "staged", "sprinter", "judge", "top_k")


def returned(two_processes, job):
    """Return the results of each of two gloo ranks."""
    _, folder = two_processes(job)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def sharded(two_processes):
    return returned(two_processes, "sharded")


@pytest.fixture(scope="module")
def spread(two_processes):
    return returned(two_processes, "spread")


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_texts_are_those_of_one_process(sharded, name):
    target = tiny.build(name)
    draft = tiny.noisy(target, 0.05)
    hla.enable(target)
    for rank in range(2):
        for kind, policy in spread_calls.policies(draft).items():
            for sampling in (False, True):
                given = sharded_calls.settings(rank, draft, policy, sampling)
                out = target.generate(**sharded_calls.prompts(rank), **given)
                key = f"{name} {kind} {'sampled' if sampling else 'greedy'}"
                assert sharded[rank][key] == sharded_calls.written(out), key
    lengths = [len(results[f"{name} strict greedy"][0][0]) for results in sharded]
    assert lengths[0] < lengths[1], "one rank is done before the other"


def test_an_error_on_one_rank_ends_the_other(sharded):
    for name in SHARDED:
        assert sharded[0][f"{name} an error"] == "RuntimeError: a criterion failed"
        assert sharded[0][f"{name} a refusal"].startswith("ValueError: input_ids")
        for what in ("an error", "a refusal"):
            assert sharded[1][f"{name} {what}"].startswith("OtherRankFailed: another rank of this target ended"), what


def test_what_a_sharded_target_cannot_do_is_refused_on_every_rank(sharded):
    reasons = {
        "draft": "the assistant is spread over ranks (FSDP2)",
        "many": "the target of generate_many is spread over ranks (FSDP2)",
        "compiled": "a target that is spread over ranks cannot be compiled here",
    }
    for name in SHARDED:
        for rank in sharded:
            for what, reason in reasons.items():
                assert rank[f"{name} {what}"].startswith(f"ValueError: {reason}"), what


def test_zero3_is_refused_by_name(sharded):
    """By the mark that DeepSpeed leaves on each parameter, of a target and of a draft."""
    for rank in sharded:
        assert rank["zero3 target"].startswith("ValueError: the target is sharded by DeepSpeed's ZeRO-3, which")
        assert rank["zero3 draft"].startswith("ValueError: the assistant is spread over ranks (DeepSpeed's ZeRO-3)")


def test_training_goes_on_behind_a_call(sharded):
    assert all(rank[f"{name} gradients"] is True for rank in sharded for name in SHARDED)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_synced_gpus_as_transformers_has_it(sharded):
    """False: every rank makes the same call, and none waits; True: whole models run in step too."""
    for name in SHARDED:
        target = tiny.build(name)
        call = {"assistant_model": tiny.noisy(target, 0.05), "lossy_policy": "svip", "max_new_tokens": 8}
        alone = hla.enable(target).generate(**sharded_calls.prompts(0), **call, do_sample=False).tolist()
        assert sharded[0][f"{name} the same"] == sharded[1][f"{name} the same"] == alone
    draft = tiny.noisy(target, 0.05)
    for rank in range(2):
        given = sharded_calls.settings(rank, draft, "svip", False)
        out = hla.enable(draft).generate(**sharded_calls.prompts(rank), **given)
        assert sharded[rank]["whole models in step"] == out.sequences.tolist()


def test_all_ranks_return_the_same(spread):
    """Also where texts are sampled, though the ranks' own random numbers differ."""
    for name in SPREAD:
        for kind in CALLS:
            for how in ("greedy", "sampled"):
                key = f"{name} {kind} {how}"
                assert spread[0][key] == spread[1][key], key
    assert len({json.dumps(value) for value in spread[0].values()}) > 2 * len(SPREAD)


@pytest.mark.full(every=2)
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_greedy_texts_are_those_of_one_process(spread, name):
    target = tiny.build(name)
    draft = tiny.noisy(target, 0.05)
    prompts = small.ragged((0, 3, 5, 1), vocab=tiny.VOCABULARY)
    hla.enable(target)
    for kind, policy in spread_calls.policies(draft).items():
        given = spread_calls.SETTINGS | {"do_sample": False, "assistant_model": draft, "lossy_policy": policy}
        out = target.generate(**prompts, **given)
        assert spread[0][f"{name} {kind} greedy"] == sharded_calls.written(out), kind
    plain = target.generate(**prompts, max_new_tokens=24, do_sample=False)
    assert torch.equal(plain, torch.tensor(spread[0][f"{name} strict greedy"][0]))


def test_what_a_spread_target_cannot_do_is_refused_on_every_rank(spread):
    for name in SPREAD:
        for rank in spread:
            assert rank[f"{name} other prompts"].startswith("ValueError: prompts, lengths or policies differ between")
            assert "the assistant is spread over ranks" in rank[f"{name} draft"]
        assert spread[0][f"{name} an error"] == "RuntimeError: a criterion failed"
        assert spread[1][f"{name} an error"].startswith("OtherRankFailed: rank 0 ended with an error")
