"""Grammar processes for the tests of the server: forked from one that has imported what they need."""

import multiprocessing

import pytest

from hf_lossy_assist.server import grammar_process


@pytest.fixture(scope="session", autouse=True)
def forked_grammar_processes():
    """Start them in milliseconds; `test_where_no_process_begins_the_client_may_ask_again` starts one as the server does."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["xgrammar", "openai", "support.serving"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_process, "SPAWN", forks)
        yield
