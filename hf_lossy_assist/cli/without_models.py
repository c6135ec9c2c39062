"""Commands without models: `policies` and `suggest` list what exists, `push` and `pull` share folders on the Hub."""

import inspect
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill, indent
from typing import Annotated

import typer
from rich.text import Text

from .. import policy
from ..registry import KINDS, PACKAGE, REQUIRED, Entry, list_entries
from ..terminal import console, show, show_json
from ..validation import nearest
from . import _options


Token = Annotated[str | None, "access token of the Hub (default: the stored one, or HF_TOKEN)"]
Revision = Annotated[str | None, "branch, tag or commit"]

MODEL, EAGLE, PICKLE, DSPARK = "draft model", "EAGLE-3 drafter", "EAGLE-3 drafter, a pickle", "DSpark drafter"
PARALLEL, DFLASH = "parallel draft model (PARD)", "DFlash drafter"
DEEPSPEC = "https://github.com/deepseek-ai/DeepSpec"
LM_STUDIO = "https://lmstudio.ai/docs/advanced/speculative-decoding"
MISTRAL_RS = "https://ericlbuehler.github.io/mistral.rs/guides/perf/speculative-decoding/"
VLLM = "https://docs.vllm.ai/en/v0.5.1/models/spec_decode.html"
HUB = "https://huggingface.co/"
PARD = "https://github.com/AMD-AGI/PARD"
Z_LAB = "https://github.com/z-lab/dflash"


