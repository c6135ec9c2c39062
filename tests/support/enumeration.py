"""The law of a text under the real engine, exactly: inside a real `generate`, every draft, coin and correction of a round.

One round is enough. Write p(y | t) for the target's law of the text y behind t. If a round from any state commits c with
Σ_c P(c)·p(y | t + c) = p(y | t), then so do all rounds together, whatever a round leaves behind for the next (lengths of caches, what stops
have learned): that is a state the next round starts from, and the equation holds from each. So a round is enumerated from the state of
a fresh call and from states behind some real rounds, and what it commits is completed by the target's own law.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
import torch

from hf_lossy_assist.drafters.networks.base import HiddenStateModel
from hf_lossy_assist.engine.call import Call
from hf_lossy_assist.engine.loop import draft_and_verify, start_round
from hf_lossy_assist.generation.runner import Runner
from hf_lossy_assist.rules import AcceptanceRule, Strict, accept
from hf_lossy_assist.rules.acceptance import next_distribution, prefix
from hf_lossy_assist.stats.speculation import RowStats, SpeculationStats


class Choices:
    """Every way in which a run's choices can fall: `each(run)` runs it again and again, and `of` says how each one falls."""

    def __init__(self) -> None:
        self.script: list[list[int]] = []  # (which of the possible ones, how many there are) of each choice
        self.at, self.weight = 0, 1.0
        self.rule: AcceptanceRule = Strict()  # whose coins matter
        self.processed = lambda verified: verified  # what a caller's processor will make of a round

    def each(self, run: Callable[[], object]) -> Iterator[tuple[float, object]]:
        """The probability of each way, and what `run` gave there."""
        while True:
            self.at, self.weight = 0, 1.0
            found = run()
            yield self.weight, found
            while self.script and self.script[-1][0] + 1 == self.script[-1][1]:
                self.script.pop()
            if not self.script:
                return
            self.script[-1][0] += 1

    def of(self, weights: Sequence[float]) -> int:
        """The index of one of `weights` above 0."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if self.at == len(self.script):
            self.script.append([0, len(possible)])
        chosen = possible[self.script[self.at][0]]
        self.at, self.weight = self.at + 1, self.weight * weights[chosen]
        return chosen

    def begin_round(self, row_ids) -> None:
        """As `Randomness` has it: these choices take its place."""

    def for_filters(self) -> "Choices":
        return self

    def draw(self, probs: torch.Tensor, row_ids, place: int = 0) -> torch.Tensor:
        """One token of each row of `probs` (B, V)."""
        law = probs.double() / probs.double().sum(dim=-1, keepdim=True)
        return torch.tensor([self.of(row) for row in law.tolist()])

    def coins(self, verified) -> torch.Tensor:
        """A coin (B, γ) from each interval that can make a difference to the strict acceptance of a filter, or to decisions made in order."""
        ends = _ends(self.rule, self.processed(verified))
        out = torch.empty(verified.tokens.shape, dtype=torch.float64)
        for b, i in itertools.product(*map(range, out.shape)):
            k = self.of(ends[b, i].diff().tolist())
            out[b, i] = ends[b, i, k : k + 2].mean()
        return out


def _ends(rule: AcceptanceRule, block) -> torch.Tensor:
    """0, the values at which a coin changes what `rule` or one inside it says, and 1, (B, γ, k) float64; a value on the edge is on neither side."""
    at = torch.stack([r.probability(block) for r in (Strict(), *_leaves(rule))], dim=-1).double().nan_to_num(0.0)
    ends = torch.nn.functional.pad(at.clamp(0, 1).sort(dim=-1).values, (1, 0))
    return torch.nn.functional.pad(ends, (0, 1), value=1.0)


def _leaves(rule: AcceptanceRule) -> Iterator[AcceptanceRule]:
    values = [getattr(rule, f.name) for f in fields(rule)]
    inside = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    inside = [v for v in inside if isinstance(v, AcceptanceRule)]
    if not inside:
        yield rule
    for part in inside:
        yield from _leaves(part)


class Remembered:
    """A `CachedModel` whose logits are those of a model's plain forward over each prefix, which runs once: enumeration asks again and again."""

    known: dict[int, tuple[object, dict[tuple[int, ...], torch.Tensor]]] = {}  # by the model's id; the model is kept

    def __init__(self, model, prompts: Sequence[torch.Tensor]):
        """As behind the prefill: it holds each prompt (n,) but the last token."""
        self.model, self.device = model, torch.device("cpu")
        self.rope = None
        self.texts = [prompt[:-1].tolist() for prompt in prompts]
        self.lengths = [len(text) for text in self.texts]

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Return those of the token behind `text`, (V,)."""
        known = self.known.setdefault(id(self.model), (self.model, {}))[1]
        if tuple(text) not in known:
            with torch.no_grad():
                out = self.model(torch.tensor([list(text)])).logits[0]
            known |= {tuple(text[: i + 1]): row for i, row in enumerate(out)}
        return known[tuple(text)]

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        width = tokens.shape[1]
        first = width - (width if keep is None else keep)
        out = []
        for text, more, count in zip(self.texts, tokens.tolist(), counts, strict=True):
            out += [self.logits(text + more[: i + 1]) for i in range(first, width)]  # padding has logits as well
            text += more[:count]
        self.lengths = [len(text) for text in self.texts]
        return torch.stack(out).view(len(self.texts), width - first, -1) if out else torch.empty(0)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.texts = [text[:n] for text, n in zip(self.texts, lengths, strict=True)]
        self.lengths = list(lengths)


class Texts:
    """The texts of `length` tokens behind one prompt, each up to its end token, and the target's law of them."""

    def __init__(self, model, prompt: torch.Tensor, size: int, length: int, end: int | None, processor=None):
        self.size, self.length, self.end = size, length, end
        self.index: dict[tuple[int, ...], int] = {}
        self._rest: dict[tuple[int, ...], np.ndarray] = {}
        level, self.p = [()], {}
        for _ in range(length):
            with torch.no_grad():
                ids = torch.stack([torch.cat([prompt, torch.tensor(t, dtype=torch.long)]) for t in level])
                logits = model(ids).logits[:, -1]
                laws = (processor(ids, logits) if processor else logits).double().softmax(dim=-1).numpy()
            self.p |= dict(zip(level, laws, strict=True))
            level = [(*t, x) for t in level for x in range(size)]
            over = [t for t in level if len(t) == length or t[-1] == end]
            self.index |= {t: len(self.index) + k for k, t in enumerate(over)}
            level = [t for t in level if t not in self.index]

    def behind(self, text: tuple[int, ...]) -> np.ndarray:
        """The target's law of the whole text, (texts,), where it begins with `text`."""
        if self.end in text:
            text = text[: text.index(self.end) + 1]
        text = text[: self.length]
        if text not in self._rest:
            if text in self.index:
                out = np.zeros(len(self.index))
                out[self.index[text]] = 1.0
            else:
                out = sum(chance * self.behind((*text, x)) for x, chance in enumerate(self.p[text]))
            self._rest[text] = out
        return self._rest[text]


