"""A model behind an OpenAI-compatible server: the target of AutoJudge's mining over an API (appendix R)."""

import os
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import lazy_loader

from ..validation import one_line, require, shown


openai = lazy_loader.load("openai")  # of the extra `api`, and slow to import
OVER = ("stop", "eos", "eos_token", "stop_sequence")  # the value of OpenAI and vLLM, and those of other servers


class Completion(NamedTuple):
    """A continuation. `finished`: the model (or a stop text) ended it, not `max_tokens`."""

    text: str
    finished: bool


class Endpoint:
    """Queries `model` at `url` (including the /v1) with the `openai` client, from any number of threads.

    `key`: by default the environment's OPENAI_API_KEY, else "none", since local servers need none; no record or error shows it. `retries`:
    how often the client repeats a request after 408, 409, 429, 5xx, a timeout or a broken connection. `timeout`: seconds without data.

    Raises, in one line with the address: `OSError` if the server cannot be reached, refuses or fails (`PermissionError` for a wrong key,
    `TimeoutError` if it does not answer); `ValueError` for requests that it does not support, and for replies that violate the API.
    """

    def __init__(self, url: str, model: str, *, key: str | None = None, retries: int = 5, timeout: float = 60.0):
        require("a model behind an API", "openai")
        if set("@?#") & set(url) or not url.isprintable() or urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(  # without the address, which may contain a password
                "url: expected an address such as http://localhost:8000/v1, without a user, a password or what follows ? "
                "or #; a key goes into OPENAI_API_KEY, several servers behind a proxy such as LiteLLM"
            )
        self.url, self.model = url.rstrip("/"), model
        self._key = (key or os.environ.get("OPENAI_API_KEY") or "").strip() or "none"
        if not (self._key.isascii() and self._key.isprintable()):  # HTTP clients would show it in their error
            raise ValueError("key: it holds characters that no HTTP header can carry: check OPENAI_API_KEY or key=")
        # Prompts and keys are not sent to servers that the named one redirects to.
        client = openai.DefaultHttpxClient(follow_redirects=False)
        self._client = openai.OpenAI(
            base_url=self.url, api_key=self._key, max_retries=retries, timeout=timeout, http_client=client
        )

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def complete(
        self, prompt: str, max_tokens: int, temperature: float = 0.0, stop: Sequence[str] = (), seed: int | None = None
    ) -> Completion:
        """Return the model's continuation of `prompt` (/v1/completions), without the text of `stop` that ended it."""
        more = ({"stop": list(stop)} if stop else {}) | ({} if seed is None else {"seed": seed})
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "extra_body": more}
        kind: type[Exception] = ValueError
        try:
            choice = self._client.completions.create(model=self.model, **body).choices[0]
            if not isinstance(choice.text, str):
                raise TypeError(f"expected a text, got {shown(choice.text)}")
            return Completion(self._hide_key(choice.text), choice.finish_reason in OVER)
        except openai.APITimeoutError:
            kind, line = TimeoutError, f"did not answer in {self._client.timeout:g} s: wait longer (timeout)"
        except openai.APIConnectionError as error:
            kind, line = ConnectionError, f"cannot be reached: {error.__cause__ or error}; check the address"
        except openai.APIStatusError as error:
            code = error.status_code
            kind = PermissionError if code in (401, 403) else OSError if code == 429 or code >= 500 else ValueError
            line = f"answered {code} for the model {shown(self.model)}: {error.message}"
        except (openai.OpenAIError, AttributeError, TypeError, IndexError, ValueError, RecursionError) as error:
            line = f"{error}; is this an OpenAI-compatible API, with the /v1?"
        raise kind(one_line(f"{self.url}: {self._hide_key(line)}", 400))

    def _hide_key(self, text: str) -> str:
        """Return what may be recorded of a text from the server."""
        return text.replace(self._key, "…") if self._key != "none" else text


def served(target: object) -> bool:
    """Return whether a target is behind an API."""
    return isinstance(target, Endpoint)
