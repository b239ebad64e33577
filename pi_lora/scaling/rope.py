"""The rope of a model from its config alone, as the papers define it. No torch is needed.

A model trained on positions `[0, L)` reads `L' > L` tokens when position `m` is replaced by `m L / L'`
(paper.tex, Eqn. 4), or when its rotary frequencies change in another way. Configs call `L' / L` the `factor`.

`pi_lora.scaling.scalings` has the scalings.
"""

from dataclasses import dataclass
from typing import Any

from pi_lora.scaling.config import RopeConfig, refused, with_full_rope, without_dynamic
from pi_lora.scaling.model_types import TRAININGS, Training
from pi_lora.scaling.scalings import ROPE_TYPES, Method, RopeType

# The config key of the original window in tokens, if the model was extended by `theta`, or by `pi` under a `longrope`.
# Ropes do not record these extensions.
ORIGINAL_WINDOW = "original_context_window"
# The windows of Llama and Llama 2 in tokens.
FIRST_LLAMAS = (2048, 4096)


@dataclass(frozen=True)
class Rope(RopeConfig):
    """The rope of the layers that attend to the whole window: its scaling and its windows.

    Whatever its name, a scaling divides each of the `frequencies` by one of the `divisors`, and multiplies cosines and
    sines by `attention_factor`.

    >>> scaling = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    >>> rope = Rope({"head_dim": 4, "max_position_embeddings": 2048, "rope_theta": 1e4, **scaling})
    >>> rope.frequencies, rope.divisors, rope.original, rope.window, rope.method
    ([1.0, 0.01], [4.0, 4.0], 2048, 8192, 'pi')
    """

    @property
    def kind(self) -> RopeType:
        """The meaning of the `rope_type`."""
        return ROPE_TYPES.get(self.rope_type, ROPE_TYPES["default"]._replace(extended_by=()))

    @property
    def divisors(self) -> list[float]:
        """The divisor of each frequency in inputs of the whole window. `dynamic` divides in longer inputs alone."""
        return self.kind.divisors(self)

    @property
    def scaled_frequencies(self) -> list[float]:
        """The rotary frequencies in inputs of the whole window, in radians a token."""
        return [frequency / divisor for frequency, divisor in zip(self.frequencies, self.divisors, strict=True)]

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines: as stated, or the default of the `rope_type`."""
        rope = self.parameters
        stated = rope.get("attention_factor")
        default = self.kind.attention_factor
        if default is None or stated is not None:
            return float(stated or 1)
        original = rope.get("original_max_position_embeddings") or self.config["original_max_position_embeddings"]
        factor = float(rope.get("factor") or self.config["max_position_embeddings"] / original)
        return default(rope, factor, original) if factor > 1 else 1.0

    @property
    def depends_on_length(self) -> bool:
        """Whether the length of an input changes the rotary frequencies, and so the states of the first tokens."""
        return self.kind.only_long_inputs or (self.rope_type == "longrope" and self.fixed_divisors is None)

    @property
    def method(self) -> Method | None:
        """The method by which the model was extended; None for an unextended model, for `direct`, and for a `longrope`
        that the model was trained with.
        """
        if self.config.get(ORIGINAL_WINDOW):
            if self.fixed_divisors:
                return "factors"
            return "pi" if self.rope_type == "longrope" else "theta"
        if self.constant_divisor is not None:
            return "pi"
        if self.rope_type == "proportional" and "factor" not in self.parameters:
            return None
        return self.kind.method

    @property
    def scale(self) -> float:
        """The factor L'/L by which the model is extended, by any method; 1 if it is not, and for `direct`."""
        if original := self.config.get(ORIGINAL_WINDOW):
            return self.window / float(original)
        return self.factor if self.method else 1.0

    @property
    def original(self) -> int:
        """The window L in tokens before the model was extended, by any method; the window of a model that is not.

        The factor of `llama3` is not the ratio of windows: Llama 3.1 reads 131,072 tokens by a factor of 8 from 8,192.
        """
        stated = self.parameters.get("original_max_position_embeddings")
        if self.kind.states_original and stated:
            return int(stated)
        return round(self.window / self.scale) if self.method else self.trained

    @property
    def window(self) -> int:
        """The context window in tokens, by the rule of transformers and vLLM.

        The factor of a `linear`, `dynamic` or `proportional` rope multiplies `max_position_embeddings`. That of `yarn`
        multiplies `original_max_position_embeddings`. With other types (`llama3`, `longrope`), and for Gemma 3 under
        `linear`, the window is `max_position_embeddings`.
        """
        declared = self.config.get("max_position_embeddings")
        if not declared:
            why = "its config has no max_position_embeddings, the context window; add it to config.json"
            raise refused(self.config, why)
        # Command R declares less in the other key; vLLM prefers this one.
        declared = self.config.get("model_max_length") or declared
        if dual_chunks := self.config.get("dual_chunk_attention_config"):
            # transformers computes no dual chunks, which Qwen2.5-1M needs beyond.
            declared = min(declared, dual_chunks.get("original_max_position_embeddings", declared))
        if self.kind.states_original and self.kind.multiplies_window:
            # Some configs have the key without a number.
            declared = self.parameters.get("original_max_position_embeddings") or declared
        return round(int(declared) * self.window_factor)

    @property
    def training(self) -> Training | None:
        """The longest sequences of the training, if the makers of the model say so and declare another window."""
        declared = (self.config.get("model_type"), self.window, self.parameters["rope_theta"])
        for training in TRAININGS:
            if (training.model_type, training.window, training.theta) == declared:
                return training
        return None

    @property
    def trained(self) -> int:
        """The tokens of the longest sequences that the model was trained on, by default its window."""
        if self.kind.only_long_inputs:
            # The frequencies of longer inputs are those of inference.
            return round(self.window / self.window_factor)
        return self.training.tokens if self.training else self.window

    @property
    def is_scaled(self) -> bool:
        """Whether the frequencies are those of a longer window than the one before a scaling."""
        return self.rope_type == "longrope" or (self.method is not None and not self.kind.only_long_inputs)

    @property
    def plain(self) -> "Rope":
        """The rope without `dynamic`, which scales inputs that are longer than those of the training."""
        if not self.kind.only_long_inputs:
            return self
        return Rope(with_full_rope(self.config, without_dynamic(self.parameters)))

    @property
    def window_factor(self) -> float:
        """The factor by which engines multiply the window that the config declares."""
        if not self.kind.multiplies_window or (self.rope_type == "linear" and self.facts.declares_extended_window):
            return 1.0
        return self.factor

    @property
    def scalings(self) -> tuple[Method, ...]:
        """The scalings that can extend the model."""
        if self.rope_type == "default" and self.facts.accepts_longrope_only:
            return (*ROPE_TYPES["linear"].extended_by, "factors")
        if self.config.get(ORIGINAL_WINDOW) and self.fixed_divisors:
            return ()
        if self.constant_divisor is not None:
            # A larger theta would be taken for another base.
            return ("pi", "direct")
        return self.kind.extended_by

    def extends(self, base: "Rope") -> bool:
        """Return whether this can be an extension of `base`. If `base` is extended already, the types are equal."""
        if base.rope_type == "default" or base.kind.only_long_inputs:
            return True
        return self.rope_type == base.rope_type and self.window >= base.window


def normalize_max_positions(config: dict[str, Any], longest_input: float | None) -> dict[str, Any]:
    """Return a config with a `linear` rope that multiplies `max_position_embeddings`, as transformers documents it.

    Some published configs (DeepSeek-Coder, LLaMA-2-7B-32K, Chinese-Alpaca-2-16k) declare the extended window there
    instead. No key marks them, but the `longest_input` of their tokenizer, in tokens, is the same number; or the model
    is a Llama 1 or 2, whose windows are 2,048 and 4,096 tokens without a scaling.
    """
    declared = config.get("max_position_embeddings")
    if declared is None:
        return config
    rope = Rope(config)
    original = declared / rope.window_factor
    is_first_llama = config.get("model_type") == "llama" and rope.parameters["rope_theta"] == 1e4
    is_extended = is_first_llama and original in FIRST_LLAMAS and declared > 2 * max(FIRST_LLAMAS)
    if declared != longest_input and not is_extended:
        return config
    return {**config, "max_position_embeddings": round(original)}
