"""Logits processors that remember something between their calls, each in another way."""

import functools
import hashlib
import io
import random
import types
from collections import Counter, deque

import numpy as np
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


class Budget(LogitsProcessor):
    """Force one token once, after so many calls: nothing shows before that it counts."""

    def __init__(self, calls=5):
        self.left = calls

    def __call__(self, input_ids, scores):
        self.left -= 1
        return pushed(scores, 8) if self.left == 0 else scores


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


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class InSlots(LogitsProcessor):
    def __init__(self):
        self.slots = Slots()

    def __call__(self, input_ids, scores):
        self.slots.calls += 1
        return pushed(scores, self.slots.calls)


class OfClass(LogitsProcessor):
    """Count in an attribute of the class."""

    calls = 0

    def __init__(self):
        type(self).calls = 0

    def __call__(self, input_ids, scores):
        type(self).calls += 1
        return pushed(scores, self.calls)


class History(LogitsProcessor):
    """Remember the last tokens and all that were seen, and forbid these."""

    def __init__(self):
        self.last, self.seen = deque(maxlen=3), set()

    def __call__(self, input_ids, scores):
        self.last.append(int(input_ids[0, -1]))
        self.seen.add(int(input_ids[0, -1]))
        scores = scores.clone()
        scores[:, list(self.seen)] = -torch.inf
        return pushed(scores, sum(self.last))


class Penalty(LogitsProcessor):
    """Count in a tensor that is changed in place."""

    def __init__(self, size=small.VOCAB):
        self.counts = torch.zeros(size)

    def __call__(self, input_ids, scores):
        self.counts[input_ids[:, -1]] += 1
        return pushed(scores - 3.0 * self.counts[: scores.shape[1]], self.counts.sum())


class Array(LogitsProcessor):
    def __init__(self):
        self.calls = np.zeros(3)

    def __call__(self, input_ids, scores):
        self.calls[1] += 1
        return pushed(scores, self.calls.sum())


class Objects(LogitsProcessor):
    """Count in lists within arrays of objects; one list is an attribute and in a field of a structure, too."""

    def __init__(self):
        self.calls = []
        self.objects = np.array([self.calls, [0], None], dtype=object)
        self.fields = np.array([(self.calls,)], dtype=[("calls", object)])

    def __call__(self, input_ids, scores):
        self.objects[0].append(1)
        self.objects[1][0] += 1
        self.objects[2] = int(input_ids[0, -1])
        self.fields[0]["calls"].append(1)
        return pushed(scores, len(self.calls) + self.objects[1][0] + self.objects[2])


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


class PythonNoise(LogitsProcessor):
    """Draw Python's and NumPy's global random numbers."""

    def __init__(self):
        random.seed(3)
        np.random.seed(4)

    def __call__(self, input_ids, scores):
        return pushed(scores, random.randrange(90) + np.random.randint(90))


class Forking:
    """A matcher whose state nobody can look into or copy but by `fork`, as a grammar library's."""

    def __init__(self, count=0):
        self._count = iter(range(count, 1000))
        self.count = count

    def __deepcopy__(self, memo):
        raise TypeError("not by copy")

    def fork(self):
        return Forking(self.count)

    def advance(self):
        self.count = next(self._count) + 1
        return self.count


class WithFork(LogitsProcessor):
    def __init__(self):
        self.matcher = Forking()

    def __call__(self, input_ids, scores):
        return pushed(scores, self.matcher.advance())


class Iterating(LogitsProcessor):
    """Hold an iterator of C, which can be copied and not looked into."""

    def __init__(self):
        self.numbers = iter(list(range(1, 500)))

    def __call__(self, input_ids, scores):
        return pushed(scores, next(self.numbers))


class Generating(LogitsProcessor):
    """Hold a generator, which cannot be copied."""

    def __init__(self):
        self.numbers = (n for n in range(1, 500))

    def __call__(self, input_ids, scores):
        return pushed(scores, next(self.numbers))


class Hashing(LogitsProcessor):
    """Hold an object of C that cannot be copied deeply."""

    def __init__(self):
        self.digest = hashlib.sha256()

    def __call__(self, input_ids, scores):
        self.digest.update(b"x")
        return pushed(scores, self.digest.digest()[0])


