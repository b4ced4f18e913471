"""One long stream out of several suites that share a base: every task keeps its data, its expert and a head of its own.

python benchmarks/joined.py OUT SUITE SUITE..
mergeway bench OUT --rules all --orders 3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ends import find_suite


def main() -> None:
    """Write OUT/suite.json; nothing is copied."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("suites", nargs="+")
    given = parser.parse_args()

    suites = [find_suite(name) for name in given.suites]
    described = json.loads((suites[0].path / "suite.json").read_text(encoding="utf-8"))
    described |= {"name": given.out.name, "base": str(suites[0].base.resolve()), "protocol": "task"}
    described["tasks"] = [
        {
            "name": f"{suite.name}-{task.name}",
            **{key: str(Path(getattr(task, key)).resolve()) for key in ("expert", "data", "head")},
        }
        for suite in suites
        for task in suite.tasks
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "suite.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
