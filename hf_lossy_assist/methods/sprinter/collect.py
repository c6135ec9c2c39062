"""Collect what SPRINTER's verifier is trained on: the draft's hidden state, the token it proposes, and p and q of that token.

Each prompt gives rows of four kinds in equal parts (Zhong et al., §3.2, huggingface.co/papers/2502.04557): the text goes on
from the original text, with the draft's tokens, with the target's, or with both interleaved as at inference. At every position of every
row the draft proposes one token, which is judged and, in some kinds, kept.

With `mix` it is what SpecDec++'s head is trained on (Huang et al., §3.2, huggingface.co/papers/2405.19715): rows of one kind, the draft's text with
that share of its tokens replaced by the target's, and of each proposed token its own state, which costs one draft step more.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import tqdm
from transformers import GenerationConfig

from ...artifacts.features import FeatureSpec
from ...artifacts.sampling_settings import decoding_of
from ...drafters.model import AssistantRun
from ...engine.call import Call
from ...generation.runner import Runner
from ...models.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ...models.rope import renew
from ...models.trials import why_not_rows
from ...policy.policy import LossyPolicy
from ...round import Selection, Verified
from ...rules import RuleRun, Strict, accept, draw
from ...stats.report import RowStats, SpeculationStats
from ...stops.basic import Constant
from ...tasks.prompts import Text
from ...training.dataset import KINDS, RECORD, REPLACED, acceptable, assemble, schema
from ...training.jobs import folders, key_of, prepare, read_part, write_part
from ...validation import (
    MOST_FACTOR,
    MOST_NEW_TOKENS,
    MOST_ROWS,
    check_flag,
    check_int,
    check_number,
    check_positive,
    shown,
)


@dataclass(frozen=True)
class CollectSettings:
    """What decides every number in the dataset. A resumed run must have the same."""

    new_tokens: int = 64  # positions of each row
    lam: float = 1.2  # λ: acceptable is q(x) ≤ λ·p(x); steers the interleaved rows, and fitting may use another
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    batch_size: int = 8  # prompts at a time; each is four rows
    seed: int = 0
    features: FeatureSpec = FeatureSpec()
    mix: float | None = (
        None  # share of the draft's tokens that are replaced, for SpecDec++; None: SPRINTER's four kinds of rows
    )

    def __post_init__(self) -> None:
        check_int("new_tokens", self.new_tokens, 1, MOST_NEW_TOKENS)
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        check_int("top_k", self.top_k, 0)
        check_int("seed", self.seed, 0)
        check_flag("do_sample", self.do_sample)
        check_number("lambda", self.lam, 0.0, MOST_FACTOR)
        check_positive("top_p", self.top_p, 1.0, hint=": pass do_sample=False (--greedy) for greedy decoding")
        check_positive("temperature", self.temperature, hint=": pass do_sample=False (--greedy) for greedy decoding")
        if self.mix is not None:
            check_number("mix", self.mix, 0.0, 1.0)
        if not isinstance(self.features, FeatureSpec):
            raise TypeError(f"features: expected a FeatureSpec, got {shown(self.features)}")
        method, position = ("SPRINTER", "predicting") if self.mix is None else ("SpecDec++", "token")
        if (self.features.model, self.features.position) != ("draft", position):
            wanted = "that predicts a token" if self.mix is None else "that encodes a token"
            raise ValueError(f"a {method} head reads the draft's state {wanted}, not the {self.features}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the rows of a prompt go on with."""
        return KINDS if self.mix is None else (REPLACED,)

    def decoding(self) -> dict[str, Any]:
        """The settings of the distributions p and q, as `generate` names them."""
        return decoding_of(asdict(self))


