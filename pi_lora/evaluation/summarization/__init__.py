"""Summaries of long documents, scored by ROUGE (paper.tex, section 3.5)."""
