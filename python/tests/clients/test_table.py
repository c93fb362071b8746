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


def test_a_client_that_is_excused_and_did_not_run_leaves_the_page_as_it_is(tmp_path):
    page, both = tmp_path / "page.md", outcomes(True)
    page.write_text(PAGE)
    both.add("sglang", "layers_are_dense", True)
    assert not table.differs(both, page, writes=True)
    assert table.differs(outcomes(True), page)
    assert not table.differs(outcomes(True), page, excused={"sglang": "it did not come"})
    # Others are compared, and so is a client that has run.
    assert table.differs(outcomes(False), page, excused={"sglang": "it did not come"})
    both.add("sglang", "layers_are_dense", False)
    assert table.differs(both, page, excused={"sglang": "it did not come"})
