"""The block diagram: what the spec has is drawn, what it lacks is not, for any scheme."""

import pytest

from figures.fig2_block_diagram import compute, draw, finding, frame_of
from keel_theory.schemes import SCHEMES, get_scheme
from keel_theory.spec import NormKind
from tests.figures._pictures import words


def _words(scheme: str, **options) -> list[str]:
    return words(draw(compute(scheme=scheme, **options)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_box_of_a_scheme_lies_apart_from_the_others(scheme: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    figure = draw(compute(scheme=scheme))
    assert figure.get_size_inches()[0] == 3.35
    boxes = [patch.get_bbox() for patch in figure.axes[0].findobj(FancyBboxPatch)]
    assert all(not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    for text in figure.axes[0].texts:  # words stay inside their boxes, and so inside the figure
        extent = text.get_window_extent()
        assert figure.bbox.x0 <= extent.x0
        assert extent.x1 <= figure.bbox.x1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_number_of_norms_is_that_of_the_spec(scheme: str) -> None:
    """Of one block of every kind: the first, and the last where it differs."""
    specs = get_scheme(scheme).specs(64)
    fields = ("norm_in", "norm_branch", "norm_out")

    def norms(block: int) -> tuple[int, ...]:
        pair = specs[2 * block : 2 * block + 2]
        return tuple(sum(getattr(spec, name) is not NormKind.NONE for name in fields) for spec in pair)

    drawn = sum(text == "RMSNorm" for text in _words(scheme))
    titles = [text for text in _words(scheme) if text.startswith("block")]
    expected = sum(norms(0)) + (sum(norms(31)) if len(titles) == 2 else 0)
    assert drawn == expected


def test_keels_first_block_has_rules_of_its_own() -> None:
    said = _words("keel")
    assert {"block 0", "blocks 1–31"} <= set(said)
    assert said.count("× $L$ = 64") == 2  # not in block 0
    assert said.count("RMSNorm") == 3 + 4  # the first attention has no norm of its output


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("highway", {"⊙ T(x)", "⊙ (1 − T(x))"}),
        ("deepnorm", {"× $L^{0.25}$\n= 2.83"}),
        ("admin", {"× 1 … 7.94", "× 1.41 … 8"}),
        ("layernorm_scaling", {"× 1 … 0.177"}),
        ("hybrid_norm", {"attention\n(QKV norm)"}),
        ("mix_ln", {"blocks 0–7", "blocks 8–31"}),
        ("scaled_shortcut_input_gain", {"⊙ gain\n(learned)"}),
    ],
)
def test_what_a_scheme_is_known_by_is_written(scheme: str, expected: set[str]) -> None:
    assert expected <= set(_words(scheme))


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln"])
def test_what_a_scheme_lacks_is_not_drawn(scheme: str) -> None:
    assert not any(text.startswith(("×", "⊙")) for text in _words(scheme))


def test_caption_names_equation_depth_and_changed_parameters() -> None:
    scheme = get_scheme("deepnorm").with_parameters(alpha="2*sqrt(L)")
    said = " ".join(" ".join(words(draw(frame_of(scheme, 16)))).split())
    assert "with alpha = 2*sqrt(L) in the place of the published value" in said
    assert "Drawn at L = 16 sub-layers (8 blocks)" in said
    assert "× $2 \\cdot √(L)$ = 8" in said


def test_layer_norm_is_named_where_the_scheme_is_read_so() -> None:
    said = words(draw(frame_of(get_scheme("post_ln").with_norm(NormKind.LAYER), 4)))
    assert "LayerNorm" in said
    assert "RMSNorm" not in said


def test_finding_holds_keel_against_the_papers_rules() -> None:
    assert finding(compute()) == {
        "n_sublayers": 64,
        "norm_in": 64,
        "norm_out": 64,
        "scale": 64,
        "nothing_else": 64,
        "verdict": "reproduced",
    }


def test_finding_sees_a_scale_and_a_norm_that_are_not_the_papers() -> None:
    frame = compute()
    scaled = frame.assign(shortcut_scale=frame["n_sublayers"].astype(float))
    assert (finding(scaled)["scale"], finding(scaled)["verdict"]) == (62, "reproduced in direction")
    assert finding(frame.assign(norm_out="rms"))["verdict"] == "not reproduced"
