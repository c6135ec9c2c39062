"""Logits processors that remember something between their calls, each in another way; most of it can be neither copied nor put back."""

import itertools
import os
import tempfile
import weakref

import torch
from transformers import (
    LogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from support import small


def pushed(scores, state):
    """Favour one token, which depends on `state`, so strongly that the text follows it."""
    favoured = 4 + int(state) * 7 % 90
    return scores + 40.0 * (torch.arange(scores.shape[1]) == favoured)


class Counting(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return pushed(scores, self.calls)


class Grammar(LogitsProcessor):
    """Advance by the last token at each call but the first, as xgrammar's processor does, and refuse one that it forbade."""

    ALLOWED = ((5, 6, 7), (8, 9, 10, 40), (11, 12, 13))

    def __init__(self):
        self.states = None

    def __call__(self, input_ids, scores):
        if self.states is None:
            self.states = [0 for _ in input_ids]
        else:
            for row, text in enumerate(input_ids):
                assert int(text[-1]) in self.ALLOWED[self.states[row]]
                self.states[row] = (self.states[row] + 1) % 3
        out = torch.full_like(scores, -torch.inf)
        for row, state in enumerate(self.states):
            out[row, list(self.ALLOWED[state])] = scores[row, list(self.ALLOWED[state])]
        return out


class Penalty(LogitsProcessor):
    """Count in a tensor that is changed in place."""

    def __init__(self, size=small.VOCAB):
        self.counts = torch.zeros(size)

    def __call__(self, input_ids, scores):
        self.counts[input_ids[:, -1]] += 1
        return pushed(scores - 3.0 * self.counts[: scores.shape[1]], self.counts.sum())


class Noise(LogitsProcessor):
    """Draw from a generator that belongs to it."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, input_ids, scores):
        return scores + 4.0 * torch.randn(scores.shape[1], generator=self.generator, dtype=scores.dtype)


class GlobalNoise(LogitsProcessor):
    """Draw Torch's global random numbers."""

    def __init__(self):
        torch.manual_seed(11)

    def __call__(self, input_ids, scores):
        return scores + 4.0 * torch.randn(scores.shape[1], dtype=scores.dtype)


class Writing(LogitsProcessor):
    """Append to a file, and read how long it is."""

    def __init__(self):
        handle, self.path = tempfile.mkstemp()
        os.close(handle)
        weakref.finalize(self, os.remove, self.path)

    def __call__(self, input_ids, scores):
        with open(self.path, "a+b") as file:
            file.write(b"x")
            return pushed(scores, file.tell())


def over_an_iterator():
    numbers = itertools.count(1)

    def processor(input_ids, scores):
        return pushed(scores, next(numbers))

    return processor


def closure():
    calls = 0

    def processor(input_ids, scores):
        nonlocal calls
        calls += 1
        return pushed(scores, calls)

    return processor


def synth_id():
    return SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2, 3, 4, 5], sampling_table_size=64, sampling_table_seed=0, context_history_size=16, device="cpu"
    )  # fmt: skip


def guidance(target):
    return UnbatchedClassifierFreeGuidanceLogitsProcessor(2.5, target, unconditional_ids=torch.tensor([[5, 6, 7]]))


KINDS = {
    "count": Counting, "grammar": Grammar, "tensor": Penalty, "own noise": Noise, "global noise": GlobalNoise, "file": Writing,
    "iterator": over_an_iterator, "closure": closure, "bound method": lambda: Counting().__call__, "SynthID": synth_id,
}  # fmt: skip
HIDDEN = "file"  # no look at attributes sees it
