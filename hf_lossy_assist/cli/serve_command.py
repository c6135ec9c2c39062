"""`hf-lossy serve`: an OpenAI-compatible server."""

import logging
import os
import sys
from dataclasses import replace
from typing import Annotated

from .. import server
from ..server.settings import KEY, ServerSettings
from ..terminal import show
from ..validation import require
from . import _options
from ._models import load_served


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
    loaded, drafter = load_served(models, loading)
    name = settings.name_model(models.model)
    made = server.routes.make_server(settings, name, loaded, drafter, chosen)
    line = f"(policies: {', '.join(chosen)}); Ctrl-C ends it once all texts are written"
    try:
        server.http.listen(
            made.app(), made.bounds, made.give_up, host, port, lambda url: show(f"{name} at {url} {line}")
        )
    finally:
        if made.worker.is_alive():  # a forward is running, during which Python's exit would abort the process
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)
