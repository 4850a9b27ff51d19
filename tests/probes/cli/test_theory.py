"""``keel theory``: what the commands print is what the functions return."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from keel_theory.asymptotics import LIMITS
from keel_theory.derivations import DERIVATIONS
from keel_theory.design import aligned_branch_share, smallest_alpha, uniform_product
from keel_theory.propagation import shortcut_log_product
from keel_theory.schemes import SCHEMES, get_scheme
from tests._cli import run_keel

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def keel(monkeypatch, capsys) -> Run:
    """The command in this process: (exit code, stdout, stderr)."""
    return partial(run_keel, monkeypatch, capsys, "theory")


@pytest.mark.parametrize("name", SCHEMES)
def test_gain_of_every_scheme(keel: Run, name: str) -> None:
    code, out, err = keel("gain", "--scheme", name, "--sublayers", "48", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["log_product"] == shortcut_log_product(get_scheme(name), 48)
    assert answer["first_block_log_product"] + answer["later_blocks_log_product"] == pytest.approx(
        answer["log_product"], abs=1e-12
    )
    assert answer["product"] == pytest.approx(10 ** answer["log10_product"])


@pytest.mark.parametrize(("alpha", "scale"), [("L", 256.0), ("L**0.25", 4.0), ("2*sqrt(L)", 32.0), ("7", 7.0)])
def test_gain_takes_an_expression_in_depth(keel: Run, alpha: str, scale: float) -> None:
    code, out, err = keel(
        "gain", "--scheme", "scaled_shortcut", "--sublayers", "256", "--alpha", alpha, "--branch-variance", "2", "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["product"] == pytest.approx(float(uniform_product(scale, 256, 2.0)))
    assert json.loads(out)["last_scale"] == scale


def test_gain_below_the_smallest_float_is_a_power_of_ten(keel: Run) -> None:
    code, out, err = keel("gain", "--scheme", "post_ln", "--sublayers", "4000")
    assert (code, err) == (0, "")
    assert f"10^{-2000 * math.log10(2):.6g}" in out


def test_gain_of_a_million_sublayers(keel: Run) -> None:
    code, out, _ = keel("gain", "--scheme", "keel", "--sublayers", "1000000", "--json")
    assert code == 0
    assert json.loads(out)["product"] == pytest.approx(1 / math.sqrt(3), rel=1e-6)


def test_alpha_answers_the_design_question(keel: Run) -> None:
    code, out, err = keel("alpha", "--sublayers", "1024", "--min-gain", "0.9", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["alpha"] == float(smallest_alpha(0.9, 1024))
    assert answer["at_alpha"]["product"] == pytest.approx(0.9)
    assert answer["at_alpha"]["branch_share"] == pytest.approx(0.19)
    assert answer["at_alpha_L"]["product"] == pytest.approx(0.99951, abs=1e-5)
    assert answer["at_alpha_L"]["aligned_branch_share"] == aligned_branch_share(1024.0, 1024)


@pytest.mark.parametrize("min_gain", ["0.9", "0.3"])
def test_one_branch_has_none_to_agree_with(keel: Run, min_gain: str) -> None:
    _, out, _ = keel("alpha", "--sublayers", "1", "--min-gain", min_gain, "--json")
    for case in ("at_alpha", "at_alpha_L"):
        answer = json.loads(out)[case]
        assert answer["aligned_branch_share"] == pytest.approx(answer["branch_share"], rel=1e-14)
    assert json.loads(out)["at_alpha"]["branch_share"] == pytest.approx(1 - float(min_gain) ** 2)
    _, text, _ = keel("alpha", "--sublayers", "1", "--min-gain", "0.9")
    assert [line.split()[-2:] for line in text.splitlines()[2:4]] == [["0.19", "0.19"], ["0.5", "0.5"]]


@pytest.mark.parametrize("power", [12, 14, 16, 18])
def test_gain_at_depths_where_sums_of_logs_cancel(keel: Run, power: int) -> None:
    _, out, _ = keel("gain", "--scheme", "keel", "--sublayers", str(10**power), "--alpha", "sqrt(L)")
    assert "kept by the shortcut   0.350181\n" in out
    assert "first block            0.57735\n" in out


def test_first_block_s_factor_is_told_with_both_conventions(keel: Run) -> None:
    """What it is for an embedding of variance 1, and at the paper's initialisation, which can be asked for as well."""
    _, out, _ = keel("gain", "--scheme", "keel", "--sublayers", "1024")
    assert "embedding variance 1\n" in out
    assert "first block, others    0.57735, " in out
    assert "first block initially  3.52673, at the paper's initialisation: embedding variance 0.0004, branch variance" in out
    _, out, _ = keel(
        "gain", "--scheme", "keel", "--sublayers", "1024", "--embedding-variance", "4e-4", "--branch-variance", "0.04"
    )
    assert "first block, others    3.52673, " in out
    _, out, _ = keel("gain", "--scheme", "pre_ln", "--sublayers", "1024")
    assert "initially" not in out
    assert "--embedding-variance" in out


