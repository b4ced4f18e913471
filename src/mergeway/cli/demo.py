"""`mergeway demo`: the main job on a stream that needs no download."""

from __future__ import annotations

from mergeway.cli.app import Json, app


@app.command()
def demo(as_json: Json = False) -> None:
    """Fold a small generated stream with every rule and compare what each keeps of the arrivals."""
    from mergeway.cli.display import console, print_json, progress, table
    from mergeway.demo import ARRIVALS, run_demo

    with progress() as bar:
        rows = run_demo(bar)
    if as_json:
        print_json(rows)
        return
    out = console()
    out.print(f"{ARRIVALS} generated arrivals on a small transformer, folded one by one into a trunk by each rule:\n")
    cells = [
        (
            r["rule"],
            f"{r['length']:.2f}",
            f"{r['first']:.2f}",
            f"{r['last']:.2f}",
            f"{r['least']:.2f}",
            f"{r['seconds']:.2f}",
        )
        for r in rows
    ]
    columns = ("rule", "length", "first", "last", "least", "seconds")
    out.print(table(columns, cells, numbers=columns[1:]))
    out.print(
        "\nlength: of the merged update against the mean arrival. first, last, least: share of an arrival's own update that is\n"
        "still there at the end, ⟨Δ, δ⟩/‖δ‖², for the first, the last and the worst-kept arrival. Each trunk was verified."
    )
