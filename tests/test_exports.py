import pi_lora


def test_every_export_is_there() -> None:
    assert pi_lora.__all__ == ["LoadedModel", "PiLoraError", "Stretch", "load"]
    for name in pi_lora.__all__:
        assert getattr(pi_lora, name).__doc__


def test_load_is_ready_to_use() -> None:
    loaded = pi_lora.load("builtin:tiny", pi_lora.Stretch(target=1024))
    assert (loaded.window, loaded.scale) == (1024, 4)
    assert not loaded.model.training
