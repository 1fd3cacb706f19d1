"""How a run stands on its processes: the agreement of all ranks, the stop flag, the end."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from oneloop import errors
from oneloop.data.groups import Group
from oneloop.data.order import key
from oneloop.errors import BadInput
from oneloop.watch.progress import Display
from oneloop.watch.throughput import peak_flops

_EXIT_FILE = "ONELOOP_EXIT_FILE"
_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUT = (nn.modules.dropout._DropoutNd,)


class Run:
    """The processes of one run, as one of them sees it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.ranks: int = accelerator.num_processes
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.cores = max(1, len(os.sched_getaffinity(0)) // self.local_ranks)
        self.main: bool = accelerator.is_main_process
        self.display = Display(shown=self.main)
        self.closing = ExitStack()
        """what has to be ended however the run ends"""
        self.signal: str | None = None
        self._stop_file: Path | None = None
        self._deadline = float("inf")
        self._looked = 0.0
        # A group on the host: what the ranks agree on never waits for a device.
        self._host = cast("dist.ProcessGroup | None", dist.new_group(backend="gloo") if self.ranks > 1 else None)
        self._interrupts = 0
        self.afresh = False
        """whether the groups loaded ahead are about to be dropped"""

    # --- stopping ---

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT and SIGUSR1 ask for a stop after the step; a second SIGINT ends at once."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def stop_by(self, *, file: Path, after: float) -> None:
        """Also stop when ``file`` appears, and ``after`` seconds from now."""
        self._stop_file = file
        self._deadline = time.monotonic() + after

    def _told_to_stop(self) -> bool:
        now = time.monotonic()
        if self.signal is None and now > self._deadline:
            self.signal = "stop.after"
        if self.main and self._stop_file and now - self._looked > 1.0:  # a look at the disk a second at most
            self._looked = now
            if self._stop_file.exists():
                self.signal = "a STOP file"
        return self.signal is not None

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                if os.isatty(1):
                    os.write(1, b"\x1b[?25h")  # a bar has hidden the cursor
                os._exit(128 + signal.SIGINT)

    # --- agreement ---

    def agreed(
        self, groups: Callable[[], Iterable[Group]], trouble: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[Group, float, bool, bool]]:
        """(group, weight of the global batch, whether to stop, whether a rank has trouble), one small host sum a step.

        The next step's sum is already under way while this one trains. After :meth:`begin_afresh` the groups are asked
        for anew.
        """
        self.afresh = True
        while self.afresh:
            self.afresh = False
            yield from self._agreed(groups(), trouble)

    def begin_afresh(self) -> None:
        """What :meth:`agreed` has loaded ahead is dropped. Every rank must get here, at the same step."""
        self.afresh = True

    def _agreed(
        self, groups: Iterable[Group], trouble: Callable[[], object]
    ) -> Iterator[tuple[Group, float, bool, bool]]:
        if self._host is None:
            for group in groups:
                yield group, group.weight, self._told_to_stop(), trouble() is not None
                if self.afresh:
                    return
            return
        coming: tuple[Group, Tensor, Any] | None = None
        for group in groups:
            told = torch.tensor([group.weight, self._told_to_stop(), trouble() is not None], dtype=torch.float64)
            work = dist.all_reduce(told, group=self._host, async_op=True)
            if coming is not None:
                yield self._told(*coming)
                if self.afresh:
                    work.wait()
                    return
            coming = group, told, work

    def _told(self, group: Group, told: Tensor, work: Any) -> tuple[Group, float, bool, bool]:
        work.wait()
        weight, stop, trouble = told.numpy().tolist()
        return group, weight, bool(stop), bool(trouble)

    def stop_wanted(self) -> bool:
        """Whether any rank was told to stop. Every rank must get here."""
        told = torch.tensor([float(self._told_to_stop())])
        if self._host:
            dist.all_reduce(told, group=self._host)
        return bool(told.numpy()[0])

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """What one rank finds wrong here is an error on all of them, so that they end together.

        Raises:
            BadInput: on every rank, with the first rank's message.
        """
        message: str | None = None
        try:
            yield
        except BadInput as error:
            message = str(error)
        except (ValueError, ImportError) as error:
            message = f"{error}{_where(error)}"
        for found in self.gathered(message):
            if found is not None:
                raise BadInput(found)

    def peak_flops(self) -> float:
        """What this rank's device can make per second at the run's precision."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return peak_flops(self.device, kinds.get(self.accelerator.mixed_precision, torch.float32))[0]

    def total(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over all ranks, on the device. Every rank must get here."""
        return cast(Tensor, self.accelerator.reduce(value, "sum"))

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all ranks, on the host. Every rank must get here."""
        told = torch.tensor(values, dtype=torch.float64)
        if self._host:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._host)
        return list(told.tolist())

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        values = [value]
        if self._host:
            values = [None] * self.ranks
            dist.all_gather_object(values, value, group=self._host)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self._host:
            dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    # --- the model ---

    def prepare(self, model: nn.Module, *, blocks: Sequence[str] = ()) -> nn.Module:
        """The model on its device, wrapped for DDP or sharded for FSDP2. Build the optimizer afterwards.

        Args:
            model: on any device.
            blocks: class names of its blocks: what FSDP2 gathers at once, where accelerate's config names none.
        """
        if not self.sharded:
            prepared = self.accelerator.prepare(model)
            if isinstance(prepared, nn.parallel.DistributedDataParallel):
                prepared.broadcast_buffers = has_batch_statistics(model)  # else a broadcast per forward for nothing
            return prepared  # type: ignore[no-any-return]
        # accelerate wants an optimizer beside the model, and would rebind its parameters by address; the real one is
        # built on the sharded parameters instead.
        plugin = self.accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap or list(blocks) or None
        prepared, _ = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        self.accelerator._optimizers.clear()
        return prepared  # type: ignore[no-any-return]

    @property
    def sharded(self) -> bool:
        return bool(self.accelerator.is_fsdp2)

    def reseed(self, *numbers: int) -> None:
        """Makes what is random in the model (dropout) a function of these numbers. About a microsecond."""
        number = key(*numbers)
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(number)
        elif self.device.type != "cpu":
            torch.manual_seed(number)

    # --- the end ---

    def end(self, code: int) -> NoReturn:
        """Ends this process with ``code``: nothing is left to destructors, which abort now and then under gloo."""
        leave(code, main=self.main)


def has_batch_statistics(model: nn.Module) -> bool:
    return any(isinstance(module, _BATCH_STATISTICS) for module in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Whether the model draws random numbers in training: a dropout layer, or an attention dropout in its config."""
    config = getattr(model, "config", None)
    rates = [getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")]
    return any(isinstance(m, _DROPOUT) and m.p > 0 for m in model.modules()) or any(rate for rate in rates if rate)


def _where(error: BaseException) -> str:
    """Where an error of someone else's code was raised, so that a bug there is not taken for a typing error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return "" if Path(frame.filename).is_relative_to(Path(__file__).parent) else f" ({frame.filename}:{frame.lineno})"


def leave(code: int, *, main: bool) -> NoReturn:
    """Ends this process. Under ``oneloop launch`` the code goes through a file, since torchrun makes every code 1."""
    file = os.environ.get(_EXIT_FILE)
    if file and code != errors.ERROR:
        if main:
            Path(file).write_text(str(code))
        code = 0
    elif code == errors.STOPPED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        code = 0  # torchrun would start the run again
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized() and code != errors.ERROR:  # after an error the other ranks may never come to that
        dist.destroy_process_group()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if not main and code not in (0, errors.ERROR):
            time.sleep(3)  # torchrun ends all ranks with the first that fails: let rank 0 say why first
        os._exit(code)
    raise SystemExit(code)
