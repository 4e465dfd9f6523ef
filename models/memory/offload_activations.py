"""Activation offloading: saved tensors are in host memory between forward and backward.

Of L layers the first N are offloaded. The tensors that layer i saves for the backward are copied to the host as soon as
they are saved, freed on the device before layer i + L - N runs, and fetched when the backward reaches layer
i + L - N - 1 (with N = L - 1, layer i + 1), so that about L - N layers are on the device at any time. This is the
schedule of TransformerEngine's `cpu_offload` (since 2.10). If layers are recomputed in chunks, the input of a chunk is
fetched at the latest when the backward reaches the chunk after it.

Not offloaded: parameters, tensors shared by all layers (cos/sin tables, masks, the encoder output), tensors smaller
than `MIN_OFFLOAD_BYTES`, and the input of the first layer that is not offloaded. A tensor saved by several operations
is copied once.

The saved-tensor hooks also see what compiled layers save; of a fully recomputed layer they see only its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .host_copies import CopyEngine, bytes_of

MIN_OFFLOAD_BYTES = 1 << 20
"""Minimal bytes of an offloaded tensor."""


class ActivationOffload:
    """Offload the saved tensors of the first layers of a stack to host memory.

    Args:
        copies: copy engine of the stack's device.
        num_layers: number of leading layers to offload, N.
        least_size: minimal bytes of an offloaded tensor.

    Attributes:
        num_layers: N.
        copies, least_size: as given.
        sent_bytes: bytes copied to the host in the last forward.
    """

    def __init__(self, copies: CopyEngine, num_layers: int, *, least_size: int = MIN_OFFLOAD_BYTES) -> None:
        self.copies = copies
        self.num_layers = num_layers
        self.least_size = least_size
        self.sent_bytes = 0

    def begin_forward(self, num_layers: int, shared: object) -> ForwardPass:
        """Begin a forward through all layers.

        Args:
            num_layers: number of layers of the stack, L > N.
            shared: nested tuples of tensors shared by all layers, which are not offloaded.
        """
        self.sent_bytes = 0
        self.copies.use_current_stream()
        return ForwardPass(self, num_layers, shared)


class ForwardPass:
    """Offloading of one forward through a stack and its backward: wrap each layer in `offload_saved_tensors`, then call
    `post_forward`; arguments as of `ActivationOffload.begin_forward`.
    """

    def __init__(self, owner: ActivationOffload, num_layers: int, shared: object) -> None:
        self._owner = owner
        self._groups: list[dict[_Range, _Stored]] = [{} for _ in range(owner.num_layers)]
        self._resident = num_layers - owner.num_layers  # number of layers whose saved tensors are on the device
        self._prefetch_distance = max(1, self._resident - 1)
        self._shared = {_address(tensor) for tensor in _tensors_in(shared)}
        self._carried: dict[_Range, _Stored] = {}  # output of the last layers, moved to the group of the next ones
        self._num_freed = 0

    @contextmanager
    def offload_saved_tensors(self, indices: range, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Context manager that offloads the tensors saved by these layers.

        Args:
            indices: indices of the layers, counted from 0: one, or a chunk that is recomputed together; in order.
            modules: the layers, whose parameters are not offloaded.
        """
        # With chunks, the nearest saved input to prefetch is that of the chunk before.
        self._prefetch_distance = max(self._prefetch_distance, len(indices))
        num_freed = min(indices.start, indices.stop - self._resident)
        for group in self._groups[self._num_freed : max(num_freed, 0)]:
            for stored in group.values():
                stored.free()
        self._num_freed = max(self._num_freed, num_freed)
        if indices.start >= len(self._groups):
            yield
            return
        group = self._groups[indices.start]
        group |= self._carried

        def pack(tensor: Tensor) -> Tensor | _Saved:
            return self._pack(tensor, group, modules)

        with saved_tensors_hooks(pack, _unpack):
            yield

    def post_forward(self, indices: range, hidden: Tensor) -> None:
        """Register the prefetch for the backward; call after these layers returned `hidden`."""
        self._carried = {}
        if indices.start < len(self._groups):
            # `hidden` is the input of the next layer: offloaded with that layer, or not at all if that one is not.
            group, address = self._groups[indices.start], _address(hidden)
            self._carried = {key: stored for key, stored in group.items() if key.address == address}
            for key in self._carried:
                del group[key]
        first, last = (max(number - self._prefetch_distance, 0) for number in (indices.start, indices.stop))
        groups = [group for group in self._groups[first:last] if group]
        if groups and hidden.requires_grad:
            hidden.register_hook(_prefetch_hook(groups))

    def _pack(self, tensor: Tensor, group: dict[_Range, _Stored], modules: Iterable[nn.Module]) -> Tensor | _Saved:
        if type(tensor) is not Tensor:  # parameters, and tensors being traced
            return tensor
        key = _Range.of(tensor)
        if key.whole in group:
            key = key.whole
        stored = group.get(key)
        if stored is None:
            if key.stop - key.start < self._owner.least_size or not self._is_offloadable(tensor, key.address, modules):
                return tensor.detach()  # not `tensor`: a reference to the node that saves it would be a cycle
            stored = group[key] = _Stored(bytes_of(tensor.untyped_storage(), key.start, key.stop), self._owner.copies)
            self._owner.sent_bytes += key.stop - key.start
        offset = int(tensor.storage_offset()) - key.start // tensor.element_size()
        return _Saved(stored, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _is_offloadable(self, tensor: Tensor, address: int, modules: Iterable[nn.Module]) -> bool:
        # Addresses are not known beforehand: FSDP2 gathers the weights of a layer only when it runs.
        weights = (parameter for module in modules for parameter in module.parameters())
        return (
            tensor.device == self._owner.copies.device
            and address not in self._shared
            and all(address != _address(weight) for weight in weights)
        )


class _Stored:
    """Memory of a saved tensor, on the device or on the host.

    Freed by reference counting: autograd drops the saved tensors of an operation as soon as its backward has run, and
    the last reference frees the device memory and the host buffer.
    """

    def __init__(self, memory: Tensor, copies: CopyEngine) -> None:
        self._copies = copies
        self._memory: Tensor | None = memory
        self._pending_copy: Any = None
        self._host: Tensor | None = None  # for `__del__`, if the allocation below fails
        self._host = copies.allocate_host(memory.numel())
        self._pending_copy = copies.copy_to_host(memory, self._host)

    def free(self) -> None:
        """Free the device memory, after the copy."""
        self._wait()
        self._memory = None

    def prefetch(self) -> None:
        """Start copying back to the device, unless the value is there."""
        if self._memory is None:
            assert self._host is not None
            self._memory = self._copies.allocate_device(self._host.numel())
            self._pending_copy = self._copies.copy_to_device(self._host, self._memory)

    def read(self) -> Tensor:
        """Return the device memory, for work submitted from now on."""
        self.prefetch()
        self._wait()
        assert self._memory is not None
        return self._memory

    def _wait(self) -> None:
        if self._pending_copy is not None:
            self._copies.wait(self._pending_copy)
            self._pending_copy = None

    def __del__(self) -> None:
        self._wait()  # the memory and the buffer may be reused only after the copy
        if self._host is not None:
            self._copies.release_host(self._host)


class _Saved(NamedTuple):
    """View of a tensor in stored memory, with strides and offset in elements."""

    stored: _Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Range(NamedTuple):
    """Byte range of a storage, identified by its address, that is copied as a unit."""

    address: int
    start: int
    stop: int
    length: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Range:
        """Return the range of a contiguous tensor; otherwise the whole storage, so that strides stay valid."""
        address, length = _address(tensor), tensor.untyped_storage().nbytes()
        if not tensor.is_contiguous():
            return cls(address, 0, length, length)
        start = int(tensor.storage_offset()) * tensor.element_size()
        return cls(address, start, start + tensor.numel() * tensor.element_size(), length)

    @property
    def whole(self) -> _Range:
        """Range of the whole storage."""
        return self._replace(start=0, stop=self.length)


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    memory = saved.stored.read()
    tensor = torch.empty(0, dtype=saved.dtype, device=memory.device)
    offset = saved.offset + int(memory.storage_offset()) // tensor.element_size()
    return tensor.set_(memory.untyped_storage(), offset, saved.size, saved.stride)


def _prefetch_hook(groups: list[dict[_Range, _Stored]]) -> Callable[[Tensor], None]:
    def prefetch(_: Tensor) -> None:
        for group in reversed(groups):  # in the order of the backward
            for stored in reversed(group.values()):
                stored.prefetch()
            group.clear()  # from now on only autograd holds references

    return prefetch


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors_in(part)
