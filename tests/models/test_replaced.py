"""Functions replaced while forwards run: put back by the last one, whatever happens in it."""

import threading
import types
from typing import Any

import pytest
import torch

from hf_lossy_assist.models.quirks.patching import ScopedPatch


def counted() -> tuple[ScopedPatch, list[Any]]:
    """A replacement of `forward` that adds 1, and the places that it was made for."""
    made: list[Any] = []

    def ours(place: Any) -> dict[str, Any]:
        made.append(place)
        theirs = place.forward
        return {"forward": lambda x: theirs(x) + 1}

    return ScopedPatch(ours), made


def test_a_method_of_the_class_is_seen_again():
    layer, (replacing, _) = torch.nn.Identity(), counted()
    with replacing.within([layer]):
        assert layer(1) == 2
    assert layer(1) == 1
    assert "forward" not in vars(layer)


def test_what_somebody_put_there_is_put_back():
    layer, (replacing, _) = torch.nn.Identity(), counted()
    theirs = layer.forward = lambda x: 10 * x
    with replacing.within([layer]):
        assert layer(1) == 11
    assert vars(layer)["forward"] is theirs


def test_a_function_of_a_file():
    file, (replacing, _) = types.ModuleType("a_file"), counted()
    theirs = file.forward = lambda x: x
    with replacing.within([file]):
        assert file.forward(1) == 2
    assert file.forward is theirs


def test_forwards_within_each_other_replace_once():
    layer, (replacing, made) = torch.nn.Identity(), counted()
    with replacing.within([layer]):
        with replacing.within([layer]):
            assert layer(1) == 2
        assert layer(1) == 2
    assert layer(1) == 1
    assert made == [layer]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(error: type[BaseException]):
    layers, (replacing, _) = [torch.nn.Identity(), torch.nn.Identity()], counted()
    with pytest.raises(error), replacing.within(layers):
        raise error
    assert not any("forward" in vars(layer) for layer in layers)


def test_an_error_while_replacing_puts_back_the_first_ones():
    first, broken = torch.nn.Identity(), object()
    replacing, _ = counted()
    with pytest.raises(AttributeError), replacing.within([first, broken]):
        pass
    assert "forward" not in vars(first)
    with replacing.within([first]):
        assert first(1) == 2
    assert first(1) == 1


def test_the_last_thread_puts_back():
    layer, (replacing, _) = torch.nn.Identity(), counted()
    begun, over, seen = threading.Event(), threading.Event(), []

    def forward() -> None:
        with replacing.within([layer]):
            begun.set()
            assert over.wait(10)
            seen.append(layer(1))

    thread = threading.Thread(target=forward)
    with replacing.within([layer]):
        thread.start()
        assert begun.wait(10)
    assert layer(1) == 2
    over.set()
    thread.join()
    assert seen == [2]
    assert layer(1) == 1
