"""Activations in host memory between forward and backward.

Of L layers the first N are offloaded. What layer i saves for the backward is copied to the host as soon as it is saved,
has left the device before layer i + L - N runs, and is fetched when the backward reaches layer i + L - N - 1 (with
N = L - 1, layer i + 1), so that about L - N layers are on the device at any time. This is the order of
TransformerEngine's `cpu_offload` (since 2.10). Of layers that are recomputed in chunks, the input of a chunk is fetched
at the latest when the backward reaches the chunk after it.

What stays on the device: parameters, whatever all layers share (angles of positions, masks, the encoder's output),
tensors of less than `LEAST_SIZE`, and the input of the first layer that is not offloaded. What several operations save
is copied once.

The hooks see what compiled layers save as well, and of a layer that is recomputed as a whole only its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .host_copies import Copies, bytes_of

LEAST_SIZE = 1 << 20
"""Bytes of the smallest tensor that is worth a copy."""


class ActivationOffload:
    """Keeps what the first layers of a stack save for the backward in host memory.

    Args:
        copies: of the device of the stack.
        layers: the first so many layers, N.
        least_size: bytes below which a tensor stays.

    Attributes:
        layers: N.
        copies: as given.
        sent_bytes: bytes of the copies to the host in the last forward.
    """

    def __init__(self, copies: Copies, layers: int, *, least_size: int = LEAST_SIZE) -> None:
        self.copies = copies
        self.layers = layers
        self._least_size = least_size
        self.sent_bytes = 0

    def forward_pass(self, layers: int, shared: object) -> ForwardPass:
        """One run through all layers.

        Args:
            layers: how many there are, L; more than are offloaded.
            shared: tensors, in nested tuples, that all layers read: they stay.
        """
        self.sent_bytes = 0
        self.copies.begin()
        return ForwardPass(self, self.copies, self.layers, layers, shared, self._least_size)


class ForwardPass:
    """One forward through a stack, and its backward. `layers` goes around each layer, `after` follows it."""

    def __init__(
        self, owner: ActivationOffload, copies: Copies, offloaded: int, layers: int, shared: object, least_size: int
    ) -> None:
        self._owner = owner
        self._copies = copies
        self._groups: list[dict[_Range, _Stored]] = [{} for _ in range(offloaded)]
        self._away = layers - offloaded
        self._ahead = max(1, self._away - 1)
        self._shared = {_address(tensor) for tensor in _tensors_in(shared)}
        self._least_size = least_size
        self._carried: dict[_Range, _Stored] = {}
        self._left = 0

    @contextmanager
    def layers(self, numbers: range, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within it some layers run, of which the backward needs nothing but what is saved here.

        Args:
            numbers: which, counted from 0: one, or a chunk that is recomputed together. They run in order.
            modules: these layers, whose parameters stay where they are.
        """
        self._ahead = max(self._ahead, len(numbers))  # the chunk before is the nearest that can be fetched
        leaving = min(numbers.start, numbers.stop - self._away)
        for group in self._groups[self._left : max(leaving, 0)]:
            for stored in group.values():
                stored.leave()
        self._left = max(self._left, leaving)
        if numbers.start >= len(self._groups):
            yield
            return
        group = self._groups[numbers.start]
        group |= self._carried

        def pack(tensor: Tensor) -> Tensor | _Saved:
            return self._pack(tensor, group, modules)

        with saved_tensors_hooks(pack, _unpack):
            yield

    def after(self, numbers: range, hidden: Tensor) -> None:
        """These layers have given `hidden`."""
        self._carried = {}
        if numbers.start < len(self._groups):
            # the next layer reads it: it is offloaded with that layer, or stays for one that is not offloaded
            group, address = self._groups[numbers.start], _address(hidden)
            self._carried = {place: stored for place, stored in group.items() if place.address == address}
            for place in self._carried:
                del group[place]
        first, last = (max(number - self._ahead, 0) for number in (numbers.start, numbers.stop))
        coming = [group for group in self._groups[first:last] if group]
        if coming and hidden.requires_grad:
            hidden.register_hook(_fetching(coming))

    def _pack(self, tensor: Tensor, group: dict[_Range, _Stored], modules: Iterable[nn.Module]) -> Tensor | _Saved:
        if type(tensor) is not Tensor:  # parameters, and tensors that are traced
            return tensor
        place = _Range.of(tensor)
        if place.whole in group:
            place = place.whole
        stored = group.get(place)
        if stored is None:
            if place.stop - place.start < self._least_size or not self._is_worth_it(tensor, place.address, modules):
                return tensor.detach()  # not `tensor`, which may hold the very node that saves it
            stored = group[place] = _Stored(bytes_of(tensor.untyped_storage(), place.start, place.stop), self._copies)
            self._owner.sent_bytes += place.stop - place.start
        offset = int(tensor.storage_offset()) - place.start // tensor.element_size()
        return _Saved(stored, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _is_worth_it(self, tensor: Tensor, address: int, modules: Iterable[nn.Module]) -> bool:
        # not known beforehand: FSDP2 gathers the weights of a layer only when it runs
        weights = (parameter for module in modules for parameter in module.parameters())
        return (
            tensor.device == self._copies.device
            and address not in self._shared
            and all(address != _address(weight) for weight in weights)
        )


class _Stored:
    """A range of memory that the backward needs, on the device or on the host.

    It lives as long as the backward may ask for it: autograd drops what an operation saved as soon as its backward has
    run, and with the last who saved it go the memory and the host buffer.
    """

    def __init__(self, memory: Tensor, copies: Copies) -> None:
        self._copies = copies
        self._memory: Tensor | None = memory
        self._copying: Any = None
        self._host: Tensor | None = None  # and stays so where the host has no memory left
        self._host = copies.host(memory.numel())
        self._copying = copies.send(memory, self._host)

    def leave(self) -> None:
        """Give up the memory of the device."""
        self._wait()
        self._memory = None

    def come_back(self) -> None:
        """Begin to fetch it, where it is not on the device."""
        if self._memory is None:
            assert self._host is not None
            self._memory = self._copies.new(self._host.numel())
            self._copying = self._copies.fetch(self._host, self._memory)

    def read(self) -> Tensor:
        """The memory on the device, for work that is submitted from now on."""
        self.come_back()
        self._wait()
        assert self._memory is not None
        return self._memory

    def _wait(self) -> None:
        if self._copying is not None:
            self._copies.wait(self._copying)
            self._copying = None

    def __del__(self) -> None:
        self._wait()  # the next who gets the memory, or the buffer, must not meet this copy
        if self._host is not None:
            self._copies.give_back(self._host)


class _Saved(NamedTuple):
    """A tensor within stored memory: how it lies there, strides and offset in elements."""

    stored: _Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Range(NamedTuple):
    """Bytes of a storage, by its address, that are copied together."""

    address: int
    start: int
    stop: int
    length: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Range:
        """Those of a tensor without gaps; otherwise the whole storage, so that strides stay as they are."""
        address, length = _address(tensor), tensor.untyped_storage().nbytes()
        if not tensor.is_contiguous():
            return cls(address, 0, length, length)
        start = int(tensor.storage_offset()) * tensor.element_size()
        return cls(address, start, start + tensor.numel() * tensor.element_size(), length)

    @property
    def whole(self) -> _Range:
        """The whole storage."""
        return self._replace(start=0, stop=self.length)


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    memory = saved.stored.read()
    tensor = torch.empty(0, dtype=saved.dtype, device=memory.device)
    offset = saved.offset + int(memory.storage_offset()) // tensor.element_size()
    return tensor.set_(memory.untyped_storage(), offset, saved.size, saved.stride)


def _fetching(groups: list[dict[_Range, _Stored]]) -> Callable[[Tensor], None]:
    def fetch(_: Tensor) -> None:
        for group in reversed(groups):  # the backward asks for the last first
            for stored in reversed(group.values()):
                stored.come_back()
            group.clear()  # from now on they live as long as the backward needs them

    return fetch


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors_in(part)
