"""What the `evaluation` section of a recipe asks for."""

from pi_lora.evaluate.passkey import evaluate_passkey
from pi_lora.evaluate.perplexity import default_stride, default_windows, evaluate_perplexity
from pi_lora.evaluate.scores import Scores
from pi_lora.recipe.schema import Evaluation
from pi_lora.run import LoadedModel


def measure(loaded: LoadedModel, evaluation: Evaluation) -> dict[str, Scores]:
    """What `evaluation` asks for, by name, on the model's whole window where it does not say."""
    scores: dict[str, Scores] = {}
    if wanted := evaluation.perplexity:
        windows = list(wanted.windows or default_windows(loaded.window))
        stride = wanted.stride or default_stride(windows)
        scores["perplexity"] = evaluate_perplexity(loaded, wanted.data, windows, stride, wanted.documents)
    if passkey := evaluation.passkey:
        target = passkey.target or loaded.window
        scores["passkey"] = evaluate_passkey(loaded, target, passkey.depths, passkey.trials, passkey.seed)
    return scores
