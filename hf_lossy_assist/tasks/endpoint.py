"""A model behind an OpenAI-compatible server: the target of AutoJudge's mining over an API (appendix R), or a
judge."""

import json
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..artifacts.reading import parse
from ..validation import check_int, check_number, nearest, one_line, shown
from .address import Address
from .bounds import Bound, TooMuch, put_bound
from .pace import Pace
from .secrets import check_key, spellings, without


OVER = ("stop", "eos", "eos_token", "stop_sequence")  # OpenAI's and vLLM's word for it, and those of other servers


class Completion(NamedTuple):
    """A continuation. `finished`: the model ended it (or a stop text did), rather than `max_tokens`."""

    text: str
    finished: bool


def _in_utf8(response: Any) -> None:
    """JSON is in UTF-8, whatever a server calls it: Python has codecs that are none of texts, "rot13" for example."""
    response.encoding = "utf-8"


class Endpoint:
    """`model` at `url` (with the /v1), usable from many threads. Every failure is one line with the address and the
    way out.

    `key`: by default the environment's OPENAI_API_KEY, else "none", as local servers need none. A user and a password in
    `url` are sent, and stand nowhere else: the attribute `url`, records and error lines are without them. `retries`: how
    often a request is repeated after 408, 409, 429 (as its Retry-After says), 5xx, a timeout or a broken connection,
    with growing pauses. `timeout`: seconds that one reply may take from the first to the last byte; it may have 16 MiB.
    `per_minute`: the most requests in a minute, repeated ones included.

    `requests` counts what was sent, repeated ones included; `tokens` the completion tokens that the server reported.

    Raises: `OSError` where the server cannot be reached, refuses or fails (`PermissionError` for a wrong key,
    `TimeoutError` where it does not answer); `ValueError` for what it does not know and for replies that are not what
    the API promises.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        retries: int = 5,
        timeout: float = 60.0,
        per_minute: float | None = None,
    ):
        try:
            import openai
        except ImportError:
            raise ImportError("a model behind an API needs openai: pip install 'hf_lossy_assist[api]'") from None
        for name, text in (("url", url), ("model", model), ("key", "" if key is None else key)):
            if not isinstance(text, str):
                raise TypeError(f"{name}: expected a text, got {shown(text)}")
        self.url, user, password = Address.of(url)
        check_int("retries", retries, 0)
        check_number("timeout", timeout, 0.001, 86400.0)
        if per_minute is not None:
            check_number("per_minute", per_minute, 0.001, 1e9)
        self.model, self.retries, self.timeout = model, retries, timeout
        self.requests = self.tokens = 0
        self._lock, self._pace, self._bound = threading.Lock(), Pace(per_minute), Bound()
        key = (key or os.environ.get("OPENAI_API_KEY") or "").strip() or "none"
        check_key(key)
        pair = f"{user}:{password}"
        self._secrets = spellings([key, user, password, pair])
        # A text may hold a user's name by chance; where there is no password, it is the secret.
        self._unwritten = spellings([key, password or user, pair])
        # The hooks see repeated requests too, which the client sends by itself.
        http = openai.DefaultHttpxClient(
            timeout=timeout,
            event_hooks={"request": [self._sending], "response": [self._bound.check_encoding, _in_utf8]},
            auth=(user, password) if user or password else None,
            follow_redirects=False,  # prompts go to the server that was named, and to no other that it names
        )
        put_bound(http, self._bound)
        self._client = openai.OpenAI(
            base_url=self.url,
            api_key=key,
            max_retries=retries,
            timeout=timeout,
            http_client=http,
            default_headers={"Accept-Encoding": "identity"},
        )
        try:
            http.build_request("GET", self.url)
        except Exception as error:  # the HTTP client's own kind, which differs by its version
            http.close()
            raise ValueError(f"url: {shown(self.url, 200)} is no address: {self._said(error)}") from None

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are kept open."""
        self._client.close()

    def complete(
        self,
        prompt: str,
        max_tokens: int,
        temperature: float = 0.0,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Completion:
        """The model's continuation of `prompt` (/v1/completions), without the text of `stop` that ended it."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
        if stop:
            body["stop"] = list(stop)
        if seed is not None:
            body["seed"] = seed
        choice = self._first(self._send(self._client.completions.with_raw_response.create, body), "/completions")
        return Completion(self._text(choice.get("text"), "/completions"), choice.get("finish_reason") in OVER)

    def chat(self, messages: Iterable[dict[str, str]], max_tokens: int, temperature: float = 0.0) -> str:
        """The model's reply to a conversation (/v1/chat/completions)."""
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        choice = self._first(
            self._send(self._client.chat.completions.with_raw_response.create, body), "/chat/completions"
        )
        message = choice.get("message")
        return self._text(message.get("content") if isinstance(message, dict) else None, "/chat/completions")

    def check(self) -> None:
        """Raise unless the server can be reached and lists the model; one without a list (404, 405) is taken at its
        word."""
        import openai

        try:
            listed = self._send(self._client.models.with_raw_response.list, None)
        except ValueError as error:
            if isinstance(error.__cause__, openai.APIStatusError) and error.__cause__.status_code in (404, 405):
                return
            raise
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            raise self._unlike("/models", "a list under 'data'", listed)
        names = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
        if self.model not in names:
            raise ValueError(f"{self.url}: {self._said(nearest('model', self.model, names), 500)}")

    def _sending(self, _: Any) -> None:
        self._pace.wait()
        with self._lock:
            self.requests += 1
        self._bound.start(self.timeout)

    def _send(self, call: Any, body: dict[str, Any] | None) -> Any:
        """The decoded reply to one request, sent as often as `retries` allows."""
        import openai

        try:
            data = call(**({} if body is None else body | {"model": self.model})).http_response.content
        except TooMuch as error:
            raise ValueError(f"{self.url} {error}; is this the API's address, with the /v1?") from None
        except openai.OpenAIError as error:
            raise self._failure(error) from error
        except (ValueError, LookupError) as error:  # in headers that the client cannot read
            raise ValueError(f"{self.url}: {self._said(error)}; is this the API's address, with the /v1?") from None
        try:
            return parse(data, self.url)
        except ValueError:
            raise ValueError(
                f"{self.url} answered {self._said(data.decode('utf-8', 'replace'), 60)!r} where JSON was expected; is this the API's address, with the /v1?"
            ) from None

    def _said(self, text: object, longest: int = 200) -> str:
        """What the server said, as one line; a key or a password that it says back is left out."""
        return one_line(without(str(text), self._secrets), longest)

    def _failure(self, error: Exception) -> Exception:
        """What the client raised, as one line."""
        import openai

        tries = f"after {self.retries + 1} tries" if self.retries else "at the only try"
        if isinstance(error, openai.APITimeoutError):
            return TimeoutError(
                f"{self.url} did not answer in {self.timeout:g} s, {tries}; wait longer (timeout) or look at it"
            )
        if isinstance(error, openai.APIConnectionError):
            cause = self._said(error.__cause__ or error)
            if isinstance(error.__cause__, TooMuch):  # older clients wrap whatever is raised in their connections
                return ValueError(f"{self.url} {cause}; is this the API's address, with the /v1?")
            return ConnectionError(
                f"{self.url} cannot be reached, {tries}: {cause}; check the address and that it runs"
            )
        if not isinstance(error, openai.APIStatusError):
            return ValueError(f"{self.url}: {self._said(error)}; check the address and the settings")
        code, said = error.status_code, self._said(error.message)
        if code in (401, 403):
            return PermissionError(
                f"{self.url} refused the key ({code}: {said}); pass the right one or set OPENAI_API_KEY"
            )
        if code == 404:
            return ValueError(
                f"{self.url} knows no model {shown(self.model)} or has no such address (404: {said}); check both, and the /v1"
            )
        if code == 429:
            return OSError(f"{self.url} has had too many requests, {tries} ({said}); lower per_minute or wait")
        if code >= 500:
            return OSError(f"{self.url} failed, {tries} ({code}: {said}); look at the server's log")
        return ValueError(f"{self.url} refused the request ({code}: {said})")

    def _first(self, reply: Any, where: str) -> dict[str, Any]:
        """The first choice of a reply, whose tokens are counted."""
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self._unlike(where, "a list under 'choices'", reply)
        usage = reply.get("usage")
        used = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(used, int):
            with self._lock:
                self.tokens += used
        return choices[0]

    def _text(self, text: Any, where: str) -> str:
        if not isinstance(text, str):
            raise self._unlike(where, "a text in the first choice", text)
        return without(text, self._unwritten)  # it may be recorded

    def _unlike(self, where: str, expected: str, given: Any) -> ValueError:
        return ValueError(
            f"{self.url}{where}: expected {expected}, got {self._said(json.dumps(given), 80)}; is this an OpenAI-compatible API?"
        )
