"""Tables are aligned, numbers to the right."""

from quire.entry.cli.table import format_bytes, format_table


def test_columns() -> None:
    assert format_table(("name", "n"), [("a", 1000), ("long name", 5)]) == (
        "name           n\n---------  -----\na          1,000\nlong name      5"
    )


def test_a_table_without_rows_has_its_titles() -> None:
    assert format_table(("name", "n"), []).splitlines()[0].split() == ["name", "n"]


def test_bytes() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536 << 10: "1.5 MiB", 3 << 30: "3.00 GiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
