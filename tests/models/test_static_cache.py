"""Storage that outlives a call is lent to one call at a time, is zeros when it is lent, and goes with its model."""

import gc
from threading import Barrier, Thread
from weakref import ref

import torch

from hf_lossy_assist.models.compiled import static_cache
from hf_lossy_assist.models.compiled.static_cache import BufferLease, StaticRowCache, pool_of


LAYERS = 2


def model():
    return torch.nn.Linear(3, 3)


def taken(lease, rows=2, capacity=8):
    like = torch.ones(rows, 2, 5, 4)
    return [lease.take((i, name), like, capacity) for i in range(LAYERS) for name in ("keys", "values")]


def places(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_the_next_call_has_the_same_storage_with_zeros_until_the_model_goes():
    owner = model()
    lease = BufferLease(owner, LAYERS)
    first = taken(lease)
    assert len(set(places(first))) == 2 * LAYERS and first[0].shape == (2, 2, 8, 4)
    for tensor in first:
        tensor.fill_(float("nan"))
    lease.give_back()
    lease.give_back()
    assert len(pool_of(owner).free) == 1
    again = taken(BufferLease(owner, LAYERS))
    assert places(again) == places(first) and not any(tensor.any() for tensor in again)
    tensor = ref(first[0])
    del first, again, lease, owner
    gc.collect()
    assert tensor() is None


def test_target_and_draft_keep_their_places_where_they_are_one_model():
    owner, found = model(), []
    for _ in range(3):
        leases = [BufferLease(owner, LAYERS) for _ in range(2)]
        found.append([places(taken(lease)) for lease in leases])
        for lease in leases:
            lease.give_back()
    assert found[0] == found[1] == found[2] and not set(found[0][0]) & set(found[0][1])


def test_calls_at_once_share_nothing():
    owner, together, found = model(), Barrier(8), []

    def call():
        for _ in range(20):
            lease = BufferLease(owner, LAYERS)
            tensors = taken(lease)
            together.wait()
            found.append(places(tensors))
            together.wait()
            lease.give_back()
            together.wait()

    threads = [Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start in range(0, len(found), 8):
        assert len({place for call in found[start : start + 8] for place in call}) == 8 * 2 * LAYERS
    assert len({place for call in found for place in call}) == 8 * 2 * LAYERS  # and nothing is made twice


def test_other_shapes_and_modes_are_other_storage():
    lease = BufferLease(model(), LAYERS)
    found = [*taken(lease), *taken(lease, rows=1), *taken(lease, capacity=16)]
    with torch.inference_mode():
        found += taken(lease)
    assert len(set(places(found))) == len(found) and found[-1].is_inference() and not found[0].is_inference()


def test_what_a_model_keeps_is_bounded(monkeypatch):
    monkeypatch.setattr(static_cache, "LEAST_BYTES", 3 * 2 * LAYERS * 2 * 2 * 8 * 4 * 4)  # three of the usual shape
    owner = model()
    for capacity in (8, 8, 4, 16, 2):
        lease = BufferLease(owner, LAYERS)
        taken(lease, capacity=capacity)
        lease.give_back()
    pool = pool_of(owner)
    assert [shape.capacity for shape, _ in pool.free] == [4, 16, 2]  # the one that was not used for longest is gone
    assert pool.bytes <= pool.limit
    assert taken(BufferLease(owner, LAYERS), capacity=32) == [None] * 2 * LAYERS  # more than is ever kept


def test_a_cache_that_grows_and_loses_rows_reuses_its_storage():
    owner, found = model(), []
    texts = torch.randn(3, 2, 300, 4)
    for _ in range(2):
        cache = StaticRowCache(LAYERS, limit=400)
        cache.lease, cache.model = BufferLease(owner, LAYERS), owner
        for start, end in ((0, 200), (200, 300)):
            cache.plan([start] * len(texts), end - start, texts.device)
            for layer in cache.layers:
                layer.update(texts[:, :, start:end], 2 * texts[:, :, start:end])
        cache.select(torch.tensor([2, 0]))
        for layer in cache.layers:
            assert layer.keys.shape[2] == 512
            assert torch.equal(layer.keys[:, :, :300], texts[[2, 0]]) and not layer.keys[:, :, 300:].any()
            assert torch.equal(layer.values, 2 * layer.keys)
        found.append(places([states for layer in cache.layers for states in (layer.keys, layer.values)]))
        cache.lease.give_back()
    assert found[0] == found[1]
    shapes = {(shape.rows, shape.capacity) for shape, _ in pool_of(owner).free}
    assert shapes == {(3, 256), (3, 512), (2, 512)}
