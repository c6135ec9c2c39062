"""Collect training data for SPRINTER's verifier: the draft's hidden state, the token it proposes, and p and q of that token.

Each prompt gives rows of four kinds in equal parts (Zhong et al., §3.2, huggingface.co/papers/2502.04557): the text continues with the original
text, the draft's tokens, the target's, or both interleaved as in inference. At every position of every row the draft proposes one token, which is
judged and, in some kinds, kept.

With `mix` the data is for SpecDec++'s head (Huang et al., §3.2, huggingface.co/papers/2405.19715): rows of one kind, the draft's text with that
share of its tokens replaced by the target's, and the state of each proposed token, which costs another draft step.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.features import FeatureSpec
from ...artifacts.identity import ModelIdentity
from ...batch.logits_processing import refuse_unknown
from ...drafters.hidden_state import refuse_models
from ...drafters.parallel import refuse_features
from ...engine.call import Call
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...round import Selection, Verified
from ...rules import RuleRun, Strict, accept, draw
from ...setting_fields import check_bounds
from ...stats.speculation import RowStats, SpeculationStats
from ...stops.constant import Constant
from ...tasks.prompts import PromptText
from ...training.jobs import SamplingSettings, continue_prompts, describe_run, refuse_blank, refuse_drafter
from ...training.processes import Models, Processes
from ...training.run_folder import RunFolder, Tell, name_units
from ...training.verifier_dataset import KINDS, RECORD, REPLACED, assemble, label_acceptable, make_schema
from ...validation import MOST_FACTOR, MOST_NEW_TOKENS, MOST_ROWS


COLUMNS = ("row", "position", "token", "p", "q", "distance", "features")


@dataclass(frozen=True)
class CollectSettings(SamplingSettings):
    """Settings that determine all values in a collected dataset. A resumed run must have the same."""

    new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "positions of each row"] = 64
    # It affects the interleaved rows, and fitting may use another.
    lam: Annotated[float, (0.0, MOST_FACTOR), "label a token acceptable where q(x) ≤ λ·p(x)"] = 1.2
    batch_size: Annotated[int, (1, MOST_ROWS), "prompts at a time; each has four rows"] = 8
    mix: Annotated[
        float | None, (0.0, 1.0), "share of the draft's tokens that the target's replace, for SpecDec++"
    ] = None
    do_sample: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rows for each prompt."""
        return KINDS if self.mix is None else (REPLACED,)

    @property
    def features(self) -> FeatureSpec:
        """The draft's state that is recorded: SPRINTER's predicts the token, SpecDec++'s encodes it."""
        return FeatureSpec(position="predicting" if self.mix is None else "token")


DEFAULTS = CollectSettings()


