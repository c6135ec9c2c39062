"""This package's engine in EleutherAI's lm-eval: a registered model, "hf-lossy".

    python -m hf_lossy_assist.evaluation.lm_eval_models run --model hf-lossy --model_args pretrained=M,assistant=D,policy=svip --tasks gsm8k

is lm-eval's command with that model registered.
"""

from functools import cache

from transformers import PreTrainedModel

from ..enabling import enable


@cache
def make_model() -> type:
    """Return a model of lm-eval whose texts a policy writes, and register it as "hf-lossy".

    It is made on demand, since lm-eval is an extra and takes seconds to import.
    """
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    @register_model("hf-lossy")
    class LossyLM(HFLM):
        """`HFLM` whose target has a standing policy; likelihoods are those of the target.

        Args:
            pretrained: the target, a loaded model or whatever lm-eval accepts.
            assistant: the draft, a loaded model, a folder or a Hub id. policy: whatever `lossy_policy=` accepts.
            kwargs: of `HFLM`.
        """

        def __init__(
            self, pretrained: object, assistant: PreTrainedModel | str, policy: object = "svip", **kwargs: object
        ):
            super().__init__(pretrained, **kwargs)
            if isinstance(assistant, str):
                from ..artifacts.loading import load_model

                assistant = load_model(assistant, dtype=self.model.dtype).to(self.model.device).eval()
            enable(self.model, assistant, policy, strict=True, tokenizer=self.tokenizer)

    return LossyLM


if __name__ == "__main__":
    make_model()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
