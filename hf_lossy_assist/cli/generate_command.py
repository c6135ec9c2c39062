"""`hf-lossy generate`: continue prompts with the help of a draft model."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import hf_lossy_assist as hla

from .. import artifacts, models, tasks, training
from ..tasks.prompts import PromptText, read_texts
from ..terminal import Bar, show, show_json, streamer
from ..training.processes import Processes
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, one_line, require
from . import _models, _options, _printing
from ._policies import Finish, PolicyOptions
from ._runs import check_out, find_workers, hint_resume


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ._models import Loaded

DEMO_PROBLEMS = 3
RECORD = "generate.json"  # of a run with --out


@_options.command
def generate_command(
    *,
    model: _options.Model = None,
    assistant: _options.Assistant = None,
    options: PolicyOptions,
    prompt: Annotated[list[str] | None, "a prompt; repeatable (default: a few demo problems)"] = None,
    prompts: _options.PromptsFile = None,
    limit: Annotated[int | None, (1, MOST), "most prompts (default: all; of the demo 3, or one batch)"] = None,
    max_new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "most new tokens of each text"] = 128,
    sampling: _options.SamplingOptions,
    batch_size: Annotated[int, (1, MOST_ROWS), "texts that are written at a time"] = 1,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
    stream: Annotated[bool, "--stream", "print each text as it is written (batch size 1)"] = False,
    out: Annotated[Path | None, "folder to write, in parts in the format of --prompts (JSON lines, Parquet)"] = None,
    running: _options.RunOptions,
    ray: _options.Ray = None,
    as_json: _options.AsJson = False,
) -> None:
    """Continue prompts with the help of a draft model, and report how much it helped.

    Examples:

      hf-lossy generate --policy svip

      hf-lossy generate --model M --assistant D --prompts questions.jsonl --chat --policy svip --fallback --batch-size 8

      hf-lossy generate --policy sprinter --head head --threshold 0.7

      hf-lossy generate --model M --assistant D --policy svip --prompts questions.jsonl --ray auto --out texts
    """
    sampling.check_ranges(": leave --do-sample out for greedy decoding")
    if stream and (as_json or batch_size > 1):
        raise ValueError("--stream shows one text at a time: leave out --json and --batch-size")
    if out is not None:
        shown = {"--stream": stream, "--json": as_json, "--prompt": prompt}
        source = _check_parts(out, running.resume, prompts, options, [name for name, given in shown.items() if given])
    elif ray is not None or running.resume:
        raise ValueError("--ray and --resume are for texts in files: pass --out")
    policy, drafter = options.policy, _models.read_drafter(options.drafter, options.policy, model, assistant)
    finish, parts = options.read(demo_models=model is None)
    models = _options.ModelOptions(model=model, assistant=assistant)
    if drafter is None:
        _models.check_parts(models, parts)
    static: dict[str, Any] = {"cache_implementation": "static"} if options.compile_rounds else {}
    settings = static | {"max_new_tokens": max_new_tokens} | artifacts.conditions.select_sampling(asdict(sampling))
    prepare = partial(_prepare, finish, drafter, settings)
    if out is not None:
        recorded = settings | asdict(options) | {"seed": sampling.seed, "chat": chat, "batch_size": batch_size}
        file, run = tasks.prompt_files.PromptFile.open(source, batch_size, limit), (batch_size, running.resume)
        processes = find_workers(ray, models, loading, _models.load_models)
        _write_parts(file, _models.load_models(models, loading), prepare, out, recorded, *run, processes)
        return
    read, problems = _read_texts(prompt, prompts, model, sampling.seed, limit, max(DEMO_PROBLEMS, batch_size))
    texts, limits = [text.prompt for text in read], [text.limits or {} for text in read]
    if any(limits) and batch_size > 1 and (stream or policy == _options.TARGET or options.compile_rounds):
        raise ValueError(
            "--prompts: a prompt has limits of its own, and a batch of fixed rows has one for all: pass --batch-size 1"
        )
    target, draft, tokenizer = _models.load_models(models, loading)
    settings = prepare((target, draft, tokenizer))[1]
    chosen = settings.get("lossy_policy")
    prompted = _models.with_template(tokenizer, texts) if chat else texts
    written = _write(target, tokenizer, prompted, limits, settings, sampling.seed, batch_size, stream)
    if not Processes.started().first:
        return
    _remark_on_companion(chosen, batch_size)
    if as_json:
        assisted = "assistant_model" in settings
        facts: dict[str, object] = {
            "model": model or "demo/target",
            "assistant": (assistant or "demo/draft") if assisted else None,
        }
        if options.drafter is not None:
            facts["drafter"] = options.drafter
        facts["policy"] = policy if chosen is None else chosen.to_dict() or "strict"
        show_json(_printing.json_report(written, tokenizer, facts))
        return
    _printing.show_outputs(written.outputs, tokenizer, problems, streamed=stream)
    _printing.show_report(written, policy)


def _prepare(
    finish: Finish, drafter: "hla.Drafter | None", settings: dict[str, Any], loaded: "Loaded"
) -> "tuple[PreTrainedModel, dict[str, Any]]":
    """Return the target and the arguments of `generate`, for models that are loaded; `settings`: those that do not depend on them."""
    target, draft, tokenizer = loaded
    chosen = finish(target, draft, tokenizer)
    if chosen is None:  # plain `generate` of the target, whatever policy its files contain
        return target, settings
    hla.enable(target)
    if drafter is not None and not (drafter.needs_assistant or drafter.takes_assistant):
        draft = None
    drafting = {"assistant_model": draft, "drafter": drafter, "lossy_policy": chosen}
    # Including the tokenizer, since heads and profiles refuse one that they were not made with.
    return target, settings | {name: value for name, value in drafting.items() if value is not None} | {
        "tokenizer": tokenizer
    }


def _check_parts(out: Path, resume: bool, prompts: Path | None, options: PolicyOptions, others: list[str]) -> Path:
    """Return the file of prompts; refuse options that do not go with files of texts. others: those that show texts, or name single ones."""
    require("--out", "pyarrow", "pydantic")
    check_out(out, resume)
    if prompts is None or others:
        given = f", not {others[0]}" if others else ""
        raise ValueError(f"--out writes files of texts for a file of prompts: pass --prompts{given}")
    if options.policy == _options.TARGET or options.compile_rounds:
        raise ValueError(f"--out writes texts in flight: leave --compile and --policy {_options.TARGET} out")
    return prompts


def _write_parts(
    file: "tasks.prompt_files.PromptFile",
    loaded: "Loaded",
    prepare: "Callable[[Loaded], tuple[PreTrainedModel, dict[str, Any]]]",
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
    if isinstance(loaded[1], hla.Drafter):  # it has no weights
        recorded, roles["draft"] = recorded | {"assistant": type(loaded[1]).__name__}, None
    facts = training.jobs.describe_run(recorded, roles, loaded[2], [source], file.path.name, "inputs")
    writers: list[row_writer.RowWriter] = []  # one in each process

    def make_writer(models: Any) -> row_writer.RowWriter:
        target, settings = prepare(models)
        settings = {"max_rows": rows, **settings}
        return row_writer.RowWriter(target, settings, seed=recorded["seed"], chat=recorded["chat"])

    def make(models: Any, number: int, tell: object) -> bytes:
        if not writers:
            if artifacts.files.hash_file(file.local) != source["sha256"]:
                raise ValueError(f"--prompts {file.path} is not the file that the job was started with")
            writers.append(make_writer(models))
        part = file.read(number)
        return file.encode(writers[0].write(part) if isinstance(part, list) else writers[0].write_table(part))

    row_writer.refuse_columns(file.columns)
    make_writer(loaded)  # refuses settings that suit no row
    names = training.run_folder.name_units(len(file.begins), file.path.suffix[1:])
    opened = training.run_folder.RunFolder.opened
    with hint_resume(out), opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        run.write_units(names, make, loaded, 0, ("writing", "parts"))
        processes.on_first(lambda: run.part.rename(out))
    if not processes.first:
        return
    count, first = file.count_errors(out / name for name in names)
    why = "" if first is None else f"; the others have an `error`, the first {one_line(first)}"
    if count == file.total:
        raise ValueError(f"{out}: no text of {file.total} prompts; all have an `error`, the first {one_line(first)}")
    show(f"{out}: texts of {f'{file.total - count} of ' if count else ''}{file.total} prompts{why}")


def _read_texts(
    prompt: list[str] | None, prompts: Path | None, model: str | None, seed: int, limit: int | None, usual: int
) -> tuple[list[PromptText], "list[hla.demo.Problem]"]:
    """Read the prompts and, if they are the demo's, their problems; usual: number of demo problems without a limit."""
    if prompt and prompts:
        raise ValueError("--prompt and --prompts are two sources: pass one of them")
    texts = [PromptText(text) for text in prompt or []][:limit] or (read_texts(prompts, limit) if prompts else [])
    problems = [] if texts or model is not None else hla.demo.problems(usual if limit is None else limit, seed)
    texts = texts or [PromptText(p.prompt) for p in problems]
    if not texts:
        raise ValueError("nothing to continue: pass --prompt or --prompts with --model")
    if not all(text.prompt.strip() for text in texts):
        raise ValueError("a prompt is empty: every prompt needs some text")
    return texts, problems


