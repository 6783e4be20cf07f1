"""Paths of the project: a notebook's own folder never matters, and published pages never show a machine's folders."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def project_path(path: str | Path) -> Path:
    """``path`` as it is when absolute, else below the project root: a notebook's own folder never matters."""
    return ROOT / Path(path).expanduser()


def usable_path(path: str | Path) -> str:
    """``path`` as this project's commands take it from any working directory: relative to the project root where it lies
    below it, else absolute. Pages are published with :func:`short_path`, or refused where an absolute path stands on them."""
    path = project_path(path)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def short_path(path: str | Path) -> str:
    """``path`` relative to the project root where it lies below it: published pages never show a machine's folders."""
    path = project_path(path)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
