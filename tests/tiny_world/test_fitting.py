"""Training of worlds: what goes wrong is found and worked around, what stops goes on."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from g2rpo_ray.common.paths import resolve_path
from tiny_world import fitting
from tiny_world.fitting import EXACT, MODES, Fitted, Mode, Paused, Session, fit
from tiny_world.flux import TinyFlux

STEPS = 8
HALF = Mode("half", half=True)
CPU = torch.device("cpu")


class Case:
    """A small regression whose half precision can be made to fail."""

    def __init__(self, fault: str = "", faulty_step: int = 3, enough: int = 0) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.generator = torch.Generator()
        self.fault, self.faulty_step, self.enough = fault, faulty_step, enough
        self.done = 0
        self.compiled: nn.Module | None = None

    def loss(self, half: bool) -> Tensor:
        inputs = torch.randn(16, 4) + torch.randn(4, generator=self.generator)
        now = self.done >= self.faulty_step
        if now and self.fault == "all":
            with torch.no_grad():
                for parameter in self.model[2].parameters():
                    parameter.fill_(math.inf)
        outputs = self.model(inputs)
        loss = (outputs - inputs.sum(dim=1, keepdim=True)).square().mean()
        if half and now and self.fault == "nan":
            return loss * math.nan
        # The loss is right; the gradient is not.
        return loss + (loss - loss.detach()) if half and now and self.fault == "off" else loss

    def after_step(self, step: int) -> bool:
        self.done = step + 1
        self.average.update_parameters(self.model)
        return self.done == self.enough

    def fit(self, modes: list[Mode], folder: Path | None = None, until_s: float = math.inf) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
        of = Fitted(
            "case", self.model, optimizer, schedule, self.loss, self.after_step,
            [self.generator], {"average": self.average}, self.compiled,
        )  # fmt: skip
        fit(of, STEPS, Session(CPU, 7, folder, until_s), modes)

    @property
    def weights(self) -> Tensor:
        states = self.model.state_dict(), self.average.module.state_dict()
        return torch.cat([value.flatten() for state in states for value in state.values()])


@pytest.mark.parametrize(("fault", "said"), [("nan", "loss nan"), ("off", "gradient by 1.0e+00")])
def test_a_mode_that_fails_gives_way_before_it_harms(
    fault: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, faulty = Case(), Case(fault)
    right.fit([EXACT])
    faulty.fit([HALF, EXACT], tmp_path)
    assert torch.equal(right.weights, faulty.weights)
    text = capsys.readouterr().out
    assert "case step 3/8" in text
    assert said in text
    assert "goes on in float32" in text
    report = json.loads((tmp_path / "case_3_2.fault.json").read_text())
    assert report["step"] == 3
    assert report["mode"] == "half"
    assert len(report["gradients_not_finite"]) == (4 if fault == "nan" else 0)
    assert set(report["largest_outputs_computed_layer_by_layer"]) == {"0", "1", "2"}


def test_where_no_mode_is_left_the_error_names_step_and_layer(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"case, step 3, float32: .*not finite: 2;"):
        Case("all").fit([HALF, EXACT], tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "case.pt", "case_3_1.fault.json", "case_3_2.fault.json",
    ]  # fmt: skip


def test_what_paused_ends_as_what_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, paused = Case(), Case("nan", faulty_step=1)
    straight.fit([EXACT])
    clock = iter(range(100))
    monkeypatch.setattr(fitting.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(Paused, match="case paused after step 4 of 8"):
        paused.fit([HALF, EXACT], tmp_path, until_s=7.5)
    assert not torch.equal(paused.weights, straight.weights)
    other = Case("nan", faulty_step=1)
    other.fit([HALF, EXACT], tmp_path)
    assert torch.equal(other.weights, straight.weights)
    # The mode that failed is not tried again.
    assert capsys.readouterr().out.count("loss nan") == 1
    again = Case()
    again.fit([EXACT], tmp_path)
    assert torch.equal(again.weights, straight.weights)


def test_what_is_enough_stays_enough(tmp_path: Path) -> None:
    case = Case(enough=3)
    case.fit([EXACT], tmp_path)
    assert case.done == 3
    again = Case()
    again.fit([EXACT], tmp_path)
    assert again.done == 0
    assert torch.equal(again.weights, case.weights)


class Layer(nn.Linear):
    """With code of its own: PyTorch 2.11 compiles no module whose code is all PyTorch's."""

    wrong = False
    """Whether it is what a faulty compiler makes of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        faulty = self.wrong and torch.compiler.is_compiling()
        return super().forward(x) * (math.nan if faulty else 1.0)


def broken(_module: object, _inputs: object) -> None:
    raise ValueError("no code for this card")


@pytest.mark.parametrize(("fault", "said"), [("nan", "loss nan"), ("broken", "no code for this")])
def test_compiled_code_that_fails_gives_way_to_the_same_eager(
    fault: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What other tests compiled would count against the same code, which then stays eager.
    torch.compiler.reset()
    right, case = Case(), Case()
    right.fit([EXACT])
    layer = Layer(8, 1)
    layer.load_state_dict(case.model[2].state_dict())
    layer.wrong = fault == "nan"
    case.model[2] = layer
    # Not the compiler of every day, which takes half a minute here.
    case.model.compile = partial(  # type: ignore[method-assign]
        case.model.compile, backend=broken if fault == "broken" else "aot_eager"
    )
    case.compiled = case.model
    case.fit([Mode("compiled", compiled=True), EXACT], tmp_path)
    assert torch.equal(right.weights, case.weights)
    text = capsys.readouterr().out
    assert said in text
    assert "case step 0/8 goes on in float32" in text


def test_bfloat16_is_near_float32_in_flux(capsys: pytest.CaptureFixture[str]) -> None:
    """So that the bounds tell rounding from faults."""
    torch.manual_seed(0)
    flux = resolve_path("tiny_world:flux")
    model = TinyFlux(flux)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

    def loss(half: bool) -> Tensor:
        x, noise = torch.randn(2, 8, 16, 64)
        tokens = torch.randint(2, 40, (8, 22))
        sigma = torch.rand(8)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            states, pooled = model.embed(tokens)
            velocity = model.velocity(
                torch.lerp(x, noise, sigma[:, None, None]), sigma, 1 + sigma, states, pooled
            )
        return (velocity.float() - noise + x).square().mean()

    of = Fitted("flux", model, optimizer, schedule, loss)
    fit(of, 2, Session(CPU), [MODES[2], EXACT])
    text = capsys.readouterr().out
    assert "goes on in float32" not in text
    off = float(text.split("gradient by ")[1].split()[0])
    assert 1e-4 < off < fitting.MOST_GRADIENT_OFF / 3
