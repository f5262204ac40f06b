"""Checks the committed GPU reports: their form, their errors against their tolerances, and whether the measured code is
still the code of the tree, or at least has the same kernels (tools/same_kernels.py --reports). Stale, incomplete and unfinished
reports are listed; with --strict stale and incomplete ones are a failure.

    python3 tools/check_reports.py [--strict]
"""
import sys

import reports


def main():
    strict = "--strict" in sys.argv[1:]
    broken, stale, incomplete, unfinished, same, count = [], [], [], [], [], 0
    for path, report in reports.all_reports():
        count += 1
        name = path.relative_to(reports.ROOT)
        broken += [f"{name}: {problem}" for problem in reports.problems_of(report)]
        if path.stem != report.get("suite"):
            broken.append(f"{name}: found suite {report.get('suite')!r}, expected {path.stem!r}")
            continue
        if "tree" not in report or "date" not in report:  # reported above
            continue
        if "incomplete" in report:
            incomplete.append(f"{name}: {report['incomplete']}")
        now = reports.tree_hash(path.stem)
        if report["tree"] != now and reports.holds(report, now):
            kept = report["same_kernels"]
            same.append(f"{name}: its {kept['kernels']} kernels are the same machine code, {len(kept.get('new', []))} are new and not in it"
                        + (f", {sum(kept['not_launched'].values())} portable ones, which that GPU does not launch, were not compared" if kept.get("not_launched") else "")
                        + f"; changed since: {', '.join(kept['changed'])}")
        elif report["tree"] != now:
            stale.append(f"{name}: measured tree {report['tree']} on {report['date']}, the tree is now {now} ({reports.how_to_measure(path.stem)} on that GPU)")
    for path, report in reports.unfinished_reports():
        of_these = "" if reports.can_be_continued(report, path.stem) else " of other sources or programs; delete the file, which nothing continues"
        unfinished.append(f"{path.relative_to(reports.ROOT)}: {report['incomplete']}{of_these}")
    for line in broken:
        print(f"broken: {line}")
    for line in same:
        print(f"same kernels: {line}")
    for line in stale:
        print(f"stale: {line}")
    for line in incomplete:
        print(f"incomplete: {line}")
    for line in unfinished:
        print(f"unfinished: {line}")
    print(f"reports: {count} found, {len(broken)} problems, {len(stale)} stale, {len(incomplete)} incomplete")
    return 1 if broken or (strict and (stale or incomplete)) else 0


if __name__ == "__main__":
    sys.exit(main())
