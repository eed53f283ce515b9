#!/usr/bin/env bash
# What the benches need on a GPU machine without a network, in .carry/: wheels of the peers, of the command line, of the
# server and of the tests, and the chat rows.
#
#   bench/carry.sh pack [DATA]      here: download the wheels (Python 3.12, Linux) and copy the rows from DATA
#   bench/carry.sh pack-unsloth     here: also those of Unsloth, which wants an older TRL and datasets of its own
#   bench/carry.sh unpack           there: .carry/*.whl to .carry/site, .carry/unsloth/*.whl to .carry/unsloth-site
#
# Wheels travel compressed. Of bitsandbytes (41 MiB) only the library for CUDA 13.0 is kept, which torch 2.11 has there
# (2.11.0+cu130), and of Unsloth (27 MiB) not its studio. Expected there: torch, transformers, accelerate, tokenizers,
# safetensors, pyarrow, numpy, psutil. Git ignores .carry/. It travels with the tracked files, 64 MiB in all.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
CUDA=${CUDA:-130}

download() { # FOLDER PACKAGE…
  local folder=$1
  shift
  mkdir -p "$folder"
  "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux2014_x86_64 --platform any \
    -d "$folder" "$@"
}

pinned() { # PACKAGE…: with the versions that the tests run on
  local package
  for package in "$@"; do grep -i "^$package==" constraints.txt; done
}

slim() { # WHEEL KEEP-IF: write the wheel again with the files for which the Python expression over `name` holds
  "$PYTHON" - "$1" "$2" <<'PY'
import os, sys, zipfile
path, keep = sys.argv[1], compile(sys.argv[2], "keep", "eval")
with zipfile.ZipFile(path) as old, zipfile.ZipFile(path + ".part", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
    for one in old.infolist():
        if eval(keep, {"name": one.filename}):
            new.writestr(one, old.read(one), zipfile.ZIP_DEFLATED)
os.replace(path + ".part", path)
PY
}

unpack() { # FROM TO
  "$PYTHON" - "$1" "$2" <<'PY'
import pathlib, sys, zipfile
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(sys.argv[2])
PY
}

travels() { # what is unpacked does not
  rm -rf .carry/site .carry/unsloth-site
  local bytes
  bytes=$(($(git ls-files -z -co --exclude-standard | xargs -0 stat -c %s 2>/dev/null | paste -sd+ -) + $(du -sb .carry | cut -f1)))
  echo "$((bytes / 1048576)) MiB travel, of 64"
  [ "$bytes" -lt $((64 * 1048576)) ]
}

case "${1:-}" in
  pack)
    rm -f .carry/*.whl
    download .carry liger-kernel==0.8.5 $(pinned trl peft bitsandbytes datasets pandas python-dateutil dill multiprocess xxhash) \
      $(pinned cyclopts docstring_parser rich-rst attrs nvidia-ml-py pytest pluggy iniconfig requests urllib3 charset-normalizer certifi) \
      $(pinned fastapi uvicorn starlette pydantic pydantic_core annotated-types annotated-doc typing-inspection) \
      $(pinned typing_extensions opentelemetry-api openai httpx2 httpcore2 jiter truststore anyio sniffio h11 idna click)
    slim .carry/bitsandbytes-*.whl "not name.endswith('.so') or name.endswith(('_cpu.so', '_cuda$CUDA.so'))"
    mkdir -p .carry/chatlm
    cp "${2:-../../shared/data/chatlm}/train_3k.parquet" .carry/chatlm/
    chmod u+w .carry/chatlm/*
    travels
    ;;
  pack-unsloth)
    rm -f .carry/unsloth/*.whl
    download .carry/unsloth unsloth==2026.10.9 unsloth_zoo==2026.10.9 "trl==1.15.*" "datasets<5" torchao tyro \
      cut_cross_entropy hf_transfer msgspec diffusers typeguard shtab einops structlog json5 docstring_parser
    slim .carry/unsloth/unsloth-*.whl "not name.startswith('studio/')"
    travels
    ;;
  unpack)
    unpack .carry .carry/site
    [ ! -d .carry/unsloth ] || unpack .carry/unsloth .carry/unsloth-site
    ;;
  *)
    sed -n '2,7p' "$0"
    exit 2
    ;;
esac
