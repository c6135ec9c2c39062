"""A model behind an OpenAI-compatible server: the target of AutoJudge's mining over an API (appendix R), or a judge."""

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import lazy_loader

from ..artifacts.json_io import parse_json
from ..validation import check_int, check_number, nearest, one_line, require, shown


openai = lazy_loader.load("openai")  # of the extra `api`, and slow to import
LARGEST = 16 << 20  # bytes of a reply's body: about a hundred times the longest response
OVER = ("stop", "eos", "eos_token", "stop_sequence")  # the value of OpenAI and vLLM, and those of other servers

REFUSALS: dict[int, tuple[type[Exception], str]] = {
    401: (PermissionError, "pass the right key or set OPENAI_API_KEY"),
    403: (PermissionError, "this key is not allowed it"),
    404: (ValueError, "check the model's name, the address, and the /v1"),
    429: (OSError, "fewer workers, or wait"),
}


class Completion(NamedTuple):
    """A continuation. `finished`: the model (or a stop text) ended it, not `max_tokens`."""

    text: str
    finished: bool


class TooLarge(ValueError):
    """A reply has more bytes than the API's replies can have, or might unpack to more."""


class Endpoint:
    """Queries `model` at `url` (including the /v1), from any number of threads. Every failure is one line with the address.

    `key`: by default the environment's OPENAI_API_KEY, else "none", since local servers need none; no record or error message shows it. `retries`:
    how often the `openai` client repeats a request after 408, 409, 429, 5xx, a timeout or a broken connection. `timeout`: seconds without data; a
    whole reply may take twice as long, and have 16 MiB.

    Raises: `OSError` if the server cannot be reached, refuses or fails (`PermissionError` for a wrong key, `TimeoutError` if it does not answer);
    `ValueError` for requests that it does not support, and for replies that violate the API.
    """

    def __init__(self, url: str, model: str, *, key: str | None = None, retries: int = 5, timeout: float = 60.0):
        require("a model behind an API", "openai")
        for name, text in (("url", url), ("model", model), ("key", "" if key is None else key)):
            if not isinstance(text, str):
                raise TypeError(f"{name}: expected a text, got {shown(text)}")
        check_url(url)
        check_int("retries", retries, 0)
        check_number("timeout", timeout, 0.001, 86400.0)
        self.url, self.model, self.timeout = url.rstrip("/"), model, timeout
        self._tries = f"after {retries + 1} tries" if retries else "at the only try"
        self._key = (key or os.environ.get("OPENAI_API_KEY") or "").strip() or "none"
        if not (self._key.isascii() and self._key.isprintable()):
            raise ValueError(
                "key: it holds characters that no HTTP header can carry, such as a line end or an accent: check OPENAI_API_KEY or key="
            )
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self._key,
            max_retries=retries,
            timeout=timeout,
            http_client=bounded_client(timeout),
            default_headers={"Accept-Encoding": "identity"},
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hf-lossy-endpoint", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and cancel the pending requests."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()
            self._loop.stop()

        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(end(), self._loop)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def complete(
        self, prompt: str, max_tokens: int, temperature: float = 0.0, stop: Sequence[str] = (), seed: int | None = None
    ) -> Completion:
        """Return the model's continuation of `prompt` (/v1/completions), without the text of `stop` that ended it."""
        body: dict[str, object] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
        body |= {"stop": list(stop)} if stop else {}
        body |= {} if seed is None else {"seed": seed}
        choice = self._first(self._send(self._client.completions.with_raw_response.create, body))
        return Completion(self._text(choice.get("text")), choice.get("finish_reason") in OVER)

    def chat(self, messages: Iterable[dict[str, str]], max_tokens: int, temperature: float = 0.0) -> str:
        """Return the model's reply to a conversation (/v1/chat/completions)."""
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        message = self._first(self._send(self._client.chat.completions.with_raw_response.create, body)).get("message")
        return self._text(message.get("content") if isinstance(message, dict) else None)

    def check(self) -> None:
        """Refuse a server that cannot be reached or does not list the model; one without a list (404, 405) is accepted. Raises: see the class."""
        if (listed := self._send(self._client.models.with_raw_response.list, None)) is None:
            return
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            raise self._unlike("a list under 'data'", listed)
        names = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
        if self.model not in names:
            raise ValueError(f"{self.url}: {self._quote(nearest('model', self.model, names), 500)}")

    def _send(self, call: Callable[..., Awaitable[Any]], body: dict[str, object] | None) -> Any:
        """Return the decoded reply; None if `body` is None and the address does not exist."""

        async def ask() -> bytes:
            return (await call(**({} if body is None else body | {"model": self.model}))).http_response.content

        if self._loop.is_closed():
            raise ConnectionError(f"{self.url}: this endpoint is closed")
        try:
            data = asyncio.run_coroutine_threadsafe(ask(), self._loop).result()
        except openai.APIStatusError as error:
            if body is None and error.status_code in (404, 405):
                return None
            raise self._refusal(error.status_code, self._quote(error.message)) from None
        except (openai.OpenAIError, asyncio.TimeoutError, ValueError, LookupError) as error:
            raise self._failure(error) from None
        try:
            return parse_json(data, self.url)
        except ValueError:
            raise self._unlike("JSON", data.decode("utf-8", "replace")) from None

    def _failure(self, error: Exception) -> Exception:
        cause = error.__cause__ or error
        if isinstance(error, openai.APITimeoutError) or isinstance(cause, asyncio.TimeoutError):
            return TimeoutError(
                f"{self.url} did not answer in {self.timeout:g} s, {self._tries}; wait longer (timeout) or look at it"
            )
        reason = self._quote(cause)
        if isinstance(error, openai.APIConnectionError) and not isinstance(cause, TooLarge):
            return ConnectionError(
                f"{self.url} cannot be reached, {self._tries}: {reason}; check the address and that it runs"
            )
        return ValueError(f"{self.url}: {reason}; is this the API's address, with the /v1?")

    def _refusal(self, code: int, message: str) -> Exception:
        kind, advice = REFUSALS.get(
            code, (OSError, "look at its log") if code >= 500 else (ValueError, "see its manual")
        )
        return kind(
            f"{self.url} answered {code}, {self._tries}, for the model {shown(self.model)} ({message}); {advice}"
        )

    def _quote(self, text: object, longest: int = 200) -> str:
        """Return the server's text as one line without the key."""
        return one_line(self._without_key(str(text)), longest)

    def _without_key(self, text: str) -> str:
        return text if self._key == "none" else text.replace(self._key, "…")

    def _first(self, reply: object) -> dict[str, object]:
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self._unlike("a list under 'choices'", reply)
        return choices[0]

    def _text(self, text: object) -> str:
        if not isinstance(text, str):
            raise self._unlike("a text in the first choice", text)
        return self._without_key(text)  # it may be recorded

    def _unlike(self, expected: str, given: object) -> ValueError:
        text = given if isinstance(given, str) else json.dumps(given)
        return ValueError(
            f"{self.url}: expected {expected}, got {self._quote(text, 80)!r}; is this an OpenAI-compatible API, with the /v1?"
        )


