"""Configs of models that are planned for before their weights are here (configs/NAME.json; sources in docs/kimi.md)."""

import json
from pathlib import Path

from ..errors import Eagle3Error

FOLDER = Path(__file__).with_name("configs")


def known_config(name: str) -> dict:
    """The config.json kept under a model's name, such as "Kimi-K2.5".

    Raises:
        Eagle3Error: none is kept under it.
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        kept = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise Eagle3Error(f"{name}: found no config.json, and eagle3_lib/targets/configs has only {kept}")
    return json.loads(path.read_text())
