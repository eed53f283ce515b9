"""Small texts that a tokenizer can be trained on in half a second: Chinese with some English, digits and punctuation."""

import random

import pyarrow as pa
import pyarrow.parquet as pq

HAN = [chr(code) for code in range(0x4E00, 0x4E00 + 400)]
ENGLISH = ["the", "model", "trains", "on", "rows", "of", "text", "and", "gives", "back", "every", "token"]


def texts(count, *, seed=0, words=300):
    """Sentences of words that come again and again."""
    rng = random.Random(seed)
    han = ["".join(rng.choices(HAN, k=rng.choice((2, 2, 3, 4)))) for _ in range(words)]
    made = []
    for _ in range(count):
        clauses = ["".join(rng.choices(han, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
        made.append(
            "，".join(clauses)
            + rng.choice(("。", "？", f" {' '.join(rng.choices(ENGLISH, k=3))} {rng.randint(0, 999)}\n"))
        )
    return made


def write_rows(path, count=400, *, seed=0, words=300):
    """A parquet file with prompts and responses."""
    prompts, responses = texts(count, seed=seed, words=words), texts(count, seed=seed + 1000, words=words)
    pq.write_table(pa.table({"prompt": prompts, "response": responses}), path)
    return str(path)
