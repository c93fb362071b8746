"""The tables of what has run, on a page of their own."""

import datetime
import json

import gpu_clients
import pytest
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
    today = datetime.date.today().isoformat()
    both = f"| {today} | {today} |"
    assert all(both in row for row in rows)
    # A check on a later day changes nothing; a row that is written anew has that day, and its last change.
    page.write_text(text.replace(both, "| 2020-01-03 | 2020-01-02 |"))
    assert not table.differs(outcomes(True), page)
    assert "| 2020-01-03 | 2020-01-02 |" in page.read_text()
    assert not table.differs(outcomes(True), page, writes=True)
    assert page.read_text() == text.replace(both, f"| {today} | 2020-01-02 |")


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


def record(client, check, passed=True, date="2026-11-29"):
    where = {"date": date, "place": "2 GPUs: NVIDIA H200"}
    return {"client": client, "version": "1.2", "check": check, "passed": passed, **where}


def test_what_ran_on_gpus_replaces_the_last_table_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE + table.GPU_BEGIN + "| old |\n" + table.GPU_END + "end\n")
    table.write_gpus(
        [
            record("vllm", "low_latency"),
            record("sglang", "layers_are_dense"),
            record("vllm", "visible.own_index", passed=False),
            record("vllm", "elastic", date="2026-11-28"),
        ],
        page,
    )
    assert page.read_text() == (
        PAGE
        + table.GPU_BEGIN
        + table.GPU_HEAD
        + "| vllm | 1.2 | 2026-11-29 | 2 GPUs: NVIDIA H200 | low latency; visible: own index | 1 of 2 |\n"
        "| sglang | 1.2 | 2026-11-29 | 2 GPUs: NVIDIA H200 | layers are dense | 1 of 1 |\n"
        "| vllm | 1.2 | 2026-11-28 | 2 GPUs: NVIDIA H200 | elastic | 1 of 1 |\n"
        + table.GPU_END
        + "end\n"
    )


def test_a_page_without_a_place_for_what_ran_on_gpus_stays_as_it_is(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match="found no place for what ran on GPUs"):
        table.write_gpus([record("vllm", "elastic")], page)
    assert page.read_text() == PAGE


def test_the_page_has_a_place_for_what_ran_on_gpus():
    text = table.PAGE.read_text()
    assert text.count(table.GPU_BEGIN) == text.count(table.GPU_END) == 1


def test_a_run_saves_each_check_with_its_version_and_result(tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("wrong rows")

    checks = [("vllm", "vllm.elastic", lambda: [None]), ("vllm", "isolated.pid", fails)]
    monkeypatch.setattr(gpu_clients, "named", lambda *_: checks)
    file = tmp_path / "ran.json"
    assert gpu_clients.main(tmp_path, [], file) == 1
    saved = json.loads(file.read_text())
    assert [(one["check"], one["passed"]) for one in saved] == [
        ("elastic", True),
        ("isolated.pid", False),
    ]
    assert all(one["version"] and one["date"] and one["place"] for one in saved)
    assert len(table.rows_of_gpus(saved)) == 1
