"""Write the shape of each model whose config is shipped beside it: `make recipes` after a config is added."""

from pydantic import TypeAdapter

from pi_lora.models.model import find
from pi_lora.planning.counting import shape_of
from pi_lora.planning.planning import BUILTIN_MODELS, CONFIGS
from pi_lora.planning.shape import Shape

for folder in (*CONFIGS.iterdir(), BUILTIN_MODELS / "tiny"):
    shape = shape_of(find(str(folder)).skeleton)
    (folder / "shape.json").write_bytes(TypeAdapter(Shape).dump_json(shape, indent=2, exclude_none=True) + b"\n")
