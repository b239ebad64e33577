"""The options of scores that were written before scores kept their options, derived from their other keys."""

from pathlib import Path
from typing import Any

from pi_lora.types import Json

# The key that only the scores of one measurement had; RULER's have `lengths` as well.
FORMER_KEYS = {
    "windows": "perplexity",
    "effective_length": "ruler",
    "lengths": "passkey",
    "k_max": "passkey",
    "tasks": "benchmarks",
    "rougeL": "summarization",
}


def former_measurement(content: Json) -> str | None:
    """Return the measurement whose scores have such keys; None if there is none."""
    return next((name for key, name in FORMER_KEYS.items() if key in content), None)


def former_options(measurement: str, content: Json) -> Json:
    """Return the options that measure another model as these scores were made. Local data that is gone is left out."""
    options: Json = {}
    match measurement:
        case "perplexity":
            options = {key: content.get(key) for key in ("documents", "min_tokens", "truncate", "seed")}
            options |= {"data": content.get("data"), "stride": content.get("stride") or None}
            options["windows"] = _all(content.get("windows"), "window")
        case "passkey":
            lengths = content.get("lengths") or []
            first = _plain(lengths[0]) if lengths else content
            depths = [_plain(depth) for depth in first.get("depths") or []]
            left_out = _plain(first.get("left_out") or {}).get("depths", [])
            options = {key: content.get(key) for key in ("seed", "k_max_only")}
            options |= {"depths": len(depths) + len(left_out) or None, "targets": _all(lengths, "target")}
            options["trials"] = max((depth["trials"] for depth in depths), default=None)
            options["target"] = None if lengths else content.get("target")
            if first.get("left_out") and options["depths"]:
                left = _plain(first["left_out"])["trials"]
                options["trials"] = (sum(depth["trials"] for depth in depths) + left) // options["depths"]
        case "benchmarks":
            options = {key: content.get(key) for key in ("limit", "batch_size", "window")}
            data = content.get("data") or {}
            options["data"] = tuple(f"{name}={place}" for name, place in data.items() if Path(place).exists())
            options["tasks"] = tuple(content.get("tasks") or ()) or None
        case "ruler":
            options = {key: content.get(key) for key in ("samples", "seed", "batch_size", "chat_template")}
            lengths = [_plain(each) for each in content.get("lengths") or []]
            options |= {"windows": _all(lengths, "window"), "tasks": tuple(lengths[0]["tasks"]) if lengths else None}
        case "summarization":
            sampling = content.get("sampling") or {}
            options = {key: sampling.get(key) for key in ("temperature", "top_p", "max_new_tokens", "seed")}
    return {key: value for key, value in options.items() if value is not None}


def _all(rows: Any, key: str) -> tuple[int, ...] | None:
    return tuple(_plain(row)[key] for row in rows) if rows else None


def _plain(part: Any) -> Json:
    return part if isinstance(part, dict) else dict(part)