class Enumerating(Runner):
    """Instead of writing, finds the law of the texts of all rows together: `law` (texts, …) one axis a row, and what it should be."""

    def __init__(self, policy, draft, length: int, rounds: int = 0, real: bool = False, processor=None, **others):
        """`processor`: the call's, a function of texts and scores. `rounds`: real ones that are drawn and shown to the stop and the rule before; they write nothing. `others`: the runner's.

        `real`: on the call's own caches, rolled back to the round's beginning for each way in which it can go.
        """
        super().__init__(policy, draft, **others)
        self.length, self.rounds, self.real = length, rounds, real
        self.processor = processor
        self.widths: set[int] = set()
        self.memory = None  # of a drafter on the target's states, before its first draft
        self.dropped = self.verified = 0.0  # tokens of a round, on average

    def decode(self, call: Call) -> SpeculationStats:
        rows, (end,) = call.rows, call.rows.eos or {None}
        call.drafter.prompts_are_read(rows)  # as long as the target's states that it may read are the prompts'
        if call.stop.settings.features is None and not self.real:  # a head reads what real forwards leave
            call.target = Remembered(call.target.model, rows.token_ids())
            if hasattr(call.drafter, "model"):
                call.drafter.model = Remembered(call.drafter.model.model, rows.token_ids())
            call.companion = call.companion and Remembered(call.companion.model, rows.token_ids())
        size = call.target.model.config.vocab_size
        prompts = self.prompts = rows.token_ids()
        texts = [Texts(call.target.model, prompt, size, self.length, end, self.processor) for prompt in prompts]
        for _ in range(self.rounds):
            verified = self._open(call)
            verdict = accept(call.rule, verified, call.randomness)
            call.stop.observe(rows.row_id_list, verified.sent.tolist(), verdict.accepted.tolist())
        self.law = sum(weight * self._joint(call, block, texts) for weight, block in self._blocks(call))
        expected = [t.behind(()) for t in texts]
        self.expected = expected[0] if len(texts) == 1 else _product(expected)
        return SpeculationStats([RowStats() for _ in rows.row_id_list], 1, True)

    def _open(self, call: Call):
        drafter = getattr(call.drafter, "then", call.drafter)  # of a composite, the part with a model
        for model in filter(None, (call.target, getattr(drafter, "model", None), call.companion)):
            if isinstance(model, HiddenStateModel):
                drafter.read(call.rows)
                self.memory = model.memory if self.memory is None else self.memory
                model.memory, model.number = self.memory, 0
            else:
                model.rollback([min(pair) for pair in zip(model.lengths, call.rows.cached_lengths(), strict=True)])
        return draft_and_verify(call, start_round(call))[0]

    def _blocks(self, call: Call):
        """Every block that can come to its verdict, with its probability."""
        call.randomness = choices = Choices()
        if self.processor is not None:
            choices.rule, choices.processed = call.rule.rule, self._process
        for weight, block in choices.each(lambda: self._open(call)):
            self.widths.add(block.tokens.shape[1])
            self.verified += weight * float(block.sent.sum())
            self.dropped += weight * float((block.drafted - block.sent).sum())
            yield weight, block

    def _process(self, verified):
        """The logits that the processor makes of all positions of a round of one row."""
        text, logits = torch.cat([self.prompts[0], verified.tokens[0]]), verified.logits.clone()
        for i in range(logits.shape[1]):
            logits[:, i] = self.processor(text[None, : len(self.prompts[0]) + i], logits[:, i])
        return replace(verified, logits=logits)

    def _joint(self, call: Call, block, texts: list[Texts]) -> np.ndarray:
        """The law of all rows' texts where this block is to be decided: given the block, rows are decided one by one."""
        batch, gamma = block.tokens.shape
        by_row = [np.zeros(len(t.index)) for t in texts]
        if block.decisions is not None:
            coins, accepted = block.decisions.coins, block.decisions.accepted.sum(dim=1)
            law = next_distribution(call.rule, block, coins, accepted).double()
            for b, n in enumerate(accepted.tolist()):
                start = tuple(block.tokens[b, :n].tolist())
                share = law[b] / law[b].sum()
                by_row[b] = sum(q * texts[b].behind((*start, x)) for x, q in enumerate(share.tolist()) if q > 0)
            return by_row[0] if batch == 1 else _product(by_row)
        ends, laws = _ends(call.rule.rule, block), {}
        for intervals in itertools.product(range(ends.shape[-1] - 1), repeat=gamma):
            at = torch.tensor(intervals).view(1, gamma, 1).expand(batch, gamma, 1)
            low, high = ends.gather(2, at)[..., 0], ends.gather(2, at + 1)[..., 0]
            shares = (high - low).prod(dim=1).tolist()  # of each row
            if not any(shares):
                continue
            coins = (low + high) / 2
            accepted = prefix(call.rule, block, coins)[0].sum(dim=1)
            key = tuple(accepted.tolist())
            if key not in laws:
                law = next_distribution(call.rule, block, coins, accepted).double()
                laws[key] = (law / law.sum(dim=1, keepdim=True)).numpy()
            for b, (share, n) in enumerate(zip(shares, key, strict=True)):
                if share > 0:
                    start = tuple(block.tokens[b, :n].tolist())
                    by_row[b] += share * sum(
                        q * texts[b].behind((*start, x)) for x, q in enumerate(laws[key][b]) if q > 0
                    )
        return by_row[0] if batch == 1 else _product(by_row)