class Recurrent(torch.nn.Module):
    """A caller's module with a buffer that each call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("hidden", torch.ones(1))

    def forward(self):
        self.hidden = self.hidden * 3 % 89
        return self.hidden


class ByModule(LogitsProcessor):
    def __init__(self):
        self.network = Recurrent()

    def __call__(self, input_ids, scores):
        return pushed(scores, self.network())


class LongTable(LogitsProcessor):
    """Grow a list that is too long to be watched."""

    def __init__(self):
        self.table = [0] * 300_000

    def __call__(self, input_ids, scores):
        self.table.append(1)
        return pushed(scores, len(self.table))


class Tally(LogitsProcessor):
    """Count in a `Counter`, whose `update` is not a dict's, and in a list as long as a vocabulary."""

    def __init__(self):
        self.seen, self.counts = Counter(), [0] * 50_000

    def __call__(self, input_ids, scores):
        self.seen[int(input_ids[0, -1])] += 1
        self.counts[int(input_ids[0, -1])] += 1
        return pushed(scores, sum(self.seen.values()) + self.counts[11])


class PastTheVersion(LogitsProcessor):
    """Change a small tensor where Torch does not count it."""

    def __init__(self):
        self.calls = torch.zeros(1)

    def __call__(self, input_ids, scores):
        self.calls.data[0] += 1
        self.calls.numpy()[0] += 1
        return pushed(scores, self.calls)


class Learning(LogitsProcessor):
    """Learn a bias online, with momentum: the state is an optimizer's."""

    def __init__(self):
        self.bias = torch.nn.Parameter(torch.zeros(small.VOCAB, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.bias], 20.0, momentum=0.9)

    def __call__(self, input_ids, scores):
        self.optimizer.zero_grad()
        with torch.enable_grad():
            (self.bias + scores.detach()).softmax(dim=-1)[:, scores[0].argmax()].sum().backward()
        self.optimizer.step()
        return scores + self.bias.detach()


class Shared(LogitsProcessor):
    """Reach one list in two ways, one of which is no Python object; write into a buffer of C."""

    def __init__(self):
        calls = []
        self.space, self.calls, self.log = types.SimpleNamespace(calls=calls), calls, io.StringIO()

    def __call__(self, input_ids, scores):
        self.space.calls.append(1)
        self.log.write("x")
        return pushed(scores, len(self.calls) + len(self.log.getvalue()))


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class ByAttributes(LogitsProcessor):
    """Keep a module within a module, and a dict that knows no missing attribute."""

    def __init__(self):
        self.settings = AttributeDict(calls=0)
        self.network = torch.nn.Sequential(Recurrent())

    def __call__(self, input_ids, scores):
        self.settings["calls"] += 1
        return pushed(scores, self.settings.calls + self.network[0]())


def closure():
    calls = 0

    def processor(input_ids, scores):
        nonlocal calls
        calls += 1
        return pushed(scores, calls)

    return processor


GLOBAL = {"calls": 0}


def in_a_global():
    GLOBAL["calls"] = 0

    def processor(input_ids, scores):
        GLOBAL["calls"] += 1
        return pushed(scores, GLOBAL["calls"])

    return processor


def in_an_attribute():
    def processor(input_ids, scores):
        processor.calls += 1
        return pushed(scores, processor.calls)

    processor.calls = 0
    return processor


def in_a_partial():
    def processor(calls, input_ids, scores):
        calls.append(1)
        return pushed(scores, len(calls))

    return functools.partial(processor, [])


def bound_method():
    return Counting().__call__


def synth_id():
    return SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2, 3, 4, 5], sampling_table_size=64, sampling_table_seed=0, context_history_size=16, device="cpu"
    )  # fmt: skip


def guidance(target):
    return UnbatchedClassifierFreeGuidanceLogitsProcessor(2.5, target, unconditional_ids=torch.tensor([[5, 6, 7]]))


# What is put back exactly for one text; for several texts, one object of these is refused.
FOLLOWED = {
    "count": Counting, "budget": Budget, "grammar": Grammar, "slots": InSlots, "class attribute": OfClass, "history": History,
    "tensor": Penalty, "tensor of a vocabulary": lambda: Penalty(150_000), "array": Array, "array of objects": Objects, "own noise": Noise,
    "global noise": GlobalNoise, "Python's noise": PythonNoise, "fork": WithFork, "iterator": Iterating, "module": ByModule, "tally": Tally, "past the version": PastTheVersion, "learning": Learning, "shared": Shared,
    "attributes": ByAttributes,
    "closure": closure, "global": in_a_global, "attribute of a function": in_an_attribute, "partial": in_a_partial,
    "bound method": bound_method, "SynthID": synth_id,
}  # fmt: skip
REFUSED = {"generator": Generating, "object of C": Hashing, "long table": LongTable}
