"""The report of a suite, measured case by case in one call or in several.

A case is what one measurement gives: one row of the report or several, always with the peers of these rows. The report is written after every case:
as long as cases are missing to bench/results/<gpu>/unfinished/<suite>.json, which no table and no check of whole reports reads, and with the last
case to bench/results/<gpu>/<suite>.json. A call with `again` takes over the cases of the unfinished report if the report is of the same kind of GPU,
of the same sources, or of sources with the same machine code (tools/same_kernels.py --reports), and of the same programs of bench/peers (`bench`, their hash,
in unfinished reports alone), and measures the missing ones. `earlier` in
the report has the day, driver, sources, ceilings and clocks of each earlier call, with its cases; everything else at the top of the report
is of the last call. A case without an entry in `earlier` was measured in the last call.
"""
import datetime
import json
import os
import signal
import time

import reports

CONTINUE, UNTIL = "INGOT_BENCH_CONTINUE", "INGOT_BENCH_UNTIL"  # of bench/gpu.py for its suites: "1"; the time.monotonic() of the end
MARGIN = 1.15  # a case may take so many times as long as before
OF_ALL_CALLS = ("suite", "gpu", "earlier", "incomplete", "bench", "missing", "case_seconds", "results")  # all else in a report is of its last call


def written(path, report):
    """Writes a report in one piece: a process that is stopped leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


def end_group(process):
    """Ends a process that leads a group, and everything in the group: its children may outlive the process and would then disturb later measurements."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class SuiteReport:
    def __init__(self, suite, cases, gpu, again=False, until=None, share=None, writes=True, folder=None, now=time.monotonic, fits=lambda report: True,
                 good=lambda row: True):
        """cases: {name of a case: anything}, in the order of the report. gpu: the kind of GPU, as PyTorch names it. again: continue an unfinished
        report for which fits(report) holds, too, without the cases of which a row is not good(row). until: the end in seconds of the clock `now`, None for none. share: (i, n), every n-th missing case
        from the i-th, of a process that only warms caches. writes: whether a report is written. folder: where (default: bench/results/<gpu>)."""
        self.suite, self.cases, self.gpu, self.until, self.now, self.writes = suite, cases, gpu, until, now, writes
        self.whole, self.unfinished = reports.paths_of(suite, folder or reports.RESULTS / reports.folder_of(gpu))
        self.bench = reports.bench_hash(suite)  # of the programs that this process began with
        self.entries = dict  # what the report says besides: a function, called at each writing
        self.rows, self.seconds, self.earlier, self._here, self._passed_over, self._begun_at = {}, {}, [], {}, {}, now()
        self.failed = []  # cases whose measurement ended with an error in this call
        self.known = {}  # seconds of cases in whatever report there is, to know what still fits
        for path in (self.whole, self.unfinished):
            self.known |= reports.read(path).get("case_seconds", {})
        whole = reports.read(self.whole)  # the earlier form has no seconds of its cases
        self.mean = whole["seconds"] / max(1, len(cases)) if "seconds" in whole and "case_seconds" not in whole else 0.0
        if again:
            self._take_over(fits, good)
        self.missing = [name for name in cases if name not in self.rows]
        if share:
            self.missing = self.missing[share[0]::share[1]]

    def _take_over(self, fits, good):
        report = reports.continued(self.suite, self.gpu, (self.unfinished, self.whole), fits)
        if report is None:
            return
        again = {row["case"] for row in report["results"] if not good(row)}
        self.seconds = {name: s for name, s in report["case_seconds"].items() if name in self.cases and name not in again}
        self.rows = {name: [row for row in report["results"] if row["case"] == name] for name in self.seconds}
        last = set(self.rows)
        for call in report.get("earlier", []):
            last -= set(call["cases"])
            self.earlier.append({**call, "cases": [name for name in call["cases"] if name in self.rows]})
        self.earlier.append({"cases": [name for name in self.rows if name in last], **{k: v for k, v in report.items() if k not in OF_ALL_CALLS}})
        self.earlier = [call for call in self.earlier if call["cases"]]

    # --- the time ---
    def left(self):
        return None if self.until is None else self.until - self.now()

    def at_most(self, seconds):
        """A limit of so many seconds that ends with the time of the call."""
        return seconds if self.until is None else max(0.0, min(seconds, self.left()))

    def expected(self, name):
        """The seconds that a case took before; of a case without known seconds, those of the longest case of this call, or before it the mean of a
        report that has only the seconds of all cases."""
        return self.known.get(name, max(self._here.values(), default=self.mean))

    def fits(self, name, before=0.0):
        """Whether a case can end in time if others take `before` seconds first. A case that cannot is named by end()."""
        left, wanted = self.left(), self.expected(name)
        good = left is None or (left > before and (before + wanted) * MARGIN <= left)
        if good:
            self._passed_over.pop(name, None)
        else:
            self._passed_over[name] = wanted
        return good

    def fitting(self, among=None):
        """The missing cases, or those of the names `among`, that fit into the time together, for a suite that measures them side by side."""
        chosen = []
        for name in self.missing:
            if (among is None or name in among) and self.fits(name, sum(map(self.expected, chosen))):
                chosen.append(name)
        return chosen

    # --- the cases ---
    def each(self):
        """The missing cases one after the other; one that does not fit into the time is passed over."""
        for name in list(self.missing):
            if self.fits(name):
                self.case, self._case_at = name, self.now()
                yield self.cases[name]

    def add(self, rows, name=None, seconds=None):
        """The rows of a case, by default of the one that each() gave last and of the seconds since then. Writes the report; returns the seconds."""
        name, seconds = name or self.case, self.now() - self._case_at if seconds is None else seconds
        for row in rows:
            row["case"] = name
        self.rows[name] = list(rows)
        self.seconds[name] = self.known[name] = self._here[name] = round(seconds, 1)
        self.missing = [n for n in self.missing if n != name]
        self._passed_over.pop(name, None)
        if self.writes:
            self.write()
        return seconds

    def leave(self, name):
        """Leaves a case, which was begun and did not end in the time, for a later call."""
        self._passed_over[name] = self.expected(name)

    def report(self):
        done = [name for name in self.cases if name in self.rows]
        left_out = [name for name in self.cases if name not in self.rows]
        said = {"incomplete": f"{len(left_out)} of {len(self.cases)} cases were not measured", "bench": self.bench, "missing": left_out} if left_out else {}
        return {"suite": self.suite, "tree": reports.tree_hash(self.suite), "gpu": self.gpu, "date": datetime.date.today().isoformat(),
                "seconds": round(self.now() - self._begun_at, 1), **self.entries(), **({"earlier": self.earlier} if self.earlier else {}), **said,
                "case_seconds": {name: self.seconds[name] for name in done}, "results": [row for name in done for row in self.rows[name]]}

    def write(self):
        report = self.report()
        written(self.unfinished if "incomplete" in report else self.whole, report)
        if "incomplete" not in report:
            self.unfinished.unlink(missing_ok=True)

    def end(self):
        """What a call has done and what it has left, in lines for its output."""
        yield f"{self.suite}: {len(self.rows)} of {len(self.cases)} cases are measured"
        if self._passed_over:
            yield (f"{self.suite}: no time was left for {len(self._passed_over)} of them, which --continue measures: "
                   + ", ".join(f"{name} ({s:.0f} s)" if s else name for name, s in self._passed_over.items()))
        if self.failed:
            yield f"{self.suite}: failed, with the errors above: {', '.join(self.failed)}"
        if self.writes and not self.missing and self.whole.is_file():
            report = reports.read(self.whole)
            yield from (f"problem: {problem}" for problem in reports.problems_of(report))
            yield f"{self.suite}: the report is {self.whole.name} of {self.whole.parent.name}"
