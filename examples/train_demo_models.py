"""Train the embedded demo models: `target`, `draft` and `companion`, with one tokenizer.

    python examples/train_demo_models.py --out runs/demo                  # all three; resumes an interrupted run
    python examples/train_demo_models.py --out runs/demo --only draft     # one of them
    python examples/train_demo_models.py --out runs/hybrid --hybrid       # instead, a target and a draft of Qwen3.5's kind
    accelerate launch examples/train_demo_models.py --out runs/demo       # several processes share each batch

A step's seed depends on its number alone, so a killed and resumed run sees the same sequences as an
undisturbed one. Finished models are written to OUT/<name> as ordinary Transformers folders (float16 safetensors).
"""

import argparse
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub.utils import tqdm
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    set_seed,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_lossy_assist.tasks import demo_task as task


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
    hybrid: bool = False  # of Qwen3.5's kind: three layers with a recurrent state, then one with attention


RECIPES = {
    # Deep and thin: on a CPU a step costs what its layers cost to launch, so depth makes the target slow and width does not.
    "target": Recipe(
        layers=12, hidden=96, heads=3, intermediate=256, steps=1800, batch=64, learning_rate=3e-3, seed=1
    ),
    # Four heads of 32 can copy every number by distance; a feed-forward part this narrow cannot add them all.
    "draft": Recipe(layers=1, hidden=48, heads=4, intermediate=12, steps=700, batch=64, learning_rate=5e-3, seed=4),
    "companion": Recipe(
        layers=1, hidden=64, heads=4, intermediate=48, steps=600, batch=64, learning_rate=5e-3, seed=3
    ),
}


# The demo target's depth and width; a draft of one layer with a state and one with attention, which copies numbers.
HYBRIDS = {
    "target": Recipe(
        layers=12, hidden=96, heads=3, intermediate=256, steps=800, batch=32, learning_rate=3e-3, seed=1, hybrid=True
    ),
    "draft": Recipe(
        layers=2, hidden=48, heads=2, intermediate=24, steps=700, batch=32, learning_rate=5e-3, seed=4, hybrid=True
    ),
}


TOKEN_PATTERN = r" ?[A-Za-z]+| ?[0-9]| ?[+=-]|[.,:?!;]"


def list_vocabulary() -> list[str]:
    """Return all tokens of the task, in a fixed order; a word includes the space before it, so texts are concatenations."""
    lists = task.NAMES, task.ITEMS, task.GAINS, task.LOSSES, task.STYLES, task.KEYS
    words = set().union(*lists, "Style has Then How many does have now The answer is".split())
    tables = task.START, task.FIRST, task.NEXT, task.CHECK, task.END
    for text in (*task.SCENES, *(text for table in tables for text in table.values())):
        words |= set(re.findall(r"[A-Za-z]+", text))
    digits = [str(digit) for digit in range(10)]
    return [*(f" {w}" for w in sorted(words)), *(f" {d}" for d in digits), *digits, *".,:?!;", " +", " -", " ="]


def build_tokenizer() -> PreTrainedTokenizerFast:
    ids = {token: i for i, token in enumerate([PAD, EOS, *list_vocabulary()])}
    core = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=256,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not recipe.hybrid:
        return LlamaForCausalLM(LlamaConfig(**shared))
    heads = {f"linear_num_{name}_heads": recipe.heads for name in ("key", "value")}
    sizes = {f"linear_{name}_head_dim": 32 for name in ("key", "value")}
    kinds = [
        "full_attention" if i % 4 == 3 or i == recipe.layers - 1 else "linear_attention" for i in range(recipe.layers)
    ]
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shared, **heads, **sizes, layer_types=kinds))


@contextmanager
def short_chunks() -> Iterator[None]:
    """Let hybrids run in chunks of 32 tokens: with Transformers' 64 a step on a CPU takes half as long again."""
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = functools.partial(original, chunk_size=32)
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = original


