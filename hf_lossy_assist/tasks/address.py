"""The address of a server, without the secrets that may stand in it."""

from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit


class Address(NamedTuple):
    """An address without the secrets in it, and those: `user:password@` before the host."""

    url: str
    user: str
    password: str

    @classmethod
    def of(cls, given: str) -> "Address":
        """Take an address apart; what is refused is not shown where it may be a secret."""
        try:
            parts = urlsplit(given)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            # `urlsplit` drops line ends and tabs; what is left of them and of spaces, no client sends.
            whole = whole and given.isprintable() and " " not in given
            (parts.hostname or "").encode("idna")
        except ValueError:  # a port that is no number, a bracket that is not closed, a label that is empty or too long
            whole = False
        if (
            whole and "@" in parts.path + parts.query + parts.fragment
        ):  # what stands before it may be a part of a password
            raise ValueError(
                "url: an '@' behind the host: write a user and a password before it, / in them as %2F, ? as %3F, # as %23, @ as %40"
            )
        if not whole:
            shown = given.rpartition("@")[2].partition("?")[0]
            raise ValueError(f"url: expected an address such as http://localhost:8000/v1, got {shown!r}")
        if parts.query or parts.fragment:
            raise ValueError(
                f"url: expected an address that ends with its path, {parts.path!r}; drop what stands behind"
            )
        bare = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        return cls(bare.rstrip("/"), unquote(parts.username or ""), unquote(parts.password or ""))
