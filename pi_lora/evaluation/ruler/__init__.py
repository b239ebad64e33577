"""RULER (Hsieh et al. 2024, arXiv 2404.06654) through lm-eval: how much of its window a model uses."""
