"""The tables of frameworks in `docs/deep_ep.md`: of what has run, from the reports of the tests that ran it.

python table.py FILE    writes the one of GPUs, from what `gpu_clients.py --save FILE` has saved
"""

import datetime
import json
import sys
from pathlib import Path

import fetch

PAGE = Path(__file__).parents[3] / "docs/deep_ep.md"
BEGIN = "<!-- made by python/tests/clients/table.py from what ran -->\n"
END = "<!-- end of what ran -->\n"
HEAD = "| framework | version | ran | last change | what ran, on 2 and 4 ranks | passed |\n|---|---|---|---|---|---|\n"
GPU_BEGIN = "<!-- python/tests/clients/table.py FILE puts here what ran on GPUs -->\n"
GPU_END = "<!-- end of what ran on GPUs -->\n"
GPU_HEAD = "| framework | version | date | where | what ran | passed |\n|---|---|---|---|---|---|\n"


class Outcomes:
    """The checks that have run, by client: the names of checks in order, and how many of their runs passed."""

    def __init__(self):
        self.by_client = {}

    def add(self, client, check, passed):
        self.by_client.setdefault(client, {}).setdefault(check, []).append(passed)

    def rows(self, dates, is_written=False):
        """A row per client. The day of its run is that of the page, unless the row is `is_written` now; the day of its
        last change stays while the other cells do."""
        lines, today = [], datetime.date.today().isoformat()
        for client, pin in fetch.pins().items():
            checks = self.by_client.get(client, {})
            runs = [passed for of_check in checks.values() for passed in of_check]
            ran = ", ".join(name.replace("_", " ") for name in checks) or "not run"
            cells = (client, pin["version"], ran, f"{sum(runs)} of {len(runs)}")
            ran_on, changed = dates.get(cells, (today, today))
            days = f"{today if is_written else ran_on} | {changed}"
            lines.append("| {} | {} | {days} | {} | {} |\n".format(*cells, days=days))
        return lines


def around(page, begin, end):
    """The text before the line `begin`, that between the two lines, and the text behind the line `end`."""
    before, _, rest = page.partition(begin)
    between, _, after = rest.partition(end)
    return before, between, after


def read(page):
    """The text before the first table, its rows, and the text behind it."""
    before, table, after = around(page, BEGIN, END)
    return before, table.removeprefix(HEAD).splitlines(keepends=True), after


def dates_of(rows):
    """The days of each row's run and last change, by its other cells."""
    dates = {}
    for row in rows:
        client, version, ran_on, changed, *others = map(str.strip, row.strip(" |\n").split("|"))
        dates[(client, version, *others)] = (ran_on, changed)
    return dates


def without(rows, clients):
    """The rows of other clients."""
    return [row for row in rows if row.split("|")[1].strip() not in clients]


def differs(outcomes, page=PAGE, writes=False, excused=()):
    """Whether the page shows something else than has run. With `writes`, it is changed, and shows it then.

    Rows of `excused` clients, none of whose checks has run, are compared with nothing.
    """
    before, rows, after = read(page.read_text())
    now = outcomes.rows(dates_of(rows), is_written=writes)
    if writes:
        page.write_text(before + BEGIN + HEAD + "".join(now) + END + after)
        return False
    not_run = [client for client in excused if client not in outcomes.by_client]
    return without(now, not_run) != without(rows, not_run)


def rows_of_gpus(records):
    """A row per client, version, date and place, in the order of the records."""
    checks = {}
    for one in records:
        cells = tuple(one[name] for name in ("client", "version", "date", "place"))
        checks.setdefault(cells, []).append((one["check"], one["passed"]))
    lines = []
    for cells, ran in checks.items():
        names = "; ".join(name.replace("_", " ").replace(".", ": ") for name, _ in ran)
        passed = f"{sum(passed for _, passed in ran)} of {len(ran)}"
        lines.append("| {} |\n".format(" | ".join([*cells, names, passed])))
    return lines


def write_gpus(records, page=PAGE):
    """Puts the records of a run on GPUs where the page has the last one."""
    text = page.read_text()
    if GPU_BEGIN not in text or GPU_END not in text:
        raise ValueError(
            f"{page}: found no place for what ran on GPUs; expected the lines {GPU_BEGIN.strip()} and "
            f"{GPU_END.strip()}. Fix: add them around its table"
        )
    before, _, after = around(text, GPU_BEGIN, GPU_END)
    rows = "".join(rows_of_gpus(records))
    page.write_text(before + GPU_BEGIN + GPU_HEAD + rows + GPU_END + after)


if __name__ == "__main__":
    write_gpus(json.loads(Path(sys.argv[1]).read_text()))
