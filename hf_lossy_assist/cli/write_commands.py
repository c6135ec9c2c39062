"""`hf-lossy generate` and `serve`: texts with the help of a draft model, of prompts and of requests."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

import hf_lossy_assist as hla

from .. import artifacts, evaluation, server, training
from .. import models as model_room
from ..server.settings import KEY, ServerSettings
from ..tasks.prompts import PromptFile, PromptText, list_errors, read_texts
from ..terminal import Bar, console, show, show_json
from ..training.processes import Processes
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, one_line, require
from . import _models, _options
from ._runs import check_out, find_workers


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluation.writer import TextWriter
    from ..stats.speculation import SpeculationStats
    from ._models import Served

DEMO_PROBLEMS = 3
RECORD = "generate.json"  # of a run with --out


@_options.command
def generate_command(
    *,
    models: _options.ModelOptions,
    policy: Annotated[
        str,
        "method, rule or stop by name, short form such as sprinter:head=DIR,threshold=0.7 or svip+fallback, JSON, "
        f"folder or Hub id; `{_options.TARGET}` for no draft",
    ] = "strict",
    prompt: Annotated[list[str] | None, "a prompt; repeatable (default: a few demo problems)"] = None,
    prompts: _options.PromptsFile = None,
    limit: Annotated[int | None, (1, MOST), "most prompts (default: all; of the demo 3, or one batch)"] = None,
    max_new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "most new tokens of each text"] = 128,
    sampling: _options.SamplingOptions,
    batch_size: Annotated[int, (1, MOST_ROWS), "texts that are written at a time"] = 1,
    job: _options.JobOptions,
    out: Annotated[Path | None, "folder to write, in parts of JSON lines"] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Continue prompts with the help of a draft model, and report how much it helped.

    `--drafter` also takes suffix, composite, auto, auto+FOLDER, or JSON with a drafter's name and parameters.

    Examples:

      hf-lossy generate --policy svip

      hf-lossy generate --model M --assistant D --prompts questions.jsonl --chat --policy svip+fallback --batch-size 8

      hf-lossy generate --model M --assistant D --policy svip --prompts questions.jsonl --ray auto --out texts
    """
    alone = policy == _options.TARGET
    if alone and models.drafter is not None:
        raise ValueError(f"--policy {_options.TARGET} has no draft: leave --drafter out")
    if out is None and (job.ray is not None or job.resume):
        raise ValueError("--ray and --resume are for texts in files: pass --out")
    chosen = None if alone else _models.read_policy(policy, models.demo)
    settings = {"max_new_tokens": max_new_tokens} | artifacts.conditions.select_sampling(asdict(sampling))
    if out is not None:
        if prompts is None or prompt or as_json or alone:
            raise ValueError(
                f"--out continues the file of --prompts: leave --prompt, --json and --policy {policy} out"
            )
        require("--out", "pyarrow", "pydantic")
        check_out(out, job.resume)
        recorded = settings | asdict(models) | {"policy": policy, "seed": sampling.seed, "chat": job.chat}
        recorded |= {"batch_size": batch_size}
        file = PromptFile.open(prompts, batch_size, limit)
        processes = find_workers(job, models, _models.load_without_drafter)
        loaded, drafter = _models.load_served(models, job)
        prepare = partial(_prepare, chosen, drafter, settings)
        _write_parts(file, loaded, prepare, out, recorded, batch_size, job.resume, processes)
        return
    texts, problems = _read_texts(prompt, prompts, models, job, sampling.seed, limit, batch_size)
    if alone and any(text.limits for text in texts):
        raise ValueError(f"--prompts: a prompt has limits of its own, which --policy {policy} does not observe")
    if alone and models.assistant is None:
        loaded, drafter = _models.load_target(models, job), None
    else:
        loaded, drafter = _models.load_served(models, job)
    target, settings = _prepare(chosen, drafter, settings, loaded)
    prompted = (
        _models.with_template(loaded[2], [text.prompt for text in texts])
        if job.chat
        else [text.prompt for text in texts]
    )
    began = time.perf_counter()
    if chosen is None:
        decoding = evaluation.writer.DecodingSettings(seed=sampling.seed, **settings)
        writer, stats = evaluation.writer.TextWriter(target, loaded[2], decoding), None
        outputs = list(_write_alone(writer, prompted, batch_size))
    else:
        requests = [{"prompt": text, **(read.limits or {})} for text, read in zip(prompted, texts, strict=True)]
        outputs, stats = _write_drafted(target, requests, settings, sampling.seed, batch_size)
    seconds = time.perf_counter() - began
    if not Processes.started().first:
        return
    if as_json:
        plain = policy if chosen is None else settings["lossy_policy"].to_dict() or "strict"
        speculation = None if stats is None else stats.to_dict()
        figures = {"policy": plain, "seconds": round(seconds, 4), "speculation": speculation, "outputs": outputs}
        show_json(asdict(models) | figures)
        return
    _show_outputs(outputs, problems)
    if stats is not None:
        console(highlight=False).print(stats.table())
    tokens = sum(len(output["token_ids"]) for output in outputs)
    show(f"policy {policy}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")


