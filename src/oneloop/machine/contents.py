"""Check that only the optimizer changes what a model holds, by the contents of its tensors.

>>> contents = Contents(model, device=device)
>>> contents.begin()                        # after the last update
>>> loss(model, batch).backward()
>>> contents.end()                          # before the next one
>>> contents.confirm()                      # raises if a tensor has changed; may come later

A version counter of torch does not see a write through ``.data``, ``.numpy()`` or ``set_()``, and a
list that is made at the start has no tensors that a forward registers later. So the contents are
compared of all tensors that exist at the time: of small ones (1 MB in total) in every step, of all
others if a step asks for it. Nothing waits for the device until :meth:`Contents.confirm`.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.device_flag import DeviceFlag
from oneloop.basics.exit_codes import Inexact
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensor_hash import tensor_hash
from oneloop.basics.tensors import dense, local
from oneloop.machine.small_tensors import WORD, SmallTensors

_KINDS = ("parameter", "buffer")
_SMALL = 1 << 20  # bytes of all tensors that are compared in every step


class _Held(NamedTuple):
    """A tensor, and where it is registered."""

    name: str  # with its kind: "buffer norm.running_mean"
    owner: dict[str, Any]
    key: str
    trained: bool

    def tensor(self) -> Tensor:
        return local(self.owner[self.key].detach())


@dataclass(frozen=True)
class _Listed:
    """The tensors of a model at a moment."""

    small: list[_Held]  # compared in every step
    others: list[_Held]
    empty: list[_Held]  # names that have no tensor yet
    children: list[dict[str, nn.Module | None]]  # of each module: its registry of modules
    modules: list[nn.Module | None]  # in all these registries
    registries: list[dict[str, Any]]  # of all modules: those of parameters and buffers
    entries: int  # number of entries in all these registries

    @property
    def names(self) -> list[str]:
        return [one.name for one in (*self.small, *self.others)]

    def now(self) -> list[Tensor]:
        """Return the small tensors that are registered now."""
        return [local(one.owner[one.key]) for one in self.small]

    def is_outdated(self) -> bool:
        """Return whether a tensor was registered or removed since then."""
        if sum(map(len, self.registries)) != self.entries:
            return True
        # Modules are equal only if they are the same object.
        if _all_values(self.children) != self.modules:
            return True
        if any(one.owner.get(one.key) is not None for one in self.empty):
            return True
        listed = chain(self.small, self.others)
        return any(one.owner.get(one.key) is None for one in listed)


class _State(NamedTuple):
    """What is compared."""

    listed: _Listed
    words: Tensor  # int64: the bytes of small tensors in their order, then the hashes of others
    lengths: tuple[int, ...]  # bytes of each small tensor
    step: int
    everything: bool  # whether there are hashes of the other tensors

    def of_untrained(self) -> "_State":
        """Return the part with the hashes of tensors that no optimizer changes."""
        places = []
        others = []
        for place, one in enumerate(self.listed.others):
            if not one.trained:
                places.append(place)
                others.append(one)
        listed = replace(self.listed, small=[], others=others)
        return _State(listed, self.hashes[places], (), self.step, everything=False)

    @property
    def hashes(self) -> Tensor:
        """Hashes of the other tensors, if there are any."""
        return self.words[-(-sum(self.lengths) // WORD) :]

    def by_name(self) -> dict[str, Any]:
        """Return what is compared of each tensor. Host sync."""
        found: dict[str, Any] = {}
        memory = self.words.view(torch.uint8).cpu().numpy()
        end = 0
        for one, length in zip(self.listed.small, self.lengths, strict=True):
            begin = end
            end += length
            found[one.name] = memory[begin:end].tobytes()
        for one, number in zip(self.listed.others, self.hashes.tolist(), strict=False):
            found[one.name] = number
        return found


class _Comparison(NamedTuple):
    """Two states that must be equal."""

    before: _State
    after: _State
    flag: DeviceFlag | None  # whether they differ; None: they do
    when: str  # the change happened

    def differs(self) -> bool:
        return self.flag is None or bool(self.flag.read())


class Contents:
    """Compares what a model holds before and after forward and backward.

    Args:
        model: as prepared: on one process, under DDP, or sharded by FSDP2.
        device: of the run.
        compared: kinds of tensors that are compared: "parameter", "buffer".
        rejected: those of which a change is an error.
        report: gets a sentence about the first other change.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        compared: Collection[str] = _KINDS,
        rejected: Collection[str] = _KINDS,
        report: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._model = model
        self._device = device
        self._compared = compared
        self._rejected = rejected
        self._report = report
        # two steps, with up to two results each, may be unread, while a third one ends
        self._flags = deque(DeviceFlag(device) for _ in range(6))
        self._unread: deque[_Comparison] = deque()
        self._begun: _State | None = None
        self._whole: _State | None = None  # at the end of the last step that compared all tensors
        self._equal_at = 0  # the last step of which all tensors were compared, and were equal
        self._listed = self._list()
        self._small = SmallTensors(device)

    def begin(self, step: int = 0, *, everything: bool = False) -> None:
        """Record the contents after an update.

        Args:
            step: the number of the step that begins.
            everything: compare all tensors in this step, and not only small ones.
        """
        # Without an earlier state, a change between two checks would be missed.
        everything = everything or self._whole is None
        self._begun = self._state(step, everything=everything)

    def end(self, when: str = "in a step, but not by its update") -> None:
        """Compare the contents before the next update. The result is read later.

        Args:
            when: words for the message.
        """
        if self._begun is None:
            return
        before = self._begun
        self._begun = None

        # In host memory, compare small tensors in place, without a second copy.
        if self._device.type == "cpu" and not before.everything and self._is_now(before):
            self._small.reuse(before.words)
            return
        after = self._state(before.step, everything=before.everything)
        if not before.everything:
            self._compare(before, after, when)
            return

        # Large tensors that no optimizer changes must be as they were in the last such step.
        whole = self._whole
        self._whole = after
        if whole is not None and whole.listed is before.listed:
            since = f"after step {whole.step}, but not by an update"
            self._compare(whole.of_untrained(), before.of_untrained(), since)
        self._compare(before, after, when)

    def _compare(self, before: _State, after: _State, when: str) -> None:
        """Compare two states; on a device, the result is read later."""
        flag = None
        same_names = before.listed is after.listed or before.listed.names == after.listed.names
        if same_names and before.words.shape == after.words.shape:
            if self._device.type != "cpu":
                flag = self._flags[0]
                self._flags.rotate(-1)
                flag.send((before.words != after.words).any())
            elif np.array_equal(before.words.numpy(), after.words.numpy()):
                if after.everything and not self._unread:
                    self._equal_at = after.step
                return
        self._unread.append(_Comparison(before, after, flag, when))

    def confirm(self) -> None:
        """Read the results of the oldest step that were not read yet.

        Raises:
            Inexact: a tensor has changed, other than by an update.
        """
        if not self._unread:
            return
        step = self._unread[0].after.step
        while self._unread and self._unread[0].after.step == step:
            self._judge(self._unread.popleft())

    @contextmanager
    def unchanged(self, what: str) -> Iterator[None]:
        """Compare all tensors before and after ``what`` (an evaluation). Host sync.

        Raises:
            Inexact: a tensor has changed.
        """
        while self._unread:
            self.confirm()
        self.begin(self._equal_at, everything=True)
        yield
        self.end(f"in {what}")
        self.confirm()

    def _judge(self, comparison: _Comparison) -> None:
        """Raise Inexact if a tensor has changed, or report the first change."""
        after = comparison.after
        when = comparison.when
        changes = [*_changes(comparison)] if comparison.differs() else []
        if not changes:
            if after.everything:
                self._equal_at = after.step
            return

        # A change that is an error goes before one that is only reported, and that once.
        errors = [change for change in changes if change.partition(" ")[0] in self._rejected]
        if not errors:
            self._report(f"the {changes[0]} {when}")
            self._report = lambda _: None
            self._compared = self._rejected
            self._listed = self._list()
            return
        change = errors[0]

        # Of a small tensor, this step is the first one that changes it.
        large = change.rpartition(" has ")[0] in {one.name for one in after.listed.others}
        raise Inexact(
            f"the {change} {when}, so the weights would depend on the parallel layout; let nothing "
            "but the optimizer change it, or train on one process without batch.grain",
            equal_at=self._equal_at if large else None,
        )

    def _list(self) -> _Listed:
        """Find all tensors that exist now."""
        found: dict[int, _Held] = {}  # a tied tensor counts once
        empty = []
        children = []
        registries: list[dict[str, Any]] = []
        for prefix, module in self._model.named_modules():
            children.append(module._modules)
            registries += [module._parameters, module._buffers]
            for held in _registered(prefix, module, self._compared):
                if held.owner[held.key] is None:
                    empty.append(held)
                else:
                    found.setdefault(id(held.owner[held.key]), held)

        # Of the smallest ones the bytes are compared in every step.
        small = []
        others = []
        total = 0
        for held in sorted(found.values(), key=lambda one: one.tensor().nbytes):
            tensor = held.tensor()
            if not tensor.numel():
                continue
            total += tensor.nbytes
            here = tensor.device.type == self._device.type
            if total <= _SMALL and here and dense(tensor):
                small.append(held)
            else:
                others.append(held)
        return _Listed(
            small=small,
            others=others,
            empty=empty,
            children=children,
            modules=_all_values(children),
            registries=registries,
            entries=sum(map(len, registries)),
        )

    def _state(self, step: int, *, everything: bool) -> _State:
        """Return what is compared, now; with ``everything`` also the hashes of large tensors."""
        if self._listed.is_outdated():
            self._listed = self._list()
        listed = self._listed

        # Copy the bytes of small tensors.
        self._small.look_at(listed.now())
        words = self._small.copied()

        # Hash the others.
        if everything and listed.others:
            hashes = [tensor_hash(one.tensor()).to(self._device) for one in listed.others]
            words = torch.cat([words, torch.stack(hashes)])
        return _State(listed, words, self._small.lengths, step, everything)

    def _is_now(self, state: _State) -> bool:
        """Return whether small tensors in host memory are as they were."""
        if self._listed.is_outdated() or state.listed is not self._listed:
            return False
        self._small.look_at(state.listed.now())
        return self._small.lengths == state.lengths and self._small.equal(state.words)


