"""Sliding-window perplexity (Press et al. 2022; paper.tex, section 3.2)."""
