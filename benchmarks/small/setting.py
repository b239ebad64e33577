"""How large everything is, at full size and in a tiny one that shows that it runs."""

from dataclasses import dataclass

from transformers import LlamaConfig


@dataclass(frozen=True)
class Setting:
    """A small LLaMA, its pre-training, and how far and how long it is extended; lengths in tokens, counts in steps."""

    vocabulary: int = 8192
    hidden: int = 512
    intermediate: int = 1408
    layers: int = 12
    heads: int = 8
    window: int = 512
    # The geometry that LLaMA has at 2048 tokens with 10000: the same share of dimensions that never turn once.
    theta: float = 1000.0
    batch_tokens: int = 65536
    pretraining_steps: int = 1000
    rate: float = 4e-3
    scales: tuple[int, ...] = (4, 8, 16)
    steps: int = 200
    every: int = 50
    tokens_a_step: int = 65536
    documents: int = 8
    depths: int = 32
    trials: int = 10
    rank: int = 32

    # The paper tunes 7B at 2e-5; LLaMA was pre-trained at 3e-4 (Touvron et al. 2023).
    RATIO = 2e-5 / 3e-4
    # Adapters take about ten times the rate of all weights (Schulman et al. 2025, "LoRA without regret").
    ADAPTERS = 10.0

    def tuning_rate(self, method: str) -> float:
        """The paper's part of the rate of pre-training."""
        return self.rate * self.RATIO * (1.0 if method == "full" else self.ADAPTERS)

    def windows(self, target: int) -> list[int]:
        """What perplexity is measured at: L and twice as much up to L'."""
        return [self.window * 2**power for power in range((target // self.window).bit_length())]

    def config(self) -> LlamaConfig:
        """The model before it is trained."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=self.window,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )


TINY = Setting(
    vocabulary=1024,
    hidden=32,
    intermediate=48,
    layers=2,
    heads=2,
    window=64,
    batch_tokens=512,
    pretraining_steps=4,
    steps=2,
    every=1,
    tokens_a_step=1024,
    documents=1,
    depths=2,
    trials=1,
    rank=4,
)
