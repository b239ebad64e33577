"""What a model card says on loading: Python that restores the scaling, to be run in the model's folder."""

import json

from pi_lora.recipe.schema import Model, Tuning

LOAD_ADAPTER = """\
An adapter alone is not the model: PEFT does not carry the scaling of positions. pi-lora restores it,

```python
import pi_lora

loaded = pi_lora.load(".")  # this folder
model, tokenizer = loaded.model, loaded.tokenizer
```

and without pi-lora the base takes its config from this folder:

```python
{imports}

run = "."  # this folder, or its name on the hub
config = AutoConfig.from_pretrained({config})  # the base's, stretched
base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, run).eval()
tokenizer = AutoTokenizer.from_pretrained(run)
```
"""

LOAD_FULL = """\
The scaling is in `config.json`, so that it loads like any model:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""

NF4 = """BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)"""


def adapter_snippet(model: Model, tuning: Tuning, builtin: bool) -> str:
    """How to load an adapter tuned from `model`, with pi-lora and without; `builtin`: the base comes with pi-lora."""
    name, quantized = json.dumps(model.name), tuning.method == "qlora"
    trust = ["trust_remote_code=True"] if model.trust_remote_code else []
    base = [
        f"find_base({name}).path" if builtin else name,
        "config=config",
        *([f"revision={json.dumps(model.revision)}"] if model.revision != "main" else []),
        *(["quantization_config=nf4", "dtype=torch.bfloat16"] if quantized else []),
        *trust,
    ]
    imports = [
        *(["import torch"] if quantized else []),
        "from peft import PeftModel",
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer"
        + (", BitsAndBytesConfig" if quantized else ""),
        *(["", f"from pi_lora.model import find_base  # {model.name} comes with pi-lora"] if builtin else []),
        *(["", f"nf4 = {NF4}"] if quantized else []),
    ]
    return LOAD_ADAPTER.format(imports="\n".join(imports), config=", ".join(["run", *trust]), base=", ".join(base))
