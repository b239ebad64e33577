"""Model cards: what a run or a merged model is, how it is loaded without losing the scaling, what was measured."""

from pi_lora.card.writing import CARD, check_own_card, is_hub_id, merged_card, refresh_scores, write_card

__all__ = ["CARD", "check_own_card", "is_hub_id", "merged_card", "refresh_scores", "write_card"]
