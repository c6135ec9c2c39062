"""No network; and no model library in the process that hands the tests out."""

import os


os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from support.sets import *  # noqa: F403  (hooks of pytest)


def pytest_configure(config):
    if not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("support.fixtures")
