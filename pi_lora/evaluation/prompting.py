"""Whether models are asked in their chat template: passkeys decide, once for all models that are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pi_lora.data.chats import chat_problem, template_tokens
from pi_lora.distributed import any_process
from pi_lora.errors import DataError
from pi_lora.evaluation.passkey import PasskeyTest
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.recipe.evaluation import PasskeyOptions, PromptOptions
from pi_lora.recipe.section import Section
from pi_lora.types import ui

# The passkeys that decide, one at each distance, and the tokens of a prompt without the template.
KEYS = 8
TOKENS = 512
# The template is used if it retrieves so many keys more: the 95 % interval of the change (`of_successes`) is above 0.
MARGIN = 5

SectionT = TypeVar("SectionT", bound=Section)


@dataclass
class Prompting:
    """How models that are compared are asked.

    Attributes:
        models: The models. The first one that is loaded decides.
        chat: Whether they are asked in their chat template; None until that is decided.
    """

    models: Sequence[ModelSource]
    chat: bool | None = None

    def settled(self, options: SectionT, loaded: LoadedModel) -> SectionT:
        """Return options with a decision in place of `chat: auto`, for which `loaded` is asked both ways if all models
        have a template.
        """
        if not isinstance(options, PromptOptions) or options.chat != "auto":
            return options
        if self.chat is None:
            self.chat = not any(chat_problem(model.tokenizer) for model in self.models) and prefers_template(loaded)
        return options.changed(chat=self.chat)


def prefers_template(loaded: LoadedModel) -> bool:
    """Whether a model retrieves more passkeys in its chat template than as raw text, beyond noise. Otherwise raw text
    is better: it is the prompt of the paper, and of models without a template.
    """
    tokens = min(TOKENS + template_tokens(loaded.tokenizer), loaded.source.original)
    retrieved = []
    for chat in (False, True):
        try:
            test = PasskeyTest(loaded, tokens, PasskeyOptions(depths=KEYS, trials=1, chat=chat))
        except DataError:  # L holds no passkey
            return False
        retrieved.append(sum(test.measure(depth)["success_rate"] for depth in range(KEYS)))
    raw, in_template = retrieved
    chat = any_process(in_template - raw >= MARGIN)
    ui.say(
        f"{loaded.name}: retrieves {raw:.0f} of {KEYS} passkeys as raw text, {in_template:.0f} in its chat template, "
        f"which is used if it retrieves {MARGIN} more: asked with chat {chat}"
    )
    return chat