def _read_texts(
    prompt: list[str] | None, prompts: Path | None, models: _options.ModelOptions, loading: _options.LoadOptions,
    seed: int, limit: int | None, rows: int,
) -> tuple[list[PromptText], "list[hla.demo.Problem]"]:  # fmt: skip
    """Read the prompts and, if they are the demo's, their problems."""
    if prompt and prompts:
        raise ValueError("--prompt and --prompts are two sources: pass one of them")
    texts = [PromptText(line) for line in prompt or []][:limit] or (read_texts(prompts, limit) if prompts else [])
    problems = []
    if not texts and models.model is None:
        problems = hla.demo.problems(max(DEMO_PROBLEMS, rows) if limit is None else limit, seed)
        texts = [PromptText(problem.prompt) for problem in problems]
    if not texts:
        server.named_drafters.check_names(models.model, models.assistant, loading.dtype, loading.device)
        raise ValueError("nothing to continue: pass --prompt or --prompts with --model")
    if not all(text.prompt.strip() for text in texts):
        raise ValueError("a prompt is empty: every prompt needs some text")
    return texts, problems


def _prepare(
    chosen: "hla.LossyPolicy | None", drafter: "hla.Drafter | None", settings: dict[str, Any], loaded: "Served"
) -> "tuple[PreTrainedModel, dict[str, Any]]":
    """Return the target and the arguments of `generate`, for models that are loaded; `settings`: those that do not depend on them."""
    target, draft, tokenizer = loaded
    if chosen is None:  # plain `generate` of the target, whatever policy its files contain
        return target, settings
    hla.enable(target)
    lossy_policy = _models.with_companion(chosen, target, draft if drafter is None else drafter, tokenizer)
    drafting = {"assistant_model": draft, "drafter": drafter, "lossy_policy": lossy_policy}
    # Including the tokenizer, since heads and profiles refuse one that they were not made with.
    return target, settings | {name: value for name, value in drafting.items() if value is not None} | {
        "tokenizer": tokenizer
    }


def _write_drafted(
    target: "PreTrainedModel", requests: list[dict[str, Any]], settings: dict[str, Any], seed: int, rows: int
) -> "tuple[list[dict[str, Any]], SpeculationStats | None]":
    """Continue `rows` texts at a time, shared among processes; return each text, and statistics of all."""
    processes = Processes.started()
    numbers = processes.share(range(len(requests)))
    results = []
    with Bar(len(numbers), "writing", "prompts", quiet=len(numbers) <= rows or not processes.first) as bar:
        share = [requests[index] for index in numbers]
        many = hla.generate_many(target, share, max_rows=rows, seed=seed, numbers=numbers, **settings)
        for result in many:
            results.append(result)
            bar.to(len(results))
    stats = [shared for shared in processes.all(many.speculation) if shared is not None]
    written = sorted(
        (result for shared in processes.all(results) for result in shared), key=lambda result: result.index
    )
    outputs = [
        {
            "prompt": requests[result.index]["prompt"],
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "speculation": result.speculation.summary(result.speculation.rows[0], sources=True),
        }
        for result in written
    ]
    return outputs, hla.SpeculationStats.merge(stats)


def _write_alone(writer: "TextWriter", prompts: list[str], rows: int) -> Iterator[dict[str, Any]]:
    """Continue `rows` texts per call of Transformers' `generate`, which ends with the longest of them."""
    ends = model_room.introspection.end_tokens(writer.target.generation_config)
    arm = evaluation.arms.Arm("target", "target", write=partial(type(writer.target).generate, writer.target))
    for start in range(0, len(prompts), rows):
        for answer in writer.write(arm, prompts[start : start + rows], start, start):
            ids = answer.token_ids
            reason = "stop" if set(ids[-1:]) & ends else "length"
            output = {"prompt": prompts[answer.prompt], "text": answer.text, "token_ids": ids}
            yield output | {"finish_reason": reason, "speculation": None}


