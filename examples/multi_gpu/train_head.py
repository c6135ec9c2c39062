"""Train SPRINTER's verifier in several processes with accelerate, for more records or a wider head than one device can take.

    torchrun --nproc-per-node 2 examples/multi_gpu/train_head.py --out head                  # the demo pair's records, collected first
    accelerate launch --num_processes 8 examples/multi_gpu/train_head.py --data collected --width 1024 --out head

`hf-lossy fit sprinter` trains in one process and stops early; this is the same loss over batches that the processes share.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.head import KINDS
from hf_lossy_assist.methods.sprinter.collect import CollectSettings, collect
from hf_lossy_assist.methods.sprinter.fit import measure
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.head_training import HeadFitSettings, fold_scaler, make_config, split_prompts
from hf_lossy_assist.training.verifier_dataset import label_acceptable, read_dataset


class Logits(torch.nn.Module):
    """A head as a module whose forward gives the loss's input."""

    def __init__(self, head: hla.Head):
        super().__init__()
        self.head = head

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head.logit(features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of `hf-lossy collect` (default: collect one of the demo)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lam", type=float, default=1.2, help="a token is acceptable if q(x) ≤ λ·p(x)")
    parser.add_argument("--width", type=int, default=64, help="of the MLP")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="of each process")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    data = args.data or collected(args.out.with_name(f"{args.out.name}.data"))
    table, settings = read_dataset(data), HeadFitSettings(kind="mlp", width=args.width)
    labels = label_acceptable(table.p, table.q, args.lam).float()
    parts = split_prompts(table.prompt, settings.seed)
    train, test = parts["training"], parts["test"]
    mean, scale = table.features[train].mean(dim=0), table.features[train].std(dim=0).clamp(min=1e-6)

    torch.manual_seed(settings.seed)  # all processes begin with the same head
    head = KINDS["mlp"](make_config(table, settings, "sprinter", f"q(x) ≤ {args.lam:g}·p(x)"))
    records = TensorDataset((table.features[train] - mean) / scale, labels[train])
    model, optimizer, loader = accelerator.prepare(
        Logits(head), torch.optim.Adam(head.parameters(), lr=1e-3), DataLoader(records, args.batch_size, shuffle=True)
    )
    for epoch in range(args.epochs):
        total = torch.zeros(2, device=accelerator.device)
        for features, wanted in loader:
            loss = F.binary_cross_entropy_with_logits(model(features), wanted)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += torch.stack([loss.detach() * len(wanted), torch.tensor(float(len(wanted)), device=total.device)])
        lost, count = accelerator.reduce(total).tolist()
        accelerator.print(f"epoch {epoch + 1}: loss {lost / count:.4f} over {count:.0f} records")
    if accelerator.is_main_process:
        head = accelerator.unwrap_model(model).head.cpu().eval()
        fold_scaler(head, mean, scale)  # so that it reads raw hidden states
        head.save_pretrained(args.out)
        auroc = measure(head, table.of(test), args.lam).evidence.auroc
        print(f"{args.out}: AUROC {auroc.value:.3f} on held-out prompts, 95 % {auroc.low} to {auroc.high}")
    accelerator.wait_for_everyone()
    # The wrapped model goes before its process group: where it is the last to hold a gloo group, Python's exit waits for
    # a thread of the group that waits for Python.
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


def collected(out: Path) -> Path:
    """Collect a small dataset of the demo pair, in all processes together."""
    if not out.exists():
        target, draft, _, tokenizer = hla.demo.load()
        texts = [PromptText(problem.prompt) for problem in hla.demo.problems(24, seed=0)]
        collect(target, draft, tokenizer, texts, out, CollectSettings(new_tokens=24, batch_size=4))
    return out


if __name__ == "__main__":
    main()
