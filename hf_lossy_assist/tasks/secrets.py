"""Keys and passwords in what comes back from a server, however it spells them."""

import base64
import json
from collections.abc import Iterable
from urllib.parse import quote, quote_plus


SHORTEST = 5  # characters of what is taken for a secret; the "none" of local servers is not one


def check_key(key: str) -> None:
    """Refuse, without showing it, a key that no HTTP header can carry."""
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            "key: it holds characters that no HTTP header can carry, such as a line end or an accent: check OPENAI_API_KEY or key="
        )


def spellings(secrets: Iterable[str]) -> list[str]:
    """Every way in which a reply may hold one of `secrets`, the longest first: as it is, in JSON, as a Python text, in an address, in base64,
    and each of these within another."""
    found = {secret for secret in secrets if len(secret) >= SHORTEST}
    for _ in range(2):
        found |= {spelt for secret in found for spelt in _spelt(secret)}
    return sorted(found, key=len, reverse=True)


def without(text: str, spelt: Iterable[str]) -> str:
    """`text` with "…" in the place of each of `spelt`."""
    for secret in spelt:
        text = text.replace(secret, "…")
    return text


def _spelt(secret: str) -> Iterable[str]:
    data = secret.encode("utf-8", "surrogatepass")
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    both = "'\""  # in a text that holds quotes of both kinds, Python escapes the single ones
    yield from (form(secret + both)[1:-1].removesuffix("\\'\"") for form in (repr, ascii))
    yield from (repr(secret)[1:-1], ascii(secret)[1:-1], quote(data, safe=""), quote(data), quote_plus(data))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(data).decode().rstrip("=")