def _show_outputs(outputs: list[dict[str, Any]], problems: "list[hla.demo.Problem]") -> None:
    """Print prompts and continuations, and how many of the demo's problems they solve."""
    screen = console(highlight=False, soft_wrap=True)
    for output in outputs:
        screen.print(Text(output["prompt"].strip(), style="dim"))
        screen.print(output["text"], end="\n\n")
    if problems:
        pairs = zip(outputs, problems, strict=True)
        solved = sum(hla.demo.answer(output["text"]) == problem.answer for output, problem in pairs)
        cut = sum(output["finish_reason"] == "length" for output in outputs)
        note = f" ({cut} cut off before the end: a larger --max-new-tokens writes on)" if cut else ""
        screen.print(f"solved {solved} of {len(problems)} problems{note}")


def _write_parts(
    file: PromptFile,
    loaded: "Served",
    prepare: "Callable[[Served], tuple[PreTrainedModel, dict[str, Any]]]",
    out: Path,
    recorded: dict[str, Any],
    rows: int,
    resume: bool,
    processes: Processes,
) -> None:
    """Continue a file of prompts, `rows` at a time, into a folder with a file for each part. recorded: options that a resumed run must share."""
    from ..server import row_writer  # neither it nor pyarrow is needed otherwise

    source = {"rows": file.total, "rows of a part": file.rows, "sha256": artifacts.files.hash_file(file.local)}
    roles: dict[str, Any] = {"target": loaded[0], "draft": loaded[1]}
    facts = training.jobs.describe_run(recorded, roles, loaded[2], [source], file.path.name, "inputs")
    writers: list[row_writer.RowWriter] = []  # one in each process

    def make_writer(models: Any) -> row_writer.RowWriter:
        target, settings = prepare(models)
        settings = {"max_rows": rows, **settings}
        return row_writer.RowWriter(target, settings, seed=recorded["seed"], chat=recorded["chat"])

    def make(models: Any, index: int, tell: object) -> bytes:
        if not writers:
            if artifacts.files.hash_file(file.local) != source["sha256"]:
                raise ValueError(f"--prompts {file.path} is not the file that the job was started with")
            writers.append(make_writer(models))
        return "".join(
            json.dumps(row, ensure_ascii=False) + "\n" for row in writers[0].write(file.read(index))
        ).encode()

    make_writer(loaded)  # refuses settings that suit no row
    names = training.run_folder.name_units(len(file.begins), "jsonl")
    opened = training.run_folder.RunFolder.opened
    with opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        run.write_units(names, make, loaded, 0, ("writing", "parts"))
        processes.on_first(lambda: run.part.rename(out))
    if not processes.first:
        return
    errors = list_errors(out / name for name in names)
    why = f"have an `error`, the first {one_line(errors[0])}" if errors else ""
    if len(errors) == file.total:
        raise ValueError(f"{out}: no text of {file.total} prompts; all {why}")
    some = f"{file.total - len(errors)} of {file.total} prompts; the others {why}"
    show(f"{out}: texts of {some if errors else f'{file.total} prompts'}")


@_options.command
def serve_command(
    *,
    models: _options.ModelOptions,
    settings: ServerSettings,
    host: Annotated[str, "address to listen at; 0.0.0.0: all of this machine's"] = "127.0.0.1",
    port: Annotated[int, (0, 65535), "port to listen at; 0: a free one"] = 8000,
    loading: _options.LoadOptions,
) -> None:
    """Serve a pair of models behind OpenAI's API: /v1/completions and /v1/chat/completions, streamed or not, and /metrics for Prometheus.

    A request selects a policy by `lossy_policy` (in the openai client by `extra_body`). `--drafter` also takes suffix, composite and auto, which
    search a request's `prediction` and the earlier texts of its API key. Ctrl-C or SIGTERM ends the server after it has completed
    the current texts, within `--grace` seconds.

    Examples:

      hf-lossy serve

      hf-lossy serve --drafter auto

      hf-lossy serve --model M --assistant D --policies svip,strict,top_k:k=2+svip --batch-size 32 --port 8000
    """
    require("this command", "starlette", "uvicorn", "prometheus_client", "pydantic")
    if settings.api_key is None:
        settings = replace(settings, api_key=os.environ.get(KEY))
    chosen = server.routes.read_policies(settings.policies)
    loaded, drafter = _models.load_served(models, loading)
    name = settings.name_model(models.model)
    running = server.routes.make_server(settings, name, loaded, drafter, chosen)
    line = f"(policies: {', '.join(chosen)}); Ctrl-C ends it once all texts are written"
    try:
        server.http.listen(
            running.app(),
            running.bounds,
            running.worker.give_up,
            host,
            port,
            lambda url: show(f"{name} at {url} {line}"),
        )
    finally:
        if running.worker.is_alive():  # a forward is running, during which Python's exit would abort the process
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)
