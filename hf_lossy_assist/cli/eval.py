"""`hf-lossy eval`: EleutherAI's lm-eval, with a policy and without."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.table import Column, Table

import hf_lossy_assist as hla

from ..terminal import console, show, show_json
from ..validation import MOST_ROWS, check_int
from .drafters import Drafter, check_draft, load_made
from .made_with import folder_of, models_from, parts_in, sources_in
from .options import TARGET, AsJson, Assistant, Device, DType, Model, Overrides, needs


DEMO = "demo"  # a task that is written for the run


def evaluate_tasks(
    tasks: Annotated[
        str,
        typer.Option(
            help="names of lm-eval's tasks, with commas between them; demo: word problems of the demo models"
        ),
    ] = DEMO,
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    policy: Annotated[
        str, typer.Option(help="method, rule or stop by name, short form, JSON, file or folder")
    ] = "svip",
    include_path: Annotated[Path | None, typer.Option(help="a folder of task files beside lm-eval's own")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="examples in each prompt (default: the task's)")] = None,
    limit: Annotated[int | None, typer.Option(help="most problems of each task (default: all)")] = None,
    batch_size: Annotated[int, typer.Option(help="prompts at a time")] = 1,
    gen_kwargs: Annotated[str | None, typer.Option(help="as lm-eval's: max_gen_toks=256,temperature=0")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="apply the tokenizer's chat template")] = False,
    dtype: DType = "float32",
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run tasks of EleutherAI's lm-eval with the target alone and with a policy, and show both figures.

    Examples:

      hf-lossy eval

      hf-lossy eval --model M --assistant D --tasks gsm8k --policy svip --limit 50 --batch-size 8 --chat
    """
    needs("lm-eval", "lm_eval")
    check_draft(model, assistant, drafter)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    if limit is not None:
        check_int("--limit", limit, 1)
    if num_fewshot is not None:
        check_int("--num-fewshot", num_fewshot, 0)
    if include_path is not None and not include_path.is_dir():
        raise FileNotFoundError(f"--include-path: there is no folder {str(include_path)!r}")
    if policy == TARGET:  # the column of the target alone would have its figures
        raise ValueError(f"--policy {TARGET} is what the target alone is called: write ./{TARGET} for the folder")
    chosen, names = hla.as_policy(policy), [name.strip() for name in tasks.split(",")]
    from ..demo.lm_eval_task import write_task
    from ..evaluation.harness import evaluate as evaluated
    from ..evaluation.harness import make_models as models
    from ..evaluation.harness import make_task_manager as manager_of

    with TemporaryDirectory() as written:
        if DEMO in names and include_path is None:
            write_task(include_path := Path(written), DEMO)
        manager = manager_of(names, include_path)
        made = models_from(model, assistant, [*sources_in(parts_in(chosen)), *folder_of(policy)], drafter)
        target, draft, tokenizer = load_made(made, dtype, device, overrides)
        common = {"tokenizer": tokenizer, "batch_size": batch_size}
        settings: dict[str, Any] = {
            "limit": limit, "num_fewshot": num_fewshot, "gen_kwargs": gen_kwargs, "apply_chat_template": chat
        }  # fmt: skip
        found, seconds = {}, {}
        plain, lossy = models()
        for name, its in ((TARGET, plain(target, **common)), (policy, lossy(target, draft, chosen, **common))):
            found[name] = evaluated(its, names, manager, **settings)
            seconds[name] = its.seconds
    if as_json:
        show_json({"results": found, "seconds": seconds, "lossless": chosen.lossless})
        return
    shown = Table(
        *(Column(name, overflow="fold") for name in ("task", "figure", *found)), box=None, padding=(0, 2, 0, 0)
    )
    for task, figures in found[TARGET].items():
        for metric in figures:
            shown.add_row(task, metric, *(f"{its[task].get(metric, float('nan')):.4f}" for its in found.values()))
    console(highlight=False).print(shown)
    kind = "lossless" if chosen.lossless else "lossy"
    show(
        f"{policy} is {kind}; seconds of generating: "
        + ", ".join(f"{name} {took:.1f}" for name, took in seconds.items())
    )
