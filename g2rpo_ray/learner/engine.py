"""DeepSpeed behind one small interface: accumulate, step, and move state in and out by name."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.imports import uncollected
from g2rpo_ray.config.learner import LearnerSection
from g2rpo_ray.learner.checkpoints.parts import StatePart, StateReader
from g2rpo_ray.learner.state import MOMENTS, MasterState, load_whole_weights
from g2rpo_ray.models.kernels import compile_errors
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.models.weights import TensorLayout, trainable_parameters, word_sums

SMALL_GRADIENTS_BYTES = 1 << 28
"""Of all weights: in float32, a rank that is alone keeps so many whole until the step."""


class LearnerError(RunError):
    """The learner cannot go on; the message says what was wrong and what to change."""


def _deepspeed() -> Any:
    """The library, imported by who computes with it: not by the driver, which knows of this file's
    classes only."""
    # Read at its import: without a CUDA card it must not look for one.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with uncollected():
        import deepspeed

    return deepspeed


def join_process_group(
    rank: int, world_size: int, address: str, port: int, timeout_s: float, device: torch.device
) -> None:
    """Enter the learner's process group: NCCL where every rank has a card, else gloo.

    Args:
        device: this rank's; all ranks have the same kind.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    deepspeed = _deepspeed()
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        # At import DeepSpeed took a card that the process sees, also one that is not the rank's.
        set_accelerator(CPU_Accelerator())
    # DeepSpeed's shared-memory op for CPUs would need a C++ compiler on the machine; gloo does not.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _deepspeed_config(
    settings: LearnerSection, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = host
    if settings.offload_parameters:
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU optimizer would need a C++ compiler on every machine.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }


def learning_rate_of(updates: int, settings: LearnerSection) -> float:
    """Of the update after ``updates`` others: a linear warm-up, then ``learner.schedule``."""
    warmup = settings.warmup_updates
    if updates < warmup:
        return settings.learning_rate * (updates + 1) / warmup
    if settings.schedule == "constant" or settings.decay_updates is None:
        return settings.learning_rate
    progress = min(1.0, (updates - warmup) / settings.decay_updates)
    if settings.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return settings.learning_rate * (1 - progress * (1 - settings.final_share))


@contextmanager
def _named_compile_errors() -> Iterator[None]:
    """The compiler's errors cannot be sent to the driver: they would end the rank's process."""
    try:
        yield
    except compile_errors() as error:
        reason = " ".join(str(error).split())
        raise LearnerError(
            f"torch.compile failed on the learner's blocks with {type(error).__name__}: "
            f"{reason:.400}; learner.compile=false does without"
        ) from None


def compile_ahead(policy: Policy, rows: int, length: int) -> None:
    """Compile the blocks, forward and back, by a pass over blank latents; no gradient is kept.

    Of a policy that DeepSpeed does not have yet: ranks compile while workers load, where otherwise
    all would wait for the first update.

    Args:
        rows: latents of the pass.
        length: tokens of the prompt.

    Raises:
        LearnerError: torch.compile fails.
    """
    first = next(policy.parameters())
    embeds = policy.blank(length, first.dtype, first.device)
    latents = torch.zeros(rows, *policy.shape.packed, device=first.device)
    sigma = torch.full((rows,), 0.5, device=first.device)
    # What comes first in the network: every block's code runs, and keeps none of its gradients.
    earliest = next(iter(trainable_parameters(policy).values()))
    with _named_compile_errors():
        velocity = policy(latents, sigma, embeds)
        torch.autograd.grad(velocity.sum(), earliest, allow_unused=True)