def make_batch(step: int, recipe: Recipe, ids: dict[str, int], share: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `input_ids` and `labels` of one step, both (batch, longest sequence); labels cover the solution and the end."""
    rows, labels = [], []
    for problem in list(islice(task.generate_problems("train", recipe.seed * 1_000_000 + step), recipe.batch))[share]:
        prompt = [ids[t] for t in re.findall(TOKEN_PATTERN, problem.prompt)]
        solution = [ids[t] for t in re.findall(TOKEN_PATTERN, problem.solution)] + [ids[EOS]]
        rows.append(torch.tensor(prompt + solution))
        labels.append(torch.tensor([-100] * len(prompt) + solution))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True, padding_value=ids[PAD]), pad(labels, batch_first=True, padding_value=-100)


def replace_file(path: Path, state: dict) -> None:
    """Write a temporary file, then rename, so that a kill leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    os.replace(part, path)


def finish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, log: list[dict]) -> None:
    """Save the finished model as a Transformers folder (float16), renamed into place."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model = model.half()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    folder.with_name(folder.name + ".log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    os.replace(part, folder)


def train(name: str, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, accelerator: Accelerator) -> None:
    recipe, ids = (HYBRIDS if args.hybrid else RECIPES)[name], tokenizer.get_vocab()
    steps = args.steps or recipe.steps
    folder, checkpoint = args.out / name, args.out / f"{name}.checkpoint.pt"
    if folder.exists():
        accelerator.print(f"{name}: already trained in {folder}")
        return

    set_seed(recipe.seed)
    model = build_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, steps, pct_start=0.05)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    start, spent, log = 0, 0.0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location="cpu")
        for key, part in parts.items():
            part.load_state_dict(state[key])
        start, spent, log = state["step"], state["seconds"], state["log"]
    model, optimizer = accelerator.prepare(model, optimizer)

    size = recipe.batch // accelerator.num_processes
    share = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
    began = time.monotonic() - spent
    bar = tqdm(range(start, steps), initial=start, total=steps, desc=name, disable=not accelerator.is_main_process)
    for step in bar:
        input_ids, labels = (x.to(accelerator.device) for x in make_batch(step, recipe, ids, share))
        logits = model(input_ids=input_ids).logits[:, :-1]  # (batch, length - 1, vocabulary)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds, done = time.monotonic() - began, step + 1
        if done % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}")
            log.append({"step": done, "loss": round(loss.item(), 5), "seconds": round(seconds, 1)})
        if done % args.checkpoint_every == 0 and accelerator.is_main_process:
            state = {key: part.state_dict() for key, part in parts.items()}
            replace_file(checkpoint, state | {"step": done, "seconds": seconds, "log": log})

    if accelerator.is_main_process:
        finish(accelerator.unwrap_model(model), tokenizer, folder, log)
        checkpoint.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    accelerator.free_memory(model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and finished models")
    parser.add_argument("--only", choices=RECIPES, action="append", help="train this model (repeatable); default all")
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="a target and a draft with recurrent states; use a separate folder",
    )
    parser.add_argument("--steps", type=int, help="train for this many steps in place of the recipe's")
    parser.add_argument("--checkpoint-every", type=int, default=200, metavar="STEPS")
    args = parser.parse_args()
    if args.steps is not None and args.steps <= 20:
        parser.error(f"--steps {args.steps}: expected more than 20, a twentieth of which warm up")
    recipes = HYBRIDS if args.hybrid else RECIPES
    unknown = [name for name in args.only or () if name not in recipes]
    if unknown:
        parser.error(
            f"--only {unknown[0]}: with --hybrid there are {' and '.join(HYBRIDS)}, as the demo's companion goes with them"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    accelerator, tokenizer = Accelerator(), build_tokenizer()
    with short_chunks():
        for name in args.only or recipes:
            train(name, args, tokenizer, accelerator)


if __name__ == "__main__":
    main()
