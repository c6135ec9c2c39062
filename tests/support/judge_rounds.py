"""AutoJudge's heads over tiny models, the rounds of a call, and what plain forwards say of what a head reads."""

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_lossy_assist import FeatureSpec, HeadConfig, LinearHead, RowStats
from hf_lossy_assist.engine import loop as decoding
from support import slow_loop, small, tiny
from support.heads import balanced, make_head
from support.tiny import NEVER_EMITTED, greedy, prompts, some_eos


RAGGED, EVEN, ONE = (9, 1, 4, 14), (6, 6, 6), (9,)
MODELS, POSITIONS = ("draft", "target", "both"), ("token", "predicting")
SPECS = [FeatureSpec(model, position) for model in MODELS for position in POSITIONS]
BOTH = SPECS[4]  # whose halves are what "draft" and "target" read


def case_id(value: Any) -> str:
    return f"{value.model}-{value.position}" if isinstance(value, FeatureSpec) else str(value)


@cache
def draft_of(name: str, kind: str = "rarely") -> Any:
    return tiny.draft_of(tiny.shared(name), kind)


def constant_head(value: float, model: str = "both", position: str = "token", **config: Any) -> LinearHead:
    """A judge that always says `value`."""
    bias = math.log(value / (1 - value)) if 0 < value < 1 else math.copysign(300, value - 0.5)
    config = {"features": FeatureSpec(model, position)} | config
    return make_head(64 if model == "both" else 32, 0.0, bias, **config)


@torch.no_grad()
def plain(model: Any, ids: torch.Tensor, spec: FeatureSpec, encoded: torch.Tensor | None = None) -> torch.Tensor:
    """The states (B, length, H) of texts (B, length) from position 0 on, by one forward without any cache."""
    inputs = {"input_ids": ids}
    if encoded is not None:
        inputs = {"input_ids": encoded.expand(len(ids), -1), "decoder_input_ids": ids}
    out = model(**inputs, output_hidden_states=True, use_cache=False)
    states = out.hidden_states if encoded is None else out.decoder_hidden_states
    return states[-1 if spec.norm else spec.layer]


def compute_features(spec: FeatureSpec, target: Any, draft: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """Compute the spec's features of every token but the first, (B, length − 1, H), the draft's numbers first."""
    models = {"draft": [draft], "target": [target], "both": [draft, target]}[spec.model]
    states = torch.cat([plain(model, ids, spec, **more) for model in models], dim=-1)
    return states[:, 1:] if spec.position == "token" else states[:, :-1]


@cache
def make_judge(name: str, kind: str, spec: FeatureSpec) -> LinearHead:
    """That of a tiny target and its draft."""
    more = {"encoded": prompts((14,))["input_ids"]} if name == "t5" else {}
    return judge_for(tiny.shared(name), draft_of(name, kind), spec, **more)


@torch.no_grad()
def judge_for(target: Any, draft: Any, spec: FeatureSpec, **more: Any) -> LinearHead:
    """A random head that divides the tokens of random texts."""
    torch.manual_seed(5)
    ids = torch.randint(4, tiny.VOCABULARY, (6, 24))
    states = compute_features(spec, target, draft, ids, **more)
    config = {"polarity": "important", "method": "autojudge", "features": spec, "threshold": 0.5}
    return balanced(LinearHead(HeadConfig(states.shape[-1], **config)), states)


class Recorder(LinearHead):
    """The same head, which keeps what it is shown."""

    def __init__(self, head: LinearHead):
        super().__init__(head.config)
        self.load_state_dict(head.state_dict())
        self.shown: list[torch.Tensor] = []

    def logit(self, features):
        self.shown.append(features.clone())
        return super().logit(features)


def record_rounds(monkeypatch: Any) -> list[Any]:
    """Every round of the calls from here on."""
    verify, out = decoding.verify, []

    def spy(call, selection):
        rows, draft = call.rows, selection.draft
        texts = [rows.ids[b : b + 1, pad : rows.lengths[b]].clone() for b, pad in enumerate(rows.pads)]
        found = SimpleNamespace(
            texts=texts, tokens=draft.tokens.clone(), drafted=draft.lengths.tolist(), sent=selection.sent.tolist(),
            finished=list(rows.finished),
        )  # fmt: skip
        out.append(found)
        found.verified, raw = verify(call, selection)
        return found.verified, raw

    monkeypatch.setattr(decoding, "verify", spy)
    return out


@torch.no_grad()
def check_features(rounds: list[Any], head: Recorder, target: Any, draft: Any, **more: Any) -> int:
    """Compare what `head` was shown with plain forwards; returns how many tokens were compared."""
    with_drafts = [r for r in rounds if r.tokens.shape[1]]
    assert len(with_drafts) == len(head.shown), "the head is asked once a round"
    whole, shown = [], []
    for r, seen in zip(with_drafts, head.shown, strict=True):
        assert seen.shape == (*r.tokens.shape, head.config.hidden_size)
        assert torch.equal(r.verified.head_accepts, LinearHead.logit(head, seen).sigmoid() < head.config.threshold)
        for b, (text, n) in enumerate(zip(r.texts, r.sent, strict=True)):
            if n and not r.finished[b]:
                whole.append(torch.cat([text[0], r.tokens[b, :n]]))
                shown.append(seen[b, :n])
    # All texts in one forward: they start at position 0, and a causal model does not see the padding on the right.
    expected = compute_features(head.config.features, target, draft, pad_sequence(whole, batch_first=True), **more)
    for text, seen, states in zip(whole, shown, expected, strict=True):
        torch.testing.assert_close(seen, states[len(text) - 1 - len(seen) : len(text) - 1], atol=2e-4, rtol=1e-3)
    return sum(len(seen) for seen in shown)


def find_eos(target: Any, lengths: tuple[int, ...]) -> int:
    return some_eos(greedy(target, prompts(lengths), eos_token_id=NEVER_EMITTED), max(lengths))


def foreign() -> dict[str, Any]:
    """A draft that has the same words in reverse order."""
    moved = small.near(small.llama())
    order = torch.cat([torch.arange(4), torch.arange(4, small.VOCAB).flip(0)])
    with torch.no_grad():
        for weight in (moved.get_input_embeddings().weight, moved.get_output_embeddings().weight):
            weight.copy_(weight[order])
    reversed_tokenizer = small.tokenizer(small.words()[::-1])
    return {"assistant_model": moved, "tokenizer": small.tokenizer(), "assistant_tokenizer": reversed_tokenizer}


@torch.no_grad()
def slow(target, draft, head, threshold, prompt, eos, window) -> tuple[list[int], RowStats]:
    """§3.3 in greedy decoding on one prompt (1, length): draft a window, verify, ask the head only where a token would be rejected."""

    def accept(drafted: list[int], choices: list[int], ids: torch.Tensor) -> int:
        states = compute_features(head.config.features, target, draft, ids)[0, ids.shape[1] - len(drafted) - 1 :]
        for i, token in enumerate(drafted):
            if token != choices[i]:
                value = float(head(states[i]))
                assert abs(value - threshold) > 1e-4, "rounding could turn this choice: take another seed"
                if value >= threshold:
                    return i
        return len(drafted)

    return slow_loop.write(target, draft, prompt, eos, window, 16, accept)
