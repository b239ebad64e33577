"""The rope of a model from its config alone, as the papers define it. No torch is needed.

A model trained on positions `[0, L)` reads `L' > L` tokens when position `m` is replaced by `m L / L'`
(paper.tex, Eqn. 4), or when its rotary frequencies change in another way. Configs call `L' / L` the `factor`.

- `pi`: every frequency divided by the factor (rope type `linear`; in a `longrope` its long factors, multiplied);
- `yarn` (Peng et al. 2023) and `llama3` (Dubey et al. 2024): low frequencies divided, high ones kept;
- `theta`: a larger base of the frequencies (NTK-aware; bloc97 2023, Roziere et al. 2023);
- `dynamic`: NTK by the length of the input, for comparison;
- `factors`: a divisor of its own for each frequency, as `pi-lora search` finds them (LongRoPE2, Shang et al. 2025);
  in configs a `longrope` with equal short and long lists;
- `direct`: nothing changes (the paper's FT).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from pi_lora.scaling.config import Config, full_attention_rope, refused, with_full_rope, without_dynamic
from pi_lora.scaling.model_types import ModelType, Training, facts_of, training_of

Method = Literal["pi", "yarn", "theta", "llama3", "dynamic", "direct", "factors"]
# The config key of the original window in tokens, if the model was extended by `theta`, or by `pi` under a `longrope`.
# Ropes do not record these extensions.
ORIGINAL_WINDOW = "original_context_window"

# The windows of Llama and Llama 2 in tokens.
FIRST_LLAMAS = (2048, 4096)


@dataclass(frozen=True)
class Rope:
    """The rope of the layers that attend to the whole window, as a config describes it.

    Whatever its name, a scaling divides each of the `frequencies` by one of the `divisors`, and multiplies cosines and
    sines by `attention_factor`.

    >>> scaling = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    >>> rope = Rope({"head_dim": 4, "max_position_embeddings": 2048, "rope_theta": 1e4, **scaling})
    >>> rope.frequencies, rope.divisors, rope.original, rope.window, rope.method
    ([1.0, 0.01], [4.0, 4.0], 2048, 8192, 'pi')
    """

    config: Config

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The parameters as transformers 5 names them; ScalingError if the model has none, or no numbers."""
        return full_attention_rope(self.config)

    @property
    def rope_type(self) -> str:
        """The `rope_type` of configs."""
        return str(self.parameters["rope_type"])

    @property
    def kind(self) -> "RopeType":
        """What the `rope_type` means."""
        return ROPE_TYPES.get(self.rope_type, ROPE_TYPES["default"]._replace(extended_by=()))

    @property
    def facts(self) -> ModelType:
        """What is special about the type of the model."""
        return facts_of(self.config.get("model_type"))

    @cached_property
    def dimensions(self) -> tuple[int, int]:
        """The dimensions of a head of the full-attention layers, and those that are rotated."""
        config = self.config
        if config.get("qk_rope_head_dim"):
            # Multi-head latent attention: a part of each head that is rotated as a whole.
            rotated = int(config["qk_rope_head_dim"])
            return rotated, rotated
        head = config.get("head_dim") or config.get("attention_head_dim")
        head = int(head or config["hidden_size"] // config["num_attention_heads"])
        if self.rope_type == "proportional":
            # Gemma 4 has larger heads in its full-attention layers.
            layers = config.get("per_layer_config") or {}
            for layer in layers.values():
                head = max(head, int(layer.get("head_dim", 0)))
        return head, int(head * float(self.parameters.get("partial_rotary_factor") or 1))

    @cached_property
    def frequencies(self) -> list[float]:
        """The unscaled rotary frequencies in radians a token, the highest first. Under `proportional` the dimensions
        that are not rotated have a frequency of 0.
        """
        head, rotated = self.dimensions
        theta = float(self.parameters["rope_theta"])
        if self.rope_type != "proportional":
            return [theta ** (-index / rotated) for index in range(0, rotated, 2)]
        frequencies = [theta ** (-index / head) for index in range(0, rotated - 1, 2)]
        return frequencies + [0.0] * (head // 2 - len(frequencies))

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
        """The factor of cosines and sines: as stated, or the default of YaRN (Peng et al. 2023, Eqn. 22) with the
        `mscale` of DeepSeek, or that of LongRoPE (Ding et al. 2024).
        """
        rope = self.parameters
        stated = rope.get("attention_factor")
        if self.rope_type not in ("yarn", "longrope") or stated is not None:
            return float(stated or 1)
        original = rope.get("original_max_position_embeddings") or self.config["original_max_position_embeddings"]
        factor = float(rope.get("factor") or self.config["max_position_embeddings"] / original)
        if factor <= 1:
            return 1.0
        if self.rope_type == "longrope":
            return math.sqrt(1 + math.log(factor) / math.log(original))
        growth = 0.1 * math.log(factor)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            return float((growth * rope["mscale"] + 1) / (growth * rope["mscale_all_dim"] + 1))
        return growth + 1

    @property
    def fixed_divisors(self) -> list[float] | None:
        """The divisors of a `longrope` that has the same for short and long inputs; None for any other rope."""
        rope = self.parameters
        if self.rope_type != "longrope" or rope["short_factor"] != rope["long_factor"]:
            return None
        return list(rope["long_factor"])

    @property
    def constant_divisor(self) -> float | None:
        """The divisor of all frequencies of a `longrope` that is PI; None for any other rope."""
        divisors = set(self.fixed_divisors or ())
        return float(divisors.pop()) if len(divisors) == 1 else None

    @property
    def depends_on_length(self) -> bool:
        """Whether the length of an input changes the rotary frequencies, and so the states of the first tokens."""
        return self.rope_type == "dynamic" or (self.rope_type == "longrope" and self.fixed_divisors is None)

    @property
    def factor(self) -> float:
        """The number that configs call `factor`; 1 without one."""
        return float(self.constant_divisor or self.parameters.get("factor") or 1)

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
        if self.rope_type == "llama3":
            return int(self.parameters["original_max_position_embeddings"])
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
        if self.rope_type == "yarn":
            # Some configs have the key without a number.
            declared = self.parameters.get("original_max_position_embeddings") or declared
        return round(int(declared) * self.window_factor)

    @property
    def training(self) -> Training | None:
        """The longest sequences of the training, if the makers of the model say so and declare another window."""
        return training_of(self.config, self.window, self.parameters["rope_theta"])

    @property
    def trained(self) -> int:
        """The tokens of the longest sequences that the model was trained on, by default its window."""
        if self.rope_type == "dynamic":
            # The frequencies of longer inputs are those of inference.
            return round(self.window / self.window_factor)
        return self.training.tokens if self.training else self.window

    @property
    def is_scaled(self) -> bool:
        """Whether the frequencies are those of a longer window than the one before a scaling."""
        return self.rope_type == "longrope" or self.method not in (None, "dynamic")

    @property
    def plain(self) -> "Rope":
        """The rope without `dynamic`, which scales inputs that are longer than those of the training."""
        if self.rope_type != "dynamic":
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
        if base.rope_type in ("default", "dynamic"):
            return True
        return self.rope_type == base.rope_type and self.window >= base.window


def normalize_max_positions(config: dict[str, Any], longest_input: float | None) -> dict[str, Any]:
    """Return a config with a `linear` rope that multiplies `max_position_embeddings`, as transformers documents it.

    Some published configs (DeepSeek-Coder, LLaMA-2-7B-32K, Chinese-Alpaca-2-16k) declare the extended window there
    instead. No key marks them, but the `longest_input` of their tokenizer, in tokens, is the same number; or they are
    extended from a window of the first Llamas, none of which was trained on so much without a scaling.
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


def _none(rope: Rope) -> list[float]:
    return [1.0] * len(rope.frequencies)


def _equal(rope: Rope) -> list[float]:
    """The paper's PI (Eqn. 4)."""
    return [rope.factor] * len(rope.frequencies)


def _listed(rope: Rope) -> list[float]:
    return list(rope.parameters["long_factor"])


def _yarn(rope: Rope) -> list[float]:
    """Peng et al. 2023, section 3.2: a frequency that turns `beta_fast` times in the original window is kept, one that
    turns `beta_slow` times is divided by the factor, and a ramp by the index leads from one to the other.
    """
    parameters = rope.parameters
    rotated = 2 * len(rope.frequencies)

    def index_of(turns: float) -> float:
        wavelength = parameters["original_max_position_embeddings"] / turns
        return rotated * math.log(wavelength / (2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    first = index_of(parameters.get("beta_fast") or 32)
    last = index_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rotated - 1)
    if first == last:
        last += 0.001
    shares = [(index - first) / (last - first) for index in range(len(rope.frequencies))]
    return [_between(rope.factor, share) for share in shares]


def _llama3(rope: Rope) -> list[float]:
    """Dubey et al. 2024, as published with Llama 3.1: a ramp by the turns in the original window."""
    low = rope.parameters["low_freq_factor"]
    high = rope.parameters["high_freq_factor"]
    original = rope.parameters["original_max_position_embeddings"]
    turns = [original * frequency / (2 * math.pi) for frequency in rope.frequencies]
    ramp = (high - low) or 1e-9  # Llama 4 Scout has none
    return [_between(rope.factor, (high - turn) / ramp) for turn in turns]


def _between(factor: float, share: float) -> float:
    """Return the divisor of a frequency that is a mean of two: divided by the factor (`share`), and unscaled."""
    share = min(max(share, 0.0), 1.0)
    return 1 / (share / factor + 1 - share)


class RopeType(NamedTuple):
    """What a `rope_type` of configs means.

    Attributes:
        divisors: The divisor of each frequency.
        method: The method that it stands for.
        extended_by: The scalings that extend such a rope. The frequencies of an extended model are extended further: a
            `linear` or `yarn` factor is multiplied. `yarn` allows no larger theta: vLLM would read the old window.
        multiplies_window: Whether engines multiply the declared window by the factor.
    """

    divisors: Callable[[Rope], list[float]]
    method: Method | None = None
    extended_by: tuple[Method, ...] = ()
    multiplies_window: bool = False


ROPE_TYPES: Mapping[str, RopeType] = {
    "default": RopeType(_none, None, get_args(Method)),
    "dynamic": RopeType(_none, "dynamic", get_args(Method), multiplies_window=True),
    "linear": RopeType(_equal, "pi", ("pi", "theta", "direct"), multiplies_window=True),
    "llama3": RopeType(_llama3, "llama3", ("llama3", "theta", "direct")),
    "longrope": RopeType(_listed, None, ("pi",)),
    "proportional": RopeType(_equal, "pi", ("pi", "theta", "direct"), multiplies_window=True),
    "yarn": RopeType(_yarn, "yarn", ("yarn",), multiplies_window=True),
}
