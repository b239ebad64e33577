"""`python -m pi_lora`."""

from pi_lora.cli import main

main()
