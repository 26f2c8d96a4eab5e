"""The dispatch hook: sees every write that a loader makes into model storage, and decides what becomes of it (paper 6.1, C).

A loader's last step is ``aten.copy_`` into a parameter, however it is spelt in Python: ``param.data[a:b] = x`` never calls
``Tensor.copy_`` but is ``aten.copy_`` at this level. Dispatch modes are per thread: what another thread writes is not seen
here, and is found by comparing storage digests instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from deltarefit.bits import DTYPES, dtype_name
from deltarefit.pieces import StridedView
from deltarefit.placement.inputs import Inputs
from deltarefit.placement.shadow import Shadow
from deltarefit.placement.storages import ModelStorage, StorageMap

__all__ = ["LoadWatch", "SourceView", "Write", "WriteKind"]

_COPY = torch.ops.aten.copy_.default
_FILLS = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default})
_FILL_TENSOR = torch.ops.aten.fill_.Tensor
_READ_SCALAR = torch.ops.aten._local_scalar_dense.default


class WriteKind(Enum):
    COPY = "copy"
    """``aten.copy_``, or a fill with a tensor's one value."""
    FILL = "fill"
    """A constant."""
    UPDATE = "update"
    """Any other operation that writes a view which this load had copied into before: it computes on what it was given."""
    OTHER = "other"
    """Any other operation that writes; unsupported."""


@dataclass(frozen=True, slots=True)
class SourceView:
    """The view of a canonical tensor that a copy takes its values from."""

    name: str
    view: StridedView
    """In elements of ``dtype``, counted from the canonical tensor's first byte; expanded to the destination's shape."""
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One write into model storage."""

    kind: WriteKind
    operation: str
    storage: ModelStorage
    view: StridedView
    """The written elements of ``dtype``, counted from the storage's first byte."""
    dtype: str
    source: SourceView | None
    """None if the values do not come straight from a canonical tensor."""
    current: str | None
    """The name that the loader had asked for last; a hint, not a fact."""

    @property
    def key(self) -> tuple[str, StridedView, str]:
        """What is written, whoever writes it."""
        return self.storage.key, self.view, self.dtype


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int | str, ...], int]:
    """Positions or keywords of the arguments that an operation writes to, and how many values it returns."""
    slots: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            slots.append(argument.name if argument.kwarg_only else position)
    return tuple(slots), len(func._schema.returns)


def _targets(slots: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for slot in slots:
        value = kwargs.get(slot) if isinstance(slot, str) else args[slot] if slot < len(args) else None
        found.extend(v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, torch.Tensor))
    return found


class LoadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its dispatch modes untyped
    """Logs what a loader writes into model storage. The writes themselves are dropped, or made on a shadow if one is given."""

    def __init__(self, storages: StorageMap, inputs: Inputs, shadow: Shadow | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self._inputs = inputs
        self._shadow = shadow
        self.writes: list[Write] = []
        self.changed_inputs: set[str] = set()
        """Canonical tensors whose memory the loader wrote to: what it copied later is not what it was given."""
        self.read_inputs: set[str] = set()
        """Names during which the loader took a tensor's value into Python, so that constants may depend on it."""
        self.is_collecting = False
        """Whether the loader had asked for every tensor before its first write."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping the hook for its compiler: nothing here is compiled, and importing that takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        slots, num_returns = _written_arguments(func)
        if not slots:
            if func is _READ_SCALAR and self._inputs.current is not None:
                self.read_inputs.add(self._inputs.current)
            return func(*self._redirected(args), **self._redirected(kwargs))
        targets = _targets(slots, args, kwargs)
        for target in targets:
            if (spec := self._inputs.find(target)) is not None:
                self.changed_inputs.add(spec.name)
        if not any(self._find(target) is not None for target in targets):
            return func(*self._redirected(args), **self._redirected(kwargs))
        self._write(func, targets, args, kwargs)
        return None if num_returns == 0 else targets[0] if num_returns == 1 else tuple(targets)

    def _find(self, tensor: torch.Tensor) -> tuple[ModelStorage, int] | None:
        """The model storage that a tensor lies in, or that its shadow stands for, and the byte where its storage begins."""
        found = self._storages.find(tensor)
        return found if found is not None or self._shadow is None else self._shadow.origin(tensor)

    def _redirected(self, values: Any) -> Any:
        return values if self._shadow is None else tree_map_only(torch.Tensor, self._shadow.redirect, values)

    def _write(self, func: Any, targets: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        if not self.writes:
            self.is_collecting = self._inputs.is_exhausted
        if func is _COPY or func is _FILL_TENSOR:
            self.copy(args[0], args[1], str(func))
        elif func in _FILLS:
            self.fill(args[0], args[1] if len(args) > 1 else 0, str(func))
        elif len(targets) == 1 and self._was_copied(update := self.describe(WriteKind.UPDATE, str(func), targets[0], None)):
            self.writes.append(update)
            self.update(update, lambda: func(*self._redirected(args), **self._redirected(kwargs)))
        else:
            for target in targets:
                if self._find(target) is not None:
                    write = self.describe(WriteKind.OTHER, str(func), target, None)
                    self.writes.append(write)
                    self.other(write)

    def _was_copied(self, update: Write) -> bool:
        """Whether this load copied into exactly this view before."""
        return update.kind is WriteKind.UPDATE and any(
            write.key == update.key and write.kind is WriteKind.COPY for write in self.writes
        )

    def update(self, write: Write, make: Callable[[], object]) -> None:
        """An operation in place on what was copied before; ``make`` carries it out, on the shadow if there is one."""
        if self._shadowed(write) is not None:
            make()

    def other(self, write: Write) -> None:
        """Any other write into model storage; it is never made."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, operation: str) -> None:
        """A copy into model storage."""
        write = self.describe(WriteKind.COPY, operation, target, source)
        self.writes.append(write)
        if self._shadow is not None and (place := self._shadowed(write)) is not None:
            place.copy_(self._shadow.redirect(source))

    def fill(self, target: torch.Tensor, value: Any, operation: str) -> None:
        """A constant write into model storage."""
        write = self.describe(WriteKind.FILL, operation, target, None)
        self.writes.append(write)
        if (place := self._shadowed(write)) is not None:
            place.fill_(value)

    def _shadowed(self, write: Write) -> torch.Tensor | None:
        """The shadow of what a write touches; None without one."""
        return None if self._shadow is None else self._shadow.view(write.storage, write.view, DTYPES[write.dtype])

    def describe(self, kind: WriteKind, operation: str, target: torch.Tensor, source: torch.Tensor | None) -> Write:
        """What a write to ``target`` touches and where its values come from."""
        found = self._find(target)
        if found is None:
            raise LookupError("not model storage")
        storage, start = found
        width = target.element_size()
        if start % width:
            kind = WriteKind.OTHER
        view = StridedView(int(target.storage_offset()) + start // width, tuple(target.shape), tuple(target.stride()))
        return Write(
            kind=kind,
            operation=operation,
            storage=storage,
            view=view,
            dtype=dtype_name(target.dtype),
            source=None if source is None else self.source_view(source, tuple(target.shape)),
            current=self._inputs.current,
        )

    def source_view(self, source: torch.Tensor, shape: tuple[int, ...]) -> SourceView | None:
        """The canonical view behind a copy's source, expanded to the destination's shape."""
        spec = self._inputs.find(source)
        if spec is None or source.is_neg() or source.is_conj() or spec.name in self.changed_inputs:
            return None
        wide = source.expand(shape)
        view = StridedView(int(wide.storage_offset()), tuple(wide.shape), tuple(wide.stride()))
        return SourceView(spec.name, view, dtype_name(source.dtype))
