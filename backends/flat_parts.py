"""Optimizers that update a part of one flat vector, in which the parameters of a group follow one another.

So each rank updates its part of the elements, and holds the optimizer's state of these only (ZeRO-1, Rajbhandari et
al. 2020, https://arxiv.org/abs/1910.02054). A checkpoint has whole tensors for each parameter: this is the map between
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import override

# Integers of as many bytes as the elements of a dtype.
_BITS = {4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """Where a rank's elements of a parameter are; a rank may have none.

    Attributes:
        in_part: The first one in this rank's part of the flat vector.
        in_whole: The first one in the parameter.
        num_elements: How many there are.
        shape: The shape of the whole parameter.
    """

    in_part: int
    in_whole: int
    num_elements: int
    shape: torch.Size


class FlatPart(torch.Tensor):
    """A tensor as a single process would have it, of which this rank holds the elements of a place in a flat vector.

    It has the whole shape, and no operations: `to_local` and `full_tensor`, named as those of torch's DTensor, give the
    elements.
    """

    _flat: torch.Tensor
    place: Place

    @staticmethod
    def __new__(cls, flat: torch.Tensor, place: Place) -> FlatPart:
        """Describes the elements at `place` in `flat`, this rank's part of a flat vector."""
        part: FlatPart = torch.Tensor._make_wrapper_subclass(cls, place.shape, dtype=flat.dtype, device=flat.device)
        part._flat, part.place = flat, place
        return part

    def to_local(self) -> torch.Tensor:
        """Returns this rank's elements, [number of elements], which are those of the flat vector themselves."""
        return self._flat.detach().narrow(0, self.place.in_part, self.place.num_elements)

    def full_tensor(self) -> torch.Tensor:
        """Returns the whole tensor; all ranks call it."""
        place, own = self.place, self.to_local()
        whole = own.new_zeros(place.shape.numel())
        whole.narrow(0, place.in_whole, place.num_elements).copy_(own)
        # Of each element, all ranks but one have zeros. Added up as numbers, -0 would become 0.
        dist.all_reduce(whole.view(_BITS[whole.element_size()]))
        return whole.view(place.shape)

    def of(self, flat: torch.Tensor) -> FlatPart:
        """Returns what belongs to the same elements in another flat vector, such as one of moments."""
        return FlatPart(flat, self.place)

    def cut(self, whole: torch.Tensor) -> FlatPart:
        """Copies this rank's elements out of a whole tensor."""
        place = self.place
        own = whole.reshape(-1).narrow(0, place.in_whole, place.num_elements).to(self.device, copy=True)
        return FlatPart(own, place._replace(in_part=0))

    @property
    @override
    def grad(self) -> FlatPart | None:  # type: ignore[override]
        """The gradient of these elements, if the flat vector has one."""
        return None if self._flat.grad is None else self.of(self._flat.grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses to compute with the part as if it were the whole."""
        if function is torch.ops.aten.detach.default:
            return args[0].of(args[0]._flat)
        raise NotImplementedError(f"{function} of a tensor of which this rank holds a part; make it whole first")


class PartsOptimizer(torch.optim.Optimizer):
    """An optimizer of flat vectors, described as one of parameters.

    Its groups are those of the loop, and hold a `FlatPart` in place of each parameter. It never steps: before the other
    one does, `give_settings` passes learning rates and the like on.
    """

    def __init__(self, flat: torch.optim.Optimizer, places: Sequence[Sequence[Place]]) -> None:
        """Describes an optimizer.

        Args:
            flat: Each of its groups has one parameter, this rank's part of a flat vector.
            places: For each group, the places of its parameters.
        """
        self._flat = flat
        groups = [
            {**group, "params": [FlatPart(group["params"][0], place) for place in of_group]}
            for group, of_group in zip(flat.param_groups, places, strict=True)
        ]
        super().__init__(groups, flat.defaults)
        self.follow()

    def give_settings(self) -> None:
        """Sets the hyper-parameters of the other optimizer to those of this one."""
        for own, flat in zip(self.param_groups, self._flat.param_groups, strict=True):
            flat.update({name: value for name, value in own.items() if name != "params"})

    def follow(self) -> None:
        """Describes the state that the other optimizer has by now; its tensors stay the same from then on."""
        if self.state:
            return
        for group, flat_group in zip(self.param_groups, self._flat.param_groups, strict=True):
            (flat,) = flat_group["params"]
            for name, value in self._flat.state.get(flat, {}).items():
                is_flat = isinstance(value, torch.Tensor) and value.shape == flat.shape
                for part in group["params"]:
                    self.state[part][name] = part.of(value) if is_flat else value

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives the other optimizer the state of all parameters, of which this rank has the parts.

        Raises:
            ValueError: Parameters of one group have taken different numbers of steps.
        """
        super().load_state_dict(state_dict)
        for group, flat_group in zip(self.param_groups, self._flat.param_groups, strict=True):
            (flat,) = flat_group["params"]
            # Written over, since DeepSpeed keeps views of these tensors from the first step on.
            before = self._flat.state.pop(flat, {})
            states = [self.state.get(part, {}) for part in group["params"]]
            if any(state.keys() != states[0].keys() for state in states):
                raise ValueError("its optimizer has state of some parameters only, which a flat vector cannot have")
            for name in states[0]:
                values = [state[name] for state in states]
                self._flat.state[flat][name] = _joined(values, group["params"], flat, before.get(name))
        self.state.clear()
        self.follow()


def _joined(values: list[Any], parts: list[FlatPart], flat: torch.Tensor, before: torch.Tensor | None) -> Any:
    """Returns the one value of a flat vector, given that of each parameter; a vector `before` is written over."""
    if not isinstance(values[0], FlatPart):
        if any(value != values[0] for value in values):
            raise ValueError("its parameters have taken different numbers of steps, which a flat vector cannot have")
        return values[0]
    joined = torch.zeros_like(flat, dtype=values[0].dtype, requires_grad=False) if before is None else before
    for value, part in zip(values, parts, strict=True):
        part.of(joined).to_local().copy_(value.to_local())
    return joined
