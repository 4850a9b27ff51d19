r"""``keel theory``: closed forms from the command line, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from keel_theory.results import Derivation
    from keel_theory.spec import Scheme

__all__ = ["register"]

_MAX_TRACED = 100_000

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", show_default=False)
]
_Sublayers = Annotated[
    int, typer.Option("--sublayers", help="Depth L: attention and FFN counted separately.", show_default=False)
]
_Variance = Annotated[
    float, typer.Option("--branch-variance", help="q: variance of a branch's output for an input of variance 1.")
]

_Embedding = Annotated[
    float,
    typer.Option(
        "--embedding-variance",
        help="v_0: variance of the stream that enters the first block; the paper's at initialisation is 4e-4.",
    ),
]
_ScaledMatrices = Annotated[
    int,
    typer.Option(
        "--scaled-matrices",
        help="k: matrices of a branch that still have the scheme's smaller initial weights (DeepNorm's beta): 2 for attention "
        "and a plain FFN at initialisation, 3 for a gated FFN; 0 once training has grown them.",
    ),
]


class _TheoryGroup(TyperGroup):
    """The commands of the theory; a number that float64 cannot hold is the question's fault, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command.

        Raises:
            TheoryError: in place of an arithmetic error.
        """
        try:
            return super().invoke(ctx)
        except (ArithmeticError, ValueError) as error:
            if isinstance(error, ValueError) and str(error) != "math domain error":
                raise
            from keel_theory.errors import TheoryError

            raise TheoryError(f"no value in float64: {error}; take numbers nearer to one") from error


group = typer.Typer(
    cls=_TheoryGroup, no_args_is_help=True, help="Closed forms: gains over depth, the scale a depth needs, limits, derivations."
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(group, name="theory")


@group.command()
def gain(
    scheme: Annotated[str, typer.Option(help="A scheme; keel schemes lists them.", show_default=False)],
    sublayers: _Sublayers,
    alpha: Annotated[str | None, typer.Option(help="Shortcut scale, an expression in L.", show_default=False)] = None,
    branch_variance: _Variance = 1.0,
    embedding_variance: _Embedding = 1.0,
    scaled_matrices: _ScaledMatrices = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another value of a parameter; may be repeated.", show_default=False),
    ] = None,
    json: _Json = False,
    output: _Output = None,
) -> None:
    """What the shortcut of a scheme keeps of a gradient over the whole stack.

    \b
    Examples:
      keel theory gain --scheme post_ln --sublayers 64
      keel theory gain --scheme keel --sublayers 1024 --alpha "2*sqrt(L)"
      keel theory gain --scheme deepnorm --sublayers 64 --scaled-matrices 2
      keel theory gain --scheme keel --sublayers 512 --embedding-variance 4e-4 --branch-variance 0.04
    """  # noqa: D301 - a real \b keeps the lines of the examples apart
    from keel_theory.schemes import get_scheme
    from probes.cli._io import emit
    from probes.cli._tables import as_json
    from probes.cli.schemes import parse_settings

    values = parse_settings(settings or []) | ({} if alpha is None else {"alpha": alpha})
    question: dict[str, Any] = {
        "branch_variance": branch_variance,
        "stream_variance": embedding_variance,
        "scaled_matrices": scaled_matrices,
    }
    answer = _gain(get_scheme(scheme).with_parameters(**values), sublayers, question)
    emit(as_json(answer) if json else _gain_text(answer), output)


@group.command(name="alpha")
def alpha_command(
    sublayers: _Sublayers,
    min_gain: Annotated[float, typer.Option(help="Product to keep over the whole stack, between 0 and 1.", show_default=False)],
    branch_variance: _Variance = 1.0,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Answer for this scheme with its first-layer rules; every sub-layer alike without.", show_default=False
        ),
    ] = None,
    embedding_variance: _Embedding = 1.0,
    json: _Json = False,
    output: _Output = None,
) -> None:
    """The smallest shortcut scale that keeps a share of the gradient, and what it costs.

    \b
    Examples:
      keel theory alpha --sublayers 1024 --min-gain 0.9
      keel theory alpha --sublayers 1024 --min-gain 0.5 --scheme keel
    """  # noqa: D301
    from probes.cli._io import emit
    from probes.cli._tables import as_json

    if scheme is None:
        if embedding_variance != 1.0:
            raise typer.BadParameter("--embedding-variance counts in a scheme's first block; name the scheme with --scheme")
        answer = _alpha(sublayers, min_gain, branch_variance)
        emit(as_json(answer) if json else _alpha_text(answer), output)
        return
    from keel_theory.schemes import get_scheme

    answer = _scheme_alpha(get_scheme(scheme), sublayers, min_gain, branch_variance, embedding_variance)
    emit(as_json(answer) if json else _scheme_alpha_text(answer), output)


@group.command()
def limits(json: _Json = False, output: _Output = None) -> None:
    """What products over depth tend to, and the wrong forms in circulation.

    The proof of each is shown by keel theory derive NAME.
    """
    from keel_theory.asymptotics import WRONG_FORMS
    from keel_theory.asymptotics import limits as all_limits
    from probes.cli._io import emit
    from probes.cli._tables import as_json

    rows = [{"name": each.id, "title": each.title, "result": _limit_text(each.result)} for each in all_limits()]
    wrong = [
        {
            "name": form.name,
            "statement": form.statement,
            "claimed": str(form.claimed.doit()),
            "derived": str(form.derived.doit()),
            "reason": form.reason,
        }
        for form in WRONG_FORMS.values()
    ]
    if json:
        emit(as_json({"limits": rows, "wrong_forms": wrong}), output)
        return
    lines = [f"{row['name']}: {row['title']}\n    {row['result']}" for row in rows]
    lines += ["", "Wrong forms in circulation"]
    lines += [f"{w['name']}: {w['statement']}\n    it is {w['derived']}: {w['reason']}" for w in wrong]
    emit("\n".join(lines), output)


def _limit_text(relation: Any) -> str:
    """``lim f = value`` for a relation whose left side holds a limit at infinite depth."""
    import sympy as sp

    left = relation.lhs.replace(sp.Limit, lambda expression, *_: sp.Function("lim")(expression.doit()))
    return f"{left} = {relation.rhs}, L -> oo"


@group.command()
def derive(
    equation: Annotated[str, typer.Argument(help="The paper's equation number, or the name of a limit.", show_default=False)],
    latex: Annotated[bool, typer.Option("--latex", help="Formulas as LaTeX.")] = False,
    json: _Json = False,
    output: _Output = None,
) -> None:
    """Derive an equation step by step, each step marked as definition, assumption, exact or limit.

    \b
    Examples:
      keel theory derive 19
      keel theory derive limit-critical --latex -o limit.tex
    """  # noqa: D301
    from keel_theory.derivations import derive as derivation_of
    from probes.cli._io import emit
    from probes.cli._tables import as_json

    if json and latex:
        raise typer.BadParameter("--json holds the LaTeX already; leave --latex out")
    derivation = derivation_of(equation)
    if json:
        emit(as_json(_derivation(derivation)), output)
    else:
        emit(derivation.to_latex() if latex else derivation.to_text(), output)


@group.command()
def phase(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The figure: .png, .svg or .pdf; with --json, the rows.", show_default=False),
    ] = None,
    branch_variance: _Variance = 1.0,
    json: _Json = False,
) -> None:
    """Draw what the shortcut keeps over depth and scale, or print it as rows.

    \b
    Example:
      keel theory phase -o phase.png
    """  # noqa: D301
    if json:
        from keel_theory.design import phase_diagram
        from probes.cli._io import emit

        emit(phase_diagram(branch_variance=branch_variance).to_frame().to_json(orient="records"), output)
        return
    if output is None:
        raise typer.BadParameter("name the figure with -o, or ask for rows with --json")
    _draw_phase(output, branch_variance)


def _draw_phase(output: Path, branch_variance: float) -> None:
    from probes.errors import OutputError

    if output.suffix not in (".png", ".svg", ".pdf"):
        raise OutputError(f"cannot draw '{output}': the name must end in .png, .svg or .pdf")
    from figures._style import save_figure
    from figures.phase_diagram import compute, draw

    figure = draw(compute(branch_variance=branch_variance))
    try:
        save_figure(figure, output)
    except OSError as error:
        raise OutputError(f"cannot write '{output}': {error.strerror or error}; name a file in an existing folder") from error


def _gain(scheme: Scheme, n_sublayers: int, question: dict[str, Any]) -> dict[str, Any]:
    import math

    from keel_theory.claim_checks import CASE
    from keel_theory.propagation import first_block_log_product, propagate_shortcut, shortcut_log_product

    log_product = shortcut_log_product(scheme, n_sublayers, **question)
    initially = {"branch_variance": CASE.initial_branch, "stream_variance": CASE.initial_embedding}
    answer: dict[str, Any] = {
        "scheme": scheme.name,
        "label": scheme.label,
        "n_sublayers": n_sublayers,
        "parameters": dict(scheme.parameters),
        "branch_variance": question["branch_variance"],
        "embedding_variance": question["stream_variance"],
        "scaled_matrices": question["scaled_matrices"],
        "without_effect": _without_effect(scheme, n_sublayers, question),
        "log_product": log_product,
        "log10_product": log_product / math.log(10),
        "product": math.exp(log_product),
        "first_block_log_product": first_block_log_product(scheme, n_sublayers, **question),
        "first_block_initial_log_product": first_block_log_product(scheme, n_sublayers, **(question | initially)),
    }
    if 2 < n_sublayers <= _MAX_TRACED:
        trace = propagate_shortcut(scheme, n_sublayers, **question)
        answer["later_blocks_log_product"] = math.fsum(trace.log_gains[2:])
        answer["last_scale"] = float(trace.shortcut_scales[-1])
        answer["last_log_scale"] = float(trace.log_shortcut_scales[-1])
    return answer


def _without_effect(scheme: Scheme, n_sublayers: int, question: dict[str, Any]) -> list[str]:
    """Parameters and options whose other values give the same product: what was asked for does not depend on them."""
    from keel_theory.propagation import shortcut_log_product
    from keel_theory.schemes import get_scheme

    def product(changed: dict[str, Any], **parameters: float | str) -> float | None:
        """The answer to the changed question; None where the scheme or the theory refuses it."""
        try:
            return shortcut_log_product(scheme.with_parameters(**parameters), n_sublayers, **(question | changed))
        except ValueError:
            return None

    asked = product({})
    defaults, idle = get_scheme(scheme.name).parameters, []
    for name, value in scheme.parameters.items():
        trials = [trial for trial in (defaults[name], *_TRIALS) if str(trial) != str(value)]
        others = [product({}, **{name: trial}) for trial in trials]
        if any(other is not None for other in others) and all(other in (None, asked) for other in others):
            idle.append(name)
    idle += [_OPTIONS[name] for name in _VARIANCES if product({name: _another(question[name])}) == asked]
    if question["scaled_matrices"] and product({"scaled_matrices": 0}) == asked:
        idle.append("--scaled-matrices")
    return idle


_TRIALS = ("0.137", "0.77", "5.3")
_VARIANCES = ("branch_variance", "stream_variance")
_OPTIONS = {"branch_variance": "--branch-variance", "stream_variance": "--embedding-variance"}


def _another(variance: float) -> float:
    return variance / 2 if variance > 1 else variance + 1


def _gain_text(answer: dict[str, Any]) -> str:
    from keel_theory.claim_checks import CASE
    from probes.cli._tables import counted

    idle = answer["without_effect"]
    settings = [f"{name} = {value}" for name, value in answer["parameters"].items() if name not in idle]
    for name in ("branch", "embedding"):
        if f"--{name}-variance" not in idle:
            settings.append(f"{name} variance {answer[f'{name}_variance']:g}")
    if answer["scaled_matrices"] and "--scaled-matrices" not in idle:
        settings.append(f"scaled matrices {answer['scaled_matrices']}")
    first = _exp(answer["first_block_log_product"])
    lines = [
        ", ".join([answer["label"], counted(answer["n_sublayers"], "sub-layer"), *settings]),
        f"  kept by the shortcut   {_exp(answer['log_product'])}",
        f"  ln, log10              {answer['log_product']:.6g} nats, {answer['log10_product']:.6g}",
    ]
    if "last_scale" in answer:
        lines.append(f"  first block, others    {first}, {_exp(answer['later_blocks_log_product'])}")
        scale = f"{answer['last_scale']:.6g}" if answer["last_scale"] else _exp(answer["last_log_scale"])
        lines.append(f"  last shortcut scale    {scale}")
    elif answer["n_sublayers"] > 2:
        lines.append(f"  first block            {first}")
    if idle:
        lines.append(f"  without effect here    {', '.join(idle)}")
    if "--embedding-variance" not in idle:
        lines.append(
            f"  first block initially  {_exp(answer['first_block_initial_log_product'])}, at the paper's initialisation: "
            f"embedding variance {CASE.initial_embedding:g}, branch variance about {CASE.initial_branch:g}"
        )
    return "\n".join(lines)


def _exp(log_product: float) -> str:
    """The exponential as text, also where it is below the smallest float.

    Example:
        >>> _exp(-0.6931471805599453), _exp(-2302.585092994046)
        ('0.5', '10^-1000')
    """
    import math

    product = math.exp(log_product)
    return f"{product:.6g}" if product > 0 else f"10^{log_product / math.log(10):.6g}"


def _alpha(n_sublayers: int, min_gain: float, branch_variance: float) -> dict[str, Any]:
    from keel_theory.design import aligned_branch_share, branch_share, smallest_alpha, smallest_alpha_law, uniform_product

    alpha = float(smallest_alpha(min_gain, n_sublayers, branch_variance))
    answer: dict[str, Any] = {
        "n_sublayers": n_sublayers,
        "min_gain": min_gain,
        "branch_variance": branch_variance,
        "alpha": alpha,
        "alpha_law": float(smallest_alpha_law(min_gain, n_sublayers, branch_variance)),
    }
    for name, scale in (("at_alpha", alpha), ("at_alpha_L", float(n_sublayers))):
        if scale > 0:
            case = (scale, n_sublayers, branch_variance)
            answer[name] = {
                "alpha": scale,
                "product": float(uniform_product(*case)),
                "branch_share": float(branch_share(*case)),
                "aligned_branch_share": aligned_branch_share(*case),
            }
    return answer


def _scheme_alpha(
    scheme: Scheme, n_sublayers: int, min_gain: float, branch_variance: float, embedding_variance: float
) -> dict[str, Any]:
    import math

    from keel_theory.design import smallest_scheme_alpha
    from keel_theory.propagation import shortcut_log_product
    from keel_theory.variance import variance_profile

    question: dict[str, Any] = {"branch_variance": branch_variance, "stream_variance": embedding_variance}
    alpha = smallest_scheme_alpha(scheme, n_sublayers, min_gain, **question)
    answer: dict[str, Any] = {
        "scheme": scheme.name,
        "label": scheme.label,
        "n_sublayers": n_sublayers,
        "min_gain": min_gain,
        "branch_variance": branch_variance,
        "embedding_variance": embedding_variance,
        "alpha": alpha,
    }
    for name, scale in (("at_alpha", alpha), ("at_alpha_L", float(n_sublayers))):
        if scale > 0:
            scaled = scheme.with_parameters(alpha=scale)
            product = math.exp(shortcut_log_product(scaled, n_sublayers, **question))
            answer[name] = {"alpha": scale, "product": product}
            if n_sublayers <= _MAX_TRACED:
                specs = scaled.specs(n_sublayers)
                profile = variance_profile(specs, branch_variance=branch_variance, input_variance=embedding_variance)
                answer[name]["branch_share"] = 1 - profile.input_cosine**2
    return answer


def _scheme_alpha_text(answer: dict[str, Any]) -> str:
    from probes.cli._tables import counted, render

    head = f"{answer['label']}, {counted(answer['n_sublayers'], 'sub-layer')}, branch variance {answer['branch_variance']:g}"
    head += f", embedding variance {answer['embedding_variance']:g}, keep {answer['min_gain']:g}"
    if answer["alpha"] == 0:
        return f"{head}\n  any alpha > 0 keeps that much"
    rows = [
        {"": label, "alpha": case["alpha"], "kept": case["product"], "branches'_share": case.get("branch_share", "")}
        for label, case in (("  smallest alpha", answer["at_alpha"]), ("  alpha = L", answer["at_alpha_L"]))
    ]
    return f"{head}\n{render(list(rows[0]), rows, wide=False)}"


def _alpha_text(answer: dict[str, Any]) -> str:
    from probes.cli._tables import counted, render

    head = f"{counted(answer['n_sublayers'], 'sub-layer')}, branch variance {answer['branch_variance']:g}"
    head += f", keep {answer['min_gain']:g}"
    if answer["alpha"] == 0:
        return f"{head}\n  branches without variance take nothing from the shortcut: any alpha > 0 will do"
    rows = [
        {
            "": label,
            "alpha": case["alpha"],
            "kept_=_cosine": case["product"],
            "branches'_share": case["branch_share"],
            "if_they_agree": case["aligned_branch_share"],
        }
        for label, case in (("  smallest alpha", answer["at_alpha"]), ("  alpha = L", answer["at_alpha_L"]))
    ]
    law = f"  law sqrt(q L / (2 ln(1/g)))  {answer['alpha_law']:.6g}"
    return "\n".join([head, render(list(rows[0]), rows, wide=False), law, *_LEGEND])


_LEGEND = (
    "",
    "kept = cosine: what the shortcut keeps of a gradient, and the cosine between the stack's input and its output.",
    "branches' share: of the output's variance, for independent branches; if they agree: for branches that all write one",
    "direction. Every sub-layer alike: Keel's first block, without a scale, has a factor of its own, 1/sqrt(v_0 + 2 q) for",
    "an embedding of variance v_0, see --scheme keel.",
)


def _derivation(derivation: Derivation) -> dict[str, Any]:
    from sympy import latex

    return {
        "id": derivation.id,
        "title": derivation.title,
        "note": derivation.note,
        "assumptions": list(derivation.assumptions),
        "steps": [
            {"text": s.text, "kind": s.kind.value, "expression": str(s.expression), "latex": latex(s.expression)}
            for s in derivation.steps
        ],
        "result": str(derivation.result),
        "latex": latex(derivation.result),
    }
