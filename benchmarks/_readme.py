"""Put the figures of results/*.json between the markers of README.md; run it after the scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from _common import RESULTS, Row, table

README = Path(__file__).resolve().parent / "README.md"


def section(result: dict[str, Any]) -> str:
    """Machine and table of one benchmark, as Markdown."""
    m = result["machine"]
    names = [f.name for f in Row.__dataclass_fields__.values()]
    rows = table(Row(*(r[n] for n in names)) for r in result["rows"])
    lines = [
        f"{m['date']}: {m['cpu']}, {m['cores']} cores, load {m['load_average']} at the start; "
        f"Python {m['python']}, torch {m['torch']} with {m['torch_threads']} threads, "
        f"Pyro {m['pyro']}.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "| " + " | ".join(["---"] * len(rows[0])) + " |",
        *("| " + " | ".join(line) + " |" for line in rows[1:]),
    ]
    return "\n".join(lines)


def main() -> None:
    text = README.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        name = result["benchmark"]
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        body = section(result)
        found = re.search(pattern, text, flags=re.DOTALL)
        if found:
            text = text[: found.end(1)] + body + "\n" + text[found.start(2) :]
        print(f"{name}: {'written' if found else 'no place for it in README.md'}")
    README.write_text(text)


if __name__ == "__main__":
    main()