def _write(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    limits: list[dict[str, object]],
    settings: dict[str, Any],
    seed: int,
    rows: int,
    stream: bool,
) -> _printing.GeneratedTexts:
    """Continue each text, `rows` at a time. `limits`: those of each text alone; settings: arguments of `generate`."""
    import torch

    torch.manual_seed(seed)
    if stream or "lossy_policy" not in settings or "cache_implementation" in settings:
        return _in_batches(target, tokenizer, texts, limits, settings, rows, stream)  # compiled rounds keep their rows
    return _in_flight(target, texts, limits, settings, seed, rows)


def _in_flight(
    target: "PreTrainedModel",
    texts: list[str],
    limits: list[dict[str, object]],
    settings: dict[str, Any],
    seed: int,
    rows: int,
) -> _printing.GeneratedTexts:
    """Continue `rows` texts at a time; a finished text makes room for the next."""
    processes = Processes.started()
    numbers = processes.share(range(len(texts)))
    outputs: dict[int, _printing.GeneratedText] = {}
    began, few = time.perf_counter(), len(numbers) <= rows
    with Bar(len(numbers), "writing", "prompts", quiet=few or not processes.first) as bar:
        share = [{"prompt": texts[number], **limits[number]} for number in numbers]
        many = hla.generate_many(target, share, max_rows=rows, seed=seed, numbers=numbers, **settings)
        for done, result in enumerate(many, 1):
            cut = result.finish_reason == "length"
            outputs[result.index] = _printing.GeneratedText(
                texts[result.index], result.token_ids, result.speculation, cut
            )
            bar.to(done)
    outputs = {number: output for part in processes.all(outputs) for number, output in part.items()}
    seconds = time.perf_counter() - began
    stats = [part for part in processes.all(many.speculation) if part is not None]
    return _printing.GeneratedTexts(
        [outputs[number] for number in sorted(outputs)], seconds, hla.SpeculationStats.merge(stats)
    )


