"""Write the shape of each model whose config is shipped beside it: `make recipes` after a config is added."""

from dataclasses import asdict

from arguments import parser_of
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.resolve import SHAPE_FILE, SHIPPED_CONFIGS, resolve_model
from pi_lora.storage import write_json


def main() -> None:
    parser_of(__doc__).parse_args()
    for folder in (*SHIPPED_CONFIGS.iterdir(), BUILTIN_FOLDER / "tiny"):
        write_json(folder / SHAPE_FILE, asdict(resolve_model(str(folder)).shape))


if __name__ == "__main__":
    main()
