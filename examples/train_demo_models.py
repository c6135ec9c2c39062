"""Train the embedded demo models: `target`, `draft` and `companion`, with one tokenizer.

    python examples/train_demo_models.py --out runs/demo                  # all three; resumes where it was stopped
    python examples/train_demo_models.py --out runs/demo --only draft     # one of them
    accelerate launch examples/train_demo_models.py --out runs/demo       # several processes: the batch is split among them

Every step's texts come from a seed made of the step's number alone, so a killed and resumed run sees the same texts as an
undisturbed one. Finished models land in OUT/<name> as ordinary Transformers folders (float16 safetensors).
"""

import argparse
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub.utils import tqdm
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hf_lossy_assist.demo import task


PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Recipe:
    layers: int
    hidden: int
    heads: int  # of 32 dimensions each
    intermediate: int
    steps: int
    batch: int
    learning_rate: float
    seed: int


RECIPES = {
    # Deep and thin: on a CPU a step costs what its layers cost to launch, so depth makes the target slow and width does not.
    "target": Recipe(
        layers=12, hidden=96, heads=3, intermediate=256, steps=1800, batch=64, learning_rate=3e-3, seed=1
    ),
    "draft": Recipe(layers=1, hidden=48, heads=2, intermediate=96, steps=800, batch=64, learning_rate=5e-3, seed=2),
    "companion": Recipe(
        layers=1, hidden=64, heads=2, intermediate=128, steps=800, batch=64, learning_rate=5e-3, seed=3
    ),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    ids = {token: i for i, token in enumerate([PAD, EOS, *task.vocabulary()])}
    core = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(task.TOKEN_PATTERN), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=256,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batch_of(step: int, recipe: Recipe, ids: dict[str, int], share: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of one step: `input_ids` and `labels`, both (batch, longest text); labels cover the solution and the end."""
    rows, labels = [], []
    for problem in list(islice(task.stream("train", recipe.seed * 1_000_000 + step), recipe.batch))[share]:
        prompt = [ids[t] for t in re.findall(task.TOKEN_PATTERN, problem.prompt)]
        solution = [ids[t] for t in re.findall(task.TOKEN_PATTERN, problem.solution)] + [ids[EOS]]
        rows.append(torch.tensor(prompt + solution))
        labels.append(torch.tensor([-100] * len(prompt) + solution))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True, padding_value=ids[PAD]), pad(labels, batch_first=True, padding_value=-100)


def write(folder: Path, save) -> None:
    """`save(temporary folder)`, then swap it in, so that a kill leaves the old folder or the new one."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save(part)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)


def train(
    name: str, out: Path, tokenizer: PreTrainedTokenizerFast, accelerator: Accelerator, steps: int | None
) -> None:
    recipe, ids = RECIPES[name], tokenizer.get_vocab()
    steps = steps or recipe.steps
    if (out / name / "model.safetensors").exists():
        accelerator.print(f"{name}: already trained in {out / name}")
        return

    set_seed(recipe.seed)
    model = build_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, steps, pct_start=0.05)
    checkpoint, start = out / f"{name}.checkpoint", 0
    if (checkpoint / "state.pt").exists():
        state = torch.load(checkpoint / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        start = state["step"]
    model, optimizer = accelerator.prepare(model, optimizer)

    count, rank = accelerator.num_processes, accelerator.process_index
    size = recipe.batch // count
    share = slice(rank * size, (rank + 1) * size)
    log, began = [], time.monotonic()
    bar = tqdm(range(start, steps), initial=start, total=steps, desc=name, disable=not accelerator.is_main_process)
    for step in bar:
        input_ids, labels = (x.to(accelerator.device) for x in batch_of(step, recipe, ids, share))
        logits = model(input_ids=input_ids).logits[:, :-1]  # (batch, length - 1, vocabulary)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            bar.set_postfix(loss=f"{loss.item():.4f}")
            log.append(
                {"step": step + 1, "loss": round(loss.item(), 5), "seconds": round(time.monotonic() - began, 1)}
            )
        if step % 200 == 199 and accelerator.is_main_process:
            state = {
                "model": accelerator.unwrap_model(model).state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": step + 1,
            }
            write(checkpoint, lambda folder, state=state: torch.save(state, folder / "state.pt"))

    if accelerator.is_main_process:
        finished = accelerator.unwrap_model(model).half()
        finished.generation_config.eos_token_id = tokenizer.eos_token_id
        finished.generation_config.pad_token_id = tokenizer.pad_token_id

        def save(folder: Path) -> None:
            finished.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        write(out / name, save)
        lines = "".join(json.dumps(row) + "\n" for row in log)
        (out / f"{name}.log.jsonl").write_text(lines)
        shutil.rmtree(checkpoint, ignore_errors=True)
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and finished models")
    parser.add_argument("--only", choices=RECIPES, action="append", help="train this model (repeatable); default all")
    parser.add_argument("--steps", type=int, help="train for this many steps in place of the recipe's")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    accelerator, tokenizer = Accelerator(), build_tokenizer()
    for name in args.only or RECIPES:
        train(name, args.out, tokenizer, accelerator, args.steps)


if __name__ == "__main__":
    main()