def served(target: object) -> bool:
    """Return whether a target is behind an API."""
    return isinstance(target, Endpoint)


def check_url(url: str) -> None:
    """Refuse anything but a plain address, without printing a password that it may contain."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # an invalid port, an unclosed bracket, an empty or too long label
        whole = False
    # `urlsplit` drops line ends and tabs; clients do not send what remains of them, or spaces.
    if not whole or not url.isprintable() or " " in url or url.count("://") != 1 or set("@?#") & set(url):
        part = url.rpartition("@")[2].partition("?")[0].partition("#")[0]
        raise ValueError(
            f"url: expected one address such as http://localhost:8000/v1, without a user, a password or what stands behind ? and #, got {part!r}; "
            "a key goes into OPENAI_API_KEY, several servers behind a proxy such as LiteLLM"
        )


def bounded_client(seconds: float) -> Any:
    """Return an HTTP client that reads each reply as a whole, within twice `seconds` and `LARGEST` bytes.

    The client's timeout restarts with every byte, so a server could send a slow drip, and it does not limit the size of a body.
    """
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request: object, **options: object) -> Any:
            return await asyncio.wait_for(self._read(request, options | {"stream": True}), 2 * seconds)

        async def _read(self, request: Any, options: dict[str, Any]) -> Any:
            response = await super().send(request, **options)
            try:
                if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                    raise TooLarge("it sent a compressed reply, which was not asked for")
                body = bytearray()
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > LARGEST:
                        raise TooLarge(f"it sent more than {LARGEST >> 20} MiB in one reply")
            finally:
                await response.aclose()
            whole = type(response)(
                response.status_code, headers=response.headers, content=bytes(body), request=request
            )
            # JSON always is, whatever the server declares: some of Python's codecs, such as rot13, do not decode bytes to text.
            whole.encoding = "utf-8"
            return whole

    # Prompts are not sent to servers that the named one redirects to.
    return BoundedClient(timeout=seconds, follow_redirects=False)
