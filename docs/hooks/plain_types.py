"""Remove the types from docstrings, "(`Head`, *optional*)", since the reference takes them from signatures; shapes move into
the description."""

import re
from typing import Any

import griffe


TYPED = re.compile(r"^(\s+\w[\w, ]*) \(((?:tuple of )?`[^\n]*?)\):", flags=re.M)


class PlainTypes(griffe.Extension):
    """An extension that mkdocstrings runs on every object."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring, if there is one."""
        if obj.docstring is not None:
            obj.docstring.value = TYPED.sub(untyped, obj.docstring.value)


def untyped(found: re.Match[str]) -> str:
    """Reduce "name (`torch.LongTensor` of shape `(B, length)`):" to the name and the shape."""
    name, kind = found[1], found[2].removesuffix(", *optional*")
    return f"{name}: {kind};" if " of shape " in kind else f"{name}:"
