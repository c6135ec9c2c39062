"""`generate` with a policy for assisted generation; everything is done by the package hf_lossy_assist."""

try:
    from hf_lossy_assist.generation.speculative import speculative_generate
    from hf_lossy_assist.policy.parse import as_policy
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "hf_lossy_assist":
        raise  # something that the package itself needs
    raise ImportError(
        "this generation method needs the package hf_lossy_assist: run `pip install -e .` in its source folder"
    ) from None

# Transformers loads this file by them, and hands them on to `generate` as well.
LOADING = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "repo_type")


def generate(inputs=None, generation_config=None, *, model, lossy_policy=None, **kwargs):
    """Transformers' `generate` for `model` with `lossy_policy`; without one, "strict"."""
    policy = as_policy("strict" if lossy_policy is None else lossy_policy)
    kwargs = {name: value for name, value in kwargs.items() if name not in LOADING}
    return speculative_generate(model, policy, inputs=inputs, generation_config=generation_config, **kwargs)
