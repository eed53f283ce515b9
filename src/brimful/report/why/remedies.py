"""What helps, ranked: for each kind of failure the fixes with what they save and cost, and the exact setting.

A full GPU has a module of its own, `gpu_remedies`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from brimful.report.why.diagnosis import Fix
from brimful.report.why.gpu_remedies import GpuRemedies
from brimful.report.why.log_settings import Settings
from brimful.report.why.wanted_block import Block
from brimful.units import GiB


def remedies(
    kind: str, figures: Mapping[str, Any], settings: Settings, *, block: Block | None = None
) -> tuple[Fix, ...]:
    """Fixes for this kind of failure, the best first: those that are enough alone before those that are not."""
    makers: dict[str, Callable[[], Iterator[Fix]]] = {
        "gpu-out-of-memory": lambda: GpuRemedies(figures, settings, block).fixes(),
        "gpu-library-out-of-memory": lambda: GpuRemedies(figures, settings, block).fixes(),
        "no-batch-fits": lambda: _no_batch(figures, settings),
        "host-killed": lambda: _host(figures, settings),
        "host-out-of-memory": lambda: _host_block(figures, settings),
        "worker-lost": lambda: _worker_lost(settings),
        "shm-full": lambda: _shm(settings),
    }
    kind = "stopped" if kind == "killed" else kind
    fixes = list(makers[kind]()) if kind in makers else list(_OTHER.get(kind, ()))
    if kind == "nan-loss" and settings.precision != "fp16" and figures.get("precision") != "fp16":
        fixes = [fix for fix in fixes if fix is not _TO_BF16]
    if kind == "disk-full" and figures.get("writing") == "file":
        fixes = [_FIND_FILES, *(fix for fix in fixes if fix is not _FIND_FILES and "damaged" not in fix.title)]
    return tuple(sorted(fixes, key=lambda fix: fix.enough is False))


def _no_batch(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    yield Fix(
        title="Look for a row that is far longer than the others, and cut rows to a length",
        saves="all that the longest row takes beyond that length",
        costs="what is beyond that length is not learnt",
        flags={
            "brimful": "--max-tokens 512",
            "transformers": "tokenizer(texts, truncation=True, max_length=512)",
            "accelerate": "tokenizer(texts, truncation=True, max_length=512)",
            "lightning": "tokenizer(texts, truncation=True, max_length=512)",
        },
    )
    yield from (
        fix
        for fix in GpuRemedies(figures, settings, None).fixes()
        if "micro-batch" not in fix.title and "Cut rows" not in fix.title
    )


def _host(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    workers = settings.workers
    fewer = max(1, workers // 2) if workers else None
    if workers != 0:
        yield Fix(
            title=f"Use {fewer} instead of {workers} loader workers"
            if fewer and fewer != workers
            else "Use fewer loader workers, and let each read less ahead",
            saves="what each worker holds: its batches, and its copy of Python objects",
            costs="slower reading, if the CPU is the bottleneck",
            flags={
                "brimful": f"--workers {fewer or 1} --prefetch 1",
                "transformers": f"dataloader_num_workers={fewer or 1}, dataloader_prefetch_factor=2",
                "accelerate": f"DataLoader(num_workers={fewer or 1}, prefetch_factor=2)",
                "lightning": f"DataLoader(num_workers={fewer or 1}, prefetch_factor=2)",
            },
        )
    yield Fix(
        title="Read the data from disk when it is needed (memory-mapped) instead of loading all of it",
        saves="most of the size of the data, in every process",
        costs="none with a fast disk",
        flags={
            "brimful": "brimful data tokenize rows.jsonl --tokenizer tokenizer --output store",
            "transformers": 'datasets.load_dataset("json", data_files="rows.jsonl", keep_in_memory=False)',
            "accelerate": 'datasets.load_dataset("json", data_files="rows.jsonl", streaming=True)',
            "lightning": 'datasets.load_dataset("json", data_files="rows.jsonl", streaming=True)',
        },
    )
    limit = figures.get("limit_bytes")
    wanted = figures.get("wanted_bytes") or 0
    more = str(max(2 * round(limit / GiB) if limit and limit >= GiB else 32, round(1.5 * wanted / GiB)))
    yield Fix(
        title="Give the container or job more RAM"
        if limit or figures.get("signal") is None
        else "Find out who was killed and at which limit, then give the container or job more RAM",
        flags={"shell": f"sudo dmesg -T | grep -i 'killed process'; docker run --memory {more}g; sbatch --mem={more}G"},
    )
    yield Fix(
        title="Load weights without a second copy in RAM, and do not keep several checkpoints there",
        saves="2–8 bytes per weight",
        flags={
            "transformers": "from_pretrained(name, dtype=torch.bfloat16)",
            "accelerate": "torch.load(path, mmap=True, weights_only=True)",
            "lightning": "torch.load(path, mmap=True, weights_only=True)",
        },
    )


def _host_block(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    """An allocation failed, so nobody was killed: where its size is known, the tensor itself is the first to look at."""
    fixes = list(_host(figures, settings))
    if (figures.get("wanted_bytes") or 0) >= GiB:
        yield Fix(
            title="Make the tensor of the traceback's last line smaller: fewer rows at once, or in parts",
            saves="a share of it, as large as the rows left out",
            costs="more, smaller steps",
        )
        fixes.sort(key=lambda fix: "loader workers" in fix.title)
    for fix in fixes:
        shell = fix.flags.get("shell", "").removeprefix("sudo dmesg -T | grep -i 'killed process'; ")
        yield replace(fix, flags={**fix.flags, "shell": shell}) if shell else fix


def _shm(settings: Settings) -> Iterator[Fix]:
    yield Fix(
        title="Give the container a larger /dev/shm",
        saves=None,
        flags={
            "shell": "docker run --shm-size 8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory at /dev/shm"
        },
    )
    fewer = max(1, settings.workers // 2) if settings.workers else 1
    yield Fix(
        title="Use fewer loader workers, and let each read less ahead",
        saves="a batch for each worker and each batch it reads ahead",
        costs="slower reading, if the CPU is the bottleneck",
        flags={
            "brimful": f"--workers {fewer} --prefetch 1",
            "transformers": f"dataloader_num_workers={fewer}, dataloader_prefetch_factor=1",
            "accelerate": f"DataLoader(num_workers={fewer}, prefetch_factor=1)",
            "lightning": f"DataLoader(num_workers={fewer}, prefetch_factor=1)",
        },
    )
    yield Fix(
        title="Remove what dead processes left in /dev/shm",
        flags={"shell": "df -h /dev/shm; ls -l /dev/shm; rm /dev/shm/torch_* /dev/shm/nccl-*"},
    )


def _worker_lost(settings: Settings) -> Iterator[Fix]:
    yield Fix(
        title="Read in the training process once, so that the worker's error is shown",
        costs="slower reading, for this test",
        flags={
            "brimful": "--workers 0",
            "transformers": "dataloader_num_workers=0",
            "accelerate": "DataLoader(num_workers=0)",
            "lightning": "DataLoader(num_workers=0)",
        },
    )
    yield Fix(
        title="Ask the kernel whether it killed the worker, and look at /dev/shm",
        flags={"shell": "sudo dmesg -T | grep -i 'killed process'; df -h /dev/shm"},
    )


_TO_BF16 = Fix(
    title="Compute in bf16 instead of fp16, which overflows above 65,504",
    costs="results are rounded to 8 bits instead of 11",
    flags={
        "brimful": "--precision bf16",
        "transformers": "bf16=True, fp16=False",
        "accelerate": 'Accelerator(mixed_precision="bf16")',
        "lightning": 'Trainer(precision="bf16-mixed")',
    },
)
_FIND_FILES = Fix(
    title="Find what fills the disk, and move caches and temporary files",
    flags={"shell": "df -h . /tmp ~/.cache; HF_HOME=/big/disk TMPDIR=/big/disk"},
)
_OTHER: dict[str, tuple[Fix, ...]] = {
    "kernel-shared-memory": (
        Fix(title="Use smaller blocks or fewer stages in this kernel", costs="a slower kernel", flags={"shell": "kernel_options={'BLOCK_M': 64, 'BLOCK_N': 32, 'num_stages': 1}"}),
        Fix(title="Leave this part uncompiled", costs="slower steps", flags={"brimful": "--compile off", "transformers": "torch_compile=False", "accelerate": 'Accelerator(dynamo_backend="no")', "lightning": "torch.compiler.disable(model)"}),
    ),
    "nccl-shm": (
        Fix(title="Switch off NCCL's cuMem host allocations", flags={"shell": "NCCL_CUMEM_HOST_ENABLE=0"}),
        Fix(title="Look whether /dev/shm is full, and give the container more", flags={"shell": "df -h /dev/shm; docker run --shm-size 8g (or --ipc=host)"}),
        Fix(title="Do without shared memory", costs="slower exchange between the cards of a machine", flags={"shell": "NCCL_SHM_DISABLE=1"}),
    ),
    "too-many-files": (
        Fix(title="Raise the limit on open files", flags={"shell": "ulimit -n 65535"}),
        Fix(title="Hand over tensors by file name instead of by open file", costs="files stay in /dev/shm if a process is killed", flags={"shell": 'torch.multiprocessing.set_sharing_strategy("file_system")'}),
        Fix(title="Use fewer loader workers, and let each read less ahead", costs="slower reading, if the CPU is the bottleneck", flags={"brimful": "--workers 2", "transformers": "dataloader_num_workers=2", "accelerate": "DataLoader(num_workers=2)", "lightning": "DataLoader(num_workers=2)"}),
    ),
    "disk-full": (
        Fix(title="Keep fewer checkpoints", saves="the size of a checkpoint each: about 12 bytes per weight with AdamW", flags={"brimful": "--keep 1", "transformers": "save_total_limit=2", "accelerate": "ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)", "lightning": "ModelCheckpoint(save_top_k=1)"}),
        Fix(title="Save only the weights, where the run need not be resumed", saves="two thirds of a checkpoint with AdamW", costs="it cannot be resumed exactly", flags={"transformers": "save_only_model=True", "accelerate": "accelerator.save_model(model, folder)", "lightning": "ModelCheckpoint(save_weights_only=True)"}),
        _FIND_FILES,
        Fix(title="Delete the checkpoint that was being written: it is damaged"),
    ),
    "gpu-fault": (
        Fix(title="Do not retry: the CUDA context is lost, so start a new process"),
        Fix(title="Run the same batch on the CPU, which names the line and the value", costs="slow, for this test", flags={"brimful": "--device cpu", "transformers": "use_cpu=True", "accelerate": "accelerate launch --cpu train.py", "lightning": 'Trainer(accelerator="cpu")'}),
        Fix(title="Make kernels report where they fail", costs="slow, for this test", flags={"shell": "CUDA_LAUNCH_BLOCKING=1"}),
        Fix(title="Compare the largest token id with the embedding table, and the largest label with the outputs", flags={"shell": "model.resize_token_embeddings(len(tokenizer))"}),
    ),
    "gpu-hardware": (
        Fix(title="Look up the Xid, and ask whoever runs the machine: reset the card, or take it out of use", flags={"shell": "sudo dmesg -T | grep -i xid; nvidia-smi -q -d ECC"}),
        Fix(title="Continue from the last checkpoint on another card", flags={"brimful": "--resume --device cuda:1", "transformers": "trainer.train(resume_from_checkpoint=True)", "accelerate": "accelerator.load_state(folder)", "lightning": 'trainer.fit(model, ckpt_path="last")'}),
    ),
    "driver": (
        Fix(title="Install a torch build for this driver and card, or a newer driver", flags={"shell": "nvidia-smi; python -m torch.utils.collect_env; pip install torch --index-url https://download.pytorch.org/whl/cu126"}),
        Fix(title="Look at the whole set-up", flags={"brimful": "brimful doctor"}),
    ),
    "nccl-duplicate-gpu": (
        Fix(title="Start no more processes on a machine than it has cards, and give each its own card", flags={"brimful": "--processes N", "transformers": "torchrun --nproc-per-node N train.py", "accelerate": "accelerate launch --num_processes N train.py", "lightning": "Trainer(devices=N)", "shell": 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'}),
    ),
    "nccl-timeout": (
        Fix(title="Look at the other ranks' logs: the one that is missing in this message holds the cause", flags={"shell": "torchrun --log-dir logs --redirects 3 train.py"}),
        Fix(title="See in which collective each rank waits", flags={"shell": "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_DISTRIBUTED_DEBUG=DETAIL"}),
        Fix(title="Give slow work (tokenizing, saving, evaluating on one rank) more time", costs="a real hang is noticed later", flags={"transformers": "ddp_timeout=7200", "accelerate": "InitProcessGroupKwargs(timeout=timedelta(hours=2))", "lightning": "DDPStrategy(timeout=timedelta(hours=2))"}),
    ),
    "nccl-peer-lost": (
        Fix(title="Look for the rank that ended first: its log holds the cause", flags={"shell": "torchrun --log-dir logs --redirects 3 train.py; sudo dmesg -T | grep -i 'killed process'"}),
        Fix(title="If no rank ended by itself, test the network between the machines", flags={"shell": "NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0"}),
    ),
    "nccl-error": (
        Fix(title="Let NCCL say what failed", flags={"shell": "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ALLOC"}),
        Fix(title="Try without peer-to-peer copies, and with a larger /dev/shm", costs="slower exchange between cards", flags={"shell": "NCCL_P2P_DISABLE=1; docker run --shm-size 8g"}),
        Fix(title="Check that all cards can add up a number", flags={"brimful": "brimful doctor"}),
    ),
    "connection": (
        Fix(title="End the run that holds the port, or use another port", flags={"shell": "torchrun --master-port 29511 train.py; ss -ltnp | grep 29500", "accelerate": "accelerate launch --main_process_port 29511 train.py"}),
        Fix(title="Check that every machine reaches MASTER_ADDR and MASTER_PORT", flags={"shell": "nc -vz $MASTER_ADDR $MASTER_PORT"}),
    ),
    "stopped": (
        Fix(title="Continue from the last checkpoint", flags={"brimful": "brimful train --run RUN --resume", "transformers": "trainer.train(resume_from_checkpoint=True)", "accelerate": "accelerator.load_state(folder)", "lightning": 'trainer.fit(model, ckpt_path="last")'}),
    ),
    "time-limit": (
        Fix(title="Save and leave before the limit, and continue in a new job", flags={"brimful": "--time-limit 8h", "transformers": "save_steps=500, trainer.train(resume_from_checkpoint=True)", "accelerate": "accelerator.save_state(folder)", "lightning": "Trainer(max_time='00:08:00:00')"}),
    ),
    "missing-package": (
        Fix(title="Install the package in this environment", flags={"brimful": "pip install 'brimful[eightbit]'", "shell": "python -m pip install -U bitsandbytes; python -m bitsandbytes"}),
    ),
    "crashed": (
        Fix(title="Find out where it crashed", flags={"shell": "python -X faulthandler train.py; sudo dmesg -T | tail"}),
        Fix(title="Read in the training process once, and reinstall what has compiled code", flags={"brimful": "--workers 0", "transformers": "dataloader_num_workers=0", "accelerate": "DataLoader(num_workers=0)", "lightning": "DataLoader(num_workers=0)"}),
    ),
    "nan-loss": (
        _TO_BF16,
        Fix(title="Lower the learning rate, warm it up for longer, and clip gradients", costs="slower learning", flags={"brimful": "--lr 1e-4 --warmup 5% --clip-norm 1.0", "transformers": "learning_rate=1e-4, warmup_steps=500, max_grad_norm=1.0", "accelerate": "accelerator.clip_grad_norm_(model.parameters(), 1.0)", "lightning": "Trainer(gradient_clip_val=1.0)"}),
        Fix(title="Find the rows of the first bad step: empty labels, zero lengths, or values that are not finite", flags={"shell": "torch.autograd.set_detect_anomaly(True)"}),
    ),
}  # fmt: skip
