"""The command line as a whole: help, version, JSON, quiet, debug, completion, and what it does not import."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

import mergeway
from mergeway.cli import main
from mergeway.cli.app import app

COMMANDS = ["demo", "merge", "init", "add", "remove", "log", "show", "verify", "rollback", "export", "report", "rules"]


@pytest.fixture
def trunk(stream, tmp_path, call):
    s = stream(3)
    call("init", tmp_path / "trunk", "--base", s.base, "--rule", "average", "--keep", 5).ok()
    call("add", tmp_path / "trunk", s.arrivals[0]).ok()
    return tmp_path / "trunk", s


def test_every_designed_command_is_there(call):
    call("rules").ok()  # commands register when the first one runs
    assert set(COMMANDS) <= {c.name or c.callback.__name__ for c in app.registered_commands}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(call, command):
    text = call(command, "--help").ok().out
    assert f"mergeway {command}" in text.replace("\n", " ")
    assert "--json" in text


def test_help_keeps_every_word(call, monkeypatch):
    """What a help text says stands in the help as a reader sees it, brackets too."""
    monkeypatch.setenv("COLUMNS", "100000")
    call("rules").ok()
    for command in app.registered_commands:
        if command.hidden:
            continue
        name = command.name or command.callback.__name__
        shown = " ".join(call(name, "--help").ok().out.split())
        for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
            about = next(
                (a for a in getattr(parameter.annotation, "__metadata__", ()) if getattr(a, "help", None)), None
            )
            if about is not None:
                assert " ".join(about.help.replace("\\[", "[").split()) in shown, f"{name}: {parameter.name}"


def test_help_and_version(call):
    text = call("--help").ok().out
    for command in COMMANDS:
        assert command in text
    assert call("--version").ok().out == f"mergeway {mergeway.__version__}\n"


def test_help_names_all_options(call):
    plain = {
        "merge": ["--rule", "--set", "--weights", "--out", "--shard-size", "--threads", "--allow-pickle", "--force"],
        "init": ["--base", "--rule", "--set", "--keep"],
        "add": ["--task", "--weight", "--again", "--no-wait"],
        "remove": ["--from", "--no-wait"],
        "export": ["--dtype", "--shard-size", "--force"],
    }
    for command, options in plain.items():
        text = re.sub(r"\x1b\[[0-9;]*m", "", call(command, "--help").ok().out)
        for option in options:
            assert option in text, f"{command} {option}"


def test_json_of_every_printing_command(trunk, call, tmp_path):
    path, s = trunk
    assert [r["rule"] for r in call("rules", "--json").json()] == list(mergeway.rules.RULES)
    assert call("init", tmp_path / "new", "--base", s.base, "--rule", "iso", "--json").json()["kind"] == "init"
    assert call("add", path, s.arrivals[1], "--json").json()["task"] == "task2"
    assert call("remove", path, "task2", "--from", s.arrivals[1], "--json").json()["kind"] == "remove"
    assert call("rollback", path, 1, "--json").json()["details"] == {"to": 1}
    assert [r["step"] for r in call("log", path, "--json").json()] == [0, 1, 2, 3, 4]
    assert call("show", path, "--json").json()["step"] == 4
    assert call("verify", path, "--json").json()["intact"] is True
    assert call("export", path, tmp_path / "out", "--json").json()["step"] == 4
    merged = call("merge", s.base, *s.arrivals, "--out", tmp_path / "merged", "--rule", "opcm", "--json").json()
    assert merged["options"]["alpha"] == 0.5 and [a["task"] for a in merged["arrivals"]] == ["task1", "task2", "task3"]
    assert merged["facts"]["lambda"] > 1


def test_rules_table_says_what_each_needs(call):
    rows = {r["rule"]: r for r in call("rules", "--json").json()}
    assert rows["average"]["remove"] and not rows["opcm"]["remove"]
    assert rows["opcm"]["options"] == {"alpha": 0.5, "norms": "raw", "scale": "adaptive", "linear": None}
    assert all(r["title"] and r["paper"] for r in rows.values())
    text = call("rules").ok().out
    assert all(name in text for name in rows)


def test_did_you_mean(call, stream, tmp_path):
    s = stream(1)
    words = ["merge", s.base, *s.arrivals, "--out", tmp_path / "out"]
    assert "did you mean 'magmax'?" in call(*words, "--rule", "magmx").mistake()
    assert "did you mean 'density'?" in call(*words, "--rule", "ties", "--set", "densty=1").mistake()
    assert "verify" in call("verfy", tmp_path).mistake()
    assert "--shard-size" in call(*words, "--shardsize", "1GB").mistake()


def test_no_arguments_show_the_help(call):
    done = call()
    assert done.code in (0, 2)
    assert "merge" in done.out + done.err and "Traceback" not in done.err


# --- stderr ----------------------------------------------------------------------------------------------------------


def test_no_progress_without_a_terminal(trunk, run):
    path, s = trunk
    assert run("add", path, s.arrivals[1]).ok().err == ""


@pytest.mark.parametrize(("flag", "said"), [("--quiet", ""), ("--json", "waiting for another process")])
def test_quiet_says_nothing_even_when_it_has_to_wait(trunk, call, flag, said):
    """The note about waiting is all that stderr gets without a terminal, and nothing with --quiet."""
    path, _ = trunk
    held = open(path / "lock", "w")  # noqa: SIM115 - closed by the timer, while the command waits
    fcntl.flock(held, fcntl.LOCK_EX)
    timer = threading.Timer(0.5, held.close)
    timer.start()
    err = call("rollback", path, 0, flag).ok().err
    timer.join()
    assert err.startswith(said) and (err == "") == (flag == "--quiet")


@pytest.mark.parametrize("where", ["first", "last"])
def test_quiet_and_debug_may_stand_anywhere(trunk, call, where):
    path, _ = trunk
    done = call("--quiet", "verify", path) if where == "first" else call("verify", path, "--quiet")
    assert done.ok().err == ""
    done = call("--debug", "log", "nowhere") if where == "first" else call("log", "nowhere", "--debug")
    assert done.code == 2
    assert "Traceback" in done.err and done.err.splitlines()[-1].startswith("error: ")


def test_errors_are_printed_in_spite_of_quiet(call):
    assert "not a trunk" in call("--quiet", "log", "nowhere").mistake()


def test_debug_does_not_outlive_its_command(call):
    call("--debug", "log", "nowhere")
    call("log", "nowhere").mistake()


def test_progress_on_a_terminal(trunk):
    """With a terminal on stderr the bar is drawn, and stdout stays clean for the next program."""
    path, s = trunk
    terminal, end = pty.openpty()
    words = [sys.executable, "-m", "mergeway", "add", path, s.arrivals[1], "--json"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=end, env=os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(end)
    drawn = b""
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # how a terminal says that nobody writes to it any more
            break
        if not chunk:
            break
        drawn += chunk
    os.close(terminal)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"\x1b[" in drawn
    assert json.loads(out)["task"] == "task2"


def test_a_closed_pipe_is_not_an_error(trunk):
    path, _ = trunk
    words = f"{sys.executable} -m mergeway log {path} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- start-up --------------------------------------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "safetensors", "huggingface_hub", "transformers")


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_does_not_import_torch():
    assert (
        loaded_after(
            "from mergeway.cli import main; assert main(['--help']) == 0; assert main(['merge', '--help']) == 0"
        )
        == set()
    )


def test_import_does_not_import_torch():
    assert loaded_after("import mergeway; dir(mergeway); mergeway.__version__; mergeway.MergewayError") == set()
    assert "torch" in loaded_after("import mergeway; mergeway.merge")


def test_completion(run):
    done = run("--show-completion", "bash", env=os.environ | {"SHELL": "/bin/bash"})
    assert "complete" in done.ok().out and "mergeway" in done.out.lower()


def test_completion_offers_the_commands():
    words = {"_MERGEWAY_COMPLETE": "complete_bash", "COMP_WORDS": "mergeway ver", "COMP_CWORD": "1"}
    script = "import sys; sys.argv[0] = 'mergeway'; from mergeway.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | words)
    assert done.stdout.split() == ["verify"]


def test_main_uses_the_process_arguments_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mergeway", "--version"])
    assert main() == 0
    assert mergeway.__version__ in capsys.readouterr().out


def test_memory_that_ran_out_is_no_bug(call, monkeypatch):
    import torch

    import mergeway.cli.rules

    monkeypatch.setattr(mergeway.cli.rules, "describe_rules", lambda: torch.empty(2**45, dtype=torch.uint8))
    done = call("rules")
    assert done.code == 1
    assert done.err.startswith("error: there was not enough memory; nothing was changed")


def test_a_bug_is_said_to_be_one(call, monkeypatch):
    """What nobody foresaw is exit 1, one line that asks for a report, and the traceback with --debug."""
    import mergeway.cli.rules

    def broken():
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(mergeway.cli.rules, "describe_rules", broken)
    done = call("rules")
    assert done.code == 1
    assert (
        done.err == "error: this is a bug in mergeway: ZeroDivisionError: boom (run again with --debug and report it)\n"
    )
    with pytest.raises(ZeroDivisionError):
        main(["rules", "--debug"])
