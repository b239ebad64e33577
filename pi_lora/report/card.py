"""What a model card says on loading: Python that restores the scaling, to be run in the model's folder."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from pi_lora.errors import ModelError
from pi_lora.models.base import ADAPTER_CONFIG_FILE, BUILTIN, read_config
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import Model, Recipe, Tuning
from pi_lora.report.paper import paper_section
from pi_lora.report.tables import eval_results, picture_lines, score_lines, stage_tables
from pi_lora.run_folder import RUN_FILE, SCORES
from pi_lora.scaling.config import Config, method_of, scale_of, window_of

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
{prepare}tokenizer = AutoTokenizer.from_pretrained(run)
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

# As pi_lora.models.nf4.keep_as_quantized.
KEEP_AS_QUANTIZED = """\
for layer in model.modules():
    if isinstance(layer, Linear4bit):  # bitsandbytes 0.50 repacks for CPUs with AVX512-BF16, inexactly or not at all
        layer.support_avx512bf16_for_cpu = False
"""


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
        *(["import torch", "from bitsandbytes.nn import Linear4bit"] if quantized else []),
        "from peft import PeftModel",
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer"
        + (", BitsAndBytesConfig" if quantized else ""),
        *(["", f"from pi_lora.models.base import find_base  # {model.name} comes with pi-lora"] if builtin else []),
        *(["", f"nf4 = {NF4}"] if quantized else []),
    ]
    return LOAD_ADAPTER.format(
        imports="\n".join(imports),
        config=", ".join(["run", *trust]),
        base=", ".join(base),
        prepare=KEEP_AS_QUANTIZED if quantized else "",
    )


def positions(config: Config) -> str:
    """What becomes of position indices, in words."""
    scale = scale_of(config)
    return {
        "pi": f"positions are divided by {scale:g}",
        None: "positions are not rescaled",
        "dynamic": f"rotary frequencies are stretched for long inputs (dynamic NTK, factor {scale:g})",
        "yarn": f"rotary frequencies are stretched by YaRN, factor {scale:g}",
    }[method_of(config)]


def recipe_rows(recipe: Recipe) -> dict[str, str]:
    """What was trained, how, and on what."""
    tuning, training = recipe.tuning, recipe.training
    variant = (", rank-stabilized" if tuning.rank_stabilized else "") + (", DoRA" if tuning.dora else "")
    adapter = f", rank {tuning.rank}, alpha {tuning.lora_alpha:g}{variant}, on {tuning.targets}"
    with_norms = "; embeddings and norms in full" if tuning.embeddings_and_norms else ""
    total = sum(source.weight for source in recipe.data.source)
    return {
        "method": f"`{tuning.method}`" + (adapter + with_norms if tuning.method != "full" else ", every weight"),
        "steps": f"{training.steps:,} of {training.global_batch_size} sequences, rate {training.learning_rate:g}",
        "data": ", ".join(f"`{source.name}` ({source.weight / total:.0%})" for source in recipe.data.source),
    }


def cost_rows(made_with: Mapping[str, Any]) -> dict[str, str]:
    """Tokens, time, memory and versions, from `run.json`."""
    versions = ", ".join(f"{name} {version}" for name, version in made_with["versions"].items())
    memory = made_with["peak_memory"] / 2**30
    return {
        "cost": f"{made_with['tokens']:,} tokens in {made_with['seconds']:,.0f} seconds, at most {memory:.1f} GiB a "
        f"process, on {made_with['hardware']}",
        "last loss": f"{made_with['loss']:.3f} nats a token",
        "versions": f"{versions}, Python {made_with['python']}"
        + (f"; pi-lora at commit `{made_with['commit']}`" if made_with["commit"] else ""),
    }


def limits(config: Config) -> str:
    """What nobody should expect of the model."""
    short = (
        f"Positions are divided by {scale_of(config):g} in short inputs too: within the original window, the paper "
        "(Chen et al. 2023, section 3.4) finds benchmarks somewhat below the base's. "
        if method_of(config) == "pi"
        else ""
    )
    return (
        f"Nothing was tuned beyond {window_of(config):,} tokens. {short}What is not listed under *Measured* was not "
        "measured. License, languages and biases are those of the base and the data."
    )


CARD = "README.md"
SCORES_BEGIN, SCORES_END = "<!-- scores -->", "<!-- end of scores -->"


def write_card(run: Path, folder: Path | None = None) -> None:
    """Write the card of a run from what its folder holds: recipe, config, provenance, scores; into another if given.

    Raises:
        ModelError: the config or a result cannot be read.
    """
    recipe = load_recipe(run / RECIPE_FILE).recipe
    full = recipe.tuning.method == "full"
    model, rows = recipe.model, {}
    if not full and model.name != (base := _base_of(run))["name"]:
        # Tuned further: the adapter stands on what the first one did.
        model, rows = model.model_copy(update=base), {"tuned further from": f"`{model.name}`"}
    loading = LOAD_FULL if full else adapter_snippet(model, recipe.tuning, model.name.startswith(BUILTIN))
    text = _card(run, model.name, full, rows, loading, pictures=folder or run)
    ((folder or run) / CARD).write_text(text, encoding="utf-8")


def merged_card(run: Path, merged: Path, checks: Sequence[str], facts: Mapping[str, str] | None = None) -> str:
    """The card of `merged`, full weights made of the adapter in `run`.

    `checks` say what came of the comparison with base and adapter, and are empty if there was none; `facts` are further
    rows of the table on how it was made. `run` may be an adapter folder of other origin, with a config but without
    recipe and provenance.

    Raises:
        ModelError: a config or a result cannot be read.
    """
    base = _base_of(run)["name"]
    dtype = read_config(merged).get("dtype", "float32")
    rows = {"weights": f"base and adapter added up in float32, stored in {dtype}", **(facts or {})}
    lines = "".join(f"- {line}\n" for line in checks) or "Not compared.\n"
    more = f"## Merged weights against base and adapter, both in float32\n\n{lines}\n"
    return _card(run, base, True, rows, LOAD_FULL, more, "With the adapter, before it was merged:\n\n")


def refresh_scores(run: Path) -> None:
    """Bring the scores in the card of a run up to what is in `scores/` now, and its metadata; what else is there stays.

    Raises:
        ModelError: a result cannot be read.
    """
    if not (run / SCORES).is_dir():
        return
    file = run / CARD
    before = file.read_text(encoding="utf-8")
    section = re.compile(f"{SCORES_BEGIN}.*?{SCORES_END}", re.DOTALL)
    after = section.sub(lambda _: _scores_section(run, run), before)
    if results := eval_results(run):
        card = ModelCard(after)
        card.data["model_name"], card.data["eval_results"] = run.resolve().name, results
        after = str(card)
    if after != before:
        file.write_text(after, encoding="utf-8")


def check_own_card(run: Path) -> None:
    """Nothing, if the card of a run may be brought up to date: there is none, or one with a place for scores.

    Raises:
        ModelError: somebody else wrote it.
    """
    file = run / CARD
    if file.is_file() and SCORES_BEGIN not in file.read_text(encoding="utf-8"):
        raise ModelError(f"{file}: has no place for scores, so it is not ours to overwrite; move it away")


def is_hub_id(name: str) -> bool:
    """Whether a model or data set is one of the hub, as far as its name tells; the hub rejects cards that link others.

    >>> is_hub_id("huggyllama/llama-7b"), is_hub_id("builtin:tiny"), is_hub_id("data/*.jsonl")
    (True, False, False)
    """
    if Path(name).expanduser().exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _card(
    run: Path,
    base: str,
    full: bool,
    rows: Mapping[str, str],
    loading: str,
    more: str = "",
    measured: str = "",
    pictures: Path | None = None,
) -> str:
    """The card of a run, or of what was merged from it; `more` is a section, `measured` goes before the scores, and
    `pictures` is the folder that the card goes to.
    """
    config = read_config(run)
    kept = run / RECIPE_FILE
    recipe = load_recipe(kept).recipe if kept.is_file() else None
    made_with = _made_with(run)
    original = made_with.get("original")
    windows = f"{original:,} to {window_of(config):,}" if original else f"{window_of(config):,}"
    table = {
        "base": f"`{base}`" + (f", revision `{recipe.model.revision}`" if recipe and is_hub_id(base) else ""),
        "window": f"{windows} tokens",
        "scaling": f"`{method_of(config) or 'direct'}`: {positions(config)}",
        **(recipe_rows(recipe) if recipe else {}),
        **(cost_rows(made_with) if made_with else {}),
        **rows,
    }
    return f"""---
{_metadata(run, base, full, recipe, config)}
---
# {base.rstrip("/").rpartition("/")[2]}, {windows} tokens

