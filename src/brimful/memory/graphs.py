"""CUDA graphs: the launches of a micro-batch recorded once, then replayed as one.

A micro-batch of T5 base is two thousand kernels, which take the host 60 ms to launch. On a fast card, or with a small model or
a small micro-batch, that is longer than they run. A replay takes the host one call.

A graph is bound to addresses, so it serves micro-batches of one size: tasks whose rows have one shape, and packed rows in
sequences of a fixed size (`layout.FixedSize`). Their tensors are copied into the recorded ones. Gradients are added up in
tensors that stay; where a step is one micro-batch they are written there instead, which spares zeroing and adding (2.4 of the
69 ms of a step of T5 base). If such a step is split after all, because its rows are too long for one micro-batch, gradients of
the parts before are put aside and added after each replay.

What the graph computes in between stays reserved for it, so all of it is given back before anything else of that size runs: a
micro-batch that does not fit the graph, an evaluation, a retry after an out-of-memory error. A micro-batch launched beside a
graph of its size would take its memory twice.

Python code of the loss runs only while recording. A number that it computes from a batch outside of tensors would be that of
the first batch for ever; planning compares a replay with the plain run of another batch, and leaves graphs alone if they differ.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from brimful.errors import in_one_line
from brimful.memory.oom import is_oom
from brimful.task import Loss, map_tensors

if TYPE_CHECKING:
    from brimful.memory.context import Divisor, StepContext

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
MOST_OOMS = 2
"""Out-of-memory errors with a graph in place, after which none is recorded any more."""
WORTH_RECORDING, MOST_WASTED = 10, 3
"""Recording takes 0.6 s for T5 base, and a replay saves up to 0.04. Graphs that were given up after fewer replays, because a
micro-batch of another size came, are wasted; after as many of them in a row none is recorded any more."""


def signature(batch: Any) -> Signature:
    """Shapes and dtypes of a batch's tensors: what a graph is bound to."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in _tensors(batch))


Recorder = Callable[[Callable[[], Loss], torch.device], tuple[Loss, Callable[[], object], int]]
"""Records work without running it. Returns what it will have computed, what runs it, and the bytes that this uses beyond
those that count as allocated by then."""


def record_launches(work: Callable[[], Loss], device: torch.device) -> tuple[Loss, Callable[[], object], int]:
    """A `Recorder` for CUDA."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with capture(device) as graph:
        result = work()
    return result, graph.replay, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


@contextmanager
def capture(device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what is launched within. After work that cannot be captured, torch 2.11 is left as if it were still capturing:
    on another stream, with an allocator that no longer empties its cache, and a default generator that refuses to draw. So its
    capture is ended, and one that succeeds follows, which resets the generator."""
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        try:
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                yield graph
        except Exception:
            torch.cuda.set_stream(stream)
            index = torch.cuda.current_device()
            with suppress(RuntimeError):  # it was ended
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
            with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.zeros((), device=device)
            raise


@dataclass
class _Recorded:
    """A recorded micro-batch: what to copy into, what to run, and where its results are."""

    replay: Callable[[], object]
    inputs: list[Tensor]
    divisor: Tensor
    loss: Loss
    gradients: list[tuple[nn.Parameter, Tensor]]
    pool_bytes: int
    replays: int = 0


