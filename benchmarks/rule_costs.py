"""What each acceptance rule costs a round: from the target's raw logits to the verdict, in milliseconds, beside strict acceptance.

    python benchmarks/rule_costs.py                                  # 8 rows, γ = 5, V = 151 936: a Qwen vocabulary
    python benchmarks/rule_costs.py --device cuda --dtype bfloat16 --json costs.json
    python benchmarks/rule_costs.py --rules strict top_k mentored --modes sampling --repeats 21

The logits are made up: a draft and a target that put a few tokens above a long tail, mostly in the same order (`--noise` says how far
apart they are; the share of tokens that strict acceptance takes is printed, since a rule has less to do where it is high). Each repeat makes
a new `Verified`, so that everything that a round works out once is worked out again: logits in float32, softmax, argmax, coins, the token after
the draft. q is given, as drafters keep it. Rules take turns in an order that rotates; figures are medians over `--repeats` after warm-up, ratios
the medians of the ratios within a repeat. "commit" is `table_of`, what the host reads of a round, made of strict acceptance's verdict.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pairs import machine, record, synchronize
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.batch.randomness import Randomness
from hf_lossy_assist.engine.commit import table_of
from hf_lossy_assist.registry import REQUIRED, entries
from hf_lossy_assist.round import Draft, Selection, Verdict, Verified
from hf_lossy_assist.rules import AcceptanceRule, accept, draw


MODES = ("greedy", "sampling")
STRICT, COMMIT = "strict", "commit"
HIDDEN = 1024  # of the states that a head reads
# Where the registered example, or the default, is strict acceptance or hardly a rule.
SETTINGS: dict[str, dict[str, Any]] = {
    "mentored": {"budget": 0.1},
    "synthetic_for_benchmarks": {"rate": 0.8},
    "top_k_tolerance": {"k": 5, "tolerance": 4.0},
}
FORMS = {f"cascade {form}": {"name": "cascade", "alpha": 0.5, "form": form} for form in ("chow", "diff", "token")}


@dataclass(frozen=True)
class Round:
    """A draft and what the target says of it, before anybody worked on it."""

    raw: torch.Tensor  # (B, γ + 1, V)
    q: torch.Tensor  # (B, γ, V) float32
    tokens: torch.Tensor  # (B, γ) int64
    hidden: torch.Tensor  # (B, γ, H)
    sampling: bool

    def verified(self, rule: AcceptanceRule) -> Verified:
        """The round as the rule finds it, with nothing worked out."""
        rows, gamma = self.tokens.shape
        lengths = torch.full((rows,), gamma, device=self.tokens.device)
        probs = self.q if self.sampling or rule.needs_draft_probs else None
        order = torch.arange(rows, device=self.tokens.device)
        selection = Selection(Draft(self.tokens, lengths, order, gamma, self.sampling, probs), lengths, sends_all=True)
        judged = None if rule.features is None else rule.judge(self.hidden)
        return Verified(selection, self.raw.to(torch.float32), judged)


@dataclass
class Arm:
    """One rule in one mode, and the seconds of each repeat."""

    name: str
    mode: str
    rule: AcceptanceRule
    seconds: list[float] = field(default_factory=list)

    def run(self, round_: Round, device: str) -> None:
        prompts = [torch.zeros(0, dtype=torch.int64, device=device)] * len(round_.tokens)
        run, randomness = self.rule.start(prompts), Randomness()
        if self.name == COMMIT:
            verified = round_.verified(self.rule)
            verdict = accept(run, verified, randomness)
            self.seconds.append(timed(lambda: table_of(verified, verdict).tolist(), device))
        else:
            self.seconds.append(timed(lambda: accept(run, round_.verified(self.rule), randomness), device))


def timed(work: Callable[[], Any], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def made_up(args: argparse.Namespace, sampling: bool) -> Round:
    """16 tokens of each place stand above the tail; draft and target each move every logit a little."""
    torch.manual_seed(args.seed)
    shape = args.rows, args.gamma + 1, args.vocabulary
    logits = torch.randn(shape).mul_(2.0)
    ids = torch.randint(args.vocabulary, (*shape[:2], 16))
    heights = 22.0 - torch.empty(ids.shape).exponential_(0.5).cumsum(dim=-1)
    logits.scatter_add_(-1, ids, heights)
    draft = (logits + args.noise * torch.randn(shape))[:, : args.gamma].to(args.device)
    target = logits.add_(args.noise * torch.randn(shape)).to(args.device, getattr(torch, args.dtype))
    q = draft.softmax(dim=-1)
    tokens = draw(q) if sampling else q.argmax(dim=-1)
    return Round(target, q, tokens, torch.randn(*tokens.shape, HIDDEN, device=args.device), sampling)


def rules(device: str) -> dict[str, AcceptanceRule]:
    """Every registered rule at one setting, and the other forms of those that have several."""
    head = (
        hla.LinearHead(hla.HeadConfig(HIDDEN, polarity="important")).to(device).eval()
    )  # untrained: it costs the same
    out: dict[str, AcceptanceRule] = {}
    for entry in entries("rule"):
        spec = {name: value for name, value in entry.parameters.items() if value != REQUIRED}
        spec |= dict(entry.example) | SETTINGS.get(entry.name, {})
        if entry.name == "judge":
            out[entry.name] = hla.Judge(head, 0.5)
        else:
            out[entry.name] = made({"name": entry.name, **spec})
        out |= {name: made(form) for name, form in FORMS.items() if form["name"] == entry.name}
    return out


def made(spec: dict[str, Any]) -> AcceptanceRule:
    rule = hla.LossyPolicy.from_dict({"rule": spec}).rule
    assert rule is not None
    return rule


def taken(round_: Round) -> tuple[float, Verdict]:
    """The share of drafted tokens that strict acceptance would take, each by itself."""
    torch.manual_seed(0)
    strict = hla.Strict()
    verified = round_.verified(strict)
    verdict = accept(strict.start([]), verified, Randomness())
    return float(strict.accepts(verified, verdict.coins).float().mean()), verdict


def report(arms: list[Arm]) -> list[dict[str, Any]]:
    rows = []
    for arm in arms:
        strict = next(a for a in arms if (a.name, a.mode) == (STRICT, arm.mode))
        ratio = statistics.median(a / b for a, b in zip(arm.seconds, strict.seconds, strict=True))
        rows.append(
            {
                "rule": arm.name,
                "mode": arm.mode,
                "ms": 1e3 * statistics.median(arm.seconds),
                "lowest": 1e3 * min(arm.seconds),
                "highest": 1e3 * max(arm.seconds),
                "of_strict": ratio,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(
        "rule", *(f"{mode}{what}" for mode in MODES for what in (" ms", ", range", ", × strict")), title=title
    )
    for name in dict.fromkeys(row["rule"] for row in rows):
        cells = []
        for mode in MODES:
            its = next((row for row in rows if (row["rule"], row["mode"]) == (name, mode)), None)
            cells += (
                [f"{its['ms']:.2f}", f"{its['lowest']:.2f}–{its['highest']:.2f}", f"{its['of_strict']:.2f}"]
                if its
                else ["–"] * 3
            )
        table.add_row(name, *cells)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="of the batch")
    parser.add_argument("--gamma", type=int, default=5, help="drafted tokens of each row")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--noise", type=float, default=1.2, help="by which draft and target move each logit")
    parser.add_argument("--rules", nargs="+", help="default: all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=9, help="figures are the medians of these (default 9)")
    parser.add_argument("--warm-up", type=int, default=2, help="repeats that do not count (default 2)")
    parser.add_argument("--seed", type=int, default=7, help="of the logits")
    parser.add_argument("--dtype", default="float32", help="of the target's raw logits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()

    chosen = rules(args.device)
    unknown = sorted(set(args.rules or ()) - set(chosen))
    if unknown:
        raise SystemExit(f"--rules: expected some of {', '.join(chosen)}, got {', '.join(unknown)}")
    chosen = {name: rule for name, rule in chosen.items() if name == STRICT or not args.rules or name in args.rules}
    arms, shares = [], {}
    for mode in args.modes:
        its = [Arm(name, mode, rule) for name, rule in chosen.items() if mode in rule.modes]
        its.append(Arm(COMMIT, mode, chosen[STRICT]))
        round_ = made_up(args, mode == "sampling")
        share, verdict = taken(round_)
        shares[mode] = {"accepted_by_strict": share, "tokens_a_row": float(verdict.accepted.float().mean())}
        with torch.inference_mode():
            for turn in range(args.warm_up + args.repeats):
                shift = turn % len(its)
                for arm in its[shift:] + its[:shift]:
                    arm.run(round_, args.device)
        for arm in its:
            del arm.seconds[: args.warm_up]
        arms += its
    where, found = machine(args.device), report(arms)
    takes = ", ".join(f"{mode} {its['accepted_by_strict']:.0%}" for mode, its in shares.items())
    show(
        found,
        f"{args.rows} rows, γ = {args.gamma}, V = {args.vocabulary}, {args.dtype}; strict takes {takes}; {where}",
    )
    record(args, where, strict=shares, rules=found)


if __name__ == "__main__":
    main()