`{base}`, made to read {window_of(config):,} tokens (L') by pi-lora.

{_table(table)}
## Load it

{loading}
{more}## Measured

{_scores_section(run, pictures, measured)}

{_beside_the_paper(recipe)}## Limits

{limits(config)}
"""


def _metadata(run: Path, base: str, full: bool, recipe: Recipe | None, config: Config) -> str:
    """What the hub reads of a card: a YAML block, which must not name a base or data that are not on the hub."""
    method = recipe.tuning.method if recipe else "lora"
    sources = [source.name for source in recipe.data.source if is_hub_id(source.name)] if recipe else []
    scaling = "position-interpolation" if method_of(config) == "pi" else method_of(config) or "direct"
    fields: dict[str, Any] = {
        "library_name": "transformers" if full else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["long-context", scaling, method, "pi-lora"],
        "datasets": sources or None,
    }
    if results := eval_results(run):
        fields |= {"model_name": run.resolve().name, "eval_results": results}
    if is_hub_id(base):
        fields |= {"base_model": base, "base_model_relation": "finetune" if full else "adapter"}
    return str(ModelCardData(**fields).to_yaml()).strip()


def _scores_section(run: Path, pictures: Path | None = None, measured: str = "") -> str:
    lines = "\n".join(score_lines(run))
    parts = [measured + lines if lines else "Nothing yet.", *stage_tables(run)]
    shown = [*parts, *(picture_lines(pictures) if pictures else [])]
    return f"{SCORES_BEGIN}\n" + "\n\n".join(part.rstrip("\n") for part in shown) + f"\n{SCORES_END}"


def _beside_the_paper(recipe: Recipe | None) -> str:
    lines = "\n".join(paper_section(recipe)) if recipe else ""
    return f"## Beside the paper\n\n{lines}\n" if lines else ""


def _base_of(run: Path) -> dict[str, str]:
    """What the adapter in a folder stands on: name and revision."""
    adapter = json.loads((run / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    return {"name": adapter["base_model_name_or_path"], "revision": adapter.get("revision") or "main"}


def _made_with(run: Path) -> dict[str, Any]:
    file = run / RUN_FILE
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return facts


def _table(rows: Mapping[str, str]) -> str:
    body = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"| | |\n|---|---|\n{body}"
