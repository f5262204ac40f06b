"""Breaks a training run in every way a disk and a kill can, and checks that each restart ends like the undisturbed run.

    python3 tests/crash/crash_test.py --command "ingot train --preset demo --data F --out {out} --steps 60 --seed 1 --checkpoint-every 20" \
                                      --info "ingot info {out} --json"

At every system call of a save (strace, each call in turn): SIGKILL, ENOSPC, EIO, and results that lie: a write that reports one
byte and does nothing, a rename that reports success and does nothing. Then kills at random moments, of the first process and of
its restarts. After each, the same command again must exit 0, reach the undisturbed run's parameter hash, and leave nothing
temporary behind. A run whose save fails goes on training: no signal may end the program.

Prints one line per failure and a summary; exits 1 when anything failed. --limit and --kills shorten the test.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

CALLS = ("openat", "mkdir", "write", "pread64", "ftruncate", "fsync", "close", "rename", "renameat2", "unlink", "rmdir", "getdents64")
FAULTS = {  # the calls where a fault makes sense
    "kill": (CALLS, "signal=SIGKILL"),
    "enospc": (("openat", "mkdir", "write", "fsync", "close", "rename", "renameat2"), "error=ENOSPC"),
    "eio": (CALLS, "error=EIO"),
    "short": (("write",), "retval=1"),
    "lie": (("rename", "renameat2"), "retval=0"),
}


class Harness:
    def __init__(self, args):
        self.args = args
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="ingot-crash-", dir=args.work))
        self.count = 0
        self.failures = []
        self.tally = collections.Counter()
        self.environment = dict(os.environ, INGOT_LOG="error", INGOT_THREADS=os.environ.get("INGOT_THREADS", "1"))

    def fresh(self):
        self.count += 1
        out = self.root / f"run{self.count}" / "out"
        out.parent.mkdir()
        return out

    def argv(self, text, out):
        return [part.replace("{out}", str(out)) for part in shlex.split(text)]

    def run(self, out, strace=()):
        return subprocess.run([*strace, *self.argv(self.args.command, out)], env=self.environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=self.args.timeout)

    def hash_of(self, out):
        done = subprocess.run(self.argv(self.args.info, out), env=self.environment, capture_output=True, text=True, timeout=self.args.timeout)
        if done.returncode != 0:
            return f"info failed: {done.stderr.strip()[-300:]}"
        return json.loads(done.stdout)["parameter_hash"]

    def fail(self, what, detail):
        self.failures.append(what)
        print(f"FAILED {what}: {detail}", flush=True)

    def start(self):
        out = self.fresh()
        begun = time.monotonic()
        done = self.run(out)
        self.seconds = time.monotonic() - begun
        if done.returncode != 0:
            sys.exit(f"the undisturbed run failed with {done.returncode}: {done.stderr.strip()[-500:]}")
        self.reference = self.hash_of(out)
        if self.run(out).returncode != 0 or self.hash_of(out) != self.reference:
            sys.exit("the same command on a finished run does not leave it as it was")
        print(f"undisturbed: {self.seconds:.2f} s, parameter hash {self.reference}", flush=True)
        shutil.rmtree(out.parent)

    def check_recovery(self, what, out):
        done = self.run(out)
        if done.returncode != 0:
            return self.fail(what, f"the restart exited with {done.returncode}: {done.stderr.strip()[-300:]}")
        found = self.hash_of(out)
        if found != self.reference:
            return self.fail(what, f"parameter hash {found}, expected {self.reference}")
        left = [str(p.relative_to(out)) for p in out.rglob("*") if ".tmp" in p.name or p.name.endswith(".partial")]
        if left:
            return self.fail(what, f"left behind: {', '.join(left)}")
        shutil.rmtree(out.parent, ignore_errors=True)

    # The calls of the main thread on the run directory, as (name, number among the calls of this name, from 1).
    def points(self):
        out = self.fresh()
        log = self.root / "calls.log"
        self.run(out, ["strace", "-f", "-y", "-s", "0", "-e", "trace=" + ",".join(CALLS), "-o", str(log)])
        main, seen, found = None, collections.Counter(), []
        for line in log.read_text(errors="replace").splitlines():
            call = re.match(r"(\d+) +(\w+)\(", line)
            if not call:
                continue
            main = main or call[1]
            if call[1] != main:
                continue
            seen[call[2]] += 1
            if str(out) in line:
                found.append((call[2], seen[call[2]], line.replace(str(out), "OUT")))
        shutil.rmtree(out.parent, ignore_errors=True)
        return found

    def inject(self):
        points = self.points()
        cases = [(fault, call, k, line) for fault in self.args.faults.split(",")
                 for call, k, line in points if call in FAULTS[fault][0]]
        print(f"{len(points)} system calls on the run directory, {len(cases)} injections", flush=True)
        if self.args.limit and len(cases) > self.args.limit:
            cases = [cases[i * len(cases) // self.args.limit] for i in range(self.args.limit)]
            print(f"of these {len(cases)}, evenly spread", flush=True)
        for fault, call, k, line in cases:
            self.inject_one(fault, call, k, line)

    def inject_one(self, fault, call, k, line):
        out = self.fresh()
        log = out.parent / "strace.log"
        what = f"{fault} at {call} {k}"
        done = self.run(out, ["strace", "-f", "-y", "-s", "0", "-e", f"trace={call}", "-e", f"inject={call}:{FAULTS[fault][1]}:when={k}",
                              "-o", str(log)])
        text = log.read_text(errors="replace")
        if fault == "kill":
            hit = "killed by SIGKILL" in text
        else:
            hit = any("(INJECTED)" in l and str(out) in l for l in text.splitlines())
            if done.returncode < 0 or done.returncode >= 128:
                return self.fail(what, f"the run died with {done.returncode} at {line}: {done.stderr.strip()[-300:]}")
            if done.returncode != 0 and not done.stderr.strip():
                return self.fail(what, f"exit status {done.returncode} without a message")
        self.tally[fault if hit else fault + " (elsewhere)"] += 1
        self.check_recovery(f"{what}: {line[:160]}", out)

    def kill_at_random(self):
        rng = random.Random(self.args.seed)
        kills, ends = 0, 0
        while kills < self.args.kills:
            out = self.fresh()
            while kills < self.args.kills:
                process = subprocess.Popen(self.argv(self.args.command, out), env=self.environment, stdin=subprocess.DEVNULL,
                                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                try:
                    _, error = process.communicate(timeout=rng.uniform(0, self.seconds))
                    if process.returncode != 0:
                        self.fail(f"after {kills} kills", f"the restart exited with {process.returncode}: {error.strip()[-300:]}")
                    ends += 1
                    break
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
                    kills += 1
            self.check_recovery(f"random kills, {kills} so far", out)
        self.tally["random kill"] = kills
        print(f"{kills} kills at random moments over {ends} runs that reached their end", flush=True)

    # A second process in the same directory must be refused with one line, and the first must not notice.
    def second_process(self):
        out = self.fresh()
        first = subprocess.Popen(self.argv(self.args.command, out), env=self.environment, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + self.args.timeout
        while not (out / ".lock").exists() and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        second = self.run(out)
        running = first.poll() is None
        first.wait(timeout=self.args.timeout)
        if not running and second.returncode == 0:
            print("the first process ended before the second could meet it")
        elif second.returncode == 0 or len(second.stderr.strip().splitlines()) != 1 or str(out) not in second.stderr:
            self.fail("second process", f"exit status {second.returncode}, expected a refusal in one line: {second.stderr.strip()[-300:]}")
        self.check_recovery("second process", out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", required=True, help="trains from start or resumes; {out} stands for the run directory")
    parser.add_argument("--info", required=True, help='prints JSON with "parameter_hash"')
    parser.add_argument("--faults", default=",".join(FAULTS), help="of " + ",".join(FAULTS))
    parser.add_argument("--limit", type=int, default=0, help="at most so many injections, evenly spread (0: all)")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds any one run may take")
    parser.add_argument("--work", default=None, help="where run directories go (a temporary directory)")
    args = parser.parse_args()
    harness = Harness(args)
    try:
        harness.start()
        if args.faults and shutil.which("strace"):
            harness.inject()
        elif args.faults:
            print("no strace: system call faults are left out")
        harness.second_process()
        harness.kill_at_random()
    finally:
        shutil.rmtree(harness.root, ignore_errors=True)
    print(", ".join(f"{n} x {name}" for name, n in sorted(harness.tally.items())))
    print(f"{len(harness.failures)} failed")
    return 1 if harness.failures else 0


if __name__ == "__main__":
    sys.exit(main())