def _in_batches(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    limits: list[dict[str, object]],
    settings: dict[str, Any],
    rows: int,
    stream: bool,
) -> _printing.GeneratedTexts:
    """Continue `rows` texts per call, which ends with the longest of them."""
    import torch

    from ..tensors import fork_random

    outputs: list[_printing.GeneratedText] = []
    calls, seconds, ends = [], 0.0, models.introspection.end_tokens(target.generation_config)
    with Bar(len(texts), "writing", "prompts", quiet=stream or len(texts) <= rows) as bar:
        for start in range(0, len(texts), rows):
            batch = texts[start : start + rows]
            inputs = tokenizer(batch, return_tensors="pt", padding=True).to(target.device)
            inputs.pop("token_type_ids", None)
            if stream:
                inputs["streamer"] = streamer(tokenizer, skip_prompt=True)
            began = time.perf_counter()
            of_one = dict(limits[start])  # with batch size 1; otherwise there are none
            if "stop_strings" in of_one:
                of_one["tokenizer"] = tokenizer
            seed = of_one.pop("seed", None)
            if "lossy_policy" not in settings:
                of_one.pop("hints", None)  # nothing drafts
            # Later texts must not depend on the seed of this one.
            with nullcontext() if seed is None else fork_random(target.device):
                if seed is not None:
                    torch.manual_seed(seed)
                out = target.generate(**inputs, **settings | of_one, return_dict_in_generate=True)
            seconds += time.perf_counter() - began
            stats = getattr(out, "speculation", None)
            calls += [stats] if stats is not None else []
            new = out.sequences[:, inputs["input_ids"].shape[1] :]
            for i, padded in enumerate(new.tolist()):
                row = None if stats is None else replace(stats, rows=[stats.rows[i]])
                length = next((j + 1 for j, token in enumerate(padded) if token in ends), len(padded))
                ids = padded[: length if row is None else row.num_new_tokens]
                outputs.append(_printing.GeneratedText(batch[i], ids, row, not set(ids[-1:]) & ends))
            bar.to(start + len(batch))
    return _printing.GeneratedTexts(outputs, seconds, hla.SpeculationStats.merge(calls) if calls else None)


def _remark_on_companion(policy: "hla.LossyPolicy | None", rows: int) -> None:
    """Print a remark if `sv` does not use its companion because the profile expects no gain with this number of rows."""
    verify = None if policy is None else policy.filter
    profile = getattr(verify, "profile", None)
    if profile is not None and getattr(verify, "fallback", False) and not profile.worthwhile(rows):
        show(
            f"remark: sv is strict acceptance here: its profile expects no gain from a companion at batch size {rows} (hf-lossy profile)",
            file=sys.stderr,
        )
