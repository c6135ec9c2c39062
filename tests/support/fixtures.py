"""The conditions of every test: as many threads as OMP_NUM_THREADS says (one), the same hypothesis examples and random state each time."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.commands import hf_lossy  # noqa: F401  (a fixture)
from support.two_processes import two_processes  # noqa: F401  (a fixture)


torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))

# Tiny models are slow enough on a shared core for hypothesis to call an example late; no test here measures time.
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A Hub of this test's own on loopback, with the client, its caches and its token pointed at it."""
    import sys
    import warnings

    from huggingface_hub import close_session, constants, hf_api
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers import dynamic_module_utils
    from transformers.utils import hub as transformers_hub

    from support.hub_server import HubServer

    # The client puts large files by a spelling that its own HTTP library deprecates.
    warnings.filterwarnings("ignore", message="Use 'content=", category=DeprecationWarning)
    home = tmp_path_factory.mktemp("hf-home")
    for name in ("HF_OIDC_RESOURCE", "HUGGING_FACE_HUB_TOKEN", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with HubServer() as server:
        # All but the token for the commands that a test starts; this process read them when it imported the client.
        environment = {
            "HF_TOKEN": server.token, "HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
        }  # fmt: skip
        for name, value in (environment | {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}).items():
            monkeypatch.setenv(name, value)
        settings = {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,  # it would ask for a Xet token, and has no way back
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
            "AGENT_HARNESSES_PATH": str(home / "agents.json"),
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value, raising=False)  # some are only in newer clients
        # These two keep the endpoint that they were made with.
        monkeypatch.setattr(hf_api.api, "endpoint", server.url)
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(home / "modules"))
        monkeypatch.setattr(sys, "path", list(sys.path))
        disable_progress_bars()
        close_session()  # its pooled connections go to the last test's server
        yield server
        close_session()
        enable_progress_bars()
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
