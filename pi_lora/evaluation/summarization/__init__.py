"""Summaries of long documents, scored by ROUGE (paper.tex, section 3.5)."""

import pi_lora.models  # noqa: F401  before transformers imports PEFT, which imports bitsandbytes