def test_alpha_of_a_scheme_counts_its_embedding(keel: Run) -> None:
    case = ("alpha", "--sublayers", "1024", "--min-gain", "0.9")
    code, out, _ = keel(*case, "--scheme", "keel", "--embedding-variance", "4e-4", "--branch-variance", "0.04")
    assert code == 0
    assert "embedding variance 0.0004, keep 0.9" in out
    code, _, err = keel(*case, "--scheme", "keel")
    assert code == 2
    assert "keeps at most 0.57735 of the gradient" in err
    assert "from an embedding of variance 1" in err
    code, _, err = keel(*case, "--embedding-variance", "4e-4")
    assert code == 2
    assert "name the scheme with --scheme" in " ".join(word for word in err.split() if word.isascii())


def test_alpha_as_text_shows_scale_law_and_price(keel: Run) -> None:
    code, out, err = keel("alpha", "--sublayers", "1024", "--min-gain", "0.9")
    assert (code, err) == (0, "")
    assert all(text in out for text in ("69.7066", "69.7102", "0.19", "0.999512"))


def test_alpha_without_branch_variance(keel: Run) -> None:
    code, out, _ = keel("alpha", "--sublayers", "8", "--min-gain", "0.5", "--branch-variance", "0")
    assert code == 0
    assert "any alpha" in out


def test_limits_name_every_limit_and_both_wrong_forms(keel: Run) -> None:
    code, out, err = keel("limits")
    assert (code, err) == (0, "")
    assert all(name in out for name in (*LIMITS, "depth-as-base", "limit-without-power", "2**(-L/2)", "exp(-q/(2*c**2))"))
    code, out, _ = keel("limits", "--json")
    assert [row["name"] for row in json.loads(out)["limits"]] == list(LIMITS)


@pytest.mark.parametrize("equation", DERIVATIONS)
def test_every_derivation_prints(keel: Run, equation: str) -> None:
    derivation = DERIVATIONS[equation]()
    code, out, err = keel("derive", equation)
    assert (code, err) == (0, "")
    assert all(step.text in out for step in derivation.steps)
    code, out, _ = keel("derive", equation, "--json")
    assert [step["text"] for step in json.loads(out)["steps"]] == [step.text for step in derivation.steps]


def test_derivation_as_latex_to_a_file(keel: Run, tmp_path: Path) -> None:
    code, out, err = keel("derive", "19", "--latex", "-o", str(tmp_path / "eq.tex"))
    assert (code, out, err) == (0, "", "")
    assert r"\lim_{L \to \infty}" in (tmp_path / "eq.tex").read_text(encoding="utf-8")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_phase_writes_the_figure(keel: Run, tmp_path: Path, suffix: str) -> None:
    code, out, err = keel("phase", "-o", str(tmp_path / f"phase.{suffix}"))
    assert (code, out, err) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == [f"phase.{suffix}"]


