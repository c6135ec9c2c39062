"""`hf-lossy serve`: an OpenAI-compatible server."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import policy, server
from ..terminal import show
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, require
from . import _options
from ._models import check_parts, load_served


KEY = "HF_LOSSY_API_KEY"


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
    require("this command", "starlette", "uvicorn", "prometheus_client", "pydantic")
    if api_key is None:
        api_key = os.environ.get(KEY)  # also if it is empty, which an option treats as unset
    server.assembly.check_key(api_key)
    chosen = server.assembly.read_policies(policy.parse.split_policies(policies))
    check_parts(models, [part for found in chosen.values() for part in found.saved().values()])
    loaded, drafter = load_served(models, loading)
    called = name or (Path(models.model).name if models.model is not None else "demo")
    settings = server.assembly.ServerSettings(
        name=called,
        api_key=api_key,
        batch_size=batch_size,
        max_waiting=max_waiting,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        grace=grace,
    )
    made = settings.make_server(loaded, drafter, chosen)
    line = f"(policies: {', '.join(chosen)}); Ctrl-C ends it once all texts are written"
    try:
        server.http.listen(
            made.app(), made.bounds, made.give_up, host, port, lambda url: show(f"{called} at {url} {line}")
        )
    finally:
        if made.worker.is_alive():  # a forward is running, during which Python's exit would abort the process
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)