def collect(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[Text], out: str | Path,
    settings: CollectSettings = CollectSettings(), *, resume: bool = False, source: str = "",
) -> Path:  # fmt: skip
    """Collect a dataset into the folder `out`.

    Each batch of prompts is a file of its own, written under a temporary name and renamed, with random numbers that depend on
    `settings.seed` and its place alone; so a run that was killed at any moment and resumed gives the same rows as one that
    was not. Under `accelerate launch` the processes share the batches among them.

    Args:
        target, draft: loaded decoder-only models with one tokenizer.
        texts: prompts, with an original continuation where there is one.
        resume: go on with an unfinished collection of the same settings.
        source: where the prompts come from, for the data card.

    Returns: `out`, a folder that `datasets.load_from_disk` reads, with a data card.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run.
    """
    from accelerate import PartialState
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()  # of `datasets`, one for each file
    if not texts:
        raise ValueError("nothing to collect from: the list of texts is empty")
    if not all(text.prompt.strip() for text in texts):
        raise ValueError("a prompt is blank: every prompt needs some text")
    out, part = folders(out)
    for name, model in (("target", target), ("draft", draft)):
        reason = why_not_rows(model)
        if reason is not None:
            raise ValueError(f"collecting needs models that run in batches; the {name} does not: {reason}")
    facts = _facts(target, draft, tokenizer, texts, settings, source)
    state = PartialState()  # one process, unless `accelerate launch` started several
    if state.is_main_process:
        prepare(out, part, facts, resume, RECORD)
    state.wait_for_everyone()
    if not (part / RECORD).is_file():  # all was there already
        return out

    key, count = key_of(part / RECORD), -(-len(texts) // settings.batch_size)
    batches = range(state.process_index, count, state.num_processes)
    for number in tqdm(batches, desc="collecting", unit="batch", disable=not state.is_main_process):
        shard, first = part / f"{number:05d}.parquet", number * settings.batch_size
        if read_part(shard, key) is not None:
            continue
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(settings.seed * 1_000_003 + number)
            rows = run_batch(target, draft, tokenizer, texts[first : first + settings.batch_size], settings, first)
        unfinished = part / f"{number:05d}.part"
        Dataset.from_dict(rows, features=schema(facts["hidden_size"], settings.kinds)).to_parquet(str(unfinished))
        write_part(shard, unfinished.read_bytes(), key)
        unfinished.unlink()

    state.wait_for_everyone()
    if state.is_main_process:
        assemble(out, part, facts, count)
    state.wait_for_everyone()
    return out


def run_batch(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[Text], settings: CollectSettings, first: int
) -> dict[str, list]:
    """All rows of some prompts, as columns. `first`: the number of the first prompt."""
    starts, forced = [], []
    for text in texts:
        prompt = tokenizer(text.prompt)["input_ids"]
        cut, ending = len(prompt), []
        if text.continuation:
            ending = tokenizer(text.continuation, add_special_tokens=False)["input_ids"]
        else:  # no original continuation: the prompt's own end serves as one
            cut = max(len(prompt) // 2, len(prompt) - settings.new_tokens, 1)
            ending = prompt[cut:]
        starts += [prompt[:cut] if kind == "original" else prompt for kind in settings.kinds]
        forced += [ending if kind == "original" else None for kind in settings.kinds]
    width = max(map(len, starts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (width - len(s)) + s for s in starts], device=target.device)
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in starts], device=target.device)
    # `generate` prepares processors and stop conditions as it will when decoding, so p and q are decoding's own distributions.
    config = GenerationConfig(
        max_new_tokens=settings.new_tokens + 1, pad_token_id=pad, eos_token_id=target.generation_config.eos_token_id,
        **settings.decoding(),
    )  # fmt: skip
    walk = _Walk(draft, settings, forced)
    type(target).generate(target, ids, attention_mask=mask, generation_config=config, custom_generate=walk)

    order = sorted(range(len(walk.records)), key=lambda i: walk.records[i][:2])
    records = [walk.records[i] for i in order]
    columns = dict(
        zip(("row", "position", "token", "p", "q", "distance"), map(list, zip(*records, strict=True)), strict=True)
    )
    rows = columns.pop("row")
    return {
        "prompt": [first + row // len(settings.kinds) for row in rows],
        "kind": [row % len(settings.kinds) for row in rows],
        **columns,
        "features": [walk.features[i] for i in order],
    }


@dataclass(frozen=True)
class _OneToken(Constant):
    """Draft one token a round, and have the draft's hidden state kept."""

    gamma: int = 1
    spec: FeatureSpec = FeatureSpec()

    @property
    def features(self) -> FeatureSpec:  # type: ignore[override]
        return self.spec


class _Walk(Runner):
    """Decoding's own rounds with one drafted token each, of which something else than the rule's verdict is kept."""

    def __init__(self, draft: Any, settings: CollectSettings, forced: Sequence[list[int] | None]):
        """`forced[b]`: the tokens that row b goes on with; None where the models write it."""
        super().__init__(LossyPolicy(stop=_OneToken(spec=settings.features)), draft)
        self.wanted, self.forced = settings, forced
        self.records: list[tuple] = []  # (row, position, token, p, q, distance)
        self.features: list[list[float]] = []  # of each record, (H,)

    def decode(self, call: Call) -> SpeculationStats:
        rows, drafter = call.rows, call.drafter
        assert isinstance(drafter, AssistantRun) and drafter.tap is not None
        kinds = [self.wanted.kinds[row % len(self.wanted.kinds)] for row in rows.index]
        while rows.unfinished:
            renew(call.renewing, rows, call.clock)
            draft = drafter.propose(rows, [0 if finished else 1 for finished in rows.finished], call.randomness)
            if self.wanted.features.position == "token":  # known one forward later
                drafter.model.feed(draft.tokens, [1] * len(kinds), keep=1)
            features = drafter.tap.at(-1).float()  # (B, H): every row is fed as many tokens as the others
            last, counts = rows.after(call.target.lengths)
            raw = call.target.feed(last, counts, keep=1).to(device=rows.ids.device, dtype=torch.float32)
            scores = call.processing(rows.ids, rows.lengths, raw, rows.index)
            # The place behind the drafted token is never looked at.
            verified = Verified(Selection(draft, draft.lengths), scores.expand(-1, 2, -1))
            x, p_x, q_x, distance = judged(verified)
            fits = acceptable(p_x, q_x, self.wanted.lam)
            verdict = accept(RuleRun(Strict()), verified, call.randomness)
            corrected = torch.where(fits | (verdict.accepted == 1), x, verdict.token)
            own = draw(verified.p[:, 0]) if verified.sampling else verified.argmax[:, 0]
            following = {"draft": x.tolist(), "target": own.tolist(), "mixed": corrected.tolist()}
            if self.wanted.mix is not None:
                replaced = torch.rand(x.shape, dtype=torch.float32, device=x.device) < self.wanted.mix
                following[REPLACED] = torch.where(replaced, own, x).tolist()

            table = zip(x.tolist(), p_x.tolist(), q_x.tolist(), distance.tolist(), strict=True)
            following["original"] = [0] * len(kinds)
            for b, record in enumerate(table):
                if rows.finished[b]:
                    continue
                position = rows.lengths[b] - rows.width
                if record[-1] != record[-1]:  # NaN: the distance of two distributions of which one is none
                    raise ValueError(
                        f"the target or the draft gave NaN or infinite logits in row {rows.index[b]}, after {position} new tokens"
                    )
                self.records.append((rows.index[b], position, *record))
                self.features.append(features[b].tolist())
                ending = self.forced[rows.index[b]]
                over = position + 1 == self.wanted.new_tokens or (ending is not None and position >= len(ending))
                if over:
                    rows.finished[b] = True
                elif ending is not None:
                    following["original"][b] = ending[position]
            tokens = [following[kind][b] for b, kind in enumerate(kinds)]
            rows.write(torch.tensor(tokens, device=rows.ids.device)[:, None])
            for b, token in enumerate(tokens):
                if not rows.finished[b]:
                    rows.commit(b, [token], verified.logits[b])
            call.target.rollback(rows.held())
            drafter.learn(rows, verified, [0] * len(tokens))
        return SpeculationStats([RowStats() for _ in rows.index], 1, True)


def judged(verified: Verified) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first drafted token x, p(x), q(x) and d_TV(p, q) at its position, each (B,), by the distributions that decoding uses.

    Greedy distributions are certain: q(x) = 1, and p(x) is 1 or 0.
    """
    x = verified.tokens[:, 0]
    if verified.q is None:
        same = (x == verified.argmax[:, 0]).float()
        return x, same, torch.ones_like(same), 1.0 - same
    p, q = verified.p[:, 0], verified.q[:, 0]  # (B, V)
    of_x = x[:, None]
    return x, p.gather(1, of_x)[:, 0], q.gather(1, of_x)[:, 0], (p - q).abs().sum(dim=1) / 2


def _facts(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[Text], settings: CollectSettings, source: str
) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([[t.prompt, t.continuation] for t in texts]).encode()).hexdigest()
    identity = ModelIdentity.of(draft)
    return {
        "settings": asdict(settings),
        "target": ModelIdentity.of(target).to_dict(),
        "draft": identity.to_dict(),
        "target_weights": weights_hash(target),
        "draft_weights": weights_hash(draft),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtypes": [str(target.dtype), str(draft.dtype)],
        "hidden_size": identity.hidden_size,
        "prompts": len(texts),
        "prompts_sha256": digest,
        "source": source,
        "versions": versions(),
    }
