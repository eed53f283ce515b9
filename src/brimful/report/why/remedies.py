"""What helps: for each kind of failure the fixes, the best first, with what they save and cost, and the exact setting.

Those for a full GPU are in `gpu_remedies`. Commands can be typed as they are where the log tells what to put in; what only the user knows is
a word in capitals.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from brimful.report.why.diagnosis import Fix, fix
from brimful.report.why.gpu_messages import Block, Settings
from brimful.report.why.gpu_remedies import NOT_LEARNT, GpuRemedies, truncated
from brimful.units import GiB

VLLM_SHARE = 0.2
"""Of a card: what vLLM needs for a model of any use, by rule of thumb."""
_FEWER_WORKERS, _SLOWER_READING = (
    "Use fewer loader workers, and let each read less ahead",
    "slower reading, if the CPU is the bottleneck",
)
_STREAMED = 'datasets.load_dataset("json", data_files="rows.jsonl", streaming=True)'
_MAPPED = "torch.load(path, mmap=True, weights_only=True)"
_KERNEL_LOG = "sudo dmesg -T | grep -i 'killed process'"


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
        "shm-full": lambda: _shm(settings),
        "vllm-no-room": lambda: _vllm(figures),
        "program-memory-limit": lambda: iter(_PROGRAMS[figures["program"]]),
        "nan-loss": lambda: _nan_loss(figures, settings),
        "missing-package": lambda: _missing_package(figures),
        "download-failed": lambda: _download(figures),
    }
    kind = "stopped" if kind == "killed" else kind
    fixes = list(makers[kind]()) if kind in makers else list(_OTHER.get(kind, ()))
    if kind == "disk-full" and figures.get("writing") == "file":
        fixes = [_FIND_FILES, *(one for one in fixes if one is not _FIND_FILES and "damaged" not in one.title)]
    return tuple(sorted(fixes, key=lambda one: one.enough is False))


def _workers(count: int, ahead: int | None = None) -> dict[str, Any]:
    """Loader workers, and how many batches each reads ahead, as each framework names them."""
    hf, loader = ("", "") if ahead is None else (f", dataloader_prefetch_factor={ahead}", f", prefetch_factor={ahead}")
    loader = f"DataLoader(num_workers={count}{loader})"
    brimful = f"--workers {count}" + " --prefetch 1" * (ahead is not None)
    return {"brimful": brimful, "transformers": f"dataloader_num_workers={count}{hf}", "accelerate": loader, "lightning": loader}  # fmt: skip


# ---- Host RAM and /dev/shm -----------------------------------------------------------------------------------------------


def _no_batch(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    yield fix(
        "Look for a row that is far longer than the others, and cut rows to a length", costs=NOT_LEARNT,
        saves="all that the longest row takes beyond that length", brimful="--max-tokens 512", peers=truncated("512"),
    )  # fmt: skip
    fixes = GpuRemedies(figures, settings, None).fixes()
    yield from (one for one in fixes if "micro-batch" not in one.title and "Cut rows" not in one.title)


def _host(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    if settings.offloaded:
        yield fix("Offload less to host RAM: to a disk, or nothing", saves="12 bytes per trained weight for the state of AdamW", costs="slower steps from a disk, or more memory on the cards", transformers='deepspeed: "offload_optimizer": {"device": "nvme", "nvme_path": "/fast/disk"}')  # fmt: skip
    workers = settings.workers
    fewer = max(1, workers // 2) if workers else None
    if workers != 0:
        yield fix(
            f"Use {fewer} instead of {workers} loader workers" if fewer and fewer != workers else _FEWER_WORKERS,
            saves="what each worker holds: its batches, and its copy of Python objects", costs=_SLOWER_READING, **_workers(fewer or 1, 2),
        )  # fmt: skip
    yield fix(
        "Read the data from disk when it is needed (memory-mapped) instead of loading all of it", costs="none with a fast disk",
        saves="most of the size of the data, in every process", brimful="brimful data tokenize rows.jsonl --tokenizer tokenizer --output store",
        transformers='datasets.load_dataset("json", data_files="rows.jsonl", keep_in_memory=False)', accelerate=_STREAMED, lightning=_STREAMED,
    )  # fmt: skip
    limit, wanted = figures.get("limit_bytes"), figures.get("wanted_bytes") or 0
    if figures.get("scope") == "machine":
        yield fix(
            "End other programs on this machine, or use one with more RAM", shell="free -h; ps aux --sort=-rss | head"
        )
    else:
        more = max(2 * math.ceil((limit or figures.get("process_bytes") or 0) / GiB), round(1.5 * wanted / GiB))
        size, mem = (f"{more}g", f"{more}G") if more else ("SIZE", "SIZE")
        yield fix(
            "Give the container or job more RAM" if limit or figures.get("signal") is None
            else "Find out who was killed and at which limit, then give the container or job more RAM",
            shell=f"{'' if figures.get('by') else f'{_KERNEL_LOG}; '}docker run --memory {size}; sbatch --mem={mem}; Kubernetes: resources.limits.memory",
        )  # fmt: skip
    yield fix(
        "Load weights without a second copy in RAM, and do not keep several checkpoints there", saves="2–8 bytes per weight",
        transformers="from_pretrained(name, dtype=torch.bfloat16)", accelerate=_MAPPED, lightning=_MAPPED,
    )  # fmt: skip


def _host_block(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    """An allocation failed, so nobody was killed: where its size is known, the tensor itself is the first to look at."""
    fixes = list(_host(figures, settings))
    if (figures.get("wanted_bytes") or 0) >= GiB:
        yield fix(
            "Make the tensor of the traceback's last line smaller: fewer rows at once, or in parts",
            saves="a share of it, as large as the rows left out", costs="more, smaller steps",
        )  # fmt: skip
        fixes.sort(key=lambda one: "loader workers" in one.title)
    if figures.get("system") == "windows":
        fixes = [one for one in fixes if "RAM" not in one.title or "shell" not in one.flags]
        fixes.insert(1, fix("Enlarge the paging file of Windows, on a disk with room", costs="none: most of it is only promised", shell="SystemPropertiesPerformance.exe (Advanced, Virtual memory)"))  # fmt: skip
    for one in fixes:
        shell = one.flags.get("shell", "").removeprefix(f"{_KERNEL_LOG}; ")
        yield replace(one, flags={**one.flags, "shell": shell}) if shell else one


def _shm(settings: Settings) -> Iterator[Fix]:
    yield fix(
        "Give the container a larger /dev/shm",
        shell="docker run --shm-size 8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory at /dev/shm",
    )
    if settings.workers != 0:
        yield fix("Read in the training process: without loader workers no batch goes through /dev/shm", costs=_SLOWER_READING, **_workers(0))  # fmt: skip
    if settings.workers is None or settings.workers > 1:
        fewer = max(1, settings.workers // 2) if settings.workers else 1
        yield fix(_FEWER_WORKERS, saves="a batch for each worker and each batch it reads ahead", costs=_SLOWER_READING, **_workers(fewer, 1))  # fmt: skip
    yield fix(
        "Look for what dead processes left in /dev/shm, and remove the files that no process holds",
        shell="df -h /dev/shm; ls -l /dev/shm; fuser -v /dev/shm/*",
    )


# ---- Beside a training -------------------------------------------------------------------------------------------------


def _vllm(figures: Mapping[str, Any]) -> Iterator[Fix]:
    """By its message: the card is taken, one request is too long for the cache, or there is no room for a cache at all."""
    free, total = figures.get("free_bytes"), figures.get("total_bytes")
    if free is None or not total:
        if tokens := figures.get("fitting_tokens"):
            yield fix(f"Allow requests of at most {tokens:,} tokens", costs="shorter prompts and answers", shell=f"vllm serve MODEL --max-model-len {tokens}; TRL: GRPOConfig(vllm_max_model_length={tokens})")  # fmt: skip
            yield fix("Keep the cache in 8 bits, which halves it", costs="slightly other answers", shell="vllm serve MODEL --kv-cache-dtype fp8")  # fmt: skip
        yield fix("Give vLLM a larger share of the card, if nothing else is on it", shell="nvidia-smi; vllm serve MODEL --gpu-memory-utilization 0.95")  # fmt: skip
        yield fix("Divide the model between two cards, or serve a quantized one", shell="vllm serve MODEL --tensor-parallel-size 2")  # fmt: skip
        return
    share = math.floor((free - 0.01 * GiB) / total * 100) / 100  # as printed, it may be rounded up
    stop = fix("Stop the other processes on the card, or use another card", shell="nvidia-smi; CUDA_VISIBLE_DEVICES=1")
    if share < 0.01:
        yield stop
        return
    give = fix(
        f"Give vLLM the {share:.0%} of the card that are free, if the weights fit in them".replace("%", " %"),
        costs="fewer or shorter answers at once",
        shell=f"vllm serve MODEL --gpu-memory-utilization {share:g} --max-model-len 4096; TRL: GRPOConfig(vllm_gpu_memory_utilization={share:g})",
    )  # fmt: skip
    yield from (give, stop) if share >= VLLM_SHARE else (stop, give)


# ---- All other failures --------------------------------------------------------------------------------------------------

_TO_BF16 = fix(
    "Compute in bf16 instead of fp16, which overflows above 65,504", costs="results are rounded to 8 bits instead of 11",
    brimful="--precision bf16", transformers="bf16=True, fp16=False", accelerate='Accelerator(mixed_precision="bf16")',
    lightning='Trainer(precision="bf16-mixed")',
)  # fmt: skip
_PIP_NAMES = {
    "bitsandbytes": "bitsandbytes", "flash_attn": "flash-attn", "transformers": "transformers", "accelerate": "accelerate", "datasets": "datasets",
    "peft": "peft", "trl": "trl", "torch": "torch", "numpy": "numpy", "pandas": "pandas", "tqdm": "tqdm", "deepspeed": "deepspeed",
    "sentencepiece": "sentencepiece", "tiktoken": "tiktoken", "tensorboard": "tensorboard", "wandb": "wandb", "yaml": "pyyaml",
    "sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "einops": "einops", "lightning": "lightning", "safetensors": "safetensors",
}  # fmt: skip
"""By module. The name of any other module need not be that of a package, and pip would install whatever has that name."""


def _missing_package(figures: Mapping[str, Any]) -> Iterator[Fix]:
    module = str(figures.get("package")).partition(".")[0]
    name = _PIP_NAMES.get(module)
    if name is None:
        yield fix("Look which Python runs the training and what it has: a file of yours is only found from its own folder", shell="which python; python -m pip list; PYTHONPATH=$PWD")  # fmt: skip
        return
    command = f"python -m pip install -U {name}"
    if module == "bitsandbytes":
        yield fix(
            "Install the package in this environment",
            brimful="pip install 'brimful[eightbit]'",
            shell=f"{command}; python -m bitsandbytes",
        )
    elif module == "flash_attn":
        yield fix(
            "Install the package in this environment",
            costs="it may be compiled for an hour",
            shell=f"{command} --no-build-isolation",
        )
        yield fix(
            "Do without it: torch has an attention of its own",
            transformers='from_pretrained(name, attn_implementation="sdpa")',
        )
    else:
        yield fix("Install the package in this environment", shell=command)


def _download(figures: Mapping[str, Any]) -> Iterator[Fix]:
    name = figures.get("name") or "OWNER/NAME"
    folder = name.rpartition("/")[2] if figures.get("name") else "NAME"
    if "mirror" in str(figures.get("host")):
        yield fix(
            "Ask for it over a proxy, or without the mirror", shell="HTTPS_PROXY=http://HOST:PORT; unset HF_ENDPOINT"
        )
    else:
        yield fix("Ask for it over a mirror of the hub, or over a proxy", costs="a mirror is run by others: send it no token", shell="HF_ENDPOINT=https://hf-mirror.com; HTTPS_PROXY=http://HOST:PORT")  # fmt: skip
    yield fix(
        "Download it on a machine that is connected, copy the folder and name it", brimful=f"--model {folder}",
        transformers=f'from_pretrained("{folder}")', shell=f"hf download {name} --local-dir {folder}",
    )  # fmt: skip
    yield fix("If it is in the cache of this machine, do not ask the hub", shell="HF_HUB_OFFLINE=1")


def _nan_loss(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    if settings.precision == "fp16" or figures.get("precision") == "fp16":
        yield _TO_BF16
    rate = figures.get("learning_rate")
    lower = f"{float(f'{0.3 * rate:.0e}'):g}" if rate else None
    yield fix(
        f"Lower the learning rate from {rate:g} to {lower}, warm it up for longer, and clip gradients" if rate
        else "Lower the learning rate to a third, warm it up for longer, and clip gradients",
        costs="slower learning", brimful=f"--lr {lower} --warmup 5% --clip-norm 1.0" if rate else "--warmup 5% --clip-norm 1.0",
        transformers=f"learning_rate={lower}, warmup_steps=500, max_grad_norm=1.0" if rate else "warmup_steps=500, max_grad_norm=1.0",
        accelerate="accelerator.clip_grad_norm_(model.parameters(), 1.0)", lightning="Trainer(gradient_clip_val=1.0)",
    )  # fmt: skip
    yield fix("Find the rows of the first bad step: empty labels, zero lengths, or values that are not finite", shell="torch.autograd.set_detect_anomaly(True)")  # fmt: skip


_FIND_FILES = fix("Find what fills the disk, and move caches and temporary files", shell="df -h . /tmp ~/.cache; HF_HOME=/big/disk TMPDIR=/big/disk")  # fmt: skip
_OWN_CARD = fix("Start no more processes on a machine than it has cards, and give each its own card", brimful="--processes N", transformers="torchrun --nproc-per-node N train.py", accelerate="accelerate launch --num_processes N train.py", lightning="Trainer(devices=N)", shell='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')  # fmt: skip
_PROGRAMS: dict[str, tuple[Fix, ...]] = {
    "duckdb": (
        fix("Let DuckDB move what does not fit to a disk with room", costs="slower", shell="SET temp_directory = '/big/disk'"),
        fix("Use fewer threads, and do not keep the order of rows", costs="slower; rows in another order", shell="SET threads = 2; SET preserve_insertion_order = false"),
        fix("Raise its limit, if the machine has more RAM", shell="SET memory_limit = '24GB'"),
    ),
    "jvm": (
        fix("Give the Java VM a larger heap", shell="spark-submit --driver-memory 16g --executor-memory 16g; java -Xmx16g"),
        fix("Divide the data into more parts, so that each holds less", costs="more, smaller tasks", shell="spark.sql.shuffle.partitions=400"),
    ),
}  # fmt: skip
_OTHER: dict[str, tuple[Fix, ...]] = {
    "sglang-no-room": (
        fix("Give SGLang a larger share of the card, if nothing else is on it", shell="nvidia-smi; python -m sglang.launch_server --mem-fraction-static 0.9"),
        fix("Divide the model between two cards, or serve a quantized one", shell="python -m sglang.launch_server --tp 2"),
    ),
    "kernel-shared-memory": (
        fix("Use smaller blocks or fewer stages in this kernel", costs="a slower kernel", shell="kernel_options={'BLOCK_M': 64, 'BLOCK_N': 32, 'num_stages': 1}"),
        fix("Leave this part uncompiled", costs="slower steps", brimful="--compile off", transformers="torch_compile=False", accelerate='Accelerator(dynamo_backend="no")', lightning="torch.compiler.disable(model)"),
    ),
    "nccl-shm": (
        fix("Switch off NCCL's cuMem host allocations", shell="NCCL_CUMEM_HOST_ENABLE=0"),
        fix("Look whether /dev/shm is full, and give the container more", shell="df -h /dev/shm; docker run --shm-size 8g (or --ipc=host)"),
        fix("Do without shared memory", costs="slower exchange between the cards of a machine", shell="NCCL_SHM_DISABLE=1"),
    ),
    "too-many-files": (
        fix("Raise the limit on open files", shell="ulimit -n 65535"),
        fix("Hand over tensors by file name instead of by open file", costs="files stay in /dev/shm if a process is killed", shell='torch.multiprocessing.set_sharing_strategy("file_system")'),
        fix(_FEWER_WORKERS, costs=_SLOWER_READING, **_workers(2)),
    ),
    "map-process-lost": (
        fix("Use fewer processes for map, and smaller batches and writes", saves="what each process holds", costs="slower preparation", brimful="brimful data tokenize rows.jsonl --tokenizer tokenizer --output store", peers="dataset.map(tokenize, num_proc=4, batch_size=100, writer_batch_size=200)"),
        fix("Ask the kernel whether it killed a process", shell=_KERNEL_LOG),
    ),
    "worker-lost": (
        fix("Read in the training process once, so that the worker's error is shown", costs="slower reading, for this test", **_workers(0)),
        fix("Ask the kernel whether it killed the worker, and look at /dev/shm", shell=f"{_KERNEL_LOG}; df -h /dev/shm"),
    ),
    "disk-full": (
        fix("Keep fewer checkpoints", saves="the size of a checkpoint each: about 12 bytes per weight with AdamW", brimful="--keep 1", transformers="save_total_limit=2", accelerate="ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)", lightning="ModelCheckpoint(save_top_k=1)"),
        fix("Save only the weights, where the run need not be resumed", saves="two thirds of a checkpoint with AdamW", costs="it cannot be resumed exactly", transformers="save_only_model=True", accelerate="accelerator.save_model(model, folder)", lightning="ModelCheckpoint(save_weights_only=True)"),
        _FIND_FILES,
        fix("Delete the checkpoint that was being written: it is damaged"),
    ),
    "gpu-fault": (
        fix("Do not retry: the CUDA context is lost, so start a new process"),
        fix("Run the same batch on the CPU, which names the line and the value", costs="slow, for this test", brimful="--device cpu", transformers="use_cpu=True", accelerate="accelerate launch --cpu train.py", lightning='Trainer(accelerator="cpu")'),
        fix("Make kernels report where they fail", costs="slow, for this test", shell="CUDA_LAUNCH_BLOCKING=1"),
        fix("Compare the largest token id with the embedding table, and the largest label with the outputs", shell="model.resize_token_embeddings(len(tokenizer))"),
    ),
    "gpu-hardware": (
        fix("Look up the Xid, and ask whoever runs the machine: reset the card, or take it out of use", shell="sudo dmesg -T | grep -i xid; nvidia-smi -q -d ECC"),
        fix("Continue from the last checkpoint on another card", brimful="--resume --device cuda:1", transformers="trainer.train(resume_from_checkpoint=True)", accelerate="accelerator.load_state(folder)", lightning='trainer.fit(model, ckpt_path="last")'),
    ),
    "driver": (
        fix("Install a torch build for this driver and card, or a newer driver", shell="nvidia-smi; python -m torch.utils.collect_env; pip install torch --index-url https://download.pytorch.org/whl/cu126"),
        fix("Look at the whole set-up", brimful="brimful doctor"),
    ),
    "nccl-duplicate-gpu": (_OWN_CARD,),
    "missing-gpu": (fix("Look which cards are there and which of them are visible", shell="nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES"), _OWN_CARD),
    "nccl-timeout": (
        fix("Look at the other ranks' logs: the one that is missing in this message holds the cause", shell="torchrun --log-dir logs --redirects 3 train.py"),
        fix("See in which collective each rank waits", shell="TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        fix("Give slow work (tokenizing, saving, evaluating on one rank) more time", costs="a real hang is noticed later", transformers="ddp_timeout=7200", accelerate="InitProcessGroupKwargs(timeout=timedelta(hours=2))", lightning="DDPStrategy(timeout=timedelta(hours=2))"),
    ),
    "nccl-peer-lost": (
        fix("Look for the rank that ended first: its log holds the cause", shell="torchrun --log-dir logs --redirects 3 train.py; sudo dmesg -T | grep -i 'killed process'"),
        fix("If no rank ended by itself, test the network between the machines", shell="NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0"),
    ),
    "nccl-error": (
        fix("Let NCCL say what failed", shell="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ALLOC"),
        fix("Try without peer-to-peer copies, and with a larger /dev/shm", costs="slower exchange between cards", shell="NCCL_P2P_DISABLE=1; docker run --shm-size 8g"),
        fix("Check that all cards can add up a number", brimful="brimful doctor"),
    ),
    "connection": (
        fix("End the run that holds the port, or use another port", shell="torchrun --master-port 29511 train.py; ss -ltnp | grep 29500", accelerate="accelerate launch --main_process_port 29511 train.py"),
        fix("Check that every machine reaches MASTER_ADDR and MASTER_PORT", shell="nc -vz $MASTER_ADDR $MASTER_PORT"),
    ),
    "stopped": (
        fix("Continue from the last checkpoint", brimful="brimful train --run RUN --resume", transformers="trainer.train(resume_from_checkpoint=True)", accelerate="accelerator.load_state(folder)", lightning='trainer.fit(model, ckpt_path="last")'),
    ),
    "time-limit": (
        fix("Save and leave before the limit, and continue in a new job", brimful="--time-limit 8h", transformers="save_steps=500, trainer.train(resume_from_checkpoint=True)", accelerate="accelerator.save_state(folder)", lightning="Trainer(max_time='00:08:00:00')"),
    ),
    "download-refused": (
        fix("Log in, accept the terms on the page of the model or dataset, and check its name", shell="hf auth login"),
    ),
    "crashed": (
        fix("Find out where it crashed", shell="python -X faulthandler train.py; sudo dmesg -T | tail"),
        fix("Read in the training process once, and reinstall what has compiled code", **_workers(0)),
    ),
}  # fmt: skip