def test_phase_as_rows(keel: Run) -> None:
    code, out, _ = keel("phase", "--json", "--branch-variance", "0.5")
    row = json.loads(out)[-1]
    assert code == 0
    assert row["product"] == pytest.approx(float(uniform_product(row["alpha"], row["n_sublayers"], 0.5)))


def test_file_and_terminal_are_the_same(keel: Run, tmp_path: Path) -> None:
    arguments = ("gain", "--scheme", "keel", "--sublayers", "64")
    _, shown, _ = keel(*arguments)
    keel(*arguments, "-o", str(tmp_path / "gain.txt"))
    assert (tmp_path / "gain.txt").read_text(encoding="utf-8") == shown


@pytest.mark.parametrize(
    ("arguments", "log_product"),
    [
        (("keel", "--alpha", "1e200"), -math.log(3) / 2),
        (("keel", "--alpha", "1e308"), -math.log(3) / 2),
        (("keel", "--alpha", "1e-200"), -math.log(3) / 2 - 62 * 200 * math.log(10)),
        (("highway", "--set", "gate_bias=800"), -64 * 800.0),
        (("highway", "--set", "gate_bias=-800"), 0.0),
        (("scaled_shortcut", "--alpha", "1", "--branch-variance", "1e308"), -32 * 308 * math.log(10)),
        (("layernorm_scaling", "--branch-variance", "1.7e308"), 0.0),
    ],
    ids=str,
)
def test_gain_at_the_ends_of_float64(keel: Run, arguments: tuple[str, ...], log_product: float) -> None:
    scheme, *options = arguments
    code, out, err = keel("gain", "--scheme", scheme, "--sublayers", "64", *options, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["log_product"] == pytest.approx(log_product, rel=1e-12)
    assert keel("gain", "--scheme", scheme, "--sublayers", "64", *options)[0] == 0


def test_an_arithmetic_error_is_one_message(keel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflows(*_: object, **__: object) -> float:
        raise OverflowError("too large")

    monkeypatch.setattr("keel_theory.propagation.shortcut_log_product", overflows)
    code, out, err = keel("gain", "--scheme", "keel", "--sublayers", "8")
    assert (code, out) == (2, "")
    assert err == "keel: no value in float64: too large; take numbers nearer to one\n"


def test_a_mistake_of_the_program_is_no_mistake_of_the_user(keel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> float:
        raise ValueError("a bug")

    monkeypatch.setattr("keel_theory.design.smallest_alpha", broken)
    with pytest.raises(ValueError, match="a bug"):
        keel("alpha", "--sublayers", "8", "--min-gain", "0.5")


@pytest.mark.parametrize("beta", ["paper", "deepnet", "0.5"])
@pytest.mark.parametrize("matrices", [0, 2, 3])
def test_gain_of_deepnorm_at_initialisation_and_after(keel: Run, matrices: int, beta: str) -> None:
    options = ("--scaled-matrices", str(matrices), "--set", f"beta={beta}", "--json")
    code, out, err = keel("gain", "--scheme", "deepnorm", "--sublayers", "64", *options)
    assert (code, err) == (0, "")
    answer, scheme = json.loads(out), get_scheme("deepnorm").with_parameters(beta=beta)
    assert answer["log_product"] == shortcut_log_product(scheme, 64, scaled_matrices=matrices)
    assert ("beta" in answer["without_effect"]) is (matrices == 0)


@pytest.mark.parametrize(
    ("arguments", "idle"),
    [
        (("deepnorm",), ["beta"]),
        (("deepnorm", "--set", "beta=1e-200"), ["beta"]),
        (("deepnorm", "--scaled-matrices", "2"), []),
        (("admin",), ["branch_variance"]),
        (("admin", "--set", "branch_variance=9"), ["branch_variance"]),
        (("highway", "--set", "norm=input"), ["norm", "--branch-variance", "--embedding-variance"]),
        (("highway",), ["--branch-variance", "--embedding-variance"]),
        (("pre_ln",), ["--branch-variance", "--embedding-variance"]),
        (("post_ln", "--scaled-matrices", "2"), ["--scaled-matrices"]),
        (("keel",), []),
        (("keel", "--branch-variance", "0"), []),
        (("mix_ln", "--set", "ratio=0.5"), []),
        (("hybrid_norm", "--set", "variant=star"), []),
    ],
    ids=str,
)
def test_gain_names_what_changes_nothing(keel: Run, arguments: tuple[str, ...], idle: list[str]) -> None:
    scheme, *options = arguments
    question = ("gain", "--scheme", scheme, "--sublayers", "64", *options)
    if options[:1] == ["--branch-variance"]:
        idle = ["alpha"]  # without branches no scale matters
    answer = json.loads(keel(*question, "--json")[1])
    assert answer["without_effect"] == idle
    head, *lines = keel(*question)[1].splitlines()
    assert ("  without effect here    " + ", ".join(idle) in lines) is bool(idle)
    assert not any(f"{name} = " in head for name in idle)
    assert ("branch variance" in head) is ("--branch-variance" not in idle)


@pytest.mark.parametrize("gain", [0.2, 0.5, 0.57])
def test_alpha_of_a_scheme_counts_its_first_block(keel: Run, gain: float) -> None:
    code, out, err = keel("alpha", "--sublayers", "1024", "--min-gain", str(gain), "--scheme", "keel", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    kept = get_scheme("keel").with_parameters(alpha=answer["alpha"])
    assert math.exp(shortcut_log_product(kept, 1024)) == pytest.approx(gain, rel=1e-9)
    assert answer["at_alpha_L"]["branch_share"] == pytest.approx(2 / 3, abs=1e-3)
    text = keel("alpha", "--sublayers", "1024", "--min-gain", str(gain), "--scheme", "keel")[1]
    assert f"{answer['alpha']:.6g}" in text


def test_alpha_of_a_scheme_where_any_will_do(keel: Run) -> None:
    code, out, _ = keel("alpha", "--sublayers", "2", "--min-gain", "0.5", "--scheme", "keel")
    assert code == 0
    assert "any alpha > 0" in out


@pytest.mark.parametrize("n_sublayers", ["1", "2"])
def test_one_sublayer_is_not_several(keel: Run, n_sublayers: str) -> None:
    for command in (
        ("gain", "--scheme", "post_ln"),
        ("alpha", "--min-gain", "0.5"),
        ("alpha", "--min-gain", "0.5", "--scheme", "scaled_shortcut"),
    ):
        out = keel(*command, "--sublayers", n_sublayers)[1]
        assert ("1 sub-layer," if n_sublayers == "1" else "2 sub-layers,") in out


def test_limits_are_limits_of_products(keel: Run) -> None:
    out = keel("limits")[1]
    assert "lim((L**(-2*delta - 1)*q/c**2 + 1)**(-L/2)) = 1, L -> oo" in out
    assert "lim((L**(2*delta - 1)*q/c**2 + 1)**(-L/2)) = 0, L -> oo" in out


@pytest.mark.parametrize("equation", ["18", "27"])
def test_json_and_file_write_names_alike(keel: Run, tmp_path: Path, equation: str) -> None:
    out = keel("derive", equation, "--json")[1]
    keel("derive", equation, "--latex", "-o", str(tmp_path / "eq.tex"))
    assert json.loads(out)["latex"] in (tmp_path / "eq.tex").read_text(encoding="ascii")


def test_a_number_of_the_joint_argument_carries_its_note(keel: Run) -> None:
    assert "Eqs. (29)-(34)" in keel("derive", "29")[1]
    assert "Eqs. (29)-(34)" in json.loads(keel("derive", "29", "--json")[1])["note"]


_GAIN = ("gain", "--scheme", "keel", "--sublayers", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*_GAIN, "--alpha", "0"), "alpha must be positive"),
        ((*_GAIN, "--alpha", "-L"), "alpha must be positive"),
        ((*_GAIN, "--alpha", "L+"), "cannot read 'L+'"),
        ((*_GAIN, "--alpha", "__import__('os').getcwd()"), "is not allowed"),
        ((*_GAIN, "--alpha", "9**9**9**9"), "is too large for a float"),
        (("gain", "--scheme", "keel", "--sublayers", "1" + 400 * "0"), "n_sublayers is past float64"),
        (("gain", "--scheme", "admin", "--sublayers", "64", "--branch-variance", "1.7e308"), "is past float64"),
        (("gain", "--scheme", "deepnorm", "--sublayers", "8", "--scaled-matrices", "-1"), "scaled_matrices must be a whole"),
        (("gain", "--scheme", "deepnorm", "--sublayers", "8", "--scaled-matrices", "2", "--set", "beta=1e200"), "past float64"),
        (("alpha", "--sublayers", "1" + 400 * "0", "--min-gain", "0.5"), "number of sub-layers is past float64"),
        (
            ("alpha", "--sublayers", "1024", "--min-gain", "0.9", "--scheme", "keel"),
            "keel keeps at most 0.57735 of the gradient",
        ),
        (("alpha", "--sublayers", "8", "--min-gain", "0.5", "--scheme", "pre_ln"), "'pre_ln' has no parameter 'alpha'"),
        (("alpha", "--sublayers", "8", "--min-gain", "2", "--scheme", "keel"), "between 0 and 1"),
        (("alpha", "--sublayers", "8", "--min-gain", "0.5", "--scheme", "nonesuch"), "unknown scheme 'nonesuch'"),
        (("gain", "--scheme", "keel", "--sublayers", "0"), "n_sublayers must be a whole number of at least 1"),
        (("gain", "--scheme", "pre_ln", "--sublayers", "8", "--alpha", "2"), "'pre_ln' has no parameter 'alpha'"),
        (("gain", "--scheme", "nonesuch", "--sublayers", "8"), "unknown scheme 'nonesuch'"),
        ((*_GAIN, "--branch-variance", "-1"), "branch_variance must be a non-negative"),
        ((*_GAIN, "--branch-variance", "nan"), "branch_variance must be a non-negative"),
        (("alpha", "--sublayers", "0", "--min-gain", "0.5"), "whole number >= 1"),
        (("alpha", "--sublayers", "8", "--min-gain", "0"), "between 0 and 1"),
        (("alpha", "--sublayers", "8", "--min-gain", "1"), "between 0 and 1"),
        (("alpha", "--sublayers", "8", "--min-gain", "0.5", "--branch-variance", "-2"), "branch variance must be"),
        (("derive", "99"), "no equation '99'; known: 1, 2"),
        (("derive", "19", "--latex", "--json"), "leave --latex out"),
        (("phase", "-o", "phase.xyz"), "must end in .png, .svg or .pdf"),
        (("phase", "-o", "absent/phase.png"), "cannot write 'absent/phase.png'"),
        (("phase", "-o", "phase.png", "--branch-variance", "-1"), "branch variance must be"),
        (("phase",), "name the figure with -o"),
    ],
)
def test_bad_input_is_one_message_and_nothing_written(
    keel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = keel(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [_GAIN, ("alpha", "--sublayers", "8", "--min-gain", "0.5"), ("limits",), ("derive", "15"), ("phase", "-o", "phase.png")],
    ids=lambda arguments: arguments[0],
)
def test_theory_never_imports_torch(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.argv = ['keel', 'theory', *{arguments!r}]\n"
        "from probes.cli.main import app\napp(standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