# A pattern for the target's name; the draft, with parts of that name; what it is; the source.
_CHAT = r"(-Instruct)?"
_TABLE: Sequence[tuple[str, str, str, str]] = (
    (rf"Llama-3\.[13]-(?:8|70|405)B{_CHAT}", r"meta-llama/Llama-3.2-1B\1", MODEL, LM_STUDIO),
    (r"Llama-3\.(?:1-8|3-70)B-Instruct", "amd/PARD-Llama-3.2-1B", PARALLEL, PARD),
    (r"Llama-3\.1-8B-Instruct", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", EAGLE, ""),
    (r"Llama-3\.3-70B-Instruct", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", EAGLE, ""),
    (r"Llama-3\.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", PICKLE, ""),
    (r"Llama-3\.3-70B-Instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", PICKLE, ""),
    (r"Vicuna-13B-v1\.3", "yuhuili/EAGLE3-Vicuna1.3-13B", PICKLE, ""),
    (r"(?:Llama-2-(?:7|13|70)b|Vicuna-(?:7|13|33)B)", "JackFram/llama-68m", MODEL, ""),
    (r"Llama-2-(?:13|70)b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", MODEL, "https://github.com/jzhang38/TinyLlama"),
    (rf"Qwen2\.5-(?:3|7|14|32|72)B{_CHAT}", r"Qwen/Qwen2.5-0.5B\1", MODEL, LM_STUDIO),
    (r"Qwen2\.5-7B-Instruct", "amd/PARD-Qwen2.5-0.5B", PARALLEL, PARD),
    (rf"Qwen2\.5-Coder-(?:1\.5|3|7|14|32)B{_CHAT}", r"Qwen/Qwen2.5-Coder-0.5B\1", MODEL, ""),
    (r"DeepSeek-R1-Distill-Qwen-(?:7|14|32)B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", MODEL, LM_STUDIO),
    (r"DeepSeek-R1-Distill-Qwen-7B", "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B", PARALLEL, PARD),
    (r"Qwen3-(?:4|8|14|32)B", "Qwen/Qwen3-0.6B", MODEL, MISTRAL_RS),
    (r"Qwen3-8B", "amd/PARD-Qwen3-0.6B", PARALLEL, PARD),
    (r"Qwen3-(8|14|32)B", r"RedHatAI/Qwen3-\1B-speculator.eagle3", EAGLE, ""),
    (r"Qwen3-(4|8|14)B", r"deepseek-ai/dspark_qwen3_\1b_block7", DSPARK, DEEPSPEC),
    (r"Qwen3-(4|8)B", r"z-lab/Qwen3-\1B-DFlash-b16", DFLASH, Z_LAB),
    (r"Qwen3-Coder-(30B-A3B|Next)(?:-Instruct)?", r"z-lab/Qwen3-Coder-\1-DFlash", DFLASH, Z_LAB),
    (r"Qwen3\.5-(?:4|9|27)B", "Qwen/Qwen3.5-0.8B", MODEL, ""),
    (r"Qwen3\.(5-4B|5-9B|5-122B-A10B|[56]-27B|[56]-35B-A3B)", r"z-lab/Qwen3.\1-DFlash", DFLASH, Z_LAB),
    (r"Qwen3\.8-27B", "z-lab/Qwen3.8-27B-DFlash2", DFLASH, ""),
    (r"gpt-oss-(20|120)b", r"RedHatAI/gpt-oss-\1b-speculator.eagle3", EAGLE, ""),
    (r"gpt-oss-(20|120)b", r"z-lab/gpt-oss-\1b-DFlash", DFLASH, Z_LAB),
    (r"gemma-2-(?:9|27)b(-it)?", r"google/gemma-2-2b\1", MODEL, ""),
    (r"SmolLM2-1\.7B(-Instruct)?", r"HuggingFaceTB/SmolLM2-135M\1", MODEL, ""),
    (r"pythia-(?:1\.4|2\.8|6\.9|12)b", "EleutherAI/pythia-160m", MODEL, ""),
    (r"opt-(?:1\.3|2\.7|6\.7|13|30|66)b", "facebook/opt-125m", MODEL, VLLM),
)


@_options.command
def policies_command(
    *,
    name: Annotated[str | None, typer.Argument(help="show this one alone, with all that is known of it")] = None,
    kind: Annotated[str | None, f"list only these: {', '.join(KINDS[:-1])} or {KINDS[-1]}"] = None,
    as_json: _options.AsJson = False,
) -> None:
    """List every method, rule, stop, filter and drafter with its guarantee; of one, show all.

    Examples:

      hf-lossy policies

      hf-lossy policies top_k

      hf-lossy policies --kind stop
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"--kind: {nearest('kind', kind, KINDS)}")
    entries = [entry for entry in list_entries() if kind in (None, entry.kind)]
    chosen = [entry for entry in entries if name in (None, entry.name)]
    if not chosen:
        raise ValueError(nearest("policy", str(name), {entry.name for entry in entries}))
    if as_json:
        show_json([entry.describe() for entry in chosen], indent=1)
        return
    if name is not None:
        show("\n\n".join(map(_format_entry, chosen)))
        return
    screen = console(highlight=False)
    for group, members in groupby(chosen, key=lambda entry: entry.kind):
        screen.print(Text(f"{group}s", style="bold underline"))
        for entry in members:
            guarantee = entry.condition or entry.guarantee
            screen.print(Text().append(entry.name, style="bold").append(f"  {guarantee}"), overflow="fold")
            screen.print(Text(indent(fill(entry.summary, screen.width - 4), "    ")))
        screen.print()
    show("all of an entry: hf-lossy policies NAME")


@_options.command
def suggest_command(
    model: Annotated[str, typer.Argument(help="the target: a Hub id or a folder of that name")],
    as_json: _options.AsJson = False,
) -> None:
    """Name published drafts for a target, from a table in this package: nothing is downloaded, and which one pays is measured.

    Example:

      hf-lossy suggest Qwen/Qwen2.5-7B-Instruct
    """
    if not model.strip():
        raise ValueError("MODEL: expected a Hub id or a folder, got an empty text")
    drafts = find_published(model)
    if as_json:
        show_json(drafts)
        return
    for draft in drafts:
        show(f"{draft['draft']}: {draft['kind']}\n  {draft['line']}\n  {draft['source']}")
    if drafts:
        show(f"which one pays: hf-lossy compare --model {model}, with the option above and --prompts FILE")
    else:
        show(
            f"no draft for {model} is in the table. Without one: hf-lossy generate --model {model} --drafter suffix; "
            "a drafter of your own: hf-lossy collect --for eagle3"
        )


@_options.command
def push_command(
    path: Annotated[Path, typer.Argument(help="folder of a head, policy, profile, drafter, models or dataset, …")],
    repo_id: Annotated[str, typer.Argument(help="repository on the Hub: org/name")],
    private: Annotated[bool, "--private", "make a new repository private"] = False,
    revision: Revision = None,
    message: Annotated[str | None, "commit message"] = None,
    token: Token = None,
) -> None:
    """Upload a folder to the Hub, after checking that it loads and contains no pickle.

    Example:

      hf-lossy push head org/name --private
    """
    show(policy.sharing.push(path, repo_id, private=private or None, token=token, message=message, revision=revision))


@_options.command
def pull_command(
    repo_id: Annotated[str, typer.Argument(help="org/name, org/name@revision or datasets/org/name")],
    out: Annotated[Path | None, "folder to copy it into; must not exist"] = None,
    revision: Revision = None,
    token: Token = None,
    local_files_only: Annotated[bool, "--local-files-only", "use the local cache and no network"] = False,
    force_download: Annotated[bool, "--force-download", "download again what is in the cache"] = False,
) -> None:
    """Download a head, a policy, models or a dataset from the Hub, check them, and print the folder.

    Examples:

      hf-lossy pull org/name --out head

      hf-lossy pull datasets/org/name --out data
    """
    where = {"local_files_only": local_files_only, "force_download": force_download}
    show(policy.sharing.pull(repo_id, out, revision=revision, token=token, **where))


def _format_entry(entry: Entry) -> str:
    """Format one entry as lines, which fit any width."""
    facts, ladder, module = entry.describe(), entry.ladder, entry.make.__module__
    parameters = (name if value == REQUIRED else f"{name}={value}" for name, value in facts["parameters"].items())
    rows = {
        f"{entry.kind} {entry.name}": entry.summary,
        "guarantee": facts["guarantee"],
        "neutral": facts["neutral"],
        "parameters": ", ".join(parameters) or "none",
        "source": entry.source,
        # A plugin's class is not a name of ours.
        "in Python": f"{'hla' if module.startswith(f'{PACKAGE}.') else module}.{entry.make.__name__}",
        "tune tries": "this setting alone" if ladder is None else f"{ladder[0]} = {', '.join(map(str, ladder[1]))}",
        "in detail": inspect.getdoc(entry.make),
    }
    return "\n".join(f"{what}: {value}" for what, value in rows.items())


def find_published(target: str) -> list[dict[str, str]]:
    """Return the drafts in the table for a target's Hub id or folder, whose name may have more behind it, as quantised copies do.

    Each has `draft`, a Hub id; `kind`: a model, or a drafter on the target's states; `source`: the page that pairs
    them, or the draft's; and `line`: how to use it. Tokenizers are compared when both models are loaded.
    """
    name, drafts = target.rstrip("/").rpartition("/")[2], list[dict[str, str]]()
    for pattern, draft, kind, source in _TABLE:
        match = re.search(rf"(?<![\w.]){pattern}(?![\w.]|-base)", name, re.IGNORECASE)
        if match is not None:
            repository = match.expand(draft)
            line = f"--{'assistant' if kind in (MODEL, PARALLEL) else 'drafter'} {repository}"
            if kind == PICKLE:
                line = f'assistant_model=hla.load_drafter("{repository}", pickle=True)'
            drafts.append({"draft": repository, "kind": kind, "source": source or HUB + repository, "line": line})
    return drafts
