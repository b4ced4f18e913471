"""A table as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from mergeway.bench.paper.table import Entry, Table, Value
from mergeway.core.files import make_directory, replace_text

_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"${name}$" for c, name in {"→": r"\rightarrow", "λ": r"\lambda", "α": r"\alpha", "γ": r"\gamma"}.items()},
    **{c: f"${name}$" for c, name in {"ρ": r"\rho", "±": r"\pm", "−": "-", "⋆": r"^\star", "Σ": r"\Sigma"}.items()},
    **{c: f"${name}$" for c, name in {"Θ": r"\Theta", "≤": r"\leq"}.items()},
}


def write_table(table: Table, folder: Path) -> list[Path]:
    """The table in every format; the files that were written."""
    make_directory(folder)
    written = []
    for suffix, text in (("md", to_markdown(table)), ("csv", to_csv(table)), ("tex", to_latex(table))):
        path = folder / f"{table.name}.{suffix}"
        replace_text(path, text)
        written.append(path)
    return written


def to_markdown(table: Table) -> str:
    """The title, the table, the note."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    marks = ["--:" if numeric else "---" for numeric in table.numeric()]
    rows = [line([_bold(c, text, "**{}**") for c, text in zip(*pair, strict=True)]) for pair in _paired(table)]
    parts = [f"**{table.title}**", "\n".join([line(list(table.columns)), "|" + "|".join(marks) + "|", *rows])]
    return "\n\n".join([*parts, table.note] if table.note else parts) + "\n"


def to_csv(table: Table) -> str:
    """One column for each number and one for its standard deviation, in full precision."""
    spread = [
        any(isinstance(cell, Value) and cell.std is not None for cell in cells)
        for cells in zip(*table.rows, strict=True)
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [n for c, two in zip(table.columns, spread, strict=True) for n in ([c, f"{c} std"] if two else [c])]
    )
    for row in table.rows:
        writer.writerow([n for c, two in zip(row, spread, strict=True) for n in _plain(c)[: 2 if two else 1]])
    return text.getvalue()


def to_latex(table: Table) -> str:
    """A table environment in the style of booktabs."""
    align = "".join("r" if numeric else "l" for numeric in table.numeric())
    lines = []
    for number, pair in enumerate(_paired(table)):
        if number in table.breaks:
            lines.append(r"\midrule")
        lines.append(" & ".join(_latex_cell(c, text) for c, text in zip(*pair, strict=True)) + r" \\")
    head = " & ".join(escape_latex(c) for c in table.columns) + r" \\"
    caption = escape_latex(f"{table.title} {table.note}".strip())
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            head,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def as_json(table: Table) -> dict[str, object]:
    """The table as `bench --json` prints it."""

    def plain(cell: Entry) -> object:
        return {"mean": cell.mean, "std": cell.std} if isinstance(cell, Value) else cell

    rows = [dict(zip(table.columns, map(plain, row), strict=True)) for row in table.rows]
    return {"name": table.name, "title": table.title, "rows": json.loads(json.dumps(rows))}


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(c, c) for c in text)


def _paired(table: Table) -> list[tuple[list[Entry], list[str]]]:
    return [(list(row), texts) for row, texts in zip(table.rows, table.texts(), strict=True)]


def _bold(cell: Entry, text: str, form: str) -> str:
    return form.format(text) if isinstance(cell, Value) and cell.best else text


def _latex_cell(cell: Entry, text: str) -> str:
    if not isinstance(cell, Value):
        return escape_latex(text)
    return _bold(cell, "$" + text.replace(" ± ", r" \pm ") + "$", r"\textbf{{\boldmath {}}}")


def _plain(cell: Entry) -> list[str | float]:
    if isinstance(cell, Value):
        return [cell.mean, "" if cell.std is None else cell.std]
    return ["" if cell is None else cell, ""]
