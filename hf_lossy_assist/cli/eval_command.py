"""`hf-lossy eval`: EleutherAI's lm-eval, with a policy and without."""

import logging
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from rich.table import Column, Table

import hf_lossy_assist as hla

from .. import evaluation, stats
from ..terminal import console, show, show_json
from ..validation import MOST, require
from . import _options
from ._models import check_parts, load_models


@_options.command
def eval_command(
    *,
    tasks: Annotated[
        str, "names of lm-eval's tasks, with commas between them; demo: word problems of the demo models"
    ] = _options.DEMO,
    models: _options.ModelOptions,
    policy: Annotated[str, "method, rule or stop by name, short form, JSON, file or folder"] = "svip",
    include_path: Annotated[Path | None, "a folder of task files beside lm-eval's own"] = None,
    num_fewshot: Annotated[int | None, (0, MOST), "examples in each prompt (default: the task's)"] = None,
    limit: Annotated[int | None, (1, MOST), "most problems of each task (default: all)"] = None,
    batch_size: _options.BatchSize = 1,
    gen_kwargs: Annotated[str | None, "as lm-eval's: max_gen_toks=256,temperature=0"] = None,
    chat: _options.Chat = False,
    loading: _options.LoadOptions,
    as_json: _options.AsJson = False,
) -> None:
    """Run tasks of EleutherAI's lm-eval with the target alone and with a policy, and show both results.

    Examples:

      hf-lossy eval

      hf-lossy eval --model M --assistant D --tasks gsm8k --policy svip --limit 50 --batch-size 8 --chat
    """
    require("this command", "lm_eval")
    models.check()
    if include_path is not None and not include_path.is_dir():
        raise FileNotFoundError(f"--include-path: there is no folder {str(include_path)!r}")
    if policy == _options.TARGET:  # else the column of the target alone would show its figures
        raise ValueError(
            f"--policy {_options.TARGET} is what the target alone is called: write ./{_options.TARGET} for the folder"
        )
    chosen, names = hla.as_policy(policy), [name.strip() for name in tasks.split(",")]
    from ..demo.lm_eval_task import write_task
    from ..models.introspection import dtype_of

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its remarks are about what this command does

    with TemporaryDirectory() as written:
        if _options.DEMO in names and include_path is None:
            write_task(include_path := Path(written), _options.DEMO)
        manager = evaluation.lm_eval_models.make_task_manager(names, include_path)
        check_parts(models, chosen.saved().values())
        target, draft, tokenizer = load_models(models, loading)
        settings: dict[str, object] = {
            "limit": limit,
            "num_fewshot": num_fewshot,
            "gen_kwargs": gen_kwargs,
            "apply_chat_template": chat,
        }
        found, seconds = {}, {}
        timed, _ = evaluation.lm_eval_models.make_models()
        standing = hla.using(target, draft, chosen, strict=True, tokenizer=tokenizer)
        for name, speculating in ((_options.TARGET, nullcontext()), (policy, standing)):
            with speculating:
                model = timed(target, tokenizer=tokenizer, batch_size=batch_size)
                found[name] = evaluation.lm_eval_models.evaluate(model, names, manager, **settings)
            seconds[name] = model.seconds
    if as_json:
        show_json({"results": found, "seconds": seconds, "lossless": chosen.lossless})
        return
    columns = (Column(name, overflow="fold") for name in ("task", "figure", *found))
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for task, figures in found[_options.TARGET].items():
        for metric in figures:
            cells = (by_task[task].get(metric, float("nan")) for by_task in found.values())
            table.add_row(task, metric, *(f"{cell:.4f}" for cell in cells))
    console(highlight=False).print(table)
    guarantee = stats.speculation.name_guarantee(chosen.lossless, dtype_of(target))
    took = ", ".join(f"{name} {duration:.1f}" for name, duration in seconds.items())
    show(f"{policy} is {guarantee}; seconds of generating: {took}")
