"""The arms of `sv_goodput.py`: a target with a draft and a companion, the policies over them, and what each took."""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pairs import synchronize
from sv_pairs import noisy
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.cli.options import chats
from hf_lossy_assist.models.int8 import int8
from hf_lossy_assist.stats.report import SpeculationStats
from hf_lossy_assist.tasks.prompts import read_prompts


@dataclass
class Triple:
    """Target, one draft, the companion, and what was profiled of them."""

    name: str
    target: Any
    draft: Any
    companion: Any
    tokenizer: Any
    made: hla.Profile


@dataclass
class Arm:
    """One way to continue prompts, and what it took in each repeat."""

    name: str
    policy: hla.LossyPolicy | None  # None: the target alone
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    calls: list[SpeculationStats] = field(default_factory=list)

    def run(self, triple: Triple, inputs: Any, args: argparse.Namespace, seed: int) -> None:
        torch.manual_seed(seed)
        more = {} if self.policy is None else {"assistant_model": triple.draft, "lossy_policy": self.policy}
        sampling = {"do_sample": not args.greedy} | (
            {} if args.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        )
        width = inputs["input_ids"].shape[1]
        synchronize(args.device)
        began = time.perf_counter()
        out = triple.target.generate(
            **inputs, max_new_tokens=args.max_new_tokens, return_dict_in_generate=True, **sampling, **more
        )
        synchronize(args.device)
        self.seconds[-1] += time.perf_counter() - began
        if self.policy is None:
            ends = triple.target.generation_config.eos_token_id
            ended = torch.isin(out.sequences[:, width:], torch.tensor(ends, device=out.sequences.device))
            alive = torch.cat([torch.ones_like(ended[:, :1]), ~ended[:, :-1].cummax(dim=1).values], dim=1)
            self.tokens[-1] += int(alive.sum())
        else:
            self.calls.append(out.speculation)
            self.tokens[-1] += out.speculation.total().num_new_tokens

    @property
    def speeds(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def arms_for(triple: Triple, gamma: int, args: argparse.Namespace) -> list[Arm]:
    made, companion, constant = triple.made, triple.companion, hla.Constant(gamma)
    policies = {
        "target": None,
        "strict": hla.LossyPolicy(stop=constant),
        "SV": hla.SpeculativeVerification(made, companion, gamma),
        "SV, no fallback": hla.SpeculativeVerification(made, companion, gamma, fallback=False),
        "SV, paper's goodput": hla.SpeculativeVerification(made, companion, gamma, corrections=False, fallback=False),
        "SV, prefix": hla.SpeculativeVerification(made, companion, gamma, exact="prefix", fallback=False),
        "SV and SVIP": hla.LossyPolicy(
            stop=hla.SVIP(max_draft=gamma), filter=hla.Verification(made, companion, fallback=False)
        ),
        "SVIP": hla.LossyPolicy(stop=hla.SVIP(max_draft=gamma)),
        "moving average": hla.LossyPolicy(stop=hla.MovingAverage(made, max_draft=gamma)),
        "staged": hla.LossyPolicy(stop=constant, filter=hla.Staged(companion)),
    }
    return [Arm(name, policy) for name, policy in policies.items() if not args.arms or name in args.arms]


def triples(args: argparse.Namespace) -> list[tuple[str, Any, Any, Any, Any, list[str], list[str]]]:
    """(name, target, draft, companion, tokenizer, prompts to profile, prompts to measure) of each draft."""
    if args.model is None:
        models = hla.demo.load(getattr(torch, args.dtype), args.device)
        profiled = [p.prompt for p in hla.demo.problems(args.profile_prompts, 0, "calibration")]
        texts = [p.prompt for p in hla.demo.problems(args.problems, args.seed)]
        third = int8(models.draft) if args.companion == "int8" else models.companion
        drafts = {} if args.weaker else {"demo draft": models.draft}
        drafts |= {f"demo draft, noise {n:g}": noisy(models.draft, n) for n in args.noise}
        return [(name, models.target, d, third, models.tokenizer, profiled, texts) for name, d in drafts.items()]
    target, draft = (
        AutoModelForCausalLM.from_pretrained(m, dtype=getattr(torch, args.dtype)).to(args.device).eval()
        for m in (args.model, args.assistant)
    )
    if args.companion == "int8":
        third = int8(draft)
    else:
        third = AutoModelForCausalLM.from_pretrained(args.companion, dtype=target.dtype).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    texts = read_prompts(args.prompts, args.problems + args.profile_prompts)
    texts = chats(tokenizer, texts) if args.chat else texts
    return [
        (Path(args.assistant).name, target, draft, third, tokenizer, texts[args.problems :], texts[: args.problems])
    ]
