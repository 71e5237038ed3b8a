"""Where the model is that travels in the wheel."""

from __future__ import annotations

import pathlib


def bundled_model() -> pathlib.Path:
    """The folder of the model that travels with the package: 12 million parameters, English (weights, tokenizer)."""
    return pathlib.Path(__file__).resolve().parent / "models" / "mmrec-12m"
