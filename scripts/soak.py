"""Disturb tiny training runs for long, and compare them with runs that nobody disturbed.

    python scripts/soak.py --faults 100 --json soak.json
    python scripts/soak.py --week 1000 --folder runs/week --json week.json

The first kills and freezes the roles of a run, one after another (``soaking/faults.py``). The
second makes so many iterations under a judge that is slow, limits, answers wrongly or is down,
while workers come and go, and watches memory, files, object store and disk (``soaking/week.py``);
what was cut off goes on where it was left.
"""

import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import measuring
import program
from soaking import faults, week


def main() -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    ends = "what ends the disturbed life of the driver before its last one"
    parser.add_argument("--end", choices=["SIGTERM", "SIGKILL"], default="SIGTERM", help=ends)
    parser.add_argument("--folder", type=Path, help="keep runs and logs here")
    late = "begin no fault so long after the first iteration, but for the first two; "
    late += "of a week, stop each run after so long"
    parser.add_argument("--limit-s", type=float, default=7200.0, help=late)
    parser.add_argument("--week", type=int, metavar="N", help="instead, N iterations of a week")
    names = list(week.RUNS)
    parser.add_argument("--runs", nargs="+", choices=names, default=names, help="of a week")
    options = parser.parse_args()
    # So that a time limit from outside ends all that was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="g2rpo-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    if options.week is not None:
        result = week.run(folder, options.week, options.runs, options.limit_s)
    else:
        end = signal.Signals[options.end]
        result = faults.run(options.faults, options.seed, folder, options.limit_s, end)
    print(json.dumps(result, indent=1))
    measuring.write_json(options.json, result)
    if result["good"] and options.folder is None:
        shutil.rmtree(folder)
    return 0 if result["good"] else 1


if __name__ == "__main__":
    program.run(main)
