"""Base models, adapters and runs: found, loaded with their scaling, quantized."""

import logging

# On processors with AVX512-BF16, bitsandbytes 0.50 warns when it or PEFT is imported and the package `kernels` is not
# installed. That package's kernel is for repacked NF4 weights, and there are none here: see pi_lora/models/weights.py.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)
