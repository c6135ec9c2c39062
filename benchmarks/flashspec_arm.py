"""flashspec (pip install flashspec) as an arm: one target and one draft, one row at a time, where it is installed."""

import argparse
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from compiled import Text
from engine import Arm


MISSING = "flashspec is not installed (pip install flashspec): no arm of it"


def flashspec_arms(target: Any, draft: Any, args: argparse.Namespace, ends: set[int]) -> list[Arm]:
    """With its defaults (prompt lookup, else two drafted tokens), and with the constant draft length of the other arms."""
    if find_spec("flashspec") is None:
        return []
    logging.getLogger("flashspec").setLevel(logging.ERROR)  # that one drafter is one arm to choose from
    fixed = {"drafter_strategy": "bandit"}
    return [
        Arm("flashspec", 1, engine(target, draft, args, ends)),
        Arm(f"flashspec γ={args.gamma}", 1, engine(target, draft, args, ends, **fixed)),
    ]


def engine(target: Any, draft: Any, args: argparse.Namespace, ends: set[int], **settings: Any) -> Callable[..., Text]:
    """Greedy decoding by an engine of its own; compiled where flashspec compiles, which is on CUDA."""
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    device = torch.device(args.device)
    made = SpeculativeEngine(
        FlashSpecConfig(
            device=str(device),
            dtype=str(target.dtype).removeprefix("torch."),
            eos_token_ids=tuple(sorted(ends)),
            sampling=SamplingConfig(temperature=0.0, gamma=args.gamma),
            bandit=BanditConfig(n_arms=1),
            compile_max_cache_len=args.capacity,
            **settings,
        ),
        [HuggingFaceDrafter("draft", device, draft.dtype, temperature=0.0, model=draft)],
        TargetModel("target", device, target.dtype, model=target),
    )

    def generate(input_ids: torch.Tensor, max_new_tokens: int, **_: Any) -> Text:
        return Text(torch.cat([input_ids, made.generate(input_ids, max_new_tokens).output_ids], dim=1))

    return generate
