"""Storage that outlives a call is lent to one call at a time, is zeros when it is lent, and goes with its model."""

import gc
from threading import Barrier, Thread
from weakref import ref

import torch

from hf_lossy_assist.models import storage
from hf_lossy_assist.models.static_cache import StaticRowCache


LAYERS = 2


def model():
    return torch.nn.Linear(3, 3)


def taken(loan, rows=2, capacity=8):
    like = torch.ones(rows, 2, 5, 4)
    return [loan.take((i, name), like, capacity) for i in range(LAYERS) for name in ("keys", "values")]


def places(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_the_next_call_has_the_same_storage_with_zeros():
    its = model()
    loan = storage.Loan(its, LAYERS)
    first = taken(loan)
    assert len(set(places(first))) == 2 * LAYERS and first[0].shape == (2, 2, 8, 4)
    for tensor in first:
        tensor.fill_(float("nan"))
    loan.give_back()
    again = taken(storage.Loan(its, LAYERS))
    assert places(again) == places(first) and not any(tensor.any() for tensor in again)


def test_target_and_draft_keep_their_places_where_they_are_one_model():
    its = model()
    found = []
    for _ in range(3):
        loans = [storage.Loan(its, LAYERS) for _ in range(2)]
        found.append([places(taken(loan)) for loan in loans])
        for loan in loans:
            loan.give_back()
    assert found[0] == found[1] == found[2] and not set(found[0][0]) & set(found[0][1])


def test_calls_at_once_share_nothing():
    its, together, found = model(), Barrier(8), []

    def call():
        for _ in range(20):
            loan = storage.Loan(its, LAYERS)
            mine = taken(loan)
            together.wait()
            found.append(places(mine))
            together.wait()
            loan.give_back()
            together.wait()

    threads = [Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start in range(0, len(found), 8):
        assert len({place for own in found[start : start + 8] for place in own}) == 8 * 2 * LAYERS
    assert len({place for own in found for place in own}) == 8 * 2 * LAYERS  # and nothing is made twice


def test_what_is_given_back_twice_is_kept_once():
    its = model()
    loan = storage.Loan(its, LAYERS)
    taken(loan)
    loan.give_back()
    loan.give_back()
    assert len(storage.pool_of(its).free) == 1


def test_other_shapes_and_modes_are_other_storage():
    its = model()
    loan = storage.Loan(its, LAYERS)
    found = [*taken(loan), *taken(loan, rows=1), *taken(loan, capacity=16)]
    with torch.inference_mode():
        found += taken(loan)
    assert len(set(places(found))) == len(found) and found[-1].is_inference() and not found[0].is_inference()


def test_what_a_model_keeps_is_bounded(monkeypatch):
    monkeypatch.setattr(storage, "LEAST", 3 * 2 * LAYERS * 2 * 2 * 8 * 4 * 4)  # three shelves of the usual shape
    its = model()
    for capacity in (8, 8, 4, 16, 2):
        loan = storage.Loan(its, LAYERS)
        taken(loan, capacity=capacity)
        loan.give_back()
    pool = storage.pool_of(its)
    assert [shelf.shape.capacity for shelf in pool.free] == [4, 16, 2]  # the one that was not used for longest is gone
    assert sum(shelf.bytes for shelf in pool.free) <= pool.limit
    assert taken(storage.Loan(its, LAYERS), capacity=32) == [None] * 2 * LAYERS  # more than is ever kept


def test_it_goes_with_its_model():
    its = model()
    loan = storage.Loan(its, LAYERS)
    kept = ref(taken(loan)[0])
    loan.give_back()
    del loan
    assert kept() is not None
    del its
    gc.collect()
    assert kept() is None


def test_a_cache_that_grows_and_loses_rows_is_written_in_what_is_kept():
    its, found = model(), []
    texts = torch.randn(3, 2, 300, 4)
    for _ in range(2):
        cache = StaticRowCache(LAYERS, limit=400)
        cache.loan = storage.Loan(its, LAYERS)
        for start, end in ((0, 200), (200, 300)):
            cache.plan([start] * len(texts), end - start, texts.device)
            for layer in cache.layers:
                layer.update(texts[:, :, start:end], 2 * texts[:, :, start:end])
        cache.select(torch.tensor([2, 0]))
        assert all(layer.keys.shape[2] == 512 for layer in cache.layers)
        for layer in cache.layers:
            assert torch.equal(layer.keys[:, :, :300], texts[[2, 0]]) and not layer.keys[:, :, 300:].any()
            assert torch.equal(layer.values, 2 * layer.keys)
        found.append(places([states for layer in cache.layers for states in (layer.keys, layer.values)]))
        cache.loan.give_back()
    assert found[0] == found[1]
    shapes = {(shelf.shape.rows, shelf.shape.capacity) for shelf in storage.pool_of(its).free}
    assert shapes == {(3, 256), (3, 512), (2, 512)}
