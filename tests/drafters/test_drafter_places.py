"""One drafter beside targets in other precisions: its own network stays as it was loaded, also in threads."""

import copy
import threading

import pytest
import torch
from support import eagle, small

import hf_lossy_assist as hla


@pytest.fixture(scope="module")
def targets():
    one = hla.enable(small.llama(layers=3).float())
    return one, hla.enable(copy.deepcopy(one).to(torch.bfloat16))


def written(target, drafter):
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    return target.generate(**small.one(), assistant_model=drafter, lossy_policy="strict", **settings)


def test_its_weights_stay(targets):
    drafter = eagle.drafter(targets[0])
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for target in (targets[1], targets[0], targets[1]):
        written(target, drafter)
        after = drafter.state_dict()
        assert all(after[name].dtype == before[name].dtype and after[name].equal(before[name]) for name in before)
    there = drafter.beside(targets[1])
    assert there.dtype == torch.bfloat16 and there is drafter.beside(targets[1])  # copied once
    assert drafter.beside(targets[0]) is drafter


def test_a_copy_follows_a_network_that_is_changed(targets):
    drafter = eagle.drafter(targets[0])
    old = drafter.beside(targets[1])
    with torch.no_grad():
        drafter.network.fc.weight.add_(1.0)
    new = drafter.beside(targets[1])
    assert new is not old and new.network.fc.weight.equal(drafter.network.fc.weight.to(torch.bfloat16))


def test_a_network_that_was_made_in_inference_mode(targets):
    with torch.inference_mode():
        drafter = eagle.drafter(targets[0])
    assert drafter.beside(targets[1]) is drafter.beside(targets[1])
    text = written(targets[1], drafter).sequences
    assert text.equal(targets[1].generate(**small.one(), max_new_tokens=12, do_sample=False))


@pytest.mark.full
def test_targets_of_two_precisions_in_threads(targets):
    drafter, errors, texts = eagle.drafter(targets[0]), [], {0: [], 1: []}

    def run(number):
        try:
            for _ in range(6):
                texts[number].append(written(targets[number], drafter).sequences)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number, target in enumerate(targets):
        expected = target.generate(**small.one(), max_new_tokens=12, do_sample=False)
        assert all(text.equal(expected) for text in texts[number])