def collect(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[PromptText],
    out: str | Path,
    settings: CollectSettings = DEFAULTS,
    *,
    resume: bool = False,
    source: str = "",
    processes: Processes | None = None,
) -> Path:
    """Collect a dataset into the folder `out`.

    Each batch of prompts is a file with random numbers that depend only on `settings.seed` and its index, so a run that was killed and
    resumed gives the same rows. Processes started by `accelerate launch` share the batches.

    Args:
        target, draft: loaded decoder-only models with one tokenizer.
        texts: prompts, with an original continuation if there is one.
        resume: continue an unfinished collection with the same settings.
        source: where the prompts come from, for the data card.
        processes: what shares the batches; None: the processes that `accelerate launch` started.

    Returns: `out`, a folder for `datasets.load_from_disk`, with a data card.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()  # those of `datasets`, one for each file
    refuse_blank([text.prompt for text in texts])
    refuse_drafter("collecting", draft)
    refuse_models("collecting", target, draft)
    refuse_features(settings.features, draft)
    pairs, size = [[text.prompt, text.continuation] for text in texts], ModelIdentity.of(draft).hidden_size
    recorded = asdict(settings) | {"features": asdict(settings.features)}
    facts = describe_run(recorded, {"target": target, "draft": draft}, tokenizer, pairs, source) | {
        "hidden_size": size
    }
    processes = Processes.started() if processes is None else processes

    def make(models: Models, index: int, tell: Tell) -> bytes:
        first = index * settings.batch_size
        chosen = texts[first : first + settings.batch_size]
        rows = run_batch(*models, chosen, settings, first, lambda done: tell(done / settings.new_tokens))
        data = io.BytesIO()
        Dataset.from_dict(rows, features=make_schema(size, settings.kinds)).to_parquet(data)
        return data.getvalue()

    names = name_units(-(-len(texts) // settings.batch_size), "parquet")
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        run.write_units(names, make, (target, draft, tokenizer), settings.seed)
        processes.on_first(lambda: assemble(run, names))
    return run.out


def run_batch(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[PromptText],
    settings: CollectSettings,
    first: int,
    progress: Callable[[int], None] = lambda positions: None,
) -> dict[str, list]:
    """Return all rows of some prompts, as columns. `first`: the index of the first prompt; `progress`: called with the positions done."""
    starts, forced, kinds = list[list[int]](), list[list[int] | None](), settings.kinds
    for text in texts:
        prompt = tokenizer(text.prompt)["input_ids"]
        cut = len(prompt)
        if text.continuation:
            ending = tokenizer(text.continuation, add_special_tokens=False)["input_ids"]
        else:  # no original continuation: the prompt's end serves as one
            cut = max(len(prompt) // 2, len(prompt) - settings.new_tokens, 1)
            ending = prompt[cut:]
        starts += [prompt[:cut] if kind == "original" else prompt for kind in kinds]
        forced += [ending if kind == "original" else None for kind in kinds]
    # `generate` prepares processors and stop conditions as in decoding, so p and q are the distributions used in decoding.
    runner = CollectRunner(draft, settings, forced, progress)
    continue_prompts(target, tokenizer, starts, settings.new_tokens + 1, settings.decoding(), runner)
    records = sorted(runner.records, key=lambda record: record[:2])
    columns = {name: [record[i] for record in records] for i, name in enumerate(COLUMNS)}
    rows = columns.pop("row")
    prompts, row_kinds = [first + row // len(kinds) for row in rows], [row % len(kinds) for row in rows]
    return {"prompt": prompts, "kind": row_kinds} | columns


@dataclass(frozen=True)
class _StrictWithStates(Strict):
    """Strict acceptance that makes drafts record their hidden states (`Draft.hidden`)."""

    spec: FeatureSpec = FeatureSpec()

    @property
    def features(self) -> FeatureSpec:  # type: ignore[override]
        return self.spec


class CollectRunner(Runner):
    """Decodes in rounds of one drafted token, each recorded whatever the rows continue with."""

    shares = False  # the draft may be ahead of the target for several rounds here

    def __init__(
        self,
        draft: PreTrainedModel,
        settings: CollectSettings,
        forced: Sequence[list[int] | None],
        progress: Callable[[int], None] = lambda positions: None,
    ):
        """`forced[b]`: the continuation of row b; None if the models write it. `progress`: called with the positions done."""
        super().__init__(LossyPolicy(_StrictWithStates(settings.features), Constant(1)), draft)
        self.wanted, self.forced, self.progress = settings, forced, progress
        self.records: list[tuple] = []  # see `COLUMNS`

    def decode(self, call: Call) -> SpeculationStats:
        rows, drafter = call.rows, call.drafter
        refuse_unknown(call.processing.processors, "collecting needs functions of the text: leave it out")
        kinds = [self.wanted.kinds[row % len(self.wanted.kinds)] for row in rows.row_id_list]
        positions = 0
        while rows.unfinished:
            draft = drafter.propose(rows, [0 if finished else 1 for finished in rows.finished], call.randomness)
            assert draft.hidden is not None, "the rule asks for them"
            last, counts = rows.uncached_tokens(call.target.lengths)
            raw = call.target.feed(last, counts, keep=1).to(device=rows.ids.device, dtype=torch.float32)
            scores = call.processing(rows.shown_ids, rows.lengths, raw, rows.row_id_list)
            # Nothing reads the position after the drafted token.
            verified = Verified(Selection(draft, draft.lengths), scores.expand(-1, 2, -1))
            following = self._judge(call, verified, draft.hidden[:, 0].float().tolist())
            tokens = [following[kind][b] for b, kind in enumerate(kinds)]
            rows.write(torch.tensor(tokens, device=rows.ids.device)[:, None])
            for b, token in enumerate(tokens):
                if not rows.finished[b]:
                    rows.commit(b, [token], verified.logits[b])
            call.target.rollback(rows.cached_lengths())
            drafter.learn(rows, verified, [0] * len(tokens))
            positions += 1
            self.progress(positions)
        return SpeculationStats([RowStats() for _ in rows.row_id_list], 1, True)

    def _judge(self, call: Call, verified: Verified, features: list[list[float]]) -> dict[str, list[int]]:
        """Record each row's drafted token, and return the tokens that rows of each kind continue with."""
        rows = call.rows
        x, p_x, q_x, distance = compute_acceptance(verified)
        fits = label_acceptable(p_x, q_x, self.wanted.lam)
        verdict = accept(RuleRun(Strict()), verified, call.randomness)
        corrected = torch.where(fits | (verdict.accepted == 1), x, verdict.token)
        drawn = draw(verified.p[:, 0]) if verified.sampling else verified.argmax[:, 0]
        following = {"draft": x.tolist(), "target": drawn.tolist(), "mixed": corrected.tolist()}
        if self.wanted.mix is not None:
            replaced = torch.rand(x.shape, dtype=torch.float32, device=x.device) < self.wanted.mix
            following[REPLACED] = torch.where(replaced, drawn, x).tolist()
        following["original"] = [0] * len(features)
        table = zip(x.tolist(), p_x.tolist(), q_x.tolist(), distance.tolist(), features, strict=True)
        for b, record in enumerate(table):
            if rows.finished[b]:
                continue
            row, position = rows.row_id_list[b], rows.lengths[b] - rows.prompt_lengths[b]
            if record[3] != record[3]:  # NaN: one of the two distributions is invalid
                raise ValueError(
                    f"the target or the draft gave NaN or infinite logits in row {row}, after {position} new tokens"
                )
            self.records.append((row, position, *record))
            ending = self.forced[row]
            if position + 1 == self.wanted.new_tokens or (ending is not None and position >= len(ending)):
                rows.finished[b] = True
            elif ending is not None:
                following["original"][b] = ending[position]
        return following


def compute_acceptance(verified: Verified) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first drafted token x, p(x), q(x) and d_TV(p, q) at its position, each (B,), for decoding's distributions.

    In greedy decoding q(x) = 1, and p(x) is 1 or 0.
    """
    x = verified.tokens[:, 0]
    if verified.q is None:
        same = (x == verified.argmax[:, 0]).float()
        return x, same, torch.ones_like(same), 1.0 - same
    p, q, index = verified.p[:, 0], verified.q[:, 0], x[:, None]  # (B, V)
    return x, p.gather(1, index)[:, 0], q.gather(1, index)[:, 0], (p - q).abs().sum(dim=1) / 2
