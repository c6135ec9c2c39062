"""Statistics of a generate call's speculation, per row and in total, with vLLM's names where vLLM reports the same."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from io import StringIO
from typing import Any, NamedTuple

from rich.table import Table

from ..terminal import PlainConsole, console
from .clock import Clock, TargetAlone, estimate_target_alone


SOURCES = ("draft", "draft-lossy", "correction", "bonus")  # values of `token_sources`


class Record(NamedTuple):
    """One row's part in one round: `accepted` by the rule, `taken` tokens committed (accepted + 1, or fewer if the row ended).

    `lossy[i]` is 1 if strict acceptance would have rejected accepted token i, `unchecked[i]` if it was accepted unchecked; `overshoot[i]` is
    q/p of a lossy token.
    """

    drafted: int
    sent: int
    accepted: int
    lossy: Sequence[int]
    taken: int
    unchecked: Sequence[int] = ()
    overshoot: Sequence[float] = ()


@dataclass
class RowStats:
    """The statistics of one row. Counts are of tokens, except `num_spec_steps` (rounds in which the row took part)."""

    num_new_tokens: int = 0
    num_spec_steps: int = 0
    num_plain_steps: int = 0  # of these, rounds without a draft
    num_draft_tokens: int = 0  # sent to the target
    num_dropped_tokens: int = 0  # drafted, but dropped by the verify filter
    num_accepted_draft_tokens: int = 0  # committed; without accepted tokens after the row's end
    num_lossy_accepts: int = 0  # of these, tokens that strict acceptance would have rejected
    num_unchecked_tokens: int = 0  # of the accepted, tokens that were not compared with the target
    overshoot_sum: float = 0.0  # of q/p of lossy tokens
    overshoot_max: float = 0.0
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)  # (tokens sent, tokens accepted) → rounds
    lossy_by_position: Counter[int] = field(default_factory=Counter)  # position in the draft (from 0) → lossy accepts
    token_sources: list[int] = field(default_factory=list)  # index into SOURCES, one for each new token

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens written by the target's calls that verified a draft, a call; 0 if none did. The others wrote one token each."""
        idle = sum(count for (sent, _), count in self.steps.items() if sent == 0)
        calls = self.num_spec_steps - idle
        return (self.num_new_tokens - idle) / calls if calls else 0.0

    def record(self, record: Record) -> None:
        """Add one round."""
        committed = min(record.accepted, record.taken)
        self.num_spec_steps += 1
        self.num_plain_steps += record.drafted == 0
        self.num_new_tokens += record.taken
        self.num_draft_tokens += record.sent
        self.num_dropped_tokens += record.drafted - record.sent
        self.num_accepted_draft_tokens += committed
        self.num_unchecked_tokens += sum(record.unchecked[:committed])
        self.steps[record.sent, committed] += 1
        for position, lossy in enumerate(record.lossy[:committed]):
            self.num_lossy_accepts += lossy
            self.lossy_by_position[position] += lossy
            self.token_sources.append(lossy)
            if lossy and record.overshoot:
                self.overshoot_sum += record.overshoot[position]
                self.overshoot_max = max(self.overshoot_max, record.overshoot[position])
        if record.taken > record.accepted:
            self.token_sources.append(3 if record.accepted == record.sent else 2)


COUNTS = [f.name for f in fields(RowStats) if f.name.startswith("num_")]
COMPILED = ("num_compiled_rounds", "num_compiled_forwards", "num_graphs")
EXACT = ("float32", "float64")  # precisions in which texts are compared token by token
MARGIN = 0.05  # loss of speed that counts as noise


def name_guarantee(lossless: bool, dtype: object) -> str:
    """Return a guarantee in words; `dtype`: the precision of the target, as `models.introspection.dtype_of` writes it."""
    return ("lossless" if dtype in EXACT else "lossless up to rounding") if lossless else "lossy"


