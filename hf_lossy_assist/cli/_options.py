"""Options shared by commands, in groups; the decorator that makes a command of a function with groups; checks between options."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ..validation import (
    DEMO,
    EXIT,
    MOST,
    MOST_NEW_TOKENS,
    MOST_ROWS,
    SUFFIX,
    check_int,
    check_number,
    check_positive,
    one_line,
    shown,
)


DEMO_PROMPTS = 64  # of `--prompts demo` without --limit
INT8 = "int8"
TARGET = "target"  # `--policy target`: no draft

# In addition to the type: the bounds of a number, option names if they differ from the parameter's, and last the help. `command` makes options of
# these.
Model = Annotated[str | None, "target model: a folder or Hub id (default: the bundled demo)"]
DRAFTS = f"a folder or Hub id; or {EXIT}N, the target's first N layers, {SUFFIX}, or `{DEMO}`, the bundled draft"
Assistant = Annotated[str | None, f"draft model: {DRAFTS} (default: that)"]
Companion = Annotated[
    str | None, f"sv's companion model: a folder, a Hub id or {INT8} (the draft in int8) (default: the demo's)"
]
Prompts = Annotated[str, "JSON lines with `prompt` (or rows of GSM8K or Spec-Bench), or `demo`"]
PromptsFile = Annotated[
    Path | None,
    "JSON lines with `prompt` (or rows of GSM8K or Spec-Bench), a .txt with a prompt per line, or hf://datasets/ORG/NAME/FILE",
]
Data = Annotated[Path | None, "the problems of --task (default: a package's, or the Hub's)"]
Shots = Annotated[int, "worked examples before each problem of gsm8k (0 to 8)"]
Chat = Annotated[bool, "--chat", "apply the tokenizer's chat template to each prompt"]
DType = Annotated[str, "float32, bfloat16, float16, auto (the files'), or int8 (weights in int8, on the CPU)"]
Device = Annotated[str, "cpu, cuda, cuda:1, …; auto takes cuda where there is one"]
Temperature = Annotated[float, "sampling temperature"]
TopK = Annotated[int, (0, MOST), "sample from the k likeliest tokens; 0 for all tokens"]
TopP = Annotated[float, "sample from the likeliest tokens of this total probability; 1 for all tokens"]
Seed = Annotated[int, (0, MOST), "random seed, of sampling and of the demo problems"]
FitSeed = Annotated[int, "random seed, of the held-out split and of training"]
Width = Annotated[int | None, "hidden units of an mlp (default: 64)"]
BatchSize = Annotated[int, (1, MOST_ROWS), "prompts at a time"]
NewTokens = Annotated[int, (2, MOST_NEW_TOKENS), "most new tokens of each text"]
Timeout = Annotated[
    float, (0.001, 86400.0), "seconds to wait for a server's reply, or of its silence, before it is asked again"
]
Out = Annotated[Path, "folder to write; must not exist"]
Trained = Annotated[
    str | None, f"a trained drafter in place of the draft model: a folder, a Hub id, or `{DEMO}`, the demo's"
]
OptionalOut = Annotated[Path | None, "folder to write; must not exist (default: nothing is written)"]
Ray = Annotated[str | None, "do the work on a Ray cluster: its address, auto, or local for this machine's cores"]
AsJson = Annotated[bool, "--json", "print JSON and nothing else"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Names of the target and its draft."""

    model: Model = None
    assistant: Assistant = None
    drafter: Trained = None

    @property
    def demo(self) -> bool:
        """Return whether no model is named."""
        return self.model is self.assistant is self.drafter is None

    def format(self) -> str:
        """Return the options as typed on a command line."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"--{name} {value}" for name, value in given if value is not None)

    def check_learnable(self) -> None:
        """Refuse a draft that computes nothing, from which nothing can be learnt."""
        if self.assistant == SUFFIX:
            raise ValueError(
                f"--assistant {SUFFIX} looks drafts up and computes nothing to learn from: pass a draft model"
            )


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Names of the target and of the drafts that are compared."""

    model: Model = None
    assistants: Annotated[
        list[str] | None,
        "--assistant",
        f"draft model: {DRAFTS}; repeatable",
    ] = None
    drafter: Trained = None

    @property
    def demo(self) -> bool:
        """Return whether the target is the demo's."""
        return self.model is self.drafter is None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Decoding settings."""

    do_sample: Annotated[bool, "--do-sample/--greedy", "sample, or take the likeliest token each time"] = False
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    seed: Seed = 0

    def check(self) -> None:
        """Refuse sampling settings in greedy decoding, where they have no effect."""
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            raise ValueError("--temperature, --top-k and --top-p are for --do-sample: pass it, or leave them out")

    def check_ranges(self, hint: str = "") -> None:
        """Refuse values that `generate` would refuse as well. hint: what to do about an invalid --top-p."""
        check_positive("--top-p", self.top_p, 1.0, hint=hint)
        check_positive("--temperature", self.temperature)
        self.check()


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Settings for loading models."""

    dtype: DType = "float32"
    device: Device = "auto"
    overrides: Annotated[
        list[str] | None,
        "--set",
        "NAME=VALUE in place of the target's generation_config.json, such as num_beams=1; repeatable",
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of a long run."""

    resume: Annotated[bool, "--resume", "continue an interrupted run"] = False


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Prepare a function for Typer: a parameter that is a dataclass becomes one option for each of its fields.

    A parameter's default, an instance of the dataclass, gives its fields' defaults. Numbers outside their bounds are refused.
    """
    groups: dict[str, Any] = {}
    options: list[tuple[str, object, object]] = []  # name, annotation, default
    checks: dict[str, Callable[[object], None]] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(hints[name]):
            options.append((name, _as_option(name, hints[name], checks), parameter.default))
            continue
        group = groups[name] = hints[name]
        defaults = group() if parameter.default is parameter.empty else parameter.default
        each = get_type_hints(group, include_extras=True)
        options += [
            (f.name, _as_option(f.name, each[f.name], checks), getattr(defaults, f.name)) for f in fields(group)
        ]

    def run(**given: object) -> None:
        bound = signature.bind(**given)
        bound.apply_defaults()
        values = bound.arguments
        for name, check in checks.items():
            if values[name] is not None:
                check(values[name])
        grouped = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()
        }
        function(**values, **grouped)

    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([inspect.Parameter(n, keyword, default=d, annotation=a) for n, a, d in options])
    run.__signature__, run.__annotations__ = signature, {n: a for n, a, _ in options}  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
    return run


