"""The Chinese pages have the headings, code blocks, links, tables and code words of the English ones."""

import pytest

from chinese import LINK, PAIRS, ROOT, differences, english, refreshed, structure, target, unmarked


@pytest.mark.parametrize("page", PAIRS)
def test_both_pages_have_the_same_structure(page: str) -> None:
    other = PAIRS[page]
    text = (ROOT / other).read_text()
    found = list(differences(structure(page, english(page)), structure(other, text)))
    assert not found, (
        f"{other}: python tools/chinese.py copies code blocks, the rest is to be translated\n" + "\n".join(found)
    )
    links = [link for link in LINK.findall(text) if ":" not in link]
    assert all((ROOT / target(other, link)).exists() for link in links)
    assert unmarked(other, text) == []
    if not page.startswith("src/"):
        for one, its in ((page, other), (other, page)):
            assert target(one, LINK.findall((ROOT / one).read_text())[0]) == its, (
                "a page begins with a link to the other"
            )


def test_links_to_english_pages_are_marked() -> None:
    marked = "[a](docs/kv.md)（英文） （[b](docs/kv.md)，英文） [English](README.md) [c](docs/zh/tour.md)"
    assert unmarked("README.zh-CN.md", f"{marked} [![e](a.png)](docs/kv.md) [d](docs/kv.md#x)") == ["docs/kv.md#x"]


PAGE = "# A\n\nText `x y` [on](b.md#c) {n}.\n\n```console\n$ one\n```\n\n- item\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAGE.replace("# A", "## 甲"), "headings: number 1 is 1 in English, 2 in Chinese"),
        (PAGE.replace("one", "two"), "blocks: number 1 is "),
        (PAGE.replace("b.md#c", "b.md"), "links: only English {'docs/b.md#c': 1}, only Chinese {'docs/b.md': 1}"),
        (PAGE.replace("x y", "x z"), "spans: only English {'x y': 1}, only Chinese {'x z': 1}"),
        (PAGE.replace("- item\n", ""), "tables: 1 in English, 0 in Chinese"),
        (PAGE.replace("{n}", "{m}"), "places: {'n'} in English, {'m'} in Chinese"),
        (PAGE.replace("`x y`", "`x\ny`").replace("Text", "文本"), ""),
    ],
)
def test_each_difference_is_told(text: str, said: str) -> None:
    found = list(differences(structure("docs/a.md", PAGE), structure("docs/a.md", text)))
    assert len(found) == bool(said) and all(one.startswith(said) for one in found)


def test_a_link_to_the_chinese_page_is_one_to_the_english_page() -> None:
    one = structure("README.md", "[a](docs/tour.md) [中文](README.zh-CN.md)")
    assert one.links == structure("README.zh-CN.md", "[a](docs/zh/tour.md) [English](README.md)").links
    assert one.links == structure("docs/zh/questions.md", "[a](tour.md#站)").links == {"docs/tour.md": 1}


def test_code_blocks_are_copied() -> None:
    blocks = structure("docs/a.md", PAGE).blocks
    assert refreshed(PAGE.replace("one", "old"), blocks) == PAGE
    assert refreshed(PAGE + PAGE, blocks) == PAGE + PAGE
