import json
import os
import stat
import subprocess
import sys
from functools import partial

import pytest
import typer
from typer.testing import CliRunner

from keel_theory.schemes import SCHEMES
from keel_theory.spec import SchemeError
from probes.cli import main as cli
from probes.cli.schemes import parse_settings
from tests._cli import run_keel

MAIN = "import sys; sys.argv[0] = 'keel'; from probes.cli.main import main; main()"


def _keel(*arguments, **options):
    """The command in its own process, warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", MAIN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


@pytest.fixture
def keel(monkeypatch, capsys):
    """The command in this process: (exit code, stdout, stderr)."""
    return partial(run_keel, monkeypatch, capsys)


def test_list_names_every_scheme_with_label_equation_and_source(keel):
    code, out, err = keel("schemes")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(SCHEMES)
    for line, scheme in zip(lines[1:], SCHEMES.values(), strict=True):
        assert all(text in line for text in (scheme.label, scheme.equation, scheme.source))


def test_list_as_json(keel):
    code, out, err = keel("schemes", "--json")
    assert (code, err) == (0, "")
    assert [row["name"] for row in json.loads(out)] == list(SCHEMES)
    assert set(json.loads(out)[0]) == {"name", "label", "equation", "source"}


@pytest.mark.parametrize("name", SCHEMES)
def test_page_of_every_scheme(keel, name):
    scheme = SCHEMES[name]
    code, out, err = keel("schemes", name)
    assert (code, err) == (0, "")
    assert all(text in out for text in (scheme.label, scheme.equation, scheme.source, "12 sub-layers"))
    for parameter, value in scheme.parameters.items():
        assert f"{parameter} = {value}: {scheme.parameter_docs[parameter]}" in out
    assert [line.split()[0] for line in out.splitlines()[-12:]] == [str(i) for i in range(12)]


@pytest.mark.parametrize("name", SCHEMES)
def test_json_of_every_scheme_is_its_specs(keel, name):
    code, out, err = keel("schemes", name, "--sublayers", "5", "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["sublayers"]
    assert [(row["sublayer"], row["block"], row["kind"]) for row in rows] == [
        (0, 0, "attention"),
        (1, 0, "ffn"),
        (2, 1, "attention"),
        (3, 1, "ffn"),
        (4, 2, "attention"),
    ]
    for row, spec in zip(rows, SCHEMES[name].specs(5), strict=True):
        assert {field: row[field] for field in spec.__slots__} == {field: getattr(spec, field) for field in spec.__slots__}


def test_keel_page_shows_the_first_block_rules(keel):
    _, out, _ = keel("schemes", "keel", "--sublayers", "4")
    table = [line.split() for line in out.splitlines()[-4:]]
    assert table == [
        ["0", "0", "attention", "rms", "none", "none", "1"],
        ["1", "0", "ffn", "rms", "none", "rms", "1"],
        ["2", "1", "attention", "rms", "none", "rms", "4"],
        ["3", "1", "ffn", "rms", "none", "rms", "4"],
    ]


def test_set_changes_parameter_and_specs(keel):
    _, out, _ = keel("schemes", "deepnorm", "--set", "alpha=2*sqrt(L)", "--set", "beta = deepnet", "--sublayers", "4", "--json")
    description = json.loads(out)
    assert {p["name"]: p["value"] for p in description["parameters"]} == {"alpha": "2*sqrt(L)", "beta": "deepnet"}
    assert [(row["shortcut_scale"], row["init_gain"]) for row in description["sublayers"]] == [(4.0, 0.5)] * 4


@pytest.mark.parametrize("options", [(), ("--json",), ("keel",), ("keel", "--json")])
def test_file_holds_what_the_terminal_shows(keel, tmp_path, options):
    _, shown, _ = keel("schemes", *options)
    path = tmp_path / "schemes.txt"
    assert keel("schemes", *options, "-o", str(path)) == (0, "", "")
    assert path.read_text(encoding="utf-8") == shown
    assert list(tmp_path.iterdir()) == [path]


BAD = [
    (["nope"], "unknown scheme 'nope'; known: highway, post_ln"),
    (["keel", "--sublayers", "0"], "at least 1 sub-layer, got 0"),
    (["keel", "--sublayers", "-4"], "at least 1 sub-layer, got -4"),
    (["keel", "--sublayers", "many"], "--sublayers"),
    (["keel", "--sublayers", "1000000000"], "--sublayers"),
    (["keel", "--set", "alpha"], "--set 'alpha' is not of the form name=value"),
    (["keel", "--set", "=2"], "--set '=2' is not of the form name=value"),
    (["keel", "--set", "alpha="], "--set 'alpha=' is not of the form name=value"),
    (["keel", "--set", "alpha=1", "--set", "alpha=2"], "--set gives 'alpha' twice: '1' and '2'"),
    (["keel", "--set", "beta=1"], "'keel' has no parameter 'beta'; its parameters: alpha"),
    (["keel", "--set", "alpha=-1"], "alpha must be positive, but '-1'"),
    (["keel", "--set", "alpha=L-12"], "'L-12' is 0 at 12 sub-layers"),
    (["keel", "--set", "alpha=L.__class__"], "'L.__class__' is not allowed"),
    (["keel", "--set", "alpha=9**9**9**9"], "too large for a float"),
    (["deepnorm", "--set", "beta=deepest"], "beta must be one of paper, deepnet, a number or an expression in L"),
    (["mix_ln", "--set", "ratio=1.5"], "ratio must be a number from 0 to 1, got '1.5'"),
    (["hybrid_norm", "--set", "variant=sun"], "variant must be one of plain, star, got 'sun'"),
    (["highway", "--set", "gate_bias=inf"], "gate_bias must be a finite number, got 'inf'"),
    (["--set", "alpha=1"], "--set needs a scheme"),
    (["keel", "--no-such-option"], "--no-such-option"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_mistake_is_one_message_on_stderr_and_exit_2(keel, arguments, message):
    code, out, err = keel("schemes", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("place", ["missing/out.json", ".", "/dev/null", "file/out.json"])
def test_place_that_cannot_be_written_is_named(keel, tmp_path, place):
    (tmp_path / "file").write_text("x")
    path = tmp_path / place
    code, out, err = keel("schemes", "-o", str(path))
    assert (code, out) == (2, "")
    assert f"cannot write '{path}'" in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_no_traceback_from_the_shell():
    result = _keel("schemes", "nope")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("keel: unknown scheme 'nope'; known:")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["no-such-command"], ["schemes", "keel", "extra"]])
def test_usage_error_exits_2(arguments):
    result = _keel(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert result.stderr


def test_a_fault_of_our_own_is_not_hidden(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        cli.main()


def test_help_has_a_shell_example():
    for arguments in (["--help"], ["schemes", "--help"]):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0
        assert "keel schemes keel --sublayers 48" in result.stdout
    assert isinstance(cli.app, typer.Typer)


@pytest.mark.parametrize("arguments", [["--help"], ["schemes"], ["schemes", "keel"]])
def test_starts_without_the_heavy_libraries(arguments):
    code = "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr)); " + MAIN
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(result.stderr.split())
    assert "probes.cli.schemes" in loaded
    assert not loaded & {"torch", "transformers", "sympy", "scipy", "pandas", "matplotlib"}


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_terminal_gets_a_drawn_table():
    import pty

    leader, follower = pty.openpty()
    subprocess.run([sys.executable, "-c", MAIN, "schemes", "keel", "--sublayers", "2"], stdout=follower, check=True, timeout=60)
    os.close(follower)
    shown = b""
    while chunk := _read(leader):
        shown += chunk
    assert "━" in shown.decode()
    assert "attention" in shown.decode()


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the closed other end this way
        return b""


def test_parse_settings_keeps_later_equals_signs():
    assert parse_settings(["a=b=c", " x = 1 "]) == {"a": "b=c", "x": "1"}
    with pytest.raises(SchemeError, match="not of the form name=value"):
        parse_settings(["=1"])


def test_new_file_has_ordinary_permissions_and_an_old_one_keeps_its_own(keel, tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("before")
    old.chmod(0o600)
    keel("schemes", "-o", str(new))
    keel("schemes", "-o", str(old))
    reference = tmp_path / "reference"
    reference.touch()
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(reference.stat().st_mode)
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert old.read_text() == new.read_text()


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_blocks_are_drawn_into_a_file(keel, tmp_path, ending):
    file = tmp_path / f"keel.{ending}"
    assert keel("schemes", "keel", "--set", "alpha=sqrt(L)", "--draw", str(file)) == (0, "", "")
    assert file.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("keel", "--draw", "keel.tiff"), "must end in .png, .svg or .pdf"),
        (("keel", "--draw", "no/such/folder/keel.svg"), "name a file in an existing folder"),
        (("--draw", "keel.svg"), "--draw needs a scheme"),
        (("nope", "--draw", "keel.svg"), "unknown scheme 'nope'"),
    ],
)
def test_drawing_refuses_what_it_cannot_do(keel, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = keel("schemes", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert list(tmp_path.iterdir()) == []
