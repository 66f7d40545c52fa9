"""Put the figures of results/*.json between the markers of README.md; run it after the scripts.

Those of `drop_in` go into docs/from_svi.md, too, a line for each model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from _common import RESULTS, ROOT, Row, table

README = Path(__file__).resolve().parent / "README.md"
FROM_SVI = ROOT / "docs" / "from_svi.md"


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


def drop_in(result: dict[str, Any]) -> str:
    """A line for each model that had `SVI` exchanged for `CVI`, as Markdown."""
    models: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        models.setdefault(row["case"], {})[row["what"]] = row["value"]
    lines = [
        "| model | lines changed | CVI: steps, seconds | negative bound | SVI: steps, seconds | "
        "negative bound |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in models.items():
        cells = [name, f"{found['lines of the model changed']:.0f}"]
        for method in ("CVI", "SVI"):
            (what,) = (w for w in found if w.startswith(f"{method}, ") and w.endswith(": seconds"))
            steps = what.removeprefix(f"{method}, ").removesuffix(" steps: seconds")
            cells += [f"{steps}, {found[what]:.3g}", f"{found[f'{method}: negative bound']:.6g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def between(text: str, name: str, body: str) -> str | None:
    """The text with another body between the markers of that name, if it has them."""
    found = re.search(rf"(<!-- {name} -->\n).*?(<!-- end -->)", text, flags=re.DOTALL)
    return text[: found.end(1)] + body + "\n" + text[found.start(2) :] if found else None


def main() -> None:
    text = README.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        name = result["benchmark"]
        found = between(text, name, section(result))
        text = text if found is None else found
        print(f"{name}: {'no place for it in README.md' if found is None else 'written'}")
        if name == "drop_in":
            page = between(FROM_SVI.read_text(), name, drop_in(result))
            assert page is not None
            FROM_SVI.write_text(page)
    README.write_text(text)


if __name__ == "__main__":
    main()
