"""The sampling explorer: driven over random logits, without a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvlab.book.explore_sampling import SamplingExplorer, outlook, sampling_picture
from kvlab.generation import Sampler, Sampling, probabilities


def label(ids: Sequence[int]) -> list[str]:
    return [f" t<{i}>" for i in ids]


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(300, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def lab(logits: torch.Tensor) -> SamplingExplorer:
    return SamplingExplorer(logits, label, n_bars=8)


def colours(lab: SamplingExplorer) -> list[str]:
    return re.findall(r"background:(#\w+)", lab.view.value)


def test_all_tokens_are_kept_before_a_knob_is_touched(lab: SamplingExplorer) -> None:
    assert "keeps 300 tokens" in lab.view.value
    assert colours(lab) == ["#0072B2"] * 8
    assert "dropped" not in lab.view.value


def test_top_k_greys_what_it_drops(lab: SamplingExplorer) -> None:
    lab.top_k.value = 3
    assert "keeps 3 tokens" in lab.view.value
    assert colours(lab) == ["#0072B2"] * 3 + ["#B8BDC4"] * 5


@pytest.mark.parametrize(
    ("knob", "value", "field"), [("top_p", 0.6, "top_p"), ("min_p", 0.2, "min_p"), ("temperature", 0.5, "temperature")]
)
def test_each_knob_shows_the_library_s_distribution(
    lab: SamplingExplorer, logits: torch.Tensor, knob: str, value: float, field: str
) -> None:
    getattr(lab, knob).value = value
    setting = Sampling(**({"temperature": 1.0} | {field: value}))  # type: ignore[arg-type]
    [probs] = probabilities(logits[None], [setting])
    assert f"keeps {int((probs > 0).sum())} tokens" in lab.view.value
    entropy = torch.distributions.Categorical(probs).entropy().item()
    assert f"entropy {entropy:.2f} nats" in lab.view.value
    shown = [float(text) for text in re.findall(r">([\d.]+)%<", lab.view.value)]
    expected = 100 * probs.sort(descending=True).values[: len(shown)]
    assert torch.tensor(shown) == pytest.approx(expected, abs=0.051)


def test_temperature_zero_keeps_the_likeliest_token(lab: SamplingExplorer, logits: torch.Tensor) -> None:
    lab.temperature.value = 0
    assert "keeps 1 token, entropy 0.00 nats" in lab.view.value
    assert colours(lab)[0] == "#0072B2"
    lab.draw.click()
    assert lab.drawn == label([int(logits.argmax())]) * 10


def test_a_draw_is_the_seed_s_and_goes_on(lab: SamplingExplorer, logits: torch.Tensor) -> None:
    lab.seed.value = 7
    lab.draw.click()
    lab.draw.click()
    sampler = Sampler([Sampling(temperature=1.0, seed=7)])
    assert lab.drawn == label([sampler(logits[None])[0] for _ in range(20)])
    assert "drawn:" in lab.view.value
    lab.seed.value = 8
    assert lab.drawn == []
    assert "drawn:" not in lab.view.value


def test_pieces_cannot_smuggle_html(lab: SamplingExplorer) -> None:
    lab.draw.click()
    assert "t<" not in lab.view.value
    assert "t&lt;" in lab.view.value


def test_the_controls_are_all_in_the_box(lab: SamplingExplorer) -> None:
    panel, view = lab.box.children
    assert view is lab.view
    assert panel.children == (lab.temperature, lab.top_k, lab.top_p, lab.min_p, lab.seed, lab.draw)


def test_outlook_of_greedy_offers_the_model_s_own_distribution(logits: torch.Tensor) -> None:
    look = outlook(logits, Sampling(), label, 4)
    assert [bar.kept for bar in look.bars] == [True, False, False, False]
    assert look.bars[1].offered == pytest.approx(logits.softmax(0).topk(2).values[1].item())


def test_the_picture_says_in_words_what_it_shows(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    pieces = lambda ids: [f" $名{i}" for i in ids]  # noqa: E731
    settings = {"greedy": Sampling(), "top-k 2": Sampling(temperature=1.0, top_k=2), "min-p": Sampling(min_p=0.1)}
    sampling_picture(logits, pieces, settings | {"T 2": Sampling(temperature=2.0)})
    assert "greedy: keeps 1 token, entropy 0.00 nats; top-k 2: keeps 2 tokens" in shown[0].alt
    assert shown[0].png.startswith(b"\x89PNG")
