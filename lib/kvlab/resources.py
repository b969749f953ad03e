"""Where the small files that ship with kvlab live: shapes, workloads, the tiny model, the figure style, statements."""

from pathlib import Path

_INSTALLED = Path(__file__).parent / "_data"
_CHECKOUT = Path(__file__).parents[2] / "data"


def resource(*parts: str) -> Path:
    """The path of a file of ``data/``, in an installed wheel as in a checkout.

    Args:
        parts: path components below ``data/``, for example ``"tiny", "config.json"``.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    root = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    path = root.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing from this installation of kvlab; reinstall it")
    return path
