"""Adapter and base to full weights that every engine reads with their scaling, in bounded memory, and checked."""

from pi_lora.merge.merging import merge

__all__ = ["merge"]