class LearnerEngine:
    """One rank's policy under DeepSpeed ZeRO, with AdamW on fp32 master weights."""

    def __init__(
        self,
        policy: Policy,
        settings: LearnerSection,
        state: StateReader | None = None,
        updates: int = 0,
        *,
        old_policy: bool = False,
    ) -> None:
        """
        Args:
            policy: on this rank's device; its trainable parameters are optimised.
            settings: of the learner.
            state: what ``state_parts()`` of all ranks gave, to continue from it to the bit.
            updates: optimizer steps behind that state.
            old_policy: what draws is not the policy in training, but a moving average of it.

        Raises:
            WeightMismatchError: the state is of other weights.
        """
        self._settings = settings
        self.updates = updates
        self._names = frozenset(trainable_parameters(policy))
        if state is not None:
            load_whole_weights(policy, state)
        first = next(policy.parameters())
        frozen: list[Any] = [p for p in policy.parameters() if not p.requires_grad]
        for parameter in frozen:
            # DeepSpeed's mark of what it must not broadcast from rank 0 at the start: all ranks
            # have read the same, and writing would make mapped memory into a copy.
            parameter.ds_optim_param = True
        adamw = torch.optim.AdamW(
            trainable_parameters(policy).values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=settings.offload_optimizer or None,
        )
        gradient_bytes = sum(p.nbytes for p in trainable_parameters(policy).values())
        self._engine, self._optimizer, _, _ = _deepspeed().initialize(
            model=policy,
            optimizer=adamw,
            dist_init_required=False,
            config=_deepspeed_config(settings, first.dtype, first.device),
        )
        self.policy: Policy = self._engine.module
        # Adapters are many and small: their gradients stay whole on every rank until the step, and
        # are reduced once. All weights' gradients would not fit; they are reduced in every pass,
        # but where that is the same to the bit and they are small.
        adapters = any(".lora_" in name for name in self._names)
        alone = torch.distributed.get_world_size() == 1 and first.dtype == torch.float32
        self._reduces_once = adapters or (alone and gradient_bytes <= SMALL_GRADIENTS_BYTES)
        self._accumulation = ExitStack()
        self._accumulates = False
        self._start_moments()
        self._keeps_old = old_policy
        averaged = old_policy or settings.ema_decay is not None
        self._state = MasterState(self._parameters(), averaged)
        if state is not None:
            self._state.load(state)
            for entry in self._optimizer.optimizer.state.values():
                entry["step"].fill_(updates)
        self._refresh_old()

    def __call__(self, *args: object) -> Tensor:
        with _named_compile_errors():
            velocity: Tensor = self._engine(*args)
        return velocity

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return learning_rate_of(self.updates, self._settings)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate gradients; ``last`` marks the final pass before ``step`` on every rank."""
        if self._reduces_once and not self._accumulates:
            self._accumulation.enter_context(self._engine.coalesce_grad_reduction())
            self._accumulates = True
        elif not self._reduces_once:
            self._engine.set_gradient_accumulation_boundary(last)
        with _named_compile_errors():
            self._engine.backward(loss)

    def step(self, *, hold: bool = False) -> float:
        """Clip, update, and return the gradient norm before clipping.

        Args:
            hold: leave the weights as they are: nothing was learned, and momentum and weight decay
                alone would move them.

        Raises:
            LearnerError: the gradient is not finite. DeepSpeed has skipped the step then: the
                weights are as they were.
        """
        self._accumulation.close()
        self._accumulates = False
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0 if hold else self.learning_rate
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not torch.isfinite(torch.tensor(norm)):
            raise LearnerError(
                f"the gradient norm of update {self.updates} is {norm}: resume from the last "
                "checkpoint with a smaller learner.learning_rate or learner.clip"
            )
        self.updates += 1
        if self._settings.ema_decay is not None:
            self._state.average(self._settings.ema_decay)
        return norm

    def move_old_policy(self, decay: float) -> None:
        """Towards the policy in training; collective.

        Args:
            decay: the share of itself that it keeps.
        """
        self._state.average(decay)
        self._refresh_old()

    def _refresh_old(self) -> None:
        # Whole on every rank, as the trained weights are, but under ZeRO-3.
        whole = self._keeps_old and self._settings.zero_stage < 3
        self._old = self._state.whole_averages() if whole else {}

    def smallest_of_ranks(self, value: int) -> int:
        """The smallest ``value`` of all ranks; collective."""
        smallest = torch.tensor(value, device=self._engine.device)
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN)
        return int(smallest)

    def weights(self) -> dict[str, Tensor]:
        """Weights to draw with, in the compute dtype, on this rank's device: the trained ones, or
        an old policy's; collective under ZeRO-3.

        Not copies, except under ZeRO-3.
        """
        if self._keeps_old:
            return self._old or self._state.whole_averages()
        return {name: self._gathered(parameter) for name, parameter in self._parameters().items()}

    def weight_layout(self) -> list[TensorLayout]:
        """Weights to draw with, in the compute dtype, whole, in the order of their names."""
        return [
            TensorLayout(name, p.dtype, tuple(getattr(p, "ds_shape", p.shape)))
            for name, p in sorted(self._parameters().items())
        ]

    def weight_shards(self) -> dict[str, Tensor]:
        """What this rank holds of each weight to draw with, flat and without a copy (but of an old
        policy under ZeRO-3).

        Everything; under ZeRO-3 its part of the flattened tensor, padded at the end of the last.
        """
        if self._keeps_old:
            old = {name: weight.view(-1) for name, weight in self._old.items()}
            return old or self._state.average_shards()
        return {
            name: getattr(p, "ds_tensor", p).detach().view(-1)
            for name, p in self._parameters().items()
        }

    def weight_shard_sums(self) -> list[int]:
        """Word sums of this rank's shards without padding, in the order of names.

        Those of all ranks add up to the whole weights' sums.
        """
        shards = self.weight_shards()
        rank = torch.distributed.get_rank() if self._settings.zero_stage == 3 else 0
        parts, starts = [], []
        for tensor in self.weight_layout():
            shard = shards[tensor.name]
            starts.append(min(rank * len(shard), tensor.numel))
            parts.append(shard[: tensor.numel - starts[-1]])
        return word_sums(parts, starts)

    def state_parts(self) -> list[StatePart]:
        """This rank's part of fp32 weights, AdamW's moments and the average, copied to the CPU.

        The parts of all ranks make up the whole state, whatever ZeRO stage and number of ranks.
        """
        return self._state.parts()

    def _start_moments(self) -> None:
        # DeepSpeed leaves them to the first step; until then there would be nothing to load into.
        stage3 = self._settings.zero_stage == 3
        zero = self._optimizer
        shards = (
            zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups
        )
        for shard in shards:
            zero.optimizer.state[shard] = {"step": torch.zeros(())} | {
                moment: torch.zeros_like(shard.detach()) for moment in MOMENTS
            }
        if not stage3:
            zero._lazy_init_hp_params_optimizer_state()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.policy.transformer.named_parameters() if n in self._names}

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with _deepspeed().zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
