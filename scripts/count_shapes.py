"""Write the shape of each model whose config is shipped beside it: `make recipes` after a config is added."""

import json
from dataclasses import asdict

from pi_lora.models.model import find
from pi_lora.planning.counting import shape_of
from pi_lora.planning.planning import BUILTIN_MODELS, CONFIGS

for folder in (*CONFIGS.iterdir(), BUILTIN_MODELS / "tiny"):
    shape = shape_of(find(str(folder)).meta_model)
    (folder / "shape.json").write_text(json.dumps(asdict(shape), indent=2) + "\n", encoding="utf-8")
