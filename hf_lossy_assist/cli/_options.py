"""Options shared by commands, in groups; the decorator that makes a command of a function with groups; checks between options."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..setting_fields import Setting, read_setting
from ..validation import DEMO, EXIT, MOST, MOST_FACTOR, MOST_NEW_TOKENS, MOST_ROWS, SUFFIX, check_int, shown


DEMO_PROMPTS = 64  # of `--prompts demo` without --limit
INT8 = "int8"
TARGET = "target"  # `--policy target`: no draft

# In addition to the type: the bounds of a number, option names if they differ from the parameter's, and last the help. `command` makes options of
# these.
Model = Annotated[str | None, "target model: a folder or Hub id (default: the bundled demo)"]
DRAFTS = f"a folder or Hub id; or {EXIT}N, the target's first N layers, {SUFFIX}, or `{DEMO}`, the bundled draft"
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
Temperature = Annotated[float, (0.0, MOST_FACTOR), "sampling temperature"]
TopK = Annotated[int, (0, MOST), "sample from the k likeliest tokens; 0 for all tokens"]
TopP = Annotated[float, (0.0, 1.0), "sample from the likeliest tokens of this total probability; 1 for all tokens"]
Seed = Annotated[int, (0, MOST), "random seed, of sampling and of the demo problems"]
FitSeed = Annotated[int, (0, MOST), "random seed, of the held-out split and of training"]
Width = Annotated[int, (1, MOST), "hidden units of an mlp"]
BatchSize = Annotated[int, (1, MOST_ROWS), "prompts at a time"]
NewTokens = Annotated[int, (2, MOST_NEW_TOKENS), "most new tokens of each text"]
Out = Annotated[Path, "folder to write; must not exist"]
Trained = Annotated[
    str | None, f"a trained drafter in place of the draft model: a folder, a Hub id, or `{DEMO}`, the demo's"
]
OptionalOut = Annotated[Path | None, "folder to write; must not exist (default: nothing is written)"]
Resume = Annotated[bool, "--resume", "continue an interrupted run"]
AsJson = Annotated[bool, "--json", "print JSON and nothing else"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Names of the target and its draft."""

    model: Model = None
    assistant: Annotated[str | None, f"draft model: {DRAFTS} (default: that)"] = None
    drafter: Trained = None

    @property
    def demo(self) -> bool:
        """Return whether no model is named."""
        return self.model is self.assistant is self.drafter is None

    def check_learnable(self, drafters: bool = True) -> None:
        """Refuse a draft that computes nothing to learn from, and if `drafters` is False those on the target's states."""
        if self.drafter is not None and not drafters:
            raise ValueError("--drafter: this command needs a draft model: leave it out, and use svip or sv with it")
        if self.assistant == SUFFIX:
            raise ValueError(
                f"--assistant {SUFFIX} looks drafts up and computes nothing to learn from: pass a draft model"
            )


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Names of the target and of the drafts that are compared."""

    model: Model = None
    assistants: Annotated[list[str] | None, "--assistant", f"draft model: {DRAFTS}; repeatable"] = None
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

    def __post_init__(self) -> None:
        """Refuse sampling settings in greedy decoding, where they have no effect."""
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            raise ValueError("--temperature, --top-k and --top-p are for --do-sample: pass it, or leave them out")


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
class JobOptions(LoadOptions):
    """Settings of a job that runs models on prompts."""

    chat: Chat = False
    resume: Resume = False
    ray: Annotated[
        str | None, "do the work on a Ray cluster: its address, auto, or local for this machine's cores"
    ] = None


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Prepare a function for Typer: a parameter that is a dataclass becomes one option for each of its fields.

    A parameter's default, an instance of the dataclass, gives its fields' defaults. Numbers outside their bounds are refused.
    """
    groups: dict[str, Any] = {}
    settings: dict[str, tuple[Setting, object]] = {}  # with the default
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(hints[name]):
            settings[name] = read_setting(hints[name]), parameter.default
            continue
        group = groups[name] = hints[name]
        defaults = group() if parameter.default is parameter.empty else parameter.default
        types = get_type_hints(group, include_extras=True)
        settings |= {f.name: (read_setting(types[f.name]), getattr(defaults, f.name)) for f in fields(group)}

    def run(**arguments: object) -> None:
        values = {name: default for name, (_, default) in settings.items()} | arguments
        for name, (setting, _) in settings.items():
            setting.check(f"--{name.replace('_', '-')}", values[name])
        grouped = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()
        }
        function(**values, **grouped)

    keyword = inspect.Parameter.KEYWORD_ONLY
    types = {name: _as_option(setting) for name, (setting, _) in settings.items()}
    signature = inspect.Signature(
        [inspect.Parameter(name, keyword, default=settings[name][1], annotation=types[name]) for name in settings]
    )
    run.__signature__, run.__annotations__ = signature, types  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
    return run


def _as_option(setting: Setting) -> object:
    """Return Typer's form of a setting; an argument has it already."""
    if not isinstance(setting.texts[-1], str):
        return Annotated[setting.kind, setting.texts[-1]]
    return Annotated[setting.kind, typer.Option(*map(str, setting.texts[:-1]), help=setting.texts[-1])]


def check_source(prompts: str, model: str | None) -> None:
    """Refuse the demo's prompts or problems for other models."""
    if prompts == DEMO and model is not None:
        raise ValueError(
            "the demo's problems are for the demo models: name other prompts, or another task, with --model"
        )


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