class Graphs:
    """Runs micro-batches of one signature as a graph. The first of them runs plainly, the second is recorded."""

    def __init__(self, wanted: Signature, record: Recorder = record_launches, *, whole_step: bool = False) -> None:
        """`whole_step`: a micro-batch is a step, as a rule, so no gradients are there before it."""
        self._wanted, self._recorder, self._whole_step = wanted, record, whole_step
        self._recorded: _Recorded | None = None
        self._trained: list[nn.Parameter] = []
        """Parameters that the plain run gave a gradient."""
        self._model_state: tuple[Any, ...] = ()
        """Of the model in that run: a graph keeps computing what was trained then."""
        self._recording = False
        self._ooms = self._wasted = 0
        self.problem = ""
        """Why there is no graph, once that is certain."""

    @property
    def pool_bytes(self) -> int:
        """What a replay uses of the memory reserved for it, beyond what torch counts as allocated then."""
        return 0 if self._recorded is None else self._recorded.pool_bytes

    def run(self, context: "StepContext", batch: Any, divisor: "Divisor", plain: Callable[[], Any]) -> dict[str, Loss]:
        """Forward and backward of a micro-batch, by the graph if it serves, else by `plain()`."""
        if self.problem or isinstance(divisor, Mapping) or signature(batch) != self._wanted:
            self._note_waste()
            self.drop()
            return plain()  # type: ignore[no-any-return]
        model_state = (context.model.training, *((id(param), param.requires_grad) for param in context.params))
        if model_state != self._model_state:  # weights were frozen, unfrozen or replaced, or the mode changed
            self.drop()
            self._trained, self._model_state = [], model_state
        if self._recorded is None and not self._trained:
            terms: dict[str, Loss] = plain()
            self._trained = [param for param in context.params if param.grad is not None]
            if len(terms) != 1 or next(iter(terms.values())).log:
                self.problem = "its loss has several terms or logs values"
            return terms
        if self._recorded is None:
            if self._whole_step and any(param.grad is not None for param in self._trained):
                return plain()  # type: ignore[no-any-return]
            self._record(context, batch)
            if self._recorded is None:
                return plain()  # type: ignore[no-any-return]
        return {"loss": self._replay(self._recorded, batch, divisor)}

    def drop(self, *, out_of_memory: bool = False) -> bool:
        """Give everything back. The next micro-batch that fits is recorded again. Returns whether there was anything."""
        if self._recorded is None and not self._recording:
            return False
        self._recorded, self._trained, self._recording = None, [], False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._ooms += out_of_memory
        if self._ooms >= MOST_OOMS:
            self.problem = f"memory ran out {MOST_OOMS} times with a graph in place"
        return True

    def _note_waste(self) -> None:
        if self._recorded is not None:
            self._wasted = 0 if self._recorded.replays >= WORTH_RECORDING else self._wasted + 1
            if self._wasted >= MOST_WASTED:
                self.problem = "micro-batches of other sizes come too often"

    def _record(self, context: "StepContext", batch: Any) -> None:
        """The launches of this micro-batch. Nothing runs, and gradients stay as they are."""
        for param in self._trained:
            if param.grad is None and not self._whole_step:
                param.grad = torch.zeros_like(param)
        static = map_tensors(batch, lambda tensor: tensor.to(context.device, copy=True))
        divisor = torch.ones((), device=context.device)

        def work() -> Loss:
            (loss,) = context.forward_backward(static, divisor).values()
            return Loss(sum=loss.sum.detach(), count=_detached(loss.count))

        try:
            self._recording = True
            loss, replay, pool_bytes = self._recorder(work, context.device)
            self._recording = False
        except Exception as error:
            if is_oom(error):
                raise
            self._recording = False
            self.problem = f"recording failed: {in_one_line(error)}"
            if self._whole_step:
                context.drop_gradients()  # nothing was computed in them
            return
        gradients = [(param, param.grad) for param in self._trained if param.grad is not None]
        if self._whole_step:
            context.drop_gradients()  # what recording left there was not computed, so a replay must not add it
        self._recorded = _Recorded(replay, _tensors(static), divisor, loss, gradients, pool_bytes)

    def _replay(self, recorded: _Recorded, batch: Any, divisor: Any) -> Loss:
        written, earlier = self._put_gradients_on(recorded)
        for static, tensor in zip(recorded.inputs, _tensors(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        value = divisor if isinstance(divisor, (int, float)) else divisor.before_forward(batch)
        recorded.divisor.copy_(value) if isinstance(value, Tensor) else recorded.divisor.fill_(value)
        recorded.replay()
        recorded.replays += 1
        if earlier:
            torch._foreach_add_(written, earlier)
        count = recorded.loss.count
        return Loss(sum=recorded.loss.sum.clone(), count=count.clone() if isinstance(count, Tensor) else count)

    def _put_gradients_on(self, recorded: _Recorded) -> tuple[list[Tensor], list[Tensor]]:
        """The recorded gradients on their parameters, with what these held. Where the replay will write over that, it is
        returned instead: the recorded gradients, and what to add to them afterwards."""
        new, written, earlier = list[Tensor](), list[Tensor](), list[Tensor]()
        for param, held in recorded.gradients:
            before, param.grad = param.grad, held
            if before is None:
                new.append(held)
            elif self._whole_step:
                written.append(held)
                earlier.append(held.clone() if before is held else before)
            elif before is not held:
                held.copy_(before)
        if new and not self._whole_step:
            torch._foreach_zero_(new)
        return written, earlier


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found
