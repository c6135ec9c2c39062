"""What a SPRINTER round costs on this machine: seconds of the engine's own runs."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from ...artifacts.heads import Head
from ...generation.enable import speculative_generate
from ...models.inspect import base_of
from ...policy.policy import LossyPolicy
from ...stats.clock import wait_for
from ...stats.report import SpeculationStats
from ...stops.basic import SVIP, Constant
from ...stops.heads import HeadStop
from ...terminal import Bar


def measure(
    target: Any, draft: Any, tokenizer: Any, prompts: Sequence[str], head: Head, new_tokens: int, max_draft: int,
    do_sample: bool, repeats: int,
) -> dict[str, float]:  # fmt: skip
    """Seconds by runs of the engine, arms taking turns at each prompt; medians over the repeats."""
    base = base_of(target)
    lengths = sorted({1, max(max_draft // 2, 1), max_draft})
    arms: dict[str, LossyPolicy | None] = {
        "target": None,
        "strict": LossyPolicy(stop=Constant(5)),
        "svip": LossyPolicy(stop=SVIP()),
    }
    # A threshold of 0 never doubts, so rounds have a known length; strict acceptance costs what the last token's check costs.
    arms |= {str(n): LossyPolicy(stop=HeadStop(head, 0.0, n)) for n in lengths}
    arms["one token"] = arms["1"]
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    counts: dict[str, tuple[int, SpeculationStats | None]] = {}
    inputs = [tokenizer(prompt, return_tensors="pt").to(target.device) for prompt in prompts]
    settings = {"max_new_tokens": new_tokens, "do_sample": do_sample, "return_dict_in_generate": True}
    with Bar((repeats + 1) * len(inputs) * len(arms), "timing", "calls") as bar:
        for repeat in range(repeats + 1):  # the first warms up
            spent = dict.fromkeys(arms, 0.0)
            tokens = dict.fromkeys(arms, 0)
            calls: dict[str, list[SpeculationStats]] = {name: [] for name in arms}
            for one in inputs:
                for name, policy in arms.items():
                    given = {"input_ids": one["input_ids"], "attention_mask": one["attention_mask"], **settings}
                    given |= {"max_new_tokens": 1} if name == "one token" else {}
                    torch.manual_seed(repeat)
                    wait_for(target.device)
                    began = time.perf_counter()
                    if policy is None:
                        out = type(base).generate(base, **given)
                    else:
                        out = speculative_generate(base, policy, assistant_model=draft, **given)
                    wait_for(target.device)
                    spent[name] += time.perf_counter() - began
                    tokens[name] += out.sequences.shape[1] - one["input_ids"].shape[1]
                    calls[name] += [] if policy is None else [out.speculation]
                    bar.to(bar.done + 1)
            for name in arms:
                counts[name] = (tokens[name], SpeculationStats.merge(calls[name]) if calls[name] else None)
                if repeat:
                    seconds[name].append(spent[name])

    took = {name: statistics.median(values) for name, values in seconds.items()}
    stats = {name: stat for name, (_, stat) in counts.items() if stat is not None}
    # Relative errors count, and no time is negative.
    fitted = [*map(str, lengths), "one token"]
    parts = [[len(stats[n].rows), stats[n].forwards["target"], stats[n].forwards.get("draft", 0)] for n in fitted]
    shares = np.array(parts, dtype=float) / np.array([took[n] for n in fitted])[:, None]
    (per_text, per_round, per_token), _ = nnls(shares, np.ones(len(fitted)))
    longest = stats[str(lengths[-1])]
    return {
        "t_draft": longest.seconds["draft"] / longest.forwards["draft"],
        "t_target": longest.seconds["target"] / longest.forwards["target"],
        "t_verifier": longest.seconds["head"] / longest.forwards["head"],
        "per_text": float(per_text),
        "per_round": float(per_round),
        "per_token": float(per_token),
        **{f"{name}_per_second": counts[name][0] / took[name] for name in ("target", "strict", "svip")},
        "strict_per_call": counts["strict"][0] / stats["strict"].forwards["target"],
    }
