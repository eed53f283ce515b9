"""Trackers (TensorBoard, Weights & Biases, MLflow, Trackio), fed by the same events as everything else.

Accelerate's tracker classes talk to the services. What is added here is a queue and a thread for each, because a log call
may take as long as a database or a server takes to answer: queued, a step pays 5 to 10 µs for it. All calls to a tracker
come from its own thread, which MLflow and Trackio insist on. A tracker that cannot start, or fails later, is reported once
and switched off; training continues, and `events.jsonl` has everything. At the end the queue is emptied for at most 30 s.

TensorBoard, wandb and MLflow write to the run's folder, Trackio to its own (where `trackio show` looks), unless their
variables say otherwise: WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR … A resumed run continues the same curves:
`trackers.json` keeps the names under which the services know it.
"""

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from brimful.errors import BadOption, BadRun, MissingExtra, in_one_line
from brimful.training.events import number

QUEUE_POINTS = 10_000
"""Points that wait for a slow tracker; more are dropped, and counted."""
START_S, DRAIN_S = 30.0, 30.0
"""How long a run waits for a tracker to start, and at its end for one to finish."""
PREFIXES = {"step": "train", "eval": "eval"}
"""The events that are logged, and the prefix of their names."""

log = logging.getLogger("brimful")
Note = Callable[[str], object]
Values = dict[str, Any]


def open_trackers(
    names: Sequence[str], run: Path, config: Mapping[str, Any], note: Note = log.warning, *, rank: int | None = None
) -> "list[Tracker]":
    """The trackers asked for, as listeners of a journal; on rank 0 only.

    `config` is stored with the run; `note` is called from a tracker's own thread.
    """
    names = list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in STARTS]:
        raise BadOption(f"trackers={','.join(unknown)} is unknown. Try: {', '.join(STARTS)}.")
    for name in names:
        if find_spec(name) is None:
            raise MissingExtra(name, "trackers")
    if int(os.environ.get("RANK", "0")) if rank is None else rank:
        return []
    trackers = [Tracker(name, partial(_without_accelerate_state, STARTS[name], run), config, note) for name in names]
    for tracker in trackers:
        tracker.wait()
    return trackers


