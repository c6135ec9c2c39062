"""Measure speculation along long texts of a real model: the seconds that each policy takes for each part of a text.

The demo's texts end after about 50 tokens. Every text here has as many tokens as the last window ends with: end tokens are forbidden. All
policies take turns at each prompt, and what is measured is stored prompt by prompt.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.loading import load_model, load_tokenizer
from hf_lossy_assist.cli._models import with_template
from hf_lossy_assist.drafters.base import Drafter
from hf_lossy_assist.tasks.prompts import read_prompts


Arms = Mapping[str, Mapping[str, Any]]  # more arguments of `generate`, by name; none: the target alone
WARM_UP = 32  # new tokens


@dataclass(frozen=True)
class LongPair:
    """A model that writes long texts, the drafter that was trained on its states, and a file of prompts; at most `tokens` of a text."""

    model: str
    drafter: str
    prompts: Path
    tokens: int | None = None

    def __str__(self) -> str:
        return f"{Path(self.model).name} with {Path(self.drafter).name}"


@dataclass
class AlongTexts:
    """Seconds of each window of each text, by arm; `windows`: the new tokens that they end with. `about`: the models."""

    windows: list[int]
    about: str = ""
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)


class Clock(BaseStreamer):
    """A streamer that notes when how many new tokens were there."""

    def __init__(self) -> None:
        self.moments: list[tuple[int, float]] = []
        self.prompt = True

    def put(self, value: torch.Tensor) -> None:
        count = 0 if self.prompt else self.moments[-1][0] + value.numel()
        self.moments.append((count, time.perf_counter()))
        self.prompt = False

    def end(self) -> None:
        pass

    def moment(self, tokens: int) -> float:
        """Return the moment at which there were as many new tokens, between two notes in proportion."""
        before = self.moments[0]
        for count, moment in self.moments:
            if count >= tokens:
                share = (tokens - before[0]) / max(count - before[0], 1)
                return before[1] + share * (moment - before[1])
            before = count, moment
        raise ValueError(f"the text has {before[0]} new tokens, {tokens} were expected")


def write_along(
    target: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    windows: Sequence[int],
    seed: int,
    how: Mapping[str, Any],
    temperature: float = 1.0,
) -> tuple[list[float], Any]:
    """Write one text to the end of the last window; return the seconds of each window, and the output. temperature 0: greedily."""
    torch.manual_seed(seed)
    clock, length = Clock(), {"max_new_tokens": windows[-1], "min_new_tokens": windows[-1]}
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = target.generate(**inputs, **length, **sampling, **how, streamer=clock, return_dict_in_generate=True)
    marks = [clock.moment(size) for size in (0, *windows)]
    return [end - start for start, end in zip(marks, marks[1:], strict=False)], out


def measure_along(
    target: PreTrainedModel,
    inputs: Sequence[Mapping[str, torch.Tensor]],
    windows: Sequence[int],
    arms: Arms,
    seed: int,
    tell: Callable[[str, int, list[float], Any], None],
    done: int = 0,
    temperature: float = 1.0,
) -> None:
    """Write a text for each of `inputs` but the first `done` with each arm, after a warm-up; `tell` gets arm, number, seconds and output."""
    for how in arms.values() if done < len(inputs) else ():
        write_along(target, inputs[0], [WARM_UP], seed, how, temperature)
    names = list(arms)
    for number in range(done, len(inputs)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            tell(name, number, *write_along(target, inputs[number], windows, seed + number, arms[name], temperature))


def load_long(pair: LongPair, texts: int) -> tuple[PreTrainedModel, Drafter, list[Mapping[str, torch.Tensor]]]:
    """Return the target, enabled, its drafter, and the first prompts as chats, tokenized."""
    target, tokenizer = load_model(pair.model, dtype=torch.float32).eval(), load_tokenizer(pair.model)
    prompts = read_prompts(pair.prompts, texts)
    if len(prompts) < texts:
        raise SystemExit(f"--long-prompts: {texts} are needed, and {pair.prompts} has {len(prompts)}")
    chats = with_template(tokenizer, prompts) if tokenizer.chat_template else prompts
    return (
        hla.enable(target),
        hla.load_drafter(pair.drafter),
        [tokenizer(chat, return_tensors="pt") for chat in chats],
    )


def long_run(run: Mapping[str, Any], pair: LongPair, file: Path) -> AlongTexts:
    """Measure a run of kind "long", or read or go on with what `file` has of it: a line for each prompt."""
    windows = [size for size in run["windows"] if pair.tokens is None or size <= pair.tokens]
    if len(windows) < 2:
        raise SystemExit(f"--long-tokens: expected {run['windows'][1]} or more, got {pair.tokens}")
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if len(rows) < run["texts"]:
        target, drafter, inputs = load_long(pair, run["texts"])
        arms = {name: {"lossy_policy": policy, "assistant_model": drafter} for name, policy in run["policies"].items()}
        row: dict[str, list[float]] = {}

        def tell(name: str, number: int, seconds: list[float], out: Any) -> None:
            row[name] = seconds
            if len(row) == len(arms):
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a") as stored:
                    stored.write(json.dumps(row) + "\n")
                rows.append(dict(row))
                row.clear()

        measure_along(target, inputs, windows, arms, run["seed"], tell, done=len(rows))
    return AlongTexts(windows, str(pair), {name: [row[name] for row in rows] for name in run["policies"]})
