"""The table of what has run, on a page of its own."""

import table

PAGE = "before\n" + table.BEGIN + table.HEAD + table.END + "after\n"


def outcomes(passed):
    found = table.Outcomes()
    found.add("vllm", "low_latency", True)
    found.add("vllm", "low_latency", passed)
    return found


def test_a_page_is_written_once_and_keeps_its_dates(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert table.differs(outcomes(True), page)
    assert page.read_text() == PAGE
    assert not table.differs(outcomes(True), page, writes=True)
    text = page.read_text()
    assert text.startswith("before\n" + table.BEGIN)
    assert text.endswith(table.END + "after\n")
    assert "| low latency | 2 of 2 |" in text
    assert "| not run | 0 of 0 |" in text
    assert not table.differs(outcomes(True), page)
    _, rows, _ = table.read(text)
    old = [row.replace(row.split(" | ")[2], "2020-01-02") for row in rows]
    page.write_text(text.replace("".join(rows), "".join(old)))
    assert not table.differs(outcomes(True), page)


def test_a_check_that_fails_changes_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert not table.differs(outcomes(True), page, writes=True)
    assert table.differs(outcomes(False), page)
