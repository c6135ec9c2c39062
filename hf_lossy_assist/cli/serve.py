"""`hf-lossy serve`: an OpenAI-compatible server."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from ..terminal import show
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, shown
from .drafters import Drafter, check_draft, load_made
from .made_with import folder_of, models_from, parts_in, sources_in
from .options import Assistant, Device, DType, Model, Overrides, needs


KEY = "HF_LOSSY_API_KEY"
LONGEST = 1_048_576  # tokens of a prompt and its text, where the model names no limit


def serve(
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    policies: Annotated[
        str, typer.Option(help="policies that requests may name, with commas; the first is used where none is named")
    ] = "svip",
    name: Annotated[
        str | None, typer.Option(help="what clients call the model (default: the name of its folder)")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen at; 0.0.0.0: all of this machine's")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen at; 0: a free one")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="what clients must present", envvar=KEY, show_envvar=True)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="texts that are written at a time")] = 16,
    max_waiting: Annotated[int, typer.Option(help="requests that may wait beside them; more are turned away")] = 256,
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens that a request may ask for")] = 512,
    max_length: Annotated[
        int | None, typer.Option(help="most tokens of a prompt and its text (default: the model's own limit)")
    ] = None,
    grace: Annotated[
        int, typer.Option(help="seconds that requests under way have once the server is to end, e.g. 120")
    ] = 30,
    dtype: DType = "float32",
    device: Device = "auto",
    overrides: Overrides = None,
) -> None:
    """Serve a pair behind OpenAI's API: /v1/completions and /v1/chat/completions, streamed or not, and /metrics for Prometheus.

    A request names a policy by `lossy_policy`, with the openai client in `extra_body`. Ctrl-C or SIGTERM ends the server once what is being
    written is written, for which there are `--grace` seconds.

    Examples:

      hf-lossy serve

      hf-lossy serve --model M --assistant D --policies svip,strict,top_k:k=2+svip --batch-size 32 --port 8000
    """
    needs("serve", "starlette", "uvicorn", "prometheus_client")
    check_draft(model, assistant, drafter)
    check_int("--port", port, 0, 65535)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    check_int("--max-waiting", max_waiting, 0, 1_000_000)
    check_int("--max-new-tokens", max_new_tokens, 1, MOST_NEW_TOKENS)
    if max_length is not None:
        check_int("--max-length", max_length, 2)
    check_int("--grace", grace, 0, 86_400)
    if api_key == "" or (api_key is None and os.environ.get(KEY) == ""):  # which an option takes for unset
        raise ValueError(f"--api-key, or {KEY}, is empty: leave it out, or pass what clients must present")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise ValueError(
            f"--api-key, or {KEY}: expected ASCII characters, no blanks at its ends: no client could present it"
        )
    from ..policy.short_form import split_policies
    from ..server.app import Server
    from ..server.connections import Bounds
    from ..server.engine import Engine
    from ..server.listening import listen, most_connections
    from ..server.questions import Limits

    chosen = _by_name(split_policies(policies))
    sources = [its for policy in chosen.values() for its in sources_in(parts_in(policy))]
    folders = [its for policy in split_policies(policies) for its in folder_of(policy)]
    made = models_from(model, assistant, [*sources, *folders], drafter)
    target, draft, tokenizer = load_made(made, dtype, device, overrides)
    for policy in chosen.values():
        hla.Runner(policy, draft, tokenizer=tokenizer).validate(target)
    limits = Limits(chosen, max_new_tokens, _longest(target, draft, max_length))
    engine = Engine((target, draft, tokenizer), chosen, batch_size, max_waiting)
    called = name or (Path(made.model).name if made.model is not None else "demo")
    bounds = Bounds(most_connections(batch_size + max_waiting), grace=grace)
    listen(
        Server(engine, called, limits, api_key, bounds),
        host,
        port,
        lambda url: show(
            f"{called} at {url} (policies: {', '.join(chosen)}); Ctrl-C ends it once all texts are written"
        ),
    )


def _by_name(policies: list[str]) -> dict[str, Any]:
    """Policies by what requests call them: a file or folder by its own name, a short form as it stands."""
    chosen: dict[str, Any] = {}
    for its in policies:
        name = Path(its).name if os.path.exists(its) else its  # which says no to JSON that is too long for a path
        if name in chosen:
            raise ValueError(f"--policies: two of them are called {shown(name)}: name each once, or rename a file")
        chosen[name] = hla.as_policy(its)
    return chosen


def _longest(target: Any, draft: Any, asked: int | None) -> int:
    """Tokens of a text that both models can read."""
    configs = [
        its.config for its in (target, draft) if hasattr(its, "config")
    ]  # a drafter on the target's states has none
    known = [getattr(its.get_text_config(decoder=True), "max_position_embeddings", None) for its in configs]
    most = min([its for its in known if its is not None], default=LONGEST)
    if asked is not None and asked > most:
        raise ValueError(f"--max-length {asked} is more than the models were made for, {most}: pass that, or less")
    return most if asked is None else asked