def _all_values(registries: list[dict[str, nn.Module | None]]) -> list[nn.Module | None]:
    return list(chain.from_iterable(map(dict.values, registries)))


def _registered(prefix: str, module: nn.Module, kinds: Collection[str]) -> Iterator[_Held]:
    """Yield the tensors of these kinds that a module has registered."""
    for kind in kinds:
        owner = getattr(module, f"_{kind}s")
        for key, tensor in owner.items():
            name = bare_name(f"{prefix}.{key}".lstrip("."))
            # FSDP2 registers whole parameters for a while: remember the shard.
            registry: dict[str, Any] = {key: tensor} if isinstance(tensor, DTensor) else owner
            trained = tensor is not None and tensor.requires_grad
            yield _Held(f"{kind} {name}", registry, key, trained)


def _changes(comparison: _Comparison) -> Iterator[str]:
    """Yield which tensors differ, and how. Host sync."""
    before = comparison.before
    after = comparison.after

    # Is a tensor new, or missing?
    names_before = set(before.listed.names)
    names_after = set(after.listed.names)
    for name in after.listed.names:
        if name not in names_before:
            yield f"{name} was registered"
    for name in before.listed.names:
        if name not in names_after:
            yield f"{name} was removed"

    # Has another content?
    contents_before = before.by_name()
    for name, content in after.by_name().items():
        if name in contents_before and contents_before[name] != content:
            yield f"{name} has changed"
