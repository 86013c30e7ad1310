"""The plots show the measurements of any run."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from moefw.training.plots import plot_expert_load, plot_loss


def records(*, bits, bytes_of_a_token=1.0):
    rng = np.random.default_rng(0)
    made = []
    for step in range(1, 61):
        loss = 1.3 + 4.2 * math.exp(-step / 15) + 0.05 * rng.normal()
        record = {"step": step, "loss": loss, "lr": 1e-3}
        if step % 20 == 0:
            record |= {
                "eval_loss": loss,
                **({"eval_bits_per_byte": loss / math.log(2) / bytes_of_a_token} if bits else {}),
            }
        made.append(record)
    made[30]["loss"] = None
    return made


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k))[1])
    return figures


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def size(png):
    """Width and height in the header of a PNG."""
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.mark.parametrize("bytes_of_a_token", [1.0, 3.2])
def test_the_loss_is_drawn_in_bits_of_a_byte_whatever_a_token_is(tmp_path, drawn, bytes_of_a_token):
    made = records(bits=True, bytes_of_a_token=bytes_of_a_token)
    plot_loss(made, tmp_path / "plots" / "loss.png", zlib_bits=2.5)
    assert size(tmp_path / "plots" / "loss.png") == (1200, 700)
    axes = drawn[0].axes[0]
    assert axes.get_ylabel().startswith("bits per byte")
    raw, _, evals, zlib = (line.get_ydata() for line in axes.lines)
    assert raw[0] == pytest.approx(made[0]["loss"] / math.log(2) / bytes_of_a_token)
    assert evals[-1] == pytest.approx(made[59]["eval_bits_per_byte"])
    assert set(zlib) == {2.5}
    assert f"evaluation {evals[-1]:.2f}" in texts(drawn[0])
    assert "zlib 2.50" in texts(drawn[0])


def test_the_loss_is_drawn_in_nats_without_zlib_otherwise(tmp_path, drawn):
    made = records(bits=False)
    plot_loss(made, tmp_path / "loss.png", zlib_bits=2.5)
    axes = drawn[0].axes[0]
    assert axes.get_ylabel().startswith("nats per token")
    assert axes.lines[0].get_ydata()[0] == pytest.approx(made[0]["loss"])
    assert not any("zlib" in text for text in texts(drawn[0]))


def test_labels_at_the_edge_never_touch(tmp_path, drawn):
    same = {"loss": 1.3, "eval_loss": 1.3, "eval_bits_per_byte": 1.3 / math.log(2)}
    made = [{**record, **same} for record in records(bits=True)]
    plot_loss(made, tmp_path / "loss.png", zlib_bits=1.3 / math.log(2))
    boxes = sorted((text.get_window_extent() for text in drawn[0].axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 3
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(boxes))


def test_the_smooth_line_follows_a_straight_one_to_its_ends(tmp_path, drawn):
    made = [{"step": step, "loss": 5.0 - 0.01 * step} for step in range(200)]
    plot_loss(made, tmp_path / "loss.png", zlib_bits=None)
    raw, smooth = (line.get_ydata() for line in drawn[0].axes[0].lines)
    np.testing.assert_allclose(smooth, raw, rtol=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "made",
    [
        [],
        [{"step": 1, "loss": 5.5, "lr": 0.0}],
        [{"step": 1, "loss": None, "lr": None, "eval_loss": None}],
        [{"step": step, "loss": 10.0**step, "lr": 1.0} for step in range(7)],
    ],
    ids=["none", "one", "null", "exploding"],
)
def test_any_run_can_be_drawn(tmp_path, made):
    plot_loss(made, tmp_path / "loss.png", zlib_bits=2.0)
    assert size(tmp_path / "loss.png") == (1200, 700)


def test_the_heat_map_shows_shares_and_the_busiest(tmp_path, drawn):
    plot_expert_load([[10, 20, 30], [7, 7, 7], [0, 0, 0]], [2, 4, 6], tmp_path / "load.png", title="load")
    assert size(tmp_path / "load.png")[0] > 600
    axes = drawn[0].axes[0]
    np.testing.assert_allclose(axes.collections[0].get_array(), [[0.5, 1.0, 1.5], [1, 1, 1], [0, 0, 0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 2", "layer 4", "layer 6"]
    assert [text.strip() for text in texts(drawn[0])] == (
        ["1.50", "1.00", "0.00", "max/mean", "0.50", "1.00", "1.50", *["1.00"] * 3, *["0.00"] * 3]
    )


def test_the_colours_are_centred_at_the_fair_share_and_fixed(tmp_path, drawn):
    plot_expert_load([[1.0, 9.0, 0.0, 0.0]], [0], tmp_path / "load.png", title="collapsed")
    mesh = drawn[0].axes[0].collections[0]
    assert mesh.get_clim() == (0.0, 2.0)
    assert tuple(mesh.cmap(3.0)) != tuple(mesh.cmap(1.0)), "what is beyond 2 has a colour of its own"


def test_more_than_32_experts_are_drawn_without_numbers(tmp_path, drawn):
    plot_expert_load(np.ones((2, 33)).tolist(), [0, 1], tmp_path / "load.png", title="many")
    assert [text.strip() for text in texts(drawn[0])] == ["1.00", "1.00", "max/mean"]


def test_a_picture_that_fails_half_way_leaves_the_old_one(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def half(self, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    out = tmp_path / "loss.png"
    plot_loss(records(bits=True), out, zlib_bits=None)
    before = out.read_bytes()
    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        plot_loss(records(bits=False), out, zlib_bits=None)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
