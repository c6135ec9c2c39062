"""What several commands share: their options, the checks between options, and the models that options name."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from ..tasks.prompts import PromptText as Text
from ..terminal import show
from ..validation import MOST_ROWS, check_int, one_line, shown
from .made_with import DEMO, place
from .overrides import override


DEMO_PROMPTS = 64  # of `--prompts demo` without --limit
INT8 = "int8"
TARGET = "target"  # `--policy target`: no draft

Model = Annotated[str | None, typer.Option(help="target model: a folder or Hub id (default: the bundled demo)")]
Assistant = Annotated[str | None, typer.Option(help="draft model: a folder or Hub id (default: the bundled demo)")]
Companion = Annotated[
    str | None,
    typer.Option(help=f"sv's companion model: a folder, a Hub id or {INT8} (the draft in int8) (default: the demo's)"),
]
Prompts = Annotated[str, typer.Option(help="JSON lines with `prompt` (or rows of GSM8K or Spec-Bench), or `demo`")]
Shots = Annotated[int, typer.Option(help="worked examples before each problem of gsm8k (0 to 8)")]
Chat = Annotated[bool, typer.Option("--chat", help="apply the tokenizer's chat template to each prompt")]
DType = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, or int8 (PyTorch's dynamic quantisation, on the CPU)")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes cuda where there is one")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="NAME=VALUE in place of the target's generation_config.json, such as num_beams=1; repeatable"
    ),
]
DoSample = Annotated[bool, typer.Option("--do-sample/--greedy", help="sample, or take the likeliest token each time")]
Temperature = Annotated[float, typer.Option(help="sampling temperature")]
TopK = Annotated[int, typer.Option(help="sample from the k likeliest tokens; 0 for all tokens")]
TopP = Annotated[
    float, typer.Option(help="sample from the likeliest tokens of this total probability; 1 for all tokens")
]
Seed = Annotated[int, typer.Option(help="random seed, of sampling and of the demo problems")]
FitSeed = Annotated[int, typer.Option(help="random seed, of the held-out split and of training")]
Width = Annotated[int | None, typer.Option(help="hidden units of an mlp (default: 64)")]
Out = Annotated[Path, typer.Option(help="folder to write; must not exist")]
Resume = Annotated[bool, typer.Option("--resume", help="continue an interrupted run")]
MaxHours = Annotated[float | None, typer.Option(help="end after so many hours; --resume goes on (default: never)")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]
Token = Annotated[str | None, typer.Option(help="access token of the Hub (default: the stored one, or HF_TOKEN)")]
Revision = Annotated[str | None, typer.Option(help="branch, tag or commit")]


def check_pair(model: str | None, assistant: str | None) -> None:
    """Both or neither: the demo's draft fits the demo's target alone."""
    if (model is None) != (assistant is None):
        given, missing = ("--model", "--assistant") if assistant is None else ("--assistant", "--model")
        raise ValueError(f"{given} needs {missing} beside it (without both, the demo models run)")


def check_prompts(prompts: str, model: str | None) -> None:
    """The demo's prompts are for the demo's models."""
    if prompts == DEMO and model is not None:
        raise ValueError("--prompts demo is for the demo models: pass a file of prompts with --model")


def check_sampling(do_sample: bool, temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings of sampling in greedy decoding, which has no use for them."""
    if not do_sample and (temperature, top_k, top_p) != (1.0, 0, 1.0):
        raise ValueError("--temperature, --top-k and --top-p are for --do-sample: pass it, or leave them out")


def batch_sizes(text: str) -> list[int]:
    """`--batch-size` where it may be several."""
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--batch-size: expected a number, or several with commas between them, got {shown(text)}"
        ) from None
    for size in sizes:
        check_int("--batch-size", size, 1, MOST_ROWS)
    return sizes


def width_of(head: str, width: int | None) -> dict[str, Any]:
    """`--width` as a setting, if it was given. Refuses it for a head without hidden units."""
    if width is not None and head != "mlp":
        raise ValueError(
            f"--width is for --head mlp, and this head is {one_line(head)}: leave it out, or pass --head mlp"
        )
    return {} if width is None else {"width": width}


