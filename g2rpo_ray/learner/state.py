"""One rank's fp32 master weights and AdamW moments by name, wherever DeepSpeed keeps them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo_ray.learner.checkpoints.parts import StatePart, StateReader
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.models.weights import WeightMismatchError, trainable_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def load_whole_weights(policy: Policy, state: StateReader) -> None:
    """Into the policy, before DeepSpeed splits it; one tensor at a time.

    Raises:
        WeightMismatchError: the state is of other weights.
    """
    parameters = trainable_parameters(policy)
    saved = {k.removeprefix("weight."): state.shape(k) for k in state if k.startswith("weight.")}
    wrong = sorted(
        name
        for name in parameters.keys() | saved.keys()
        if name not in parameters or saved.get(name) != tuple(parameters[name].shape)
    )
    if wrong:
        raise WeightMismatchError(
            f"{len(wrong)} tensors of the checkpoint and of the model differ, first "
            f"{', '.join(wrong[:3])}: it belongs to another model.path, model.lora or "
            "model.trained_modules"
        )
    for name, parameter in parameters.items():
        parameter.copy_(state[f"weight.{name}"])


class MasterState:
    """What this rank optimises: a range of every flattened weight (none, of some)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], keeps_average: bool) -> None:
        """
        Args:
            parameters: after DeepSpeed has split them.
            keeps_average: a moving average of the fp32 weights.
        """
        self._parameters: dict[str, Any] = dict(parameters)
        self._averages: dict[str, Tensor] = {}
        if keeps_average:
            self._averages = {name: self._fp32(p).clone() for name, p in parameters.items()}
        self._on_host: dict[str, Tensor] = {}

    def parts(self) -> list[StatePart]:
        """Copies on the CPU, to be used before the next call: it overwrites them.

        Their memory is kept, since fresh pages cost more time than the copying.
        """
        parts = []
        for name, parameter in self._parameters.items():
            shape, start, length = self._range(parameter)
            tensors = {"weight": self._fp32(parameter)}
            tensors |= {moment: self._fp32(parameter, moment) for moment in MOMENTS}
            if name in self._averages:
                tensors["ema"] = self._averages[name]
            for kind, tensor in tensors.items():
                key, part = f"{kind}.{name}", tensor[:length]
                if key not in self._on_host:
                    self._on_host[key] = torch.empty_like(part, device="cpu")
                data = self._on_host[key].copy_(part)
                parts.append(StatePart(key, shape, start, data))
        return [part for part in parts if len(part.data) > 0]

    @torch.no_grad()
    def load(self, state: StateReader) -> None:
        """Fill in what was saved; an average begins with the weights where none was saved."""
        for name, parameter in self._parameters.items():
            for kind in (None, *MOMENTS):
                value = self._read(state, f"{kind or 'weight'}.{name}", parameter)
                self._set_fp32(parameter, value, kind)
        if self._averages:
            saved = any(key.startswith("ema.") for key in state)
            kind = "ema" if saved else "weight"
            self._averages = {
                name: self._read(state, f"{kind}.{name}", self._parameters[name])
                for name in self._averages
            }

    def _read(self, state: StateReader, key: str, parameter: Any) -> Tensor:
        """This rank's part, on its device; the last rank's is padded under ZeRO-3."""
        _, start, length = self._range(parameter)
        value = torch.zeros_like(self._fp32(parameter))
        value[:length] = state.read(key, start, start + length)
        return value

    def _range(self, parameter: Any) -> tuple[tuple[int, ...], int, int]:
        """Shape of a weight; first and number of its elements that this rank optimises."""
        if hasattr(parameter, "ds_tensor"):
            size = parameter.ds_tensor.numel()
            start = min(torch.distributed.get_rank() * size, parameter.ds_numel)
            length = min(size, parameter.ds_numel - start)
            return tuple(parameter.ds_shape), start, length
        if parameter._hp_mapping is None:
            return tuple(parameter.shape), 0, 0
        address = parameter._hp_mapping.lp_fragment_address
        return tuple(parameter.shape), address.start, address.numel

    def _fp32(self, parameter: Any, moment: str | None = None) -> Tensor:
        """This rank's part of a master weight, or of a moment; flat, padded under ZeRO-3."""
        if hasattr(parameter, "ds_tensor"):
            from deepspeed import utils

            if moment is None:
                return utils.safe_get_local_fp32_param(parameter).detach()
            return utils.safe_get_local_optimizer_state(parameter, moment)
        if parameter._hp_mapping is None:
            return torch.empty(0)
        return parameter._hp_mapping.get_hp_fragment(moment).detach()

    def _set_fp32(self, parameter: Any, value: Tensor, moment: str | None) -> None:
        if not hasattr(parameter, "ds_tensor"):
            self._fp32(parameter, moment).copy_(value)
            return
        from deepspeed import utils

        if moment is None:
            utils.safe_set_local_fp32_param(parameter, value)
        else:
            utils.safe_set_local_optimizer_state(parameter, value, moment)

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Move the average towards the weights of now; ``decay`` is the share that it keeps."""
        for name, average in self._averages.items():
            average.lerp_(self._fp32(self._parameters[name]), 1 - decay)

    def average_shards(self) -> dict[str, Tensor]:
        """This rank's part of every average in its weight's dtype and on its device, flat; the last
        rank's is padded under ZeRO-3."""
        return {n: a.to(_place(self._parameters[n])) for n, a in self._averages.items()}

    def whole_averages(self) -> dict[str, Tensor]:
        """The averages in their weights' dtype and on their device; collective."""
        wholes = {}
        for name, part in self.average_shards().items():
            shape, start, length = self._range(self._parameters[name])
            whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
            whole.view(-1)[start : start + length] = part[:length]
            # An element is on one rank, and the others add zero: no rounding.
            torch.distributed.all_reduce(whole)
            wholes[name] = whole
        return wholes


def _place(parameter: Any) -> Tensor:
    """A tensor on the device and in the dtype in which the network has a weight."""
    tensor: Tensor = getattr(parameter, "ds_tensor", parameter)
    return tensor
