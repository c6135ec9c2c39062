"""`hf-lossy generate`: continue prompts with the help of a draft model."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import hf_lossy_assist as hla

from .. import artifacts, models, training
from ..tasks.prompts import PromptFile, PromptText, list_errors, read_texts
from ..terminal import Bar, show, show_json, streamer
from ..training.processes import Processes
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, one_line, require
from . import _models, _options, _printing
from ._runs import check_out, find_workers, hint_resume


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ._models import Served

DEMO_PROBLEMS = 3
RECORD = "generate.json"  # of a run with --out


@_options.command
def generate_command(
    *,
    models: _options.ModelOptions,
    policy: Annotated[
        str,
        f"method, rule or stop by name, short form such as sprinter:head=DIR,threshold=0.7, JSON, folder or Hub id; `{_options.TARGET}` for no draft",
    ] = "strict",
    fallback: Annotated[bool, "--fallback", "stop drafting while it does not pay"] = False,
    compile_rounds: Annotated[bool, "--compile", "compile the rounds; the first texts wait for it"] = False,
    prompt: Annotated[list[str] | None, "a prompt; repeatable (default: a few demo problems)"] = None,
    prompts: _options.PromptsFile = None,
    limit: Annotated[int | None, (1, MOST), "most prompts (default: all; of the demo 3, or one batch)"] = None,
    max_new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "most new tokens of each text"] = 128,
    sampling: _options.SamplingOptions,
    batch_size: Annotated[int, (1, MOST_ROWS), "texts that are written at a time"] = 1,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
    stream: Annotated[bool, "--stream", "print each text as it is written (batch size 1)"] = False,
    out: Annotated[Path | None, "folder to write, in parts of JSON lines"] = None,
    running: _options.RunOptions,
    ray: _options.Ray = None,
    as_json: _options.AsJson = False,
) -> None:
    """Continue prompts with the help of a draft model, and report how much it helped.

    `--drafter` also takes suffix, composite, auto, auto+FOLDER, or JSON with a drafter's name and parameters.

    Examples:

      hf-lossy generate --policy svip

      hf-lossy generate --model M --assistant D --prompts questions.jsonl --chat --policy svip --fallback --batch-size 8

      hf-lossy generate --policy sprinter:head=head,threshold=0.7

      hf-lossy generate --model M --assistant D --policy svip --prompts questions.jsonl --ray auto --out texts
    """
    sampling.check()
    alone = policy == _options.TARGET
    by_call = stream or alone or compile_rounds  # not by continuous batching
    if stream and (as_json or batch_size > 1):
        raise ValueError("--stream shows one text at a time: leave out --json and --batch-size")
    if alone and (fallback or models.drafter is not None):
        raise ValueError(f"--policy {_options.TARGET} has no draft: leave --fallback and --drafter out")
    if out is None and (ray is not None or running.resume):
        raise ValueError("--ray and --resume are for texts in files: pass --out")
    if out is not None and (prompts is None or prompt or as_json or by_call):
        raise ValueError(
            "--out continues a file: pass --prompts, and leave --prompt, --json, --stream, --compile and --policy target out"
        )
    chosen = None if alone else _models.read_policy(policy, models.demo)
    chosen = chosen.with_fallback() if chosen is not None and fallback else chosen
    settings: dict[str, Any] = {"cache_implementation": "static"} if compile_rounds else {}
    settings |= {"max_new_tokens": max_new_tokens} | artifacts.conditions.select_sampling(asdict(sampling))
    if out is not None:
        require("--out", "pyarrow", "pydantic")
        check_out(out, running.resume)
        recorded = settings | asdict(models) | {"policy": policy, "fallback": fallback}
        recorded |= {"seed": sampling.seed, "chat": chat, "batch_size": batch_size}
        assert prompts is not None
        file = PromptFile.open(prompts, batch_size, limit)
        processes = find_workers(ray, models, loading, _models.load_without_drafter)
        loaded, drafter = _models.load_served(models, loading)
        prepare = partial(_prepare, chosen, drafter, settings)
        _write_parts(file, loaded, prepare, out, recorded, batch_size, running.resume, processes)
        return
    read, problems = _read_texts(prompt, prompts, models.model, sampling.seed, limit, max(DEMO_PROBLEMS, batch_size))
    texts, limits = [text.prompt for text in read], [text.limits or {} for text in read]
    if any(limits) and by_call:
        raise ValueError(
            "--prompts: a prompt has limits of its own: leave --stream, --compile and --policy target out"
        )
    load = _models.load_target if alone and models.assistant is None else _models.load_served
    loaded, drafter = load(models, loading)
    target, settings = _prepare(chosen, drafter, settings, loaded)
    prompted = _models.with_template(loaded[2], texts) if chat else texts
    if by_call:
        written = _write_by_call(target, loaded[2], prompted, settings, sampling.seed, batch_size, stream)
    else:
        written = _write_in_flight(target, prompted, limits, settings, sampling.seed, batch_size)
    if not Processes.started().first:
        return
    if as_json:
        default = "demo/draft" if "assistant_model" in settings else None
        names: dict[str, object] = {
            "model": models.model or "demo/target",
            "assistant": default if alone else models.assistant or default,
        }
        names |= {} if models.drafter is None else {"drafter": models.drafter}
        names["policy"] = policy if chosen is None else settings["lossy_policy"].to_dict() or "strict"
        show_json(_printing.json_report(written, loaded[2], names))
        return
    _printing.show_outputs(written.outputs, loaded[2], problems, streamed=stream)
    _printing.show_report(written, policy)


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

    def make(models: Any, number: int, tell: object) -> bytes:
        if not writers:
            if artifacts.files.hash_file(file.local) != source["sha256"]:
                raise ValueError(f"--prompts {file.path} is not the file that the job was started with")
            writers.append(make_writer(models))
        rows = writers[0].write(file.read(number))
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()

    make_writer(loaded)  # refuses settings that suit no row
    names = training.run_folder.name_units(len(file.begins), "jsonl")
    opened = training.run_folder.RunFolder.opened
    with hint_resume(out), opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        run.write_units(names, make, loaded, 0, ("writing", "parts"))
        processes.on_first(lambda: run.part.rename(out))
    if not processes.first:
        return
    errors = list_errors(out / name for name in names)
    why = f"have an `error`, the first {one_line(errors[0])}" if errors else ""
    if len(errors) == file.total:
        raise ValueError(f"{out}: no text of {file.total} prompts; all {why}")
    written = (
        f"{file.total - len(errors)} of {file.total} prompts; the others {why}" if errors else f"{file.total} prompts"
    )
    show(f"{out}: texts of {written}")


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


def _write_in_flight(
    target: "PreTrainedModel",
    texts: list[str],
    limits: list[dict[str, object]],
    settings: dict[str, Any],
    seed: int,
    rows: int,
) -> _printing.GeneratedTexts:
    """Continue `rows` texts at a time; a finished text makes room for the next. `limits`: those of each text alone."""
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
    outputs = {number: output for shared in processes.all(outputs) for number, output in shared.items()}
    seconds = time.perf_counter() - began
    stats = [shared for shared in processes.all(many.speculation) if shared is not None]
    return _printing.GeneratedTexts(
        [outputs[number] for number in sorted(outputs)], seconds, hla.SpeculationStats.merge(stats)
    )


def _write_by_call(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    settings: dict[str, Any],
    seed: int,
    rows: int,
    stream: bool,
) -> _printing.GeneratedTexts:
    """Continue `rows` texts per call, which ends with the longest of them."""
    import torch

    torch.manual_seed(seed)
    outputs: list[_printing.GeneratedText] = []
    calls, began = [], time.perf_counter()
    ends = models.introspection.end_tokens(target.generation_config)
    with Bar(len(texts), "writing", "prompts", quiet=stream or len(texts) <= rows) as bar:
        for start in range(0, len(texts), rows):
            batch = texts[start : start + rows]
            inputs = tokenizer(batch, return_tensors="pt", padding=True).to(target.device)
            inputs.pop("token_type_ids", None)
            if stream:
                inputs["streamer"] = streamer(tokenizer, skip_prompt=True)
            out = target.generate(**inputs, **settings, return_dict_in_generate=True)
            stats = getattr(out, "speculation", None)
            calls += [stats] if stats is not None else []
            for i, padded in enumerate(out.sequences[:, inputs["input_ids"].shape[1] :].tolist()):
                row = None if stats is None else replace(stats, rows=[stats.rows[i]])
                length = next((j + 1 for j, token in enumerate(padded) if token in ends), len(padded))
                ids = padded[: length if row is None else row.num_new_tokens]
                outputs.append(_printing.GeneratedText(batch[i], ids, row, not set(ids[-1:]) & ends))
            bar.to(start + len(batch))
    seconds = time.perf_counter() - began
    return _printing.GeneratedTexts(outputs, seconds, hla.SpeculationStats.merge(calls) if calls else None)
