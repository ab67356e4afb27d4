"""Names of bundled configurations mean random weights; everything else is loaded as it is."""

from pathlib import Path

from quire.bench.workload import model_folder, printable, resolve_target


def test_a_bundled_name_has_dummy_weights_and_no_tokenizer() -> None:
    folder = str(model_folder("qwen3-0.6b"))
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    assert resolve_target({"model": "qwen3-0.6b", "dtype": "half"}) == (
        "qwen3-0.6b",
        dummy | {"dtype": "half", "model": folder},
    )
    assert resolve_target({}) == ("qwen3-0.6b", dummy | {"model": folder})


def test_what_was_given_wins() -> None:
    assert resolve_target({"model": "qwen3-0.6b", "load_format": "auto"})[1]["load_format"] == "auto"


def test_a_folder_or_hub_id_is_loaded_as_it_is(tmp_path: Path) -> None:
    assert resolve_target({"model": str(tmp_path)}) == (tmp_path.name, {"model": str(tmp_path)})
    assert resolve_target({"model": "Org/Name"}) == ("Name", {"model": "Org/Name"})


def test_result_files_hold_no_secrets() -> None:
    assert printable({"model": "/a/b", "hf_token": "secret", "dtype": "half"}) == {"dtype": "half"}
