"""The small files of models: where they are looked for, and what is taken where settings are silent."""

from pathlib import Path

import pytest
from peft import LoraConfig

from pi_lora.models.files import AdapterSettings, is_local


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("gpt2", False),
        ("owner/model", False),
        ("some/folder/model", True),
        ("./model", True),
        ("../model", True),
        ("/model", True),
        ("~/model", True),
        ("builtin:tiny", True),
    ],
)
def test_a_name_of_one_slash_at_most_may_be_on_the_hub(
    name: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_local(name) is local
    (tmp_path / "gpt2").mkdir()
    assert is_local("gpt2")


def test_settings_that_an_adapter_leaves_out_are_those_of_peft() -> None:
    """PEFT's own files have them all; those of other trainers may not."""
    settings, theirs = AdapterSettings(peft_type="LORA"), LoraConfig()
    names = "r lora_alpha use_rslora init_lora_weights".split()
    assert {name: getattr(settings, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert settings.scaling("q_proj", settings.r) == 1.0


def test_the_scaling_is_by_the_root_of_the_rank_where_rank_stabilized() -> None:
    stabilized = AdapterSettings(peft_type="LORA", lora_alpha=8, use_rslora=True, alpha_pattern={"q_proj": 16})
    assert stabilized.scaling("model.layers.0.self_attn.k_proj", 16) == 2.0
    assert stabilized.scaling("model.layers.0.self_attn.q_proj", 16) == 4.0
    assert stabilized.scaling("model.layers.0.self_attn.xq_proj", 16) == 2.0
