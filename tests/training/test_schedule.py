import pytest

from pi_lora.errors import RecipeError
from pi_lora.recipe.schema import Training
from pi_lora.training.schedule import rate_share


@pytest.mark.parametrize(
    ("schedule", "options", "end"),
    [("constant", {}, 1.0), ("linear", {}, 0.0125), ("cosine_with_min_lr", {"min_lr_rate": 0.1}, 0.1003)],
)
def test_schedules_warm_up_from_a_tenth(schedule: str, options: dict[str, float], end: float) -> None:
    share = rate_share(Training(steps=100, schedule=schedule, schedule_options=options, warmup_steps=20))
    assert [share(step) for step in (0, 10, 20, 99)] == pytest.approx([0.1, 0.55, 1.0, end], abs=1e-4)


@pytest.mark.parametrize(
    ("schedule", "options"), [("linear", {"min_lr": 0.1}), ("warmup_stable_decay", {}), ("cosine_with_min_lr", {})]
)
def test_options_that_a_schedule_does_not_take_are_refused(schedule: str, options: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=f"training.schedule_options: {schedule} does not accept them"):
        rate_share(Training(schedule=schedule, schedule_options=options))
