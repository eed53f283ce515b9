"""Shares of a sweep on a Ray cluster, a card for each, or cores where there are none.

Ray moves the shares and streams the messages back; what is trained and who writes results is as on one box. `--ray auto`
joins the cluster that this machine belongs to, `--ray local` starts one here for as long as the sweep takes.
"""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from brimful.errors import BadOption, LostProcess, MissingExtra, NoConnection, UserError, in_one_line
from brimful.tasks.heads.packed.share import Message, Share, work

_ANSWERS_S = 5.0


def check_address(address: str) -> None:
    """Whether something listens at a host and port, which Ray itself asks for minutes; `auto` and `local` name none."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadOption(
            f"--ray {address}: nothing answers there ({in_one_line(error)}); give the address that `ray start --head` printed, or auto or local"
        ) from None


def connect(address: str) -> tuple[Any, int, int]:
    """Ray, and the cluster's cards and cores."""
    check_address(address)
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    try:
        if not ray.is_initialized():
            ray.init(
                address=None if address == "local" else address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:
        raise NoConnection(
            f"--ray {address}: no cluster answers there ({in_one_line(error)}); start one with `ray start --head`, or use --ray local"
        ) from None
    there = ray.cluster_resources()
    return ray, int(there.get("GPU", 0)), int(there.get("CPU", 1))


def run_shares(ray: Any, shares: Sequence[Share], stop: Callable[[], bool] = lambda: False) -> Iterator[Message]:
    """All messages of all shares, as they come. With `stop` the tasks are cancelled: what they did since they last told
    their state, 20 s at most, is lost."""
    shares = [share for share in shares if any(share.groups)]
    resources = {"num_gpus": 1} if shares and shares[0].device.startswith("cuda") else {"num_cpus": 1}
    remote = ray.remote(**resources)(_stream).options(num_returns="streaming")
    streams = {remote.remote(share): share for share in shares}
    while streams:
        ready, _ = ray.wait(list(streams), num_returns=1, fetch_local=False, timeout=1)
        if stop():
            for stream in streams:
                ray.cancel(stream)
            return
        for stream in ready:
            try:
                message = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (
                    cause if isinstance(cause, UserError) else LostProcess(f"a Ray task failed: {in_one_line(cause)}")
                ) from None
            except ray.exceptions.RayError as error:
                raise LostProcess(
                    f"a machine of the cluster was lost ({in_one_line(error)}); what was trained is kept: the same command goes on from there"
                ) from None
            yield message


def _stream(share: Share) -> Iterator[Message]:
    yield from work(share)
