"""The bounds, and how far a model stays below them, as tables."""

from itertools import groupby

from rich.table import Table

from pi_lora.theory.measured import Attention
from pi_lora.theory.setting import Bounds, Setting


def bounds_table(setting: Setting, bounds: Bounds) -> Table:
    """Section 2.3 in numbers: as the paper states it, and as it holds."""
    table = Table(
        title=f"d {setting.head_dim}, c {setting.theta:g}, L {setting.original}, L' {setting.target}",
        caption=f"B(s)/d is at least {bounds.lowest:.4g} on all whole s in [0, {setting.target}] "
        f"(at {bounds.lowest_at}); H is max_j |h_j|",
    )
    table.add_column("")
    table.add_column("paper", justify="right")
    table.add_column("holds for every h", justify="right")
    table.add_row("interpolation, |a - a_linear|", f"d H / {bounds.papers_divisor:.2f}", f"d H / {bounds.divisor:.2f}")
    table.add_row("extrapolation, |a|", "2 H B(s)", "2 H B(s)")
    table.add_row("their ratio if B(s) = d", f"{bounds.papers_factor:.1f}", f"{bounds.factor:.1f}")
    table.add_row("their ratio where B(s) is least", f"{bounds.papers_ratio:.1f}", f"{bounds.ratio:.1f}")
    return table


def attention_table(found: Attention) -> Table:
    """The largest of each layer, over its heads."""
    table = Table(
        title=f"{found.model}: scores of {found.pairs} queries and keys a head, {found.tokens} tokens of {found.text}",
        caption="the largest over heads, pairs and distances; shares are of the bound for the same pair and distance",
    )
    for name in (
        "layer",
        "H",
        "|a| inside",
        "|a| beyond",
        "of its bound",
        "|a - line|",
        "of its bound",
        "of Eqn. 5",
    ):
        table.add_column(name, justify="right")
    for layer, group in groupby(found.heads, key=lambda each: each.layer):
        heads = list(group)
        table.add_row(
            str(layer),
            *(f"{max(getattr(each, key) for each in heads):.1f}" for key in ("coefficient", "inside", "beyond")),
            f"{max(each.beyond_share for each in heads):.0%}",
            f"{max(each.between for each in heads):.2f}",
            f"{max(each.between_share for each in heads):.0%}",
            f"{max(each.papers_share for each in heads):.0%}",
        )
    return table
