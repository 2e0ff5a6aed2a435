"""Trains a model so that it can be stopped, and goes wrong neither unseen nor for good.

Every step draws its batch from a seed of its own. So a step can be done again: in full precision,
to compare; layer by layer, to find what is not finite; in another process, to go on after a stop.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from g2rpo_ray.common.files import replacing
from g2rpo_ray.models.kernels import compile_errors

CHECKED, CHECKED_EVERY = 20, 500
"""The first steps, and then every so many, are compared with full precision."""
MOST_LOSS_OFF, MOST_GRADIENT_OFF, MOST_LATER = 0.1, 0.3, 1.0
"""Relative differences from it; rounding to bfloat16 makes a few thousandths and hundredths. Later,
where losses and gradients are small, only a gradient that points elsewhere is wrong."""
KEEP_EVERY_S = 60.0


class Paused(Exception):  # noqa: N818
    """Time is over; the same training goes on from the file that was kept."""


@dataclass(frozen=True)
class Mode:
    """How a step is computed."""

    name: str
    half: bool = False
    """bfloat16 products; parameters, optimizer and losses are float32 in every mode."""
    compiled: bool = False
    written_out: bool = True
    """Attention as products and a softmax, not by a kernel of its own."""
    tf32: bool = True


EXACT = Mode("float32", tf32=False)
MODES = (
    Mode("compiled bfloat16", half=True, compiled=True, written_out=False),
    Mode("compiled bfloat16, attention written out", half=True, compiled=True),
    Mode("bfloat16, attention written out", half=True),
    Mode("compiled TF32, attention written out", compiled=True),
    Mode("TF32, attention written out"),
    EXACT,
)
"""From fast to safe."""


@dataclass(frozen=True)
class Session:
    """Where training runs, and for how long."""

    device: torch.device
    seed: int = 0
    folder: Path | None = None
    """Of what a stopped training goes on from, and of reports on what went wrong."""
    until_s: float = math.inf
    """Time of ``time.monotonic`` at which training pauses."""


@dataclass
class Fitted:
    """A model and how it is trained."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    batch_loss: Callable[[bool], Tensor]
    """Draws a batch and gives its loss; its argument asks for bfloat16 products."""
    after_step: Callable[[int], bool | None] = lambda _: None
    """True says that this was enough."""
    generators: Sequence[torch.Generator] = ()
    """That batches are drawn from, beside PyTorch's own."""
    kept: Mapping[str, nn.Module] = field(default_factory=dict)
    """What changes beside the model."""
    compiled: nn.Module | None = None
    """The part that is compiled where modes ask for it."""


def modes_for(device: torch.device, compiled: bool) -> list[Mode]:
    """Those to be tried, the fastest first; bfloat16 is no gain on a CPU."""
    if device.type != "cuda":
        return [EXACT]
    return [mode for mode in MODES if compiled or not mode.compiled]


def fit(of: Fitted, steps: int, session: Session, modes: Sequence[Mode] | None = None) -> None:
    """Descend the loss, the gradient's norm clipped at 1; print ten losses on the way.

    Where a mode's loss or gradient is not finite or off, the next safer one goes on.

    Args:
        modes: those to be tried; by default the device's.

    Raises:
        FloatingPointError: the last mode failed, too; its message names the step and the layer.
        Paused: time is over.
    """
    Fit(of, steps, session, modes or modes_for(session.device, of.compiled is not None)).run()


