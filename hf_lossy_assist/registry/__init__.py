"""Register everything that has a name: `entry` describes what a name stands for, `registry` registers and looks up, `discovery` imports what registers."""

from .discovery import PLUGINS
from .entry import KINDS, NEEDS, REQUIRED, Entry, Guarantee, HeadKind, Kind, Method, Need
from .registry import (
    Names,
    NoDeepCopy,
    find_entry,
    find_method,
    find_method_for_head,
    find_name,
    forget,
    list_entries,
    register_drafter,
    register_filter,
    register_method,
    register_rule,
    register_stop,
    set_base,
)


__all__ = [
    "KINDS", "NEEDS", "PLUGINS", "REQUIRED", "Entry", "Guarantee", "HeadKind", "Kind", "Method", "Names", "Need",
    "NoDeepCopy", "find_entry",
    "forget", "find_method", "find_method_for_head", "find_name", "list_entries", "register_drafter", "register_filter", "register_method", "register_rule",
    "register_stop", "set_base",
]  # fmt: skip
