"""Write the shape of each model whose config is shipped beside it: `make recipes` after a config is added."""

import json
from dataclasses import asdict

from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.source import SHIPPED_CONFIGS, resolve_model

for folder in (*SHIPPED_CONFIGS.iterdir(), BUILTIN_FOLDER / "tiny"):
    shape = resolve_model(str(folder)).shape
    content = json.dumps(asdict(shape), indent=2)
    (folder / "shape.json").write_text(content + "\n", encoding="utf-8")