def _product(laws: list[np.ndarray]) -> np.ndarray:
    out = laws[0]
    for law in laws[1:]:
        out = np.multiply.outer(out, law)
    return out


def marginal(law: np.ndarray, row: int) -> np.ndarray:
    """The law of one row's texts, whatever the others are."""
    return law.sum(axis=tuple(axis for axis in range(law.ndim) if axis != row))


def off(
    target, draft, policy, prompts, length: int = 3, rounds: int = 0, end: int | None = 1, room: int = 9, real: bool = False,
    processor=None, others: dict | None = None, **settings,
) -> tuple[float, Enumerating]:  # fmt: skip
    """How far the law of all rows' texts together is from the target's at most, under `policy`, and the runner that found it.

    `prompts`: `input_ids` and `attention_mask`; `length` of the texts; `room`: how many tokens the call may write; `real` as in `Enumerating`.
    `processor`: the caller's, for one row. `others`: more arguments of the runner; `settings`: of the call.
    """
    runner = Enumerating(policy, draft, length, rounds, real, processor, **others or {})
    settings |= {} if processor is None else {"logits_processor": [processor]}
    type(target).generate(
        target, **prompts, do_sample=True, top_k=0, max_new_tokens=room, eos_token_id=end, pad_token_id=0, custom_generate=runner, **settings
    )  # fmt: skip
    assert abs(runner.law.sum() - 1) < 1e-6
    return float(np.abs(runner.law - runner.expected).max()), runner