class Tracker:
    """One tracker: called with every event, never in the way. An `end` event closes it."""

    def __init__(self, name: str, start: Callable[[], Any], config: Mapping[str, Any], note: Note) -> None:
        self.name, self._note = name, note
        self._start, self._config = start, _flat(config)
        self._queue: queue.Queue[tuple[Values, int] | None] = queue.Queue(QUEUE_POINTS)
        self._started, self._off = threading.Event(), False
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float = START_S) -> None:
        """Until it has started, or cannot."""
        if not self._started.wait(timeout_s):
            self._say(f"{self.name} has not started within {timeout_s:g} s; training begins, and its points wait")

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] in PREFIXES and not self._off:
            try:
                self._queue.put_nowait((scalars(event), event["step"]))
            except queue.Full:
                self._dropped += 1
        elif event["event"] == "end":
            self.close()

    def close(self, timeout_s: float = DRAIN_S) -> None:
        """Send what waits and finish; the rest is dropped. A second call does nothing."""
        if not self._thread.is_alive():
            return
        start = time.monotonic()
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, start + timeout_s - time.monotonic()))
        if self._thread.is_alive() and not self._off:
            self._off = True
            self._note(
                f"{self.name} did not take {self._queue.qsize()} points within {timeout_s:g} s; they are dropped"
            )
        elif self._dropped and not self._off:
            self._say(f"{self.name} was too slow for {self._dropped} points; events.jsonl has them")

    def _say(self, message: str) -> None:
        try:
            self._note(message)
        except Exception:
            log.warning(message)

    def _work(self) -> None:
        """The thread: start, log, finish. Whatever fails ends it."""
        try:
            with _stdout_to_stderr():
                tracker = self._start()
                tracker.start()
            tracker.store_init_configuration(self._config)
            self._started.set()
            while (item := self._queue.get()) is not None and not self._off:
                tracker.log(*item)
            with _stdout_to_stderr():
                tracker.finish()
        except BaseException as error:  # wandb leaves by SystemExit
            self._off = True
            self._say(f"{self.name} is switched off, training continues: {in_one_line(error)}")
        finally:
            self._started.set()


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a step or an evaluation by name: `train/loss`, `train/terms/words`, `eval/bleu`."""
    prefix = PREFIXES[event["event"]]
    return {f"{prefix}/{name}": value for name, value in _figures(event) if name != "step"}


def _figures(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, part in event.items():
        if isinstance(part, Mapping):
            yield from ((f"{name}/{inner}", value) for inner, value in _figures(part))
        elif (value := number(event, name)) is not None:
            yield name, value


def _flat(config: Mapping[str, Any], prefix: str = "") -> Values:
    """One level, as trackers want it: `options/lr`. What is neither number nor text becomes text; None is left out."""
    values: Values = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= _flat(value, f"{prefix}{name}/")
        elif value is not None:
            values[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return values


def _tensorboard(run: Path) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker("tensorboard", run)


def _wandb(run: Path) -> Any:
    import wandb
    from accelerate.tracking import WandBTracker

    quiet = wandb.Settings(console="off", silent=True)
    wandb.setup(quiet)  # before it can ask for a key: the terminal is not its own
    names = _known_names(run, {"wandb": uuid.uuid4().hex[:8]})
    return WandBTracker(
        os.environ.get("WANDB_PROJECT", "brimful"), name=run.name, id=names["wandb"], resume="allow", dir=str(run),
        settings=quiet,
    )  # fmt: skip


def _mlflow(run: Path) -> Any:
    import mlflow
    from accelerate.tracking import MLflowTracker

    class Resumed(MLflowTracker):  # type: ignore[misc]
        """Remembers the id that MLflow gave the run, to continue with it."""

        def start(self) -> None:
            if self.run_id is None:  # MLFLOW_RUN_ID comes first
                self.run_id: str | None = _known_names(run, {}).get("mlflow")
            super().start()
            _known_names(run, {"mlflow": self.active_run.info.run_id})

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run.resolve() / 'mlflow.db'}")
    return Resumed("brimful", logging_dir=(run.resolve() / "mlflow").as_uri(), run_name=run.name)


def _trackio(run: Path) -> Any:
    from accelerate.tracking import TrackioTracker

    names = _known_names(run, {"trackio": f"{run.name}-{uuid.uuid4().hex[:4]}"})
    return TrackioTracker(
        "brimful", name=names["trackio"], resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
    )


STARTS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio,
}  # fmt: skip


def _known_names(run: Path, new: Mapping[str, str]) -> dict[str, str]:
    """What `trackers.json` holds, with what is new to it added."""
    path = run / "trackers.json"
    try:
        names = json.loads(path.read_text()) if path.exists() else {}
        if missing := {name: value for name, value in new.items() if name not in names}:
            names |= missing
            path.write_text(json.dumps(names))
    except (OSError, ValueError) as error:
        raise BadRun(f"{path} cannot be used ({in_one_line(error)}). Try: remove it to begin new curves.") from error
    return names


def _without_accelerate_state(make: Callable[[Path], Any], run: Path) -> Any:
    """A tracker without Accelerate's PartialState, which would choose a device, set thread counts and join a process group.

    Its logger insists on that state, so it gets a plain one; and which process logs was decided above.
    """
    from accelerate import tracking

    tracking.logger = _PlainLogger(logging.getLogger("accelerate.tracking"), {})
    tracker = make(run)
    tracker.main_process_only = False
    return tracker


class _PlainLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    def warning_once(self, message: str, *args: Any) -> None:
        self.warning(message, *args)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Greetings of services go to stderr: stdout is for results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
