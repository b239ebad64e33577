"""`pi-lora env`."""

from pi_lora.cli.app import app, out, working


@app.command()
def env() -> None:
    """Print what a report of a bug needs: versions, processor, memory, GPUs, kernels."""
    with working("loading libraries"):
        from pi_lora.data.cache import cache_folder
        from pi_lora.models.machine import facts

        found = {**facts(), "cache": str(cache_folder())}
    width = max(map(len, found))
    for name, value in found.items():
        out.print(f"{name:{width}}  {value}", highlight=False, markup=False, soft_wrap=True)
