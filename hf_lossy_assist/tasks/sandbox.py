"""Processes that see no network, no file of the user's and no other process: bubblewrap, where it is installed and works.

docs/security.md says what that promises and what it does not.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path


# Where shared libraries and their lists are, on the distributions that there are. /etc itself, homes and data stay out of sight.
SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/alternatives",
)  # fmt: skip
TRIAL = 60.0  # seconds that a process in the sandbox may take to start, on a busy machine


@cache
def why_not() -> str | None:
    """Why programs cannot be put into a sandbox here, or None where they can. Tried once, with a real process."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    command = wrapped([sys.executable, "-I", "-B", "-S", "-c", "print('ready')"], ())
    try:
        tried = subprocess.run(
            command, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work here ({' '.join(str(error).split())[:200]})"
    if tried.stdout != b"ready\n":
        said = " ".join(tried.stderr.decode(errors="replace").split())[:200]
        return f"bubblewrap does not work here ({said or f'it ended with {tried.returncode}'})"
    return None


def wrapped(command: list[str], modules: tuple[str, ...]) -> list[str]:
    """`command` in a sandbox of its own, where Python and `modules` can be imported: new namespaces of every kind, so no
    network and no sight of other processes; those folders alone, read-only, and an empty /tmp; no capabilities; and
    everything in it ends with the process that this returns a command for."""
    bwrap = shutil.which("bwrap") or "bwrap"
    # bwrap dies with the thread that started it. A process that is one thread stands between, so that a kept worker does
    # not die with the thread that happened to ask first; the group that is killed is that of both.
    out = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
    out += [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for folder in SYSTEM:
        out += ["--ro-bind-try", folder, folder]
    for folder in visible(modules):
        out += ["--ro-bind-try", folder, folder]
    return [*out, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp", "--", *command]


def visible(modules: tuple[str, ...]) -> list[str]:
    """What Python needs beside the system's libraries: itself, its library, installed packages, `modules`, and worker.py."""
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    places += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [path for path in sys.path if any(Path(path).glob("*.dist-info"))]  # packages are installed there
    places += [os.path.dirname(sys.executable), os.path.dirname(os.path.realpath(sys.executable))]
    places += [found for name in modules if (found := _home(name)) is not None]
    places += [str(Path(__file__).with_name("worker.py"))]
    places = [place for place in dict.fromkeys(map(os.path.abspath, places)) if place != "/"]
    return [p for p in places if not any(Path(p).is_relative_to(o) for o in (*SYSTEM, *places) if o != p)]


def _home(module: str) -> str | None:
    """The folder (or file) of a module, which an editable install may have anywhere."""
    spec = find_spec(module)
    if spec is None:
        return None
    return next(iter(spec.submodule_search_locations or ()), spec.origin)
