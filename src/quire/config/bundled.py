"""Location of the model that ships inside the package. Knows nothing of its contents."""

from pathlib import Path

from quire.contracts.errors import ModelNotFound

NAME = "quire-tiny"


def bundled_model() -> Path:
    """Return the folder of the bundled model, the default when no model is named.

    Raises `ModelNotFound` when the installation lacks the model (packages trimmed by hand).
    """
    folder = Path(__file__).parent.parent / "bundled" / NAME
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"the bundled model is not at {folder}: reinstall quire, or name a model.")
    return folder
