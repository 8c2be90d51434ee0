"""Every benchmark of the CPU engine in one run, with the verdict on each aim of issue 2.

In:  how often engine and transformers are measured, threads for both; parts to leave out.
Out: a table of figure, aim and verdict on stdout, all figures as JSON with --json; exit code 1 if
     an aim is missed. Takes about ten minutes on two quiet cores; each part is a fresh process.
Not here: the measurements (the scripts beside this one).

    python bench/run_all.py --json docs/results/bench_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PARTS = ("engine", "scheduler", "server", "memory")
AIMS = {  # the least ratio of transformers' time to gnomon's
    "prefill 128": 1.0,
    "prefill 512": 1.0,
    "decode 64 after 128": 1.0,
    "32 mixed 64-512, 64 new": 2.0,
    "32 mixed, one by one": 5.0,
    "32 equal 256, 64 new": 1.2,
}


class Line(NamedTuple):
    """One line of the table."""

    name: str
    figure: str
    aim: str
    is_reached: bool


def run_script(name: str, *arguments: str, threads: int = 1) -> tuple[int, str]:
    """Exit code and stdout of a script beside this one; what it says on stderr is shown."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(HERE / name), *arguments]
    print(f"... {name} {' '.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def measure(part: str, repetitions: int, threads: list[int]) -> Any:
    """The figures of one part."""
    if part == "server":
        code, text = run_script("server_overhead.py", "--json")
        return json.loads(text) if code == 0 else {"failed": code}
    if part == "memory":
        code, text = run_script("load_memory.py")
        return {"is_lawful": code == 0, "table": text.splitlines()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        if part == "scheduler":
            run_script("scheduler.py", "--json", str(path))
            return json.loads(path.read_text())
        found = {}
        for count in threads:
            sizes = ("--threads", str(count), "--repetitions", str(repetitions))
            run_script("engine_vs_transformers.py", *sizes, "--json", str(path), threads=count)
            found[str(count)] = json.loads(path.read_text())
        return found


def lines(found: dict[str, Any]) -> Iterator[Line]:
    """The table of all parts that were measured."""
    for count, result in found.get("engine", {}).items():
        for family, figures in result["families"].items():
            for case, by in figures["medians_s"].items():
                name = f"{family}, {count} threads: {case}"
                text = f"{by['gnomon']:.3f} s, transformers {by['transformers']:.3f} s"
                yield Line(
                    name,
                    f"{text}, {by['ratio']:.2f} x",
                    f">= {AIMS[case]} x",
                    by["ratio"] >= AIMS[case],
                )
    if "scheduler" in found:
        queue = found["scheduler"]["queue"]
        for case in ("decode", "decode_long", "mixed"):
            cost = found["scheduler"][case]["step_us"] / 1e3
            yield Line(f"scheduling 256: {case}", f"{cost:.3f} ms", "<= 1.5 ms", cost <= 1.5)
        growth = queue["growth_of_median"]
        yield Line("10,000 queued over 100", f"{growth:+.1%}", "<= 10 %", growth <= 0.1)
    for name, aim in (("first token", 5.0), ("further token", 1.0)):
        if name in found.get("server", {}):
            by = found["server"][name]
            added = by["http"] - by["engine"]
            yield Line(f"server adds: {name}", f"{added:+.3f} ms", f"< {aim} ms", added < aim)
    if "memory" in found:
        is_lawful = found["memory"]["is_lawful"]
        text = "all loads" if is_lawful else "see the table"
        yield Line("memory of loading 2 GiB", text, "1.15 x + 100 MB", is_lawful)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--skip", nargs="*", default=[], choices=PARTS)
    options = parser.parse_args()
    found: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    for part in PARTS:
        if part not in options.skip:
            found[part] = measure(part, options.repetitions, options.threads)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    table = list(lines(found))
    width = max(len(line.name) for line in table)
    for line in table:
        verdict = "reached" if line.is_reached else "MISSED"
        print(f"{line.name:{width}}  {line.figure:48}  {line.aim:16}  {verdict}")
    return 0 if all(line.is_reached for line in table) else 1


if __name__ == "__main__":
    sys.exit(main())
