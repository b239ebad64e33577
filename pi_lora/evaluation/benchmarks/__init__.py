"""Short-context benchmarks (paper.tex, table 5) through lm-eval."""
