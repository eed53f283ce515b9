"""`brimful export RUN --output DIR`: a trained model as a folder that other programs load."""

from pathlib import Path
from typing import Any, Literal

from brimful.cli.flags import Json, Switch
from brimful.cli.output import progress, show
from brimful.errors import BadOption
from brimful.languages import tr
from brimful.units import show_bytes


def export(
    model: str,
    /,
    *,
    output: Path,
    merge: Switch = False,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    base: str | None = None,
    json: Json = False,
) -> None:
    """Write a trained model into a new folder that transformers, vLLM and llama.cpp's converter load.

    Of a run with --lora, the adapter alone is written, in PEFT's format; with --merge, the base model with the adapter added.

    Parameters
    ----------
    model
        A run of `brimful train` (its best model), one of its checkpoints, or a folder of a model or an adapter.
    output
        The folder to write. It must not exist.
    merge
        Add the adapter to its base. A base that was trained on in 4 or 8 bits is read unquantized.
    dtype
        The dtype of the weights. Default: bf16 with --merge, else as they are.
    base
        The folder of the base model, if it is not where it was in training. Another model is refused.
    """
    from brimful.tasks.adapters import find_adapter, verified_adapter
    from brimful.tasks.adapters import merge as merge_adapter
    from brimful.tasks.export import check_new, copy_folder, dtype_of, stored_tensors, write_model
    from brimful.tasks.model_folder import check_hashes, resolve

    check_new(output)
    adapter = find_adapter(model)
    if adapter is None and (merge or base is not None):
        name = "merge=True" if merge else f"base={base!r}"
        raise BadOption(f"{name} is for adapters, and {model} is a whole model. Try: without it.")
    if adapter is not None and not merge and (dtype or base):
        name = f"dtype={dtype!r}" if dtype else f"base={base!r}"
        raise BadOption(
            f"{name} needs merge=True, since {model} is an adapter, which is copied as it is. Try: merge=True."
        )
    facts: dict[str, Any] = {"output": str(output.absolute())}
    with progress("export") as report:
        if adapter is None:
            source = resolve(model)
            check_hashes(source)
            write_model(source, output, dtype=dtype_of(dtype), progress=report)
            facts |= {"kind": "model", "source": str(source), "base": None}
        elif merge:
            used = merge_adapter(adapter, output, dtype_of(dtype), report, base=base)
            facts |= {"kind": "merged", "source": str(adapter), "base": str(used)}
        else:
            copy_folder(verified_adapter(adapter), output)
            facts |= {"kind": "adapter", "source": str(adapter), "base": None}
    facts["size_bytes"] = sum(file.stat().st_size for file in output.iterdir())
    facts["dtypes"] = (
        [] if facts["kind"] == "adapter" else sorted({tensor.dtype for tensor in stored_tensors(output).values()})
    )
    saved = tr("Saved to {path}", path=output)
    show(f"{saved} ({show_bytes(facts['size_bytes'])})", facts, as_json=json)