@dataclass
class SpeculationStats:
    """The statistics of one generate call; `rows[b]` are row b's.

    `forwards` and `seconds` are by part: "prefill" (of all models, for ragged prompts), "target", "draft", and with some policies
    "companion" and "head". `alone` is the estimated time of the target alone (`TargetAlone`); None after a single round.
    """

    rows: list[RowStats]
    num_spec_tokens: int  # the policy's longest draft
    lossless: bool
    forwards: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    alone: TargetAlone | None = None
    dtype: str = EXACT[0]  # precision of the target
    falls_back: bool = False  # the policy disables drafting while it does not pay
    num_compiled_rounds: int = 0  # rounds that ran as one compiled function
    num_compiled_forwards: int = 0  # compiled forwards in rounds that ran stage by stage
    num_graphs: int = 0  # compiled during the call
    eager_because: str | None = None  # why something to be compiled ran eagerly
    # Rounds for `settle`: the row, its length before the round, and the record.
    later: list[tuple[int, int, Record]] = field(default_factory=list)

    def record(self, row: int, record: Record, begins: int | None) -> None:
        """Add one row's part in a round. `begins`: its length before, if finished rows are continued and truncated later; else None."""
        if begins is None:
            self.rows[row].record(record)
        else:
            self.later.append((row, begins, record))

    def settle(self, lengths: Sequence[int]) -> None:
        """Add the stored rounds, limited to the `lengths` that the texts were truncated to."""
        for row, begins, record in self.later:
            if begins < lengths[row]:  # else the round wrote nothing of the text
                self.rows[row].record(record._replace(taken=min(record.taken, lengths[row] - begins)))
        self.later.clear()

    def close(self, clock: Clock) -> None:
        """Copy the counts and seconds of `clock` at the end of the call."""
        self.forwards, self.seconds = dict(clock.forwards), clock.seconds()
        lengths = [row.num_new_tokens for row in self.rows]
        self.alone = estimate_target_alone(clock.reads, lengths, self.seconds.get("prefill", 0.0))

    @classmethod
    def merge(cls, calls: Sequence["SpeculationStats"]) -> "SpeculationStats":
        """Merge several calls of one policy: concatenate rows, add forwards and seconds."""
        stages = dict.fromkeys(stage for call in calls for stage in (*call.forwards, *call.seconds))
        return cls(
            [row for call in calls for row in call.rows],
            max(call.num_spec_tokens for call in calls),
            all(call.lossless for call in calls),
            {stage: sum(call.forwards.get(stage, 0) for call in calls) for stage in stages},
            {stage: sum(call.seconds.get(stage, 0.0) for call in calls) for stage in stages},
            TargetAlone.sum([call.alone for call in calls]),
            calls[0].dtype,
            all(call.falls_back for call in calls),
            **{name: sum(getattr(call, name) for call in calls) for name in COMPILED},
            eager_because=next((call.eager_because for call in calls if call.eager_because), None),
        )

    def total(self) -> RowStats:
        """Return the sum over all rows (without `token_sources`)."""
        out = RowStats()
        for row in self.rows:
            for name in (*COUNTS, "overshoot_sum", "steps", "lossy_by_position"):
                setattr(out, name, getattr(out, name) + getattr(row, name))
            out.overshoot_max = max(out.overshoot_max, row.overshoot_max)
        return out

    def summary(self, row: RowStats | None = None, sources: bool = False) -> dict[str, Any]:
        """Return the JSON form of one row, or of all rows together."""
        r = self.total() if row is None else row
        lengths = range(self.num_spec_tokens + 1)
        by_length: dict[int, list[int]] = {}
        for (sent, accepted), count in sorted(r.steps.items()):
            by_length.setdefault(sent, [0] * (sent + 1))[accepted] += count
        accepted_at = [sum(c for (_, n), c in r.steps.items() if n > slot) for slot in range(self.num_spec_tokens)]
        out = {
            "mean_acceptance_length": r.mean_acceptance_length,
            "draft_acceptance_rate": r.num_accepted_draft_tokens / r.num_draft_tokens if r.num_draft_tokens else 0.0,
            "acceptance_histogram": _trim([sum(c for (_, n), c in r.steps.items() if n == k) for k in lengths]),
            "acceptance_histogram_by_draft_length": {str(k): v for k, v in by_length.items()},
            **{name: getattr(r, name) for name in COUNTS},
            "num_spec_tokens": self.num_spec_tokens,
            "lossy_share_by_position": _trim(
                [r.lossy_by_position[slot] / n if n else 0.0 for slot, n in enumerate(accepted_at)]
            ),
        }
        for name, value in (("mean", r.overshoot_sum / max(r.num_lossy_accepts, 1)), ("max", r.overshoot_max)):
            out[f"{name}_overshoot"] = float(f"{value:.4g}") if value else None
        if sources:
            out["token_sources"] = [SOURCES[s] for s in r.token_sources]
        return out

    def to_dict(self, rows: bool = False, sources: bool = False) -> dict[str, Any]:
        """Return the JSON form of the call; with `rows`, each row's under "rows"; with `sources`, the source of each token."""
        out = self.summary() | {
            "lossless": self.lossless,
            "guarantee": self.guarantee,
            **{name: getattr(self, name) for name in COMPILED},
            "eager_because": self.eager_because,
            "forwards": dict(self.forwards),
            "seconds": {stage: round(s, 6) for stage, s in self.seconds.items()},
            "target_alone_seconds": None if self.alone is None else round(self.alone.seconds, 6),
            "target_alone_estimate": None if self.alone is None else self.alone.kind,
        }
        if rows:
            out["rows"] = [self.summary(row, sources) for row in self.rows]
        return out

    @property
    def guarantee(self) -> str:
        return name_guarantee(self.lossless, self.dtype)

    @property
    def worth(self) -> float | None:
        """The estimated speed relative to the target alone; below 1 drafting did not pay. None: unknown."""
        spent = sum(self.seconds.values())
        return None if self.alone is None or spent == 0 else self.alone.seconds / spent

    def advice(self) -> str | None:
        """Return a warning if drafting lost more than `MARGIN` against the target alone, as far as that can be estimated."""
        if self.worth is None or self.alone is None or self.worth >= 1 - MARGIN:
            return None
        seconds = f"{'at most' if self.alone.kind == 'at most' else 'about'} {self.alone.seconds:.3f} s"
        line = f"drafting did not pay: {sum(self.seconds.values()):.3f} s, and the target alone would take {seconds}"
        return line if self.falls_back else f"{line}; try policy.with_fallback()"

    def __getattr__(self, name: str) -> Any:
        """Return an entry of `to_dict()`."""
        entries = {} if name.startswith("_") else self.to_dict()  # copies and pickles ask for such names
        if name in entries:
            return entries[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def table(self) -> Table:
        """Return the statistics as a `rich.table.Table`."""
        s, several = self.summary(), len(self.rows) > 1
        lines: list[tuple[str, object]] = [
            ("guarantee", self.guarantee),
            ("new tokens", s["num_new_tokens"]),
            (f"rounds{f' of {len(self.rows)} rows, added up' if several else ''}", s["num_spec_steps"]),
            ("mean acceptance length (bonus included)", f"{s['mean_acceptance_length']:.2f}"),
            ("draft acceptance rate", f"{s['draft_acceptance_rate']:.1%}"),
            ("drafted tokens verified", s["num_draft_tokens"]),
            ("accepted", s["num_accepted_draft_tokens"]),
        ]
        if not self.lossless:
            lines.append(("of these lossy", s["num_lossy_accepts"]))
            names = ("mean", "max") if s["max_overshoot"] else ()
            lines += [(f"{name} overshoot q/p of lossy tokens", f"{s[f'{name}_overshoot']:g}") for name in names]
        if unchecked := s["num_unchecked_tokens"]:
            share = unchecked / s["num_new_tokens"]
            lines.append(("never checked by the target", f"{unchecked} ({share:.1%} of the new tokens)"))
        for stage, count in sorted(self.forwards.items()):
            name = f"{stage} forwards{', each of all rows' if several and stage == 'target' else ''}"
            lines.append((name, f"{count} in {self.seconds.get(stage, 0.0):.3f} s"))
        if self.alone is not None:
            lines.append((f"target alone, estimated seconds ({self.alone.kind})", f"{self.alone.seconds:.3f}"))
        table = Table("speculation", "", show_edge=False, caption=self.advice(), caption_justify="left")
        table.columns[1].justify = "right"
        for name, value in lines:
            table.add_row(name, str(value))
        return table

    def _print(self) -> PlainConsole:
        screen = console(width=100, record=True, file=StringIO())
        screen.print(self.table())
        return screen

    def _repr_html_(self) -> str:
        """Return the table, for notebooks."""
        return str(self._print().export_html(inline_styles=True, code_format="<pre>{code}</pre>"))

    def __str__(self) -> str:
        return self._print().export_text()


def _trim(values: list[Any]) -> list[Any]:
    """Take the zeros at the end away: a stop's longest draft is rarely reached."""
    while values and not values[-1]:
        values.pop()
    return values
