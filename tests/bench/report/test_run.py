"""The page of a run holds the numbers of the run, and nothing that was not recorded."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
import statistics

import pytest
from written import FOLDS, ORDERS, SWEEP


def test_streams_are_those_of_the_files(written, report):
    _, data = report(written.path)
    assert {(s["rule"], s["number"]): s["matrix"] for s in data["streams"]} == FOLDS
    assert all(s["order"] == ORDERS[s["number"]] for s in data["streams"])
    assert all(s["seconds"] == [0.25, 0.5, 0.75] for s in data["streams"])
    ends = json.loads((written.path / "ends.json").read_text())
    assert data["base"] == ends["base"] and data["experts"] == ends["experts"]


def test_headline_is_worked_out_by_hand(written, report):
    _, data = report(written.path)
    rows = {r["rule"]: r for r in data["headline"]["rows"]}
    # average: (60+72+66)/3 = 66 and (64+62+70)/3 = 65⅓; BWT ((60−90)+(72−80))/2 = −19 and ((64−88)+(62−71))/2 = −16.5
    assert rows["average"]["acc"] == pytest.approx((66 + 196 / 3) / 2)
    assert rows["average"]["acc_std"] == pytest.approx(statistics.pstdev([66, 196 / 3]))
    assert rows["average"]["bwt"] == pytest.approx(-17.75)
    assert rows["average"]["bwt_std"] == pytest.approx(1.25)
    # ode: 78 and 77 of base 55 and experts 91
    assert rows["ode"]["gap"] == pytest.approx((100 * 23 / 36 + 100 * 22 / 36) / 2)
    assert rows["ode"]["gradients"] == 4
    assert rows["ode"]["seconds"] == pytest.approx(1.5)


def test_courses_are_worked_out_by_hand(written, report):
    _, data = report(written.path)
    course = next(c for c in data["courses"] if c["rule"] == "average")
    assert course["acc"] == pytest.approx([89.0, 74.0, (66 + 196 / 3) / 2])
    assert course["acc_std"] == pytest.approx([1.0, 1.0, 1 / 3])
    assert course["bwt"] == pytest.approx([0.0, (-20 - 13) / 2, -17.75])
    assert course["by_task"] == pytest.approx({"ants": 61.0, "bees": 71.0, "cats": 65.0})


def test_trajectories_are_those_of_the_folds(written, report):
    _, data = report(written.path)
    recorded = [r["details"]["trajectory"] for r in written.rows if r["details"]]
    assert len(recorded) == 4
    names = {"rule", "number", "length", "fold", "task"}
    assert [{k: v for k, v in p.items() if k not in names} for p in data["trajectories"]] == recorded


def test_table_shows_the_same_numbers(written, report):
    page, data = report(written.path)
    body = re.search(r'id="headline">.*?<tbody>(.*?)</tbody>', page.read_text(), re.S)[1]
    shown = {m[0]: float(m[1]) for m in re.findall(r'<th scope="row" data-v="(.*?)".*?<b>(.*?)</b>', body)}
    assert shown == {r["rule"]: round(r["acc"], 1) for r in data["headline"]["rows"]}
    assert list(shown) == ["ode", "average"]


def test_without_a_sweep_the_page_says_how_to_get_one(written, report):
    page, data = report(written.path)
    assert data["sweep"] is None
    assert "has no recorded sweep" in page.read_text()
    assert "mergeway report RUN --suite SUITE" in page.read_text()


def test_recorded_sweep_is_embedded(swept, report):
    page, data = report(swept.path)
    assert data["sweep"] == SWEEP
    assert "has no recorded sweep" not in page.read_text()


def test_run_without_trajectories_says_so(written, report):
    rows = [r for r in written.rows if r["key"].startswith("average")]
    (written.path / "folds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page, data = report(written.path)
    assert data["trajectories"] == []
    assert "No rule of this run follows a trajectory" in page.read_text()


def test_unfinished_stream_and_cut_line_are_left_out(written, report):
    text = (written.path / "folds.jsonl").read_text()
    (written.path / "folds.jsonl").write_text(text[:-80])
    before = (written.path / "folds.jsonl").read_bytes()
    _, data = report(written.path)
    assert {(s["rule"], s["number"]) for s in data["streams"]} == set(FOLDS) - {("ode", 1)}
    assert (written.path / "folds.jsonl").read_bytes() == before, "reading must not change a run"


def test_page_loads_nothing(written, report):
    text = report(written.path)[0].read_text()
    assert not re.findall(r'(?:src|href|action|url\()\s*=?\s*["\']?(?:https?:)?//', text)
    assert "default-src 'none'" in text


def test_page_holds_the_charting_library_as_it_was_published(written, report):
    """A page can be mailed; the library in it is the file that plotly publishes, byte for byte."""
    text = report(written.path)[0].read_text()
    assert len(text) < 1_000_000
    packed = re.search(r'id="plotly">([^<]*)<', text)[1]
    library = gzip.decompress(base64.b64decode(packed))
    assert library.startswith(b"/**\n* plotly.js (cartesian - minified) v4.1.1")
    assert hashlib.sha256(library).hexdigest() == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"


def test_a_rule_is_named_apart_from_its_options(written, report):
    for file in ("run.json", "folds.jsonl", "timings.jsonl"):
        path = written.path / file
        path.write_text(path.read_text().replace('"ode', '"ode:guidance=0.2:step=0.01'))
    text = report(written.path)[0].read_text()
    page = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "<dd>ode<small>guidance=0.2, step=0.01; ACC 77." in page
    seen = re.sub(r"<[^>]*>", "", page)
    assert "guidance=0.2, step=0.01" in seen and "ode:guidance" not in seen.split("About this run")[0]


def test_ends_are_those_of_the_tasks_that_were_folded(written, report):
    ends = json.loads((written.path / "ends.json").read_text())
    ends["base"]["dogs"], ends["experts"]["dogs"] = 10.0, 20.0
    (written.path / "ends.json").write_text(json.dumps(ends))
    out, data = report(written.path)
    assert data["ends"] == {"base": 55.0, "experts": 91.0}
    assert "3 of 4 tasks, 2 rules, 2 orders" in out.read_text()


def test_names_cannot_break_out_of_the_page(written, report):
    evil = "</script><b>&x"
    for file in ("folds.jsonl", "ends.json"):
        path = written.path / file
        path.write_text(path.read_text().replace("bees", json.dumps(evil)[1:-1]))
    page, data = report(written.path)
    assert evil in data["tasks"]
    assert evil not in page.read_text()


def test_numbers_that_json_does_not_know_become_null(written, report):
    path = written.path / "folds.jsonl"
    path.write_text(path.read_text().replace('"barrier": 0.0', '"barrier": NaN'))
    (page, data) = report(written.path)
    assert [p["barrier"] for p in data["trajectories"]] == [None] * 4
    assert "NaN" not in re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1]


def test_report_replaces_a_report_and_nothing_else(written, report, call, tmp_path):
    report(written.path)
    report(written.path)
    mine = tmp_path / "mine.html"
    mine.write_text("<p>my own page")
    assert "is not a report" in call("report", written.path, "--out", mine).mistake()
    assert mine.read_text() == "<p>my own page"
    assert "is not a report" in call("report", written.path, "--out", tmp_path).mistake()


def test_mistakes_are_one_line(written, call, tmp_path):
    assert "neither a run" in call("report", tmp_path / "nothing").mistake()
    out = tmp_path / "x.html"
    (written.path / "run.json").write_text("{")
    assert "run.json" in call("report", written.path, "--out", out).mistake()
    shutil.rmtree(written.path)
    written.path.mkdir()
    (written.path / "run.json").write_text(json.dumps({"suite": "tiny", "utilities": "uniform", "samples": 8}))
    assert "no finished stream" in call("report", written.path, "--out", out).mistake()
    assert not out.exists()


def test_certificates_over_streams(written, report):
    """Two streams of `ode` with two paths each, all certified; the written run has no losses, so no task is the worst."""
    page, data = report(written.path)
    (row,) = data["certificates"]
    assert (row["rule"], row["streams"], row["folds"], row["certified"], row["within"]) == ("ode", 2, 4, 4, 4)
    assert (row["gamma"], row["kept"], row["worst"], row["rise"]) == (0.5, None, None, None)
    body = re.search(r'id="certificates">.*?<tbody>(.*?)</tbody>', page.read_text(), re.S)[1]
    assert re.findall(r"<t[dh].*?>(.*?)</t[dh]>", body) == [
        *("ode", "3", "4", "100 %", "100 %", "0.0000", "0.500", "–", "–", "–")
    ]


def test_rules_that_end_at_the_same_accuracy_are_both_the_best(written, report):
    plain = {
        (row["key"].split(".")[-1], row["fold"]): row["accuracies"] for row in written.rows if "average" in row["key"]
    }
    rows = [{**row, "accuracies": plain[row["key"].split(".")[-1], row["fold"]]} for row in written.rows]
    (written.path / "folds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(written.path)[0].read_text()
    assert "Best rules" in text and "average and ode" in text
