"""`hf-lossy serve`: an OpenAI-compatible server."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hf_lossy_assist as hla

from .. import policy, server
from ..terminal import show
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, shown
from . import _options
from ._models import check_parts, find_parts, load_served


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ._models import Draft

KEY = "HF_LOSSY_API_KEY"
LONGEST = 1_048_576  # tokens of a prompt and its text, if the model has no limit


@_options.command
def serve_command(
    *,
    models: _options.ModelOptions,
    policies: Annotated[
        str, "policies that requests may name, with commas; the first is used where none is named"
    ] = "svip",
    name: Annotated[str | None, "what clients call the model (default: the name of its folder)"] = None,
    host: Annotated[str, "address to listen at; 0.0.0.0: all of this machine's"] = "127.0.0.1",
    port: Annotated[int, (0, 65535), "port to listen at; 0: a free one"] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="what clients must present", envvar=KEY, show_envvar=True)
    ] = None,
    batch_size: Annotated[int, (1, MOST_ROWS), "texts that are written at a time"] = 16,
    max_waiting: Annotated[int, (0, 1_000_000), "requests that may wait beside them; more are turned away"] = 256,
    max_new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "most new tokens that a request may ask for"] = 512,
    max_length: Annotated[
        int | None, (2, MOST), "most tokens of a prompt and its text (default: the model's own limit)"
    ] = None,
    grace: Annotated[
        int, (0, 86_400), "seconds that requests under way have once the server is to end, e.g. 120"
    ] = 30,
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
    _options.require_extra("serve", "starlette", "uvicorn", "prometheus_client")
    if api_key == "" or (api_key is None and os.environ.get(KEY) == ""):  # which an option treats as unset
        raise ValueError(f"--api-key, or {KEY}, is empty: leave it out, or pass what clients must present")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise ValueError(
            f"--api-key, or {KEY}: expected ASCII characters, no blanks at its ends: no client could present it"
        )
    chosen = _read_policies(policy.parse.split_policies(policies))
    check_parts(models, [part for found in chosen.values() for part in find_parts(found)])
    (target, draft, tokenizer), drafter = load_served(models, loading)
    for found in chosen.values():
        hla.Runner(found, draft, tokenizer=tokenizer, drafter=drafter).validate(target)
    limits = server.fields.RequestLimits(chosen, max_new_tokens, _find_longest(target, draft, max_length))
    worker = server.worker.Worker((target, draft, tokenizer), chosen, batch_size, max_waiting, drafter)
    worker.check_settings()
    called = name or (Path(models.model).name if models.model is not None else "demo")
    bounds = server.http.Bounds(server.http.count_connections(batch_size + max_waiting), grace=grace)
    line = f"(policies: {', '.join(chosen)}); Ctrl-C ends it once all texts are written"
    try:
        server.http.listen(
            server.routes.Server(worker, called, limits, api_key, bounds),
            host,
            port,
            lambda url: show(f"{called} at {url} {line}"),
        )
    finally:
        if worker.is_alive():  # a forward is running, during which Python's exit would abort the process
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)


def _read_policies(policies: list[str]) -> "dict[str, hla.LossyPolicy]":
    """Return policies by the names that requests use: a file or folder by its name, a short form unchanged."""
    chosen: dict[str, hla.LossyPolicy] = {}
    for text in policies:
        name = Path(text).name if os.path.exists(text) else text  # False for JSON that is too long for a path
        if name in chosen:
            raise ValueError(f"--policies: two of them are called {shown(name)}: name each once, or rename a file")
        chosen[name] = hla.as_policy(text)
    return chosen


def _find_longest(target: "PreTrainedModel", draft: "Draft", wanted: int | None) -> int:
    """Return the most tokens of a text that both models can read."""
    configs = [
        found for model in (target, draft) if (found := getattr(model, "config", None)) is not None
    ]  # a drafter on states has none
    known = [getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) for config in configs]
    most = min([length for length in known if length is not None], default=LONGEST)
    if wanted is not None and wanted > most:
        raise ValueError(f"--max-length {wanted} is more than the models were made for, {most}: pass that, or less")
    return most if wanted is None else wanted