class Fit:
    """One training: where it stands, and in which mode."""

    def __init__(self, of: Fitted, steps: int, session: Session, modes: Sequence[Mode]) -> None:
        self.of, self.steps, self.session, self.modes = of, steps, session, list(modes)
        self.step = 0
        if of.compiled is not None and any(mode.compiled for mode in modes):
            of.compiled.compile(dynamic=False)

    def run(self) -> None:
        self._go_on()
        began, started_s = self.step, time.monotonic()
        kept_s = started_s
        enough: bool | None = False
        while self.step < self.steps and not enough:
            loss, norm = self._advance()
            enough = self.of.after_step(self.step)
            if self.step % max(1, self.steps // 10) == 0 or self.step == self.steps - 1:
                self._say(f"loss {loss:.4f} norm {norm:.3f} {time.monotonic() - started_s:.1f} s")
            self.step += 1
            now_s = time.monotonic()
            if now_s - kept_s > KEEP_EVERY_S or now_s > self.session.until_s:
                self._keep()
                kept_s = now_s
            if now_s > self.session.until_s and self.step < self.steps and not enough:
                raise Paused(f"{self.of.name} paused after step {self.step} of {self.steps}")
            if enough:
                self._say("is enough")
                self.steps = self.step
        if self.step > began:
            self._keep()

    def _advance(self) -> tuple[float, float]:
        """One step of the optimizer: the loss before it, and the gradient's norm."""
        while True:
            try:
                loss, norm = self._gradient(self.modes[0])
                wrong = self._what_is_wrong(loss, norm)
            except compile_errors() as error:
                wrong = f"cannot be compiled: {' '.join(str(error).split())[:300]}"
            if wrong is None:
                break
            self._fall_back(wrong)
        nn.utils.clip_grad_norm_(self.of.model.parameters(), 1.0)
        self.of.optimizer.step()
        self.of.schedule.step()
        return loss, norm

    def _gradient(self, mode: Mode) -> tuple[float, float]:
        """Leave this step's gradient in the parameters; the loss, and the gradient's norm."""
        self.of.optimizer.zero_grad(set_to_none=True)
        with self._computing(mode):
            loss = self.of.batch_loss(mode.half)
            loss.backward()
        return loss.item(), nn.utils.get_total_norm(list(self._gradients().values())).item()

    @contextmanager
    def _computing(self, mode: Mode) -> Iterator[None]:
        digest = blake2b(f"{self.of.name} {self.session.seed} {self.step}".encode(), digest_size=8)
        number = int.from_bytes(digest.digest()) >> 1
        torch.manual_seed(number)
        for generator in self.of.generators:
            generator.manual_seed(number)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if mode.tf32 else "highest")
        # Never cuDNN's: with torch 2.11 its backward pass gives NaN on H100 and H200.
        kernels = [SDPBackend.MATH, *([] if mode.written_out else [SDPBackend.FLASH_ATTENTION])]
        eager = self.of.compiled is not None and not mode.compiled
        stance = torch.compiler.set_stance("force_eager") if eager else nullcontext()
        try:
            with sdpa_kernel(kernels), stance:
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _gradients(self) -> dict[str, Tensor]:
        named = self.of.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    def _what_is_wrong(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, norm of the gradient {norm}"
        checked = self.step < CHECKED or self.step % CHECKED_EVERY == 0
        if self.modes[0] == EXACT or not checked:
            return None
        found = self._gradients()
        exact_loss, exact_norm = self._gradient(EXACT)
        exact = self._gradients()
        apart = nn.utils.get_total_norm([found[name] - exact[name] for name in exact]).item()
        loss_off = abs(loss - exact_loss) / max(abs(exact_loss), 1e-12)
        gradient_off = apart / max(exact_norm, 1e-12)
        for name, parameter in self.of.model.named_parameters():
            parameter.grad = found.get(name)
        off = f"off float32: loss by {loss_off:.1e}, gradient by {gradient_off:.1e}"
        if self.step in (0, CHECKED - 1) or self.step >= CHECKED:
            self._say(f"in {self.modes[0].name}: {off}")
        # So that what is not finite counts as off, too.
        if self.step < CHECKED:
            fine = loss_off <= MOST_LOSS_OFF and gradient_off <= MOST_GRADIENT_OFF
        else:
            fine = gradient_off <= MOST_LATER
        return None if fine else off

    def _fall_back(self, wrong: str) -> None:
        mode = self.modes[0]
        bad = [n for n, g in self._gradients().items() if not bool(g.isfinite().all())]
        sizes = self._layer_sizes(mode)
        layer = next((name for name, size in sizes.items() if not math.isfinite(size)), None)
        where = f"first layer whose output is not finite: {layer}"
        report = {
            "step": self.step,
            "mode": mode.name,
            "wrong": wrong,
            "first_layer_not_finite": layer,
            "gradients_not_finite": bad,
            "largest_outputs_computed_layer_by_layer": sizes,
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "learning_rates": self.of.schedule.get_last_lr(),
        }
        place = ""
        if self.session.folder is not None:
            file = self.session.folder / f"{self.of.name}_{self.step}_{len(self.modes)}.fault.json"
            file.write_text(json.dumps(report, indent=1) + "\n")
            place = f"; see {file}"
        self._keep()
        text = f"{mode.name}: {wrong}; {where}; {len(bad)} gradients are not finite{place}"
        self._say(text)
        if len(self.modes) == 1:
            raise FloatingPointError(f"{self.of.name}, step {self.step}, {text}")
        self.modes.pop(0)
        torch.compiler.reset()
        self._say(f"goes on in {self.modes[0].name}")

    def _layer_sizes(self, mode: Mode) -> dict[str, float]:
        """Largest |output| of each layer at this step's batch, in the order of their calls."""
        sizes: dict[str, float] = {}

        def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
                for each in output if isinstance(output, tuple) else (output,):
                    if isinstance(each, Tensor) and each.numel():
                        sizes[name] = float(each.detach().float().abs().max())

            return look

        layers = [(n, m) for n, m in self.of.model.named_modules() if not list(m.children())]
        hooks = [module.register_forward_hook(watch(name)) for name, module in layers]
        # Compiled code has no layers.
        eager = Mode("", mode.half, False, mode.written_out, mode.tf32)
        try:
            with torch.no_grad(), self._computing(eager):
                self.of.batch_loss(mode.half)
        finally:
            for hook in hooks:
                hook.remove()
        return sizes

    def _say(self, text: str) -> None:
        print(f"{self.of.name} step {self.step}/{self.steps} {text}", flush=True)

    @property
    def _file(self) -> Path | None:
        return self.session.folder and self.session.folder / f"{self.of.name}.pt"

    @property
    def _parts(self) -> dict[str, Any]:
        of = self.of
        own = {"model": of.model, "optimizer": of.optimizer, "schedule": of.schedule}
        return own | dict(of.kept)

    def _keep(self) -> None:
        if self._file is None:
            return
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state |= {"step": self.step, "steps": self.steps, "mode": self.modes[0].name}
        with replacing(self._file) as file:
            torch.save(state, file)

    def _go_on(self) -> None:
        if self._file is None or not self._file.exists():
            return
        state = torch.load(self._file, map_location=self.session.device, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.step, self.steps = state["step"], state["steps"]
        names = [mode.name for mode in self.modes]
        if state["mode"] in names:
            del self.modes[: names.index(state["mode"])]
        self._say(f"goes on in {self.modes[0].name}")
