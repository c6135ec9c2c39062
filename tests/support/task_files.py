"""Files of problems, and calls from other threads."""

import json
import threading

from hf_lossy_assist.tasks.load import Problem


ANY = Problem("?")


def rows(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def in_thread(call):
    """What `call` returns in another thread than the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(60)
    return found[0]