def _as_option(name: str, annotation: object, checks: dict[str, Callable[[object], None]]) -> object:
    """Return Typer's form of an annotation; add the check of its bounds to `checks`."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *texts = get_args(annotation)
    if not isinstance(texts[-1], str):  # Typer's form already
        return annotation
    if isinstance(texts[0], tuple):
        low, high = texts.pop(0)
        check = check_int if int in (kind, *get_args(kind)) else check_number
        checks[name] = lambda value: check(f"--{name.replace('_', '-')}", value, low, high)
    return Annotated[kind, typer.Option(*texts[:-1], help=texts[-1])]


def check_prompts(prompts: str, model: str | None) -> None:
    """Refuse the demo's prompts for other models."""
    if prompts == DEMO and model is not None:
        raise ValueError("--prompts demo is for the demo models: pass a file of prompts with --model")


def read_batch_sizes(text: str) -> list[int]:
    """Read a `--batch-size` that may have several values."""
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--batch-size: expected a number, or several with commas between them, got {shown(text)}"
        ) from None
    for size in sizes:
        check_int("--batch-size", size, 1, MOST_ROWS)
    return sizes


def read_width(head: str, width: int | None) -> dict[str, Any]:
    """Return `--width` as a setting, if it was given; refuse it for a head without hidden units."""
    if width is not None and head != "mlp":
        raise ValueError(
            f"--width is for --head mlp, and this head is {one_line(head)}: leave it out, or pass --head mlp"
        )
    return {} if width is None else {"width": width}