def needs(extra: str, *modules: str) -> None:
    """Refuse in one line where an optional dependency is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"this command needs {', '.join(missing)}: pip install 'hf_lossy_assist[{extra}]'")


def open_endpoint(role: str, url: str | None, model: str | None, timeout: float) -> Any:
    """Connect to the server of --ROLE-url and --ROLE-model, role "target" or "judge"; it has answered once."""
    from ..tasks.endpoint import Endpoint

    if url is None or model is None:
        raise ValueError(
            f"this needs --{role}-url and --{role}-model: an OpenAI-compatible server and a model's name there"
        )
    endpoint = Endpoint(url, model, timeout=timeout)
    try:
        endpoint.check()
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def load(
    model: str | None, assistant: str | None, dtype: str, device: str, overrides: list[str] | None = None
) -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer as the options name them; the demo's where both are None. `overrides`: `--set`."""
    import torch

    from ..models.int8 import quantised
    from ..models.loading import load_model, load_tokenizer

    if device == "auto":  # under `accelerate launch` each process has its own
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, INT8: torch.float32}
    if dtype not in kinds:
        raise ValueError(f"--dtype: expected {', '.join(kinds)}, got {dtype!r}")
    if device.partition(":")[0] == "meta":
        raise ValueError(
            f"--device {device!r} holds no weights, so nothing can run there: expected cpu, cuda, cuda:1, …"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if dtype == INT8 and not device.startswith("cpu"):
        raise ValueError(f"--dtype {INT8} computes on the CPU alone, and --device is {device}: pass --device cpu")
    if model is None and assistant is None:
        models = hla.demo.load(kinds[dtype], device)
        target, draft = (quantised(m) if dtype == INT8 else m for m in (models.target, models.draft))
        override(target, overrides)
        return target, draft, models.tokenizer

    def read(source: str | None) -> Any:
        if source is None:
            return None
        model = load_model(source, dtype=kinds[dtype]).to(device).eval()
        return quantised(model) if dtype == INT8 else model

    source = model or str(hla.demo.FOLDER / "target")
    tokenizer = load_tokenizer(source, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if assistant is not None:
        _check_tokenizers(tokenizer, source, assistant)
        if place(assistant) == place(source):
            show(
                "remark: --assistant is --model, and a draft that costs what the target costs gains nothing: pass a smaller model",
                file=sys.stderr,
            )
    target, draft = read(source), read(assistant)
    override(target, overrides)
    return target, draft, tokenizer


def _check_tokenizers(tokenizer: Any, model: str, assistant: str) -> None:
    """Refuse a draft whose token ids mean other words, before weights are read. A draft without a tokenizer has the target's."""
    from ..models.identity import same_ids
    from ..models.loading import load_tokenizer

    try:
        its = load_tokenizer(assistant)
    except OSError:  # it has none, or there is no such model, which loading it says
        return
    if not same_ids(tokenizer, its):
        raise ValueError(
            f"--assistant {one_line(assistant)} has another tokenizer than --model {one_line(model)}: token ids mean other words; pass a draft "
            "of the target's family"
        )


def load_companion(companion: str | None, target: Any, draft: Any, tokenizer: Any) -> Any:
    """`--companion`, in the target's precision and place; the demo's where it is None."""
    from ..models.identity import same_ids
    from ..models.int8 import int8

    if companion is None:
        return hla.demo.load(target.dtype, target.device).companion
    if companion == INT8:
        if draft is None or isinstance(draft, hla.Drafter):
            raise ValueError(
                f"--companion {INT8} is the draft model in int8, and --drafter drafts without one: pass --assistant in its place"
            )
        return int8(draft)
    model, _, its = load(companion, None, str(target.dtype).removeprefix("torch."), str(target.device))
    if not same_ids(tokenizer, its):
        raise ValueError(f"--companion {companion} has another tokenizer than the target: token ids mean other words")
    return model


def chats(tokenizer: Any, prompts: list[str]) -> list[str]:
    """Prompts in the tokenizer's chat template, without the begin token that the tokenizer will add itself."""
    try:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in prompts
        ]
    except Exception as error:  # the template is a program of the model's, and may raise whatever it likes
        raise ValueError(
            f"--chat: the tokenizer's chat template failed ({type(error).__name__}: {one_line(error)}): leave --chat out, or use "
            "another tokenizer"
        ) from None
    begin = tokenizer.bos_token
    if begin and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        texts = [text.removeprefix(begin) for text in texts]
    return texts


def demo_texts(count: int, seed: int) -> list[Text]:
    """Demo problems, and their solutions, that neither the models were trained on nor a test uses."""
    return [Text(p.prompt, p.solution) for p in hla.demo.problems(count, seed, "calibration")]


def demo_source(seed: int) -> str:
    """How records name the demo problems."""
    return f"the demo task, calibration problems of seed {seed}"
