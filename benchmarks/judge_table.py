"""What AutoJudge calls important on the demo, and how well the shipped judge tells it on problems of a seed it never saw.

    python benchmarks/judge_table.py [--head HEAD]

Mines `--problems` test problems (the judge was fitted on calibration problems), sorts the mismatches into numbers (a digit, + or − on either side) and wording,
and counts for each how many are important and how many of them the judge would let pass at its own threshold.
"""

import argparse
import re
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score

import hf_lossy_assist as hla
from hf_lossy_assist.methods.autojudge.hidden_states import hidden_states, read_mined
from hf_lossy_assist.methods.autojudge.mine import mine
from hf_lossy_assist.methods.autojudge.mine_settings import MineSettings
from hf_lossy_assist.tasks.tasks import DemoTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", help="a judge's folder or Hub repository; default the demo's")
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=21, help="of the demo's test problems")
    args = parser.parse_args()

    models = hla.demo.load()
    head = hla.Head.from_pretrained(args.head) if args.head else hla.demo.head("autojudge")
    task = DemoTask("test", args.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = mine(
            models.target, models.draft, models.tokenizer, task, task.problems(args.problems), Path(folder, "mined"),
            MineSettings(96), batch_size=32,
        )  # fmt: skip
        mined = read_mined(data)
    spec = head.config.features
    states = [
        hidden_states(model, mined, (spec.position,), name)[spec.position]
        for name, model in (("draft", models.draft), ("target", models.target))
        if spec.reads(name)
    ]
    with torch.no_grad():
        p = head(torch.cat(states, dim=1))  # P(important)
    number = torch.tensor(
        [
            re.search(r"[0-9+-]", models.tokenizer.decode(pair)) is not None
            for pair in zip(mined.target_token.tolist(), mined.draft_token.tolist(), strict=True)
        ]
    )
    threshold = head.config.threshold
    table = Table("mismatch", "count", "important", "let pass", "important ones let pass", title=f"τ = {threshold}")
    for name, of in (("number", number), ("wording", ~number), ("all", torch.ones_like(number))):
        important, passed = mined.important & of, (p < threshold) & of
        table.add_row(
            name, str(int(of.sum())), f"{int(important.sum())} ({float(important.sum() / of.sum()):.1%})",
            f"{int(passed.sum())} ({float(passed.sum() / of.sum()):.1%})", str(int((passed & important).sum())),
        )  # fmt: skip
    console = Console()
    console.print(table)
    auroc = roc_auc_score(mined.important.numpy(), p.numpy())
    console.print(f"{args.problems} test problems of seed {args.seed}: AUROC {auroc:.4f}")


if __name__ == "__main__":
    main()
