"""Let tests, and the processes that they start, take this processor for one of another kind.

`PI_LORA_TEST_PROCESSOR` says which: `bf16` (with AVX512-BF16), `plain` (without, nor any AVX-512 for torch), or `other`
than this one. What asks for the instructions is answered accordingly: torch's capabilities and the speed that is
measured, which decide the precision of training, and bitsandbytes' library, which decides whether NF4 weights are
repacked.

`other` is `plain` where the precision of training is bfloat16 by itself, else `bf16`.

On a processor without the instructions, `bf16` takes the code paths of those that have them, but not their kernels: a
product with repacked NF4 weights fails, and bfloat16 arithmetic is torch's own rather than the processor's, so that it
rounds otherwise in places. On one that has them, `plain` limits torch and oneDNN as well.

Python imports this module at its start where its folder is on the path.
"""

import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

VARIABLE = "PI_LORA_TEST_PROCESSOR"
INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
LIMITS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def own_kind() -> str:
    """The kind of this processor, as Linux lists its instructions; elsewhere none are known."""
    listed = Path("/proc/cpuinfo")
    flags = set(listed.read_text().split()) if listed.exists() else set()
    return "bf16" if flags & set(INSTRUCTIONS) else "plain"


def asked_kind() -> str | None:
    """The kind that the tests are to see; None: whatever is there."""
    asked = os.environ.get(VARIABLE) or None
    if asked == "other":
        fast = "from pi_lora.models.device import has_fast_bfloat16; raise SystemExit(not has_fast_bfloat16())"
        own = {**os.environ, VARIABLE: ""}
        return "bf16" if subprocess.run([sys.executable, "-c", fast], env=own, check=False).returncode else "plain"
    if asked not in (None, "plain", "bf16"):
        raise ValueError(f"{VARIABLE}: {asked}: no kind of processor; set plain, bf16 or other")
    return asked


def pretend(kind: str) -> None:
    """Answer as a processor of `kind` would, in this process and in those that it starts."""
    os.environ[VARIABLE] = kind
    here, paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *(path for path in paths if path and path != here)])
    if kind == "plain":
        os.environ.update(LIMITS)
    for name, change in CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name], kind == "bf16")
    sys.meta_path.insert(0, _Changing(kind == "bf16"))


def _torch_cpu(module: ModuleType, has_bf16: bool) -> None:
    found = module.get_capabilities

    def get_capabilities() -> MappingProxyType[str, Any]:
        return MappingProxyType({**found(), "avx512_bf16": has_bf16, "amx_bf16": False})

    module.get_capabilities = get_capabilities


def _pi_lora(module: ModuleType, has_bf16: bool) -> None:
    module.bfloat16_speed = lambda: 2.0 if has_bf16 else 0.5


def _bitsandbytes(module: ModuleType, has_bf16: bool) -> None:
    module.lib.has_avx512bf16_cpu = lambda: has_bf16
    if has_bf16 and own_kind() != "bf16":
        module.lib.gemv_4bit_inference_cpu_nf4_bf16 = _not_here


def _not_here(*arguments: object) -> None:
    raise RuntimeError("bitsandbytes' product with repacked NF4 weights needs AVX512-BF16, which is not here")


CHANGES: dict[str, Callable[[ModuleType, bool], None]] = {
    "torch.cpu": _torch_cpu,
    "pi_lora.models.device": _pi_lora,
    "bitsandbytes.cextension": _bitsandbytes,
}


class _Changing:
    """Changes a module of `CHANGES` when it is imported: most processes that tests start import none of them."""

    def __init__(self, has_bf16: bool) -> None:
        self.has_bf16 = has_bf16

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in CHANGES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            CHANGES[name](module, self.has_bf16)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if kind := asked_kind():
    pretend(kind)
