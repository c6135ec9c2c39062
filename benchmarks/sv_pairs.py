"""How much S and A of a companion tell about acceptance, for several pairs of draft and companion (the SV paper's Tables 1, 7, 8).

    python benchmarks/sv_pairs.py            # the demo's models, in int8, and with noise

For each pair strict decoding of `--prompts` demo prompts, of which a fifth is held out for the figures.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import disable_progress_bars
from pairs import machine
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.cli.profile import PROFILED
from hf_lossy_assist.methods.sv.held_out import report
from hf_lossy_assist.methods.sv.instrument import ProfileSettings
from hf_lossy_assist.methods.sv.sampling import collect
from hf_lossy_assist.models.int8 import int8


@torch.no_grad()
def noisy(model: Any, noise: float, seed: int = 1) -> Any:
    """A copy whose matrices are off by `noise` of their own spread: a worse model of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * parameter.std() * noise)
    copied.config.name_or_path = f"{model.config.name_or_path}~{noise:g}"
    return copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROFILED)
    parser.add_argument("--gamma", type=int, nargs="+", default=[5])
    parser.add_argument("--noise", type=float, nargs=2, default=[0.5, 0.8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bars()

    models = hla.demo.load()
    hla.enable(models.target)
    low, high = args.noise
    kinds = {
        "A draft": models.draft, "B companion": models.companion, "C draft in int8": int8(models.draft),
        f"D draft, noise {low:g}": noisy(models.draft, low), f"E draft, noise {high:g}": noisy(models.draft, high),
        "F half of the target": hla.early_exit(models.target, models.target.config.num_hidden_layers // 2),
    }  # fmt: skip
    by_letter = {name[0]: (name, model) for name, model in kinds.items()}
    pairs = ["AB", "AC", "AD", "AF", "BA", "CB", "DA", "DB", "EB", "EF"]  # draft and companion
    texts = [p.prompt for p in hla.demo.problems(args.prompts, 0, "calibration")]
    settings = ProfileSettings(gamma=tuple(args.gamma), batch_size=32)
    table, rows = (
        Table("draft", "companion", "accepted", "H(X)", title="information gain in bits, held-out prompts"),
        [],
    )
    for pair in pairs:
        (draft_name, draft), (companion_name, companion) = (by_letter[letter] for letter in pair)
        metrics = report(collect(models.target, draft, companion, models.tokenizer, texts, settings), settings.seed)[2]
        rows.append({"draft": draft_name, "companion": companion_name} | metrics)
        if len(rows) == 1:
            for line in metrics["information"]:
                table.add_column(line["resolution"])
            for column in ("S alone", "A alone", "correlation"):
                table.add_column(column)
        gains, finest = [f"{line['gain']:.3f}" for line in metrics["information"]], metrics["information"][-1]
        table.add_row(
            draft_name, companion_name, f"{metrics['acceptance']:.0%}", f"{finest['entropy']:.2f}", *gains,
            f"{finest['gain_s']:.3f}", f"{finest['gain_a']:.3f}", f"{metrics['correlation']:.2f}",
        )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    console.print(machine("cpu"))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
