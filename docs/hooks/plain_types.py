"""The types of our docstrings stand in Markdown, "(`Head`, *optional*)", and the reference takes types from signatures: shapes move into
the description, the rest goes."""

import re
from typing import Any

import griffe


TYPED = re.compile(r"^(\s+\w[\w, ]*) \(((?:tuple of )?`[^\n]*?)\):", flags=re.M)


class PlainTypes(griffe.Extension):
    """Run by mkdocstrings on every object that it reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring, if there is one."""
        if obj.docstring is not None:
            obj.docstring.value = TYPED.sub(untyped, obj.docstring.value)


def untyped(found: re.Match[str]) -> str:
    """Of "name (`torch.LongTensor` of shape `(B, length)`):" the name and the shape."""
    name, kind = found[1], found[2].removesuffix(", *optional*")
    return f"{name}: {kind};" if " of shape " in kind else f"{name}:"
