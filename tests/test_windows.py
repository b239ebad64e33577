"""What Windows lacks is not needed to import the package, nor to measure."""

import subprocess

# Libraries have been imported before, each with what it needs here; the package is imported once more.
WITHOUT_UNIX = """
import importlib, os, pkgutil, select, signal, sys
from enum import IntEnum

def names():
    import pi_lora
    return ["pi_lora", *(module.name for module in pkgutil.walk_packages(pi_lora.__path__, "pi_lora."))]

def load():
    for name in names():
        importlib.import_module(name)

load()
for name in [name for name in sys.modules if name.partition(".")[0] == "pi_lora"]:
    del sys.modules[name]
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
there = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
for lacking in [each.name for each in signal.Signals if each.name not in there]:
    delattr(signal, lacking)
signal.Signals = IntEnum("Signals", {name: getattr(signal, name) for name in there})
for module, lacking in ((os, ("O_NONBLOCK", "fork", "getsid", "killpg", "setsid")), (select, ("poll",))):
    for name in lacking:
        delattr(module, name)

load()
from pathlib import Path
from pi_lora.distributed import HANG_UP, STOP_SIGNALS
from pi_lora.recipe.files import find_recipe, load_recipe
assert {each.name for each in STOP_SIGNALS} == {"SIGINT", "SIGTERM"} and HANG_UP is None
assert load_recipe(find_recipe(Path("demo"))).recipe.context.target == 1024
print(len(names()), "modules")
"""


def test_every_module_imports_without_modules_that_windows_lacks(python: str) -> None:
    ended = subprocess.run([python, "-c", WITHOUT_UNIX], capture_output=True, text=True)
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert int(ended.stdout.split()[0]) > 80
