"""Tables as text: rounding, the best in bold, and names that Markdown, CSV and LaTeX would trip over."""

from __future__ import annotations

import csv
import io

import pytest

from mergeway.bench.paper import Table, Value
from mergeway.bench.paper.formats import as_json, escape_latex, to_csv, to_latex, to_markdown
from mergeway.bench.paper.table import mark_best, over_orders

TABLE = Table(
    "demo",
    "50 % of A & B",
    ("rule_name", "ACC", "n"),
    [["a|b_c", Value(79.64, 1.25, best=True), Value(3.0, digits=0)], ["base", None, "x^2"]],
    "cats → ants",
    (1,),
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Value(79.64), "79.6"),
        (Value(79.64, 1.25), "79.6 ± 1.2"),
        (Value(-0.04), "0.0"),
        (Value(-5.0, 0.0, 3), "-5.000 ± 0.000"),
        (Value(1234.5, digits=0), "1234"),
    ],
)
def test_numbers(value, shown):
    assert str(value) == shown


def test_mean_and_deviation_by_hand():
    """The deviation is that of the orders themselves: √((1 + 0 + 1)/3)."""
    made = over_orders([1.0, 2.0, 3.0])
    assert made.mean == 2
    assert made.std == pytest.approx((2 / 3) ** 0.5)


def test_markdown():
    assert to_markdown(TABLE).splitlines() == [
        "**50 % of A & B**",
        "",
        "| rule_name | ACC | n |",
        "|---|--:|--:|",
        "| a\\|b_c | **79.6 ± 1.2** | 3 |",
        "| base | n/a | x^2 |",
        "",
        "cats → ants",
    ]


def test_csv_holds_every_digit():
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows == [["rule_name", "ACC", "ACC std", "n"], ["a|b_c", "79.64", "1.25", "3.0"], ["base", "", "", "x^2"]]


def test_latex():
    text = to_latex(TABLE)
    assert r"\caption{50 \% of A \& B cats $\rightarrow$ ants}" in text
    assert r"\begin{tabular}{lrr}" in text
    body = text.split(r"\midrule")
    assert r"a|b\_c & \textbf{\boldmath $79.6 \pm 1.2$} & $3$ \\" in body[1]
    assert r"base & n/a & x\textasciicircum{}2 \\" in body[2]
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    assert text.count("{") == text.count("}")


def test_everything_special_to_latex_is_escaped():
    assert escape_latex(r"\a_b{c}#$~") == r"\textbackslash{}a\_b\{c\}\#\$\textasciitilde{}"


def test_json():
    assert as_json(TABLE)["rows"] == [
        {"rule_name": "a|b_c", "ACC": {"mean": 79.64, "std": 1.25}, "n": {"mean": 3.0, "std": None}},
        {"rule_name": "base", "ACC": None, "n": "x^2"},
    ]


def test_best_of_each_column():
    rows = mark_best([["a", Value(1.0), Value(5.04)], ["b", Value(2.0), Value(4.96)], ["c", None, Value(3.0)]])
    assert [[isinstance(c, Value) and c.best for c in row] for row in rows] == [
        [False, False, True],
        [False, True, True],  # 5.04 and 4.96 are both shown as 5.0
        [False, False, False],
    ]
    for equal in ([["alone", Value(1.0)]], [["a", Value(1.0)], ["b", Value(1.0)]]):
        assert not any(isinstance(c, Value) and c.best for row in mark_best(equal) for c in row)
